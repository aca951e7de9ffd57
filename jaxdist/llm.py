"""`jaxdist.LLM`: a model to call from Python, on lists of prompts, as vLLM's."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import count
from typing import Any

import numpy as np

from jaxdist import platform
from jaxdist.config import UsageError, limits
from jaxdist.config.errors import did_you_mean
from jaxdist.data.tokenizer import Tokenizer, load_tokenizer
from jaxdist.inference.device import default_mesh
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.other_servers import here
from jaxdist.inference.outputs import RequestOutput
from jaxdist.inference.sampling.generation_config import CHOICES, described, sampling_defaults
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.llm_texts import Prompt, Texts, prompts_of

_log = logging.getLogger("jaxdist.llm")


class LLM:
    """A model on a mesh, ready to continue texts.

    >>> llm = LLM("models/smollm2-135m-instruct.gguf")
    >>> [output] = llm.generate("Rain is", SamplingParams(max_tokens=20))
    >>> output.outputs[0].text
    """

    def __init__(
        self,
        model: str,
        *,
        mesh: str = default_mesh.AUTO,
        tokenizer: str | None = None,
        warm: bool = False,
        generation_config: str = "auto",
        parse_special: bool = False,
        **options: Any,
    ):
        """Reads the model.

        Args:
            model: A run's folder, a Hugging Face folder, a GGUF file, or a name on the hub.
            mesh: Replicas x pipeline stages x tensor parallelism; "auto" takes one accelerator, or
                as many of a CPU's cores as pay.
            tokenizer: In place of the model's own, as `data.tokenizer`.
            warm: Compile all before the first prompt, rather than as it comes.
            generation_config: "auto" samples as the model's generation_config.json says where no
                sampling_params are given; "none" leaves it out.
            parse_special: Take special tokens that prompts of text spell for what they are, as in
                texts that a chat template made elsewhere; they are plain text otherwise.
            options: Fields of RunnerOptions and EngineOptions, such as max_num_seqs.

        Raises UsageError for what cannot work.
        """
        limits.choice("generation_config", generation_config, CHOICES)
        runner_options, engine_options = _options(options)
        shape = default_mesh.parse(mesh)
        if shape is None:
            platform.a_device_a_core()
        # JAX is loaded here, after the options are known to be right.
        from jaxdist.inference.load import load_engine
        from jaxdist.training.model_source import open_model

        source = open_model(model, "model")
        self._files = source.companions()
        self._defaults = sampling_defaults(self._files) if generation_config == "auto" else {}
        if self._defaults:
            _log.info(described(self._defaults))
        # A model's most tokens are as many of them as there is room for.
        most = self._defaults.get("max_tokens")
        self._default = self.get_default_sampling_params()
        if most is not None:
            self._default = replace(self._default, max_tokens=None)
            if engine_options.default_max_tokens is None:
                engine_options = replace(engine_options, default_max_tokens=most)
        self.engine: Engine = load_engine(
            source,
            mesh=default_mesh.mesh_for(shape, source.config, runner_options),
            runner_options=runner_options,
            engine_options=engine_options,
            tokenizer=None if tokenizer is None else load_tokenizer(tokenizer),
            warm=warm,
        )
        self._ids = map(str, count())
        self._text = Texts(self.tokenizer, parse_special)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, None where it has none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` and `chat` take where no sampling_params are given."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue the prompts; outputs in their order.

        prompts: One or several: a text, token ids, or a mapping with `prompt` or
            `prompt_token_ids`.
        sampling_params: For all, or one for each; None takes `get_default_sampling_params()`.
        use_tqdm: Show a bar, which goes on as prompts are done.
        priority: One for each prompt; the least is served first.

        RequestError where one of them cannot be served; then none is.
        """
        several = prompts_of(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [sampling_params or self._default] * len(several)
        else:
            each = list(sampling_params)
        if len(each) != len(several):
            raise UsageError(
                f"there are {len(several)} prompts and {len(each)} sampling_params; give one for "
                "all or one for each"
            )
        ranks = [0] * len(several) if priority is None else list(priority)
        if len(ranks) != len(several):
            raise UsageError(
                f"there are {len(several)} prompts and {len(ranks)} priorities; give one for each"
            )
        requests = [
            (ids, {"params": params, "priority": rank})
            for ids, params, rank in zip(several, each, ranks, strict=True)
        ]
        return [self._text.told(output) for output in self._run(requests, use_tqdm)]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a chat, or a list of chats, by the model's own template.

        messages: Mappings with `role` and `content`, or lists of them.
        use_tqdm: Show a bar.
        chat_template: In place of the model's own.
        tools: Functions that the model may call, as OpenAI describes them.
        chat_template_kwargs: Further variables of the template, such as enable_thinking.
        """
        chats = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        rendered = self._render(
            chats,
            chat_template,
            tools or (),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            extra=chat_template_kwargs,
        )
        # A thread of its own: that of a notebook's cell runs an event loop already.
        with ThreadPoolExecutor(1) as thread:
            prompts, stops = thread.submit(asyncio.run, rendered).result()
        if stops:
            sampling_params = sampling_params or self._default
            if isinstance(sampling_params, SamplingParams):
                sampling_params = _ending(sampling_params, stops)
            else:
                sampling_params = [_ending(params, stops) for params in sampling_params]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: str = "mean") -> list[np.ndarray]:
        """The prompts' hidden states, pooled ("mean" or "last"), float32 [hidden_size] each."""
        outputs = self._run([(ids, {"pooling": pooling}) for ids in prompts_of(prompts)])
        return [output.embedding for output in outputs if output.embedding is not None]

    def _run(
        self, requests: Sequence[tuple[str | Sequence[int], dict]], shown: bool = False
    ) -> list[RequestOutput]:
        from rich.console import Console
        from rich.progress import Progress

        engine = self.engine
        prepared = [
            engine.prepare(next(self._ids), stream=False, **self._text.read(prompt), **how)
            for prompt, how in requests
        ]
        last: dict[str, RequestOutput] = {}
        with Progress(console=Console(stderr=True), disable=not shown) as bar:
            task = bar.add_task("prompts", total=len(prepared))
            try:
                for one in prepared:
                    engine.add(one)
                while len(last) < len(prepared):
                    last.update((output.request_id, output) for output in engine.step())
                    bar.update(task, completed=len(last))
            finally:
                for one in prepared:
                    engine.abort_request(one.request_id)
        return [last[one.request_id] for one in prepared]

    async def _render(
        self,
        chats: Sequence[Sequence[Any]],
        template: str | None,
        tools: Sequence[Mapping[str, Any]],
        **how: Any,
    ) -> tuple[list[list[int]], Sequence[str]]:
        """The prompts' ids, and texts that end an answer besides the parameters' own."""
        from pydantic import ValidationError

        from jaxdist.server.chat import Chat
        from jaxdist.server.errors import APIError
        from jaxdist.server.messages import Message, Tool

        if self.tokenizer is None:
            raise UsageError("a chat needs a tokenizer, and this model has none")
        chat = Chat(self.tokenizer, self._files, template=template)
        await chat.start()
        try:
            told = [Tool.model_validate(tool) for tool in tools]
            prompts = [
                await chat.prompt(list(map(Message.model_validate, messages)), told, **how)
                for messages in chats
            ]
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, fault["loc"]))
            field = "tools" if error.title == "Tool" else "messages"
            raise UsageError(f"{field}: {where}: {fault['msg']}") from None
        except APIError as error:
            raise UsageError(error.message) from None
        finally:
            await chat.close()
        return prompts, chat.stops


def _ending(params: SamplingParams, stops: Sequence[str]) -> SamplingParams:
    return replace(params, stop=(*params.stop, *stops))


def _options(given: Mapping[str, Any]) -> tuple[RunnerOptions, EngineOptions]:
    """Each option to whom it belongs; UsageError for one that nobody has."""
    of_runner = {field.name for field in fields(RunnerOptions)}
    of_engine = {field.name for field in fields(EngineOptions)}
    known = of_runner | of_engine
    for name in given:
        if name not in known:
            raise UsageError(
                f"LLM has no option {name}"
                + (f"; {fix}" if (fix := here(name, str)) else did_you_mean(name, sorted(known)))
            )
    engine_options = EngineOptions(**{k: v for k, v in given.items() if k in of_engine})
    return RunnerOptions(**{k: v for k, v in given.items() if k in of_runner}), engine_options
