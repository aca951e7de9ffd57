"""Texts for `LLM`: what spells a special token is that token only where it was asked for."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxdist.data.tokenizer import JsonTokenizer
from jaxdist.llm_texts import Texts


def tokenizer() -> JsonTokenizer:
    """A token a byte, and two special ones; texts open with <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "<|end|>"])
    bos, eos = map(inner.token_to_id, ("<s>", "<|end|>"))
    return JsonTokenizer(inner, name="", eos_id=eos, bos_id=bos, fingerprint="")


def test_special_tokens_are_read_where_asked_for(caplog):
    made = tokenizer()
    plain, parsed = Texts(made), Texts(made, parse_special=True)
    for texts in (plain, parsed):
        assert texts.read("hi") == {"prompt": "hi"}
        assert texts.read([1, 2]) == {"prompt": [1, 2]}
    assert not caplog.records
    assert plain.read("<s>hi") == {"prompt": "<s>hi"}
    assert "a prompt spells <s>, which is plain text here; parse_special=True" in caplog.text
    read = {"prompt": [made.bos_id, *made.encode("hi"), made.eos_id]}
    for text in ("hi<|end|>", "<s>hi<|end|>"):  # opened once
        assert parsed.read(text) == read | {"prompt_text": text}
    assert Texts(None, parse_special=True).read("<s>") == {"prompt": "<s>"}
