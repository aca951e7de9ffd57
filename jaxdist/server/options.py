"""What the command line of `python -m jaxdist.serve` can say."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from jaxdist.config import MeshShape, UsageError, limits
from jaxdist.config.options import MODEL, REQUIRED, dashed, option
from jaxdist.inference.device import default_mesh
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.other_servers import here
from jaxdist.inference.sampling.generation_config import CHOICES
from jaxdist.server.dialects.choice import CHOICES as CALLS
from jaxdist.server.limits import Limits
from jaxdist.server.reasoning import CHOICES as THOUGHTS
from jaxdist.server.service import ServerOptions

API_KEY = "JAXDIST_API_KEY"  # one more key, which no list of processes shows


def check_words(words: Sequence[str]) -> None:
    """UsageError, with our own word, for those of vLLM's and SGLang's command lines."""
    own = {field.name for field in fields(Options)}
    for before, word in zip(("", *words), words, strict=False):
        if not word.startswith("-") and not before.startswith("-"):
            raise UsageError(
                f"{word} is given without an option; a model is --model {word}, and of several "
                "keys or names each has an option of its own"
            )
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("-") and name not in own and (fix := here(name, _spelled)):
            raise UsageError(f"{word.partition('=')[0]} is not an option here; {fix}")


def _spelled(name: str) -> str:
    ours = {"num_speculative_tokens": "speculative_tokens"}.get(name, name)
    return dashed(f"--{ours}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options, by their names; each says what it is in its help."""

    model: str = option(REQUIRED, MODEL)
    mesh: str = option(default_mesh.AUTO, default_mesh.HELP)
    simulate: bool = option(False, "Let the CPU stand in for all devices of the mesh.")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 serves other machines.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    served_model_name: tuple[str, ...] = option((), "The model's name for clients; repeatable.")
    api_key: tuple[str, ...] = option(
        (), f"A key that clients must send; repeatable. {API_KEY} in the environment adds one."
    )
    cors_origin: tuple[str, ...] = option(
        (), "An origin whose pages may use the server from a browser; repeatable, * for all."
    )
    chat_template: str | None = option(None, "A file to take the chat template from.")
    dtype: str = option("bfloat16", "Of weights and activations: float32 or bfloat16.")
    kv_dtype: str | None = option(None, "Of cached keys and values; --dtype by default.")
    quantization: str | None = option(
        None, "keep: leave a .gguf file's weights in their blocks; less memory."
    )
    block_size: int = option(16, "Tokens of one block of the KV cache.")
    num_blocks: int | None = option(None, "Blocks of a replica; by default from free memory.")
    memory_fraction: float | None = option(None, "Share of the free memory for the KV cache.")
    max_num_seqs: int = option(32, "Most sequences that run at a time.")
    max_num_batched_tokens: int | None = option(None, "Most tokens of a replica in a step.")
    max_model_len: int | None = option(None, "Most tokens of a sequence; the model's by default.")
    no_prefix_caching: bool = option(False, "Compute each prompt whole.")
    policy: str = option("fcfs", "Who is served first: fcfs, or lpm for the longest cached prefix.")
    speculative_tokens: int = option(0, "Most tokens guessed at a time from repeated text.")
    generation_config: str = option(
        "auto", "auto samples as the model's generation_config.json says; none leaves it out."
    )
    default_max_tokens: int | None = option(
        None,
        "Of an answer to a chat that names no max_tokens; by default the context's end, "
        "1024 on a CPU.",
    )
    seed: int | None = option(None, "Makes the answers to requests without a seed reproducible.")
    max_queued: int = option(512, "Sequences that may wait; above it requests are refused (429).")
    max_concurrent: int = option(1024, "Requests that may be open at a time.")
    request_timeout: float = option(600.0, "Seconds that a request may take.")
    max_body_bytes: int = option(16 * 2**20, "Of a request's body.")
    grace: float = option(30.0, "Seconds that running requests have to finish after SIGTERM.")
    log_text: bool = option(False, "Put prompts and answers into the log.")
    parse_special: bool = option(
        False, "Read special tokens that prompts of /v1/completions spell; they are text otherwise."
    )
    reasoning_parser: str = option(
        "none",
        f"How the model writes its thoughts: {', '.join(THOUGHTS)}; they are told apart then.",
    )
    tool_call_parser: str = option(
        "auto",
        f"How the model writes calls of tools: {', '.join(CALLS)}; auto goes by its chat template, "
        "none leaves them in the text.",
    )
    prompt_details: bool = option(False, "Tell in the usage how many prompt tokens were cached.")

    def __post_init__(self):
        limits.whole("port", self.port, 0, 65535)
        limits.number("grace", self.grace, 0)
        limits.choice("generation-config", self.generation_config, CHOICES)
        limits.choice("reasoning-parser", self.reasoning_parser, THOUGHTS)
        limits.choice("tool-call-parser", self.tool_call_parser, CALLS)
        if "" in (*self.api_key, *self.served_model_name):
            raise UsageError("--api-key and --served-model-name must not be empty")

    @property
    def mesh_shape(self) -> MeshShape | None:
        """The mesh, None for `auto`. UsageError where --simulate cannot know its size."""
        mesh = default_mesh.parse(self.mesh)
        if self.simulate and mesh is not None and not mesh.is_resolved:
            raise UsageError(f"mesh {mesh}: with --simulate write the number instead of -1")
        return mesh

    def runner(self) -> RunnerOptions:
        """Of the device's side."""
        names = "block_size num_blocks memory_fraction max_num_seqs max_model_len dtype kv_dtype "
        names += "quantization"
        same = {name: getattr(self, name) for name in names.split()}
        return RunnerOptions(**same, max_drafts=self.speculative_tokens)

    def engine(self) -> EngineOptions:
        """Of the host's side."""
        return EngineOptions(
            max_num_batched_tokens=self.max_num_batched_tokens,
            policy=self.policy,
            enable_prefix_caching=not self.no_prefix_caching,
            num_speculative_tokens=self.speculative_tokens,
            default_max_tokens=self.default_max_tokens,
            seed=self.seed,
        )

    def server(self) -> ServerOptions:
        """Of the server."""
        extra = os.environ.get(API_KEY)
        path = Path(self.model)
        return ServerOptions(
            names=self.served_model_name or (path.stem if path.suffix == ".gguf" else path.name,),
            api_keys=(*self.api_key, *([extra] if extra else [])),
            cors_origins=self.cors_origin,
            log_text=self.log_text,
            parse_special=self.parse_special,
            prompt_details=self.prompt_details,
            reasoning_parser=self.reasoning_parser,
            tool_call_parser=self.tool_call_parser,
            limits=Limits(
                max_body_bytes=self.max_body_bytes,
                max_queued=self.max_queued,
                max_concurrent=self.max_concurrent,
                request_timeout=self.request_timeout,
            ),
            grace=self.grace,
        )

    def template(self) -> str | None:
        """The chat template that was given. UsageError where it cannot be read."""
        if self.chat_template is None:
            return None
        try:
            return Path(self.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UsageError(f"--chat-template {self.chat_template}: {error}") from None
