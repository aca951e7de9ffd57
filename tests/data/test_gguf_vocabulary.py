"""What is written about a tokenizer is what `gguf_tokenizer` needs to encode as it does."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from jaxdist.config import UsageError
from jaxdist.data.gguf_tokenizer import PRE_TOKENIZERS
from jaxdist.data.gguf_vocabulary import tokenizer_entries
from jaxdist.data.tokenizer import (
    BytesTokenizer,
    JsonTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
)

TEXTS = [
    "Hello world, it's 12345 o'clock!",
    "\n\n  def f(x):\n\treturn x**2  # na\u00efve caf\u00e9 e\u0301 \u65e5\u672c \U0001f389\r\n",
    "I'LL don't   x9y87\n\n\n a",
    " ",
    "<|begin|> <s> [PAD1]",
]


def through_a_file(tokenizer: Tokenizer, path: Path, **options: Any) -> Tokenizer:
    """The tokenizer that a GGUF file gives back."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in tokenizer_entries(tokenizer, **options).items():
        add = {bool: "bool", int: "uint32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{add}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(str(path))


def assert_same(ours: Tokenizer, original: Tokenizer, texts: list[str]) -> None:
    for text in texts:
        ids = original.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)
    assert (ours.bos_id, ours.eos_id) == (original.bos_id, original.eos_id)
    assert ours.vocab_size == original.vocab_size


def json_tokenizer(inner: Inner, bos_id: int | None = None, eos_id: int | None = 1):
    return JsonTokenizer(inner, name="made", eos_id=eos_id, bos_id=bos_id, fingerprint="")


def byte_level(pre: str, text: str) -> Inner:
    inner = Inner(models.BPE(ignore_merges=pre == "llama-bpe"))
    inner.normalizer, inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|begin|>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([text + " 1234 567 89"], trainer)
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return inner


@pytest.mark.parametrize("pre", [name for name in PRE_TOKENIZERS if name != "default"])
@pytest.mark.parametrize("bos_id", [None, 0])
def test_byte_level_comes_back(pre: str, bos_id: int | None, play: str, tmp_path: Path):
    original = json_tokenizer(byte_level(pre, play), bos_id)
    entries = tokenizer_entries(original)
    assert entries["tokenizer.ggml.pre"] == pre and entries["tokenizer.ggml.model"] == "gpt2"
    kinds = entries["tokenizer.ggml.token_type"]
    assert kinds[:3] == [3, 3, 1] and kinds[-1] == 4
    ours = through_a_file(original, tmp_path / "m.gguf", chat_template="{{ x }}")
    assert_same(ours, original, [*TEXTS, play[:3000], "a<tool>b"])
    field = gguf.GGUFReader(tmp_path / "m.gguf").fields["tokenizer.chat_template"]
    assert field.contents() == "{{ x }}"


def test_ids_that_no_token_has_are_filled(play: str, tmp_path: Path):
    content = json.loads(byte_level("gpt-2", play).to_str())
    content["model"]["vocab"]["zebra"] = 410
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<tool>"]
    original = json_tokenizer(Inner.from_str(json.dumps(content)))
    entries = tokenizer_entries(original)
    assert entries["tokenizer.ggml.tokens"][400:411] == [
        f"[UNUSED{i}]" for i in range(400, 410)
    ] + ["zebra"]
    assert entries["tokenizer.ggml.token_type"][400:411] == [5] * 10 + [1]
    assert_same(through_a_file(original, tmp_path / "m.gguf"), original, TEXTS)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_comes_back(
    prefix: bool, play: str, train_sentencepiece: Callable[..., bytes], tmp_path: Path
):
    original = SentencePieceTokenizer(train_sentencepiece(add_dummy_prefix=prefix), name="made")
    ours = through_a_file(original, tmp_path / "m.gguf")
    assert_same(ours, original, [*TEXTS, play[:3000]])


def test_merges_with_byte_fallback_become_scores(
    play: str, train_sentencepiece: Callable[..., bytes], tmp_path: Path
):
    """Llama 2's tokenizer.json is a SentencePiece model written as merges."""
    protocol: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    pieces = protocol.ModelProto.FromString(train_sentencepiece()).pieces
    vocabulary = {piece.piece: i for i, piece in enumerate(pieces)}
    merges = [
        (piece.piece[:cut], piece.piece[cut:])
        for piece in sorted(pieces, key=lambda piece: -piece.score)
        for cut in range(1, len(piece.piece))
        if piece.type == 1 and piece.piece[:cut] in vocabulary and piece.piece[cut:] in vocabulary
    ]
    inner = Inner(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    original = json_tokenizer(inner, bos_id=1, eos_id=2)
    entries = tokenizer_entries(original)
    assert entries["tokenizer.ggml.token_type"] == [piece.type for piece in pieces]
    assert entries["tokenizer.ggml.add_space_prefix"] is True
    ours = through_a_file(original, tmp_path / "m.gguf")
    assert_same(ours, original, ["Hello world, it's 12345!", "na\u00efve \U0001f389", play[:3000]])


def test_what_has_no_form_in_gguf_is_named(play: str, train_sentencepiece: Callable[..., bytes]):
    with pytest.raises(UsageError, match="tokenizer bytes has no form in GGUF"):
        tokenizer_entries(BytesTokenizer())
    words = Inner(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(UsageError, match="made is of kind WordLevel"):
        tokenizer_entries(json_tokenizer(words))
    inner = byte_level("gpt-2", play)
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    inner.normalizer = normalizers.Lowercase()
    with pytest.raises(UsageError, match="rules that have no name here.*gpt-2.*qwen2"):
        tokenizer_entries(json_tokenizer(inner))
    protocol: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    model = protocol.ModelProto.FromString(train_sentencepiece())
    model.trainer_spec.model_type = protocol.TrainerSpec.UNIGRAM
    unigram = SentencePieceTokenizer(model.SerializeToString(), name="made")
    with pytest.raises(UsageError, match="made is a SentencePiece model but no BPE"):
        tokenizer_entries(unigram)


def test_entries_are_plain_python(train_sentencepiece: Callable[..., bytes]):
    entries = tokenizer_entries(SentencePieceTokenizer(train_sentencepiece(), name="made"))
    for value in entries.values():
        assert type(value) in (bool, int, str, list) and not isinstance(value, np.generic)
