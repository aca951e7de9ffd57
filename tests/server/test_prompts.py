"""Prompts as lists of ids."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.data.tokenizer import BytesTokenizer
from jaxdist.server.aside import LONG
from jaxdist.server.prompts import encode


class Noted(BytesTokenizer):
    """Knows which threads it was asked in."""

    def __init__(self):
        super().__init__()
        self.threads = set()

    def encode(self, text: str) -> list[int]:
        """As bytes."""
        self.threads.add(threading.current_thread() is threading.main_thread())
        return super().encode(text)


@pytest.mark.parametrize(("count", "on_the_loop"), [(2, True), (128, False)])
def test_many_prompts_hold_up_nobody_where_they_are_long_together(count, on_the_loop):
    tokenizer = Noted()
    model: Any = SimpleNamespace(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size)
    texts = [str(i).rjust(LONG // 100) for i in range(count)]
    found = asyncio.run(encode(model, texts, "prompt"))
    assert tokenizer.threads == {on_the_loop}
    assert [text for text, _ in found] == texts
    assert all(tokenizer.decode(ids) == text for text, ids in found)
