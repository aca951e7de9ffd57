"""What is done with a request before the engine sees it: all checks, and what may take long.

Nothing here depends on the engine's state, so it runs on the caller's thread.
"""

import random
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from jaxdist.config.errors import UsageError
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.errors import BUSY, RequestError
from jaxdist.inference.guidance.guide import bad_word_ids
from jaxdist.inference.guidance.thoughts import AfterThoughts, Opening
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.request import resolve_max_tokens, whole_ids
from jaxdist.inference.scheduling.step import Runner


def child_seed(seed: int, index: int) -> int:
    """The seed of the continuation `index` of n; the first one's is the request's."""
    if index == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=4).digest()) >> 1


@dataclass(kw_only=True, eq=False)
class Prepared:
    """A request that was checked, ready for `Engine.add`.

    Attributes:
        prompt: Its text, where it was given as text.
        params: Of each of the n, seeds set; one for an embedding.
        grammar: What `params.structured_outputs` compiled to.
        bad_words: Token sequences that do not appear.
        stream: Whether there is an output whenever something is new, or only the last.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: list[SamplingParams]
    max_tokens: int
    pooling: str | None = None
    priority: int = 0
    salt: Hashable = None
    grammar: Any = None
    bad_words: Sequence[tuple[int, ...]] = ()
    stream: bool = True
    arrival_time: float = field(default_factory=time.monotonic)


class Preparer:
    """Checks requests for one model."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        options: EngineOptions,
    ):
        self.runner, self.tokenizer, self.eos_ids = runner, tokenizer, eos_ids
        self._default_max_tokens = options.default_max_tokens
        self._seeds = random.Random(options.seed)

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt_text: str | None = None,
        pooling: str | None = None,
        priority: int = 0,
        cache_salt: Hashable = None,
        opening: Opening = Opening.AFTER,
        stream: bool = True,
    ) -> Prepared:
        """Check a request. RequestError names what is wrong; from any thread.

        prompt: Text, encoded without special tokens and opened by the tokenizer's bos_id, or ids
        that are taken as they are. prompt_text: what the ids spell, to be told in the output.
        pooling: "mean" or "last" to embed the prompt instead of continuing it. priority: the least
        is served first. cache_salt: only equal ones share cached blocks. opening: where thoughts
        may come first, structured_outputs bind what follows them.
        """
        if pooling not in (None, "mean", "last"):
            raise RequestError(f"pooling={pooling!r} is not one of mean, last", param="pooling")
        ids = self._encode(prompt) if isinstance(prompt, str) else whole_ids(prompt)
        params = params or SamplingParams()
        max_tokens = resolve_max_tokens(
            ids,
            params.max_tokens,
            default=self._default_max_tokens and max(self._default_max_tokens, params.min_tokens),
            embeds=pooling is not None,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.runner.max_model_len,
            capacity=(self.runner.num_blocks - 1) * self.runner.block_size,
        )
        tokenizer = self._check(params)
        seed = self._seeds.getrandbits(31) if params.seed is None else params.seed
        seeds = [child_seed(seed, i) for i in range(1 if pooling else params.n)]
        return Prepared(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else prompt_text,
            prompt_ids=ids,
            params=[params.varied(seed=s) for s in seeds],
            max_tokens=max_tokens,
            pooling=pooling,
            priority=priority,
            salt=cache_salt,
            grammar=None if pooling else self._compile(params, tokenizer, opening),
            bad_words=() if tokenizer is None else bad_word_ids(params.bad_words, tokenizer),
            stream=stream,
        )

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("a prompt of text needs a tokenizer; give token ids", param="prompt")
        ids = self.tokenizer.encode(text)
        return ids if self.tokenizer.bos_id is None else [self.tokenizer.bos_id, *ids]

    def _check(self, params: SamplingParams) -> Tokenizer | None:
        """RequestError where the parameters do not suit this model; its tokenizer."""
        try:
            params.check_against(self.runner.vocab_size)
        except UsageError as error:  # its message begins with the field
            raise RequestError(str(error), param=str(error).split(" ", 1)[0]) from None
        if self.tokenizer is None:
            for name in ("stop", "bad_words", "structured_outputs"):
                if getattr(params, name):
                    raise RequestError(
                        f"{name} needs a tokenizer, and this model has none; leave it out",
                        param=name,
                    )
        return self.tokenizer

    def _compile(
        self, params: SamplingParams, tokenizer: Tokenizer | None, opening: Opening
    ) -> Any:
        structured = params.structured_outputs
        if structured is None or tokenizer is None:
            return None
        # Only loaded where it is asked for: its library is an extra.
        from jaxdist.inference.guidance.grammar import Busy
        from jaxdist.inference.guidance.grammar import compile as compile_grammar

        try:
            grammar = compile_grammar(structured, tokenizer, sorted(self.eos_ids))
        except Busy as error:
            raise RequestError(str(error), code=BUSY) from None
        except UsageError as error:
            raise RequestError(str(error), param="structured_outputs") from None
        after = opening is Opening.AFTER
        return grammar if after else AfterThoughts(grammar, tokenizer, opening)
