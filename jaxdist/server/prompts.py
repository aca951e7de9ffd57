"""Prompts as clients give them - a text, several, ids, several lists of ids - as lists of ids."""

import asyncio
from collections.abc import Sequence
from typing import Any

from jaxdist.server.errors import APIError
from jaxdist.server.service import Model

_LONG = 20_000  # characters; what takes longer to encode must not hold up others


def split(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """The single prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    return list(prompt)


async def encode(
    model: Model, prompts: Sequence[str | list[int]], field: str, *, add_special_tokens: bool = True
) -> list[tuple[str | None, list[int]]]:
    """(text, ids) of each prompt, opened with bos where the tokenizer has one.

    Raises APIError, naming `field`, for an empty prompt or ids outside of the vocabulary.
    """
    if not prompts:
        raise APIError(f"{field} holds no prompt; give at least one", param=field)
    return [await _encode_one(model, prompt, field, add_special_tokens) for prompt in prompts]


async def _encode_one(
    model: Model, prompt: str | list[int], field: str, add_special_tokens: bool
) -> tuple[str | None, list[int]]:
    if isinstance(prompt, str):
        tokenizer, text = model.tokenizer, prompt
        encode_text = tokenizer.encode
        ids = await asyncio.to_thread(encode_text, text) if len(text) > _LONG else encode_text(text)
        if add_special_tokens and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id, *ids]
    else:
        text, ids = None, prompt
        if ids and max(ids) >= model.vocab_size:
            raise APIError(
                f"{field}: a token id is outside of the vocabulary of {model.vocab_size}",
                param=field,
            )
    if not ids:
        raise APIError(f"{field} has no tokens; give at least one", param=field)
    return text, list(ids)
