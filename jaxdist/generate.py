"""`python -m jaxdist.generate`: write text with a model, or chat with it, in the terminal."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from jaxdist import platform
from jaxdist.config import UsageError, limits, one_line_errors
from jaxdist.config.options import MODEL, REQUIRED, option, parse_options
from jaxdist.inference.device import default_mesh
from jaxdist.inference.device.runner_options import DTYPES
from jaxdist.inference.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says."""

    model: str = option(REQUIRED, MODEL)
    prompt: str | None = option(None, "Text to continue.")
    chat: bool = option(False, "Talk with the model, by its own template, until Ctrl-D.")
    system: str | None = option(None, "With --chat: what the model is told first.")
    max_tokens: int = option(100, "Most tokens to write, at once.")
    temperature: float = option(0.8, "0 takes the likeliest token; higher varies more.")
    top_p: float = option(1.0, "Only the likeliest tokens that hold this probability.")
    top_k: int = option(0, "Only so many of the likeliest tokens; 0 for all.")
    seed: int = option(0, "The same seed writes the same text.")
    mesh: str = option(default_mesh.AUTO, default_mesh.HELP)
    simulate: bool = option(False, "Let the CPU stand in for all devices of the mesh.")
    dtype: str = option("bfloat16", "Of weights and activations: float32 or bfloat16.")
    quantization: str | None = option(
        None, "keep: leave a .gguf file's weights in their blocks; less memory."
    )

    def __post_init__(self):
        limits.whole("max-tokens", self.max_tokens, 1)
        limits.number("temperature", self.temperature, 0)
        limits.whole("seed", self.seed, 0, 2**32 - 1)
        limits.choice("dtype", self.dtype, DTYPES)
        if self.chat == (self.prompt is not None):
            raise UsageError("give --prompt TEXT to continue, or --chat to talk, and not both")
        if self.system is not None and not self.chat:
            raise UsageError("--system is what a chat begins with; add --chat, or leave it out")
        if self.chat and not (find_spec("jinja2") and find_spec("pydantic")):
            raise UsageError("--chat needs jinja2 and pydantic; pip install 'jaxdist[serve]'")
        if self.quantization is not None:
            limits.choice("quantization", self.quantization, ("keep",))

    def sampling(self) -> SamplingParams:
        """Of each text."""
        names = "max_tokens temperature top_p top_k seed"
        return SamplingParams(**{name: getattr(self, name) for name in names.split()})


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, load, write the text as it comes; returns the exit code."""
    with one_line_errors():
        options = parse_options(Options, sys.argv[1:] if argv is None else argv, "jaxdist generate")
        try:
            for piece in write(options):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print()
            return 130
        print()
    return 0


def write(options: Options) -> Iterator[str]:
    """The prompt and its continuation in pieces, or a chat's answers; checked before it is read."""
    mesh, sampling = default_mesh.parse(options.mesh), options.sampling()
    platform.leave_at_signals()
    if options.simulate:
        platform.simulate_devices(mesh.size if mesh else platform.num_cores())
    elif mesh is None:
        platform.a_device_a_core()
    # JAX is loaded here, after the options are known to be right.
    from jaxdist.data import load_tokenizer
    from jaxdist.inference.naive import check_prompt
    from jaxdist.inference.stream import load_for_one, stream
    from jaxdist.training.model_source import open_model

    source = open_model(options.model)
    if source.tokenizer is None:
        raise UsageError(f"--model {options.model} has no tokenizer; put its tokenizer.json there")
    if options.chat:
        from jaxdist.server.terminal import converse

        engine = load_for_one(source, mesh, options.dtype, quantization=options.quantization)
        yield from converse(engine, source.companions(), sampling, options.system)
        return
    tokenizer = load_tokenizer(source.tokenizer)
    prompt = tokenizer.encode(str(options.prompt))
    if tokenizer.bos_id is not None:
        prompt = [tokenizer.bos_id, *prompt]
    check_prompt(source.config, prompt, options.max_tokens)
    length = len(prompt) + options.max_tokens
    engine = load_for_one(source, mesh, options.dtype, length, options.quantization)
    yield str(options.prompt)
    yield from stream(engine, prompt, sampling)


if __name__ == "__main__":
    sys.exit(main())
