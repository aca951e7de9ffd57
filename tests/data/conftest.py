"""Text and small vocabularies learned from it."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import sentencepiece

from jaxdist.data.sources import EMBEDDED_FOLDER


@pytest.fixture(scope="session")
def play() -> str:
    """A stretch of real text."""
    return (EMBEDDED_FOLDER / "tempest.txt").read_text()[:20_000]


@pytest.fixture(scope="session")
def train_sentencepiece(play: str) -> Callable[..., bytes]:
    """Trains a SentencePiece BPE model of 600 pieces with byte fallback, as Llama's."""

    def train(**options: Any) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(play.splitlines()),
            model_writer=model,
            model_type="bpe",
            vocab_size=600,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
            **options,
        )
        return model.getvalue()

    return train
