"""Prompts as clients give them - a text, several, ids, several lists of ids - as lists of ids."""

from collections.abc import Sequence
from typing import Any

from jaxdist.server.aside import aside
from jaxdist.server.errors import APIError
from jaxdist.server.service import Model

Encoded = tuple[str | None, list[int]]  # the text, where it is all of it, and the ids


def split(prompt: str | Sequence[Any]) -> list[str | list[int]]:
    """The single prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    return list(prompt)


async def encode(
    model: Model,
    prompts: Sequence[str | list[int]],
    field: str,
    *,
    add_special_tokens: bool = True,
    parse_special: bool = False,
) -> list[Encoded]:
    """(text, ids) of each prompt, opened with bos where the tokenizer has one.

    parse_special: Take what spells a special token for that token, and not for text.

    Raises APIError, naming `field`, for an empty prompt or ids outside of the vocabulary.
    """
    if not prompts:
        raise APIError(f"{field} holds no prompt; give at least one", param=field)

    def encoded() -> list[Encoded]:
        return [
            _encode_one(model, prompt, field, add_special_tokens, parse_special)
            for prompt in prompts
        ]

    return await aside(sum(map(len, prompts)), encoded)


def cut(prompts: Sequence[Encoded], count: int | None, room: int) -> list[Encoded]:
    """The last `count` tokens of each, -1: of which there are at most `room`; None: all."""
    if count is None:
        return list(prompts)
    most = room if count == -1 else count
    return [(None, ids[-most:]) if len(ids) > most else (text, ids) for text, ids in prompts]


def _encode_one(
    model: Model,
    prompt: str | list[int],
    field: str,
    add_special_tokens: bool,
    parse_special: bool,
) -> Encoded:
    if isinstance(prompt, str):
        tokenizer, text = model.tokenizer, prompt
        encode_text = model.chat.tokens.encode_raw if parse_special else tokenizer.encode
        ids, bos = encode_text(text), tokenizer.bos_id
        if add_special_tokens and bos is not None and (ids[:1] != [bos] or not parse_special):
            ids = [bos, *ids]  # a text may spell it, once is enough
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
