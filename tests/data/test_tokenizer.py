"""Round trips, documents that spell special tokens, and files that are refused."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxdist.config import ModelConfig, UsageError
from jaxdist.data.tokenizer import check_fits, load_tokenizer

SPECIAL = ["<|begin|>", "<|endoftext|>", "<|im_start|>"]


@pytest.fixture(scope="module")
def json_folder(play: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json whose template opens texts with <|begin|>, which truncates and pads."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([play], trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    inner.enable_truncation(max_length=8)
    inner.enable_padding(length=32)
    folder = tmp_path_factory.mktemp("json")
    inner.save(str(folder / "tokenizer.json"))
    return folder


@given(st.text())
@settings(deadline=None)
def test_bytes_round_trip(text: str):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode([*ids, 256]) == text
    np.testing.assert_array_equal(tokenizer.encode_batch([text, ""])[0], ids)


def test_bytes_survive_what_is_not_utf8():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("a\ud800b") == [97, 63, 98]
    assert tokenizer.decode([97, 0xE2, 0x82]) == "a\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (257, 256, None)


def test_json_by_file_and_by_folder(json_folder: Path):
    by_folder = load_tokenizer(str(json_folder))
    by_file = load_tokenizer(str(json_folder / "tokenizer.json"))
    assert by_folder.fingerprint == by_file.fingerprint
    assert (by_folder.bos_id, by_folder.eos_id) == (0, 1)
    assert by_folder.vocab_size == 400


def test_json_takes_documents_whole_and_adds_nothing(json_folder: Path, play: str):
    tokenizer = load_tokenizer(str(json_folder))
    ids = tokenizer.encode(play)
    assert len(ids) > 1000 and tokenizer.decode(ids) == play
    assert not set(ids) & {0, 1, 2}
    np.testing.assert_array_equal(tokenizer.encode_batch(["x", play])[1], ids)


def test_json_eos_of_the_file_beside_it_wins(json_folder: Path, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((json_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_start|>"}})
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_id == 2
    assert tokenizer.fingerprint != load_tokenizer(str(json_folder)).fingerprint


def test_sentencepiece(train_sentencepiece: Callable[..., bytes], tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece())
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 600)
    text = "  Two  spaces,\na naïve line, 日本 and <s> </s>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    without = tmp_path / "without.model"
    without.write_bytes(train_sentencepiece(bos_id=-1, eos_id=-1))
    assert load_tokenizer(str(without)).eos_id is None


@pytest.mark.parametrize("kind", ["json", "sentencepiece", "bytes"])
def test_text_never_becomes_a_control_token(
    kind: str, json_folder: Path, train_sentencepiece: Callable[..., bytes], tmp_path: Path
):
    (tmp_path / "t.model").write_bytes(train_sentencepiece())
    paths = {"json": json_folder, "sentencepiece": tmp_path / "t.model", "bytes": "bytes"}
    tokenizer = load_tokenizer(str(paths[kind]))
    text = "a<|endoftext|>b <|im_start|><|begin|></s><s><unk>"
    ids = tokenizer.encode(text)
    assert not set(ids) & ({0, 1, 2} | {tokenizer.eos_id})
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(tokenizer.encode_batch([text])[0], ids)


def test_check_fits():
    tokenizer = load_tokenizer("bytes")
    model = ModelConfig.from_preset("tiny")
    check_fits(tokenizer, replace(model, vocab_size=257))
    with pytest.raises(UsageError, match="257 tokens.*vocab_size=256; set model.vocab_size.*257"):
        check_fits(tokenizer, replace(model, vocab_size=256))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.json", None, "no file or folder .*missing.json"),
        ("tokenizer.json", "{]", "is not a tokenizer.json"),
        (
            "tokenizer.json",
            '{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}',
            "no tokens",
        ),
        ("t.model", "no protocol buffer", "is not a SentencePiece model"),
        ("t.model", "", "is empty"),
        ("~nobody-of-this-name/t.model", None, "no file or folder"),
        ("t.gguf", "no GGUF file at all, is it?", "not a GGUF file"),
        ("t.vocab", "a b", "must end in .json, .model or .gguf"),
    ],
)
def test_refused(name: str, content: str | None, said: str, tmp_path: Path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=said):
        load_tokenizer(str(tmp_path / name))


@pytest.mark.parametrize("content", ["[1]", "{", "\xff"])
def test_a_damaged_file_beside_a_tokenizer_is_named(
    content: str, json_folder: Path, tmp_path: Path
):
    shutil.copy(json_folder / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match="tokenizer_config.json is not .*remove it"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("token", [5, ["</s>"], {"content": 5}, True])
def test_an_end_that_is_no_text_is_refused_by_its_file(
    token: object, json_folder: Path, tmp_path: Path
):
    shutil.copy(json_folder / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": token}))
    with pytest.raises(UsageError, match="special_tokens_map.json: eos_token must be a text"):
        load_tokenizer(str(tmp_path))


def test_a_text_beyond_the_vocabulary_is_refused(tmp_path: Path):
    Inner(models.WordLevel({"a": 0}, unk_token="?")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="tokenizer.json cannot encode the text"):
        load_tokenizer(str(tmp_path)).encode("b")


def test_folder_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="holds none of tokenizer.json"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["pipe", "tokenizer.json", "tokenizer.model", "a.gguf"])
@pytest.mark.parametrize("by_folder", [True, False])
def test_a_pipe_is_refused_without_waiting_for_its_writer(
    name: str, by_folder: bool, tmp_path: Path
):
    os.mkfifo(tmp_path / name)
    said = "holds none of" if by_folder and name == "pipe" else f"{name} is a pipe, a socket"
    with pytest.raises(UsageError, match=said):
        load_tokenizer(str(tmp_path if by_folder else tmp_path / name))


def test_a_device_is_refused():
    with pytest.raises(UsageError, match="/dev/zero is a pipe, a socket or a device"):
        load_tokenizer("/dev/zero")
