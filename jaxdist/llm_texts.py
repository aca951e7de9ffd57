"""Texts on their way into `LLM`, and of the tokens that come out of it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from jaxdist.config import UsageError
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.outputs import Logprobs, RequestOutput
from jaxdist.server.special_tokens import SpecialTokens

_log = logging.getLogger("jaxdist.llm")

Prompt = str | Sequence[int] | Mapping[str, Any]


def prompts_of(given: Prompt | Sequence[Prompt]) -> list[str | Sequence[int]]:
    """One prompt or several, as texts or ids."""
    one = isinstance(given, (str, Mapping)) or (len(given) and isinstance(given[0], int))
    several: Any = [given] if one else given
    found: list[str | Sequence[int]] = []
    for prompt in several:
        if isinstance(prompt, Mapping):
            key = "prompt_token_ids" if "prompt_token_ids" in prompt else "prompt"
            if key not in prompt:
                raise UsageError("a prompt's mapping needs prompt or prompt_token_ids")
            prompt = prompt[key]
        found.append(prompt)
    return found


class Texts:
    """Of one tokenizer, None where a model has none.

    parse_special: Take special tokens that a prompt spells for what they are.
    """

    def __init__(self, tokenizer: Tokenizer | None, parse_special: bool = False):
        self._tokenizer, self._parse_special = tokenizer, parse_special
        self._of_token: dict[int, str] = {}

    @cached_property
    def _special(self) -> SpecialTokens:
        assert self._tokenizer is not None
        return SpecialTokens(self._tokenizer)

    def read(self, prompt: str | Sequence[int]) -> dict[str, Any]:
        """The prompt as `Engine.prepare` takes it."""
        if not isinstance(prompt, str) or self._tokenizer is None:
            return {"prompt": prompt}
        found = next(self._special.find(prompt), None)
        if found is None:
            return {"prompt": prompt}
        if not self._parse_special:
            _log.warning(
                "a prompt spells %s, which is plain text here; parse_special=True reads it",
                found[1],
            )
            return {"prompt": prompt}
        ids, bos = self._special.encode_raw(prompt), self._tokenizer.bos_id
        # A beginning that is spelled is not written a second time.
        opening = [] if bos is None or ids[:1] == [bos] else [bos]
        return {"prompt": [*opening, *ids], "prompt_text": prompt}

    def told(self, output: RequestOutput) -> RequestOutput:
        """The output with the text of each token that a log-probability is told of."""
        if self._tokenizer is None:
            return output
        return replace(
            output,
            prompt_logprobs=self._named(output.prompt_logprobs),
            outputs=[replace(one, logprobs=self._named(one.logprobs)) for one in output.outputs],
        )

    def _named(self, entries: Sequence[Logprobs | None] | None) -> list[Any] | None:
        if entries is None:
            return None
        return [
            entry and {i: replace(found, decoded_token=self._of(i)) for i, found in entry.items()}
            for entry in entries
        ]

    def _of(self, token: int) -> str:
        if token not in self._of_token:
            assert self._tokenizer is not None
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._of_token[token] = text
        return self._of_token[token]
