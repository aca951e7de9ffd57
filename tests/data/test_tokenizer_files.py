"""The small files that go with a model."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxdist.config import UsageError
from jaxdist.data.tokenizer import JsonTokenizer, load_tokenizer
from jaxdist.data.tokenizer_files import (
    chat_template,
    files_beside,
    files_of_path,
    files_of_tokenizer,
)

TEXT = "Zoë says <|end|> 12"


def byte_level(bos_id: int | None) -> JsonTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|start|>", "<|end|>"])
    return JsonTokenizer(inner, name="x", eos_id=257, bos_id=bos_id, fingerprint="x")


@pytest.mark.parametrize("bos_id", [None, 256])
def test_a_tokenizer_in_memory_is_read_back(bos_id, tmp_path):
    tokenizer = byte_level(bos_id)
    files = files_of_tokenizer(tokenizer, "{{ messages }}")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    back = load_tokenizer(str(tmp_path))
    assert (back.bos_id, back.eos_id, back.vocab_size) == (bos_id, 257, 258)
    assert back.encode(TEXT) == tokenizer.encode(TEXT)
    assert back.decode(back.encode(TEXT)) == TEXT
    assert chat_template(files) == "{{ messages }}"
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 257
    assert tokenizer.encode(TEXT) == byte_level(bos_id).encode(TEXT)  # it was left as it was


def test_transformers_reads_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_level(256)
    for name, content in files_of_tokenizer(tokenizer).items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain = "Zoë says 12"
    assert theirs(plain).input_ids == [256, *tokenizer.encode(plain)]
    assert theirs.eos_token_id == 257


def test_files_are_copied_as_they_are(tmp_path):
    for name in ("tokenizer.json", "merges.txt", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    assert sorted(files_beside(tmp_path)) == [
        "generation_config.json",
        "merges.txt",
        "tokenizer.json",
    ]
    assert sorted(files_of_path(tmp_path / "tokenizer.json")) == ["merges.txt", "tokenizer.json"]
    (tmp_path / "own.json").write_text("own")
    assert files_of_path(tmp_path / "own.json") == {"tokenizer.json": b"own"}
    assert files_of_path(tmp_path / "some.gguf") == {}


def test_chat_templates_are_found_in_all_places():
    named = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    config = json.dumps({"chat_template": named}).encode()
    assert chat_template({"tokenizer_config.json": config}) == "b"
    assert chat_template({"chat_template.jinja": b"c", "tokenizer_config.json": config}) == "c"
    assert chat_template({}) is None
    for no_template in ([None, 1], [{}], [{"name": ["default"], "template": "b"}], 5, {}):
        config = json.dumps({"chat_template": no_template}).encode()
        assert chat_template({"tokenizer_config.json": config}) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff"),
        ("chat_template.json", b"[]"),
        ("chat_template.json", b"{"),
        ("tokenizer_config.json", b"null"),
        ("tokenizer_config.json", b'{"a":' * 100_000),
    ],
)
def test_a_damaged_file_of_a_template_is_named(name, content):
    with pytest.raises(UsageError, match=f"{name} of the model is not"):
        chat_template({name: content})
