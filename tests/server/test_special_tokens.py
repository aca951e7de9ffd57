"""Users' text never becomes a control token, wherever a template puts it."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxdist.data.tokenizer import BytesTokenizer, JsonTokenizer
from jaxdist.server.special_tokens import Disguise, SpecialTokens
from tests.server.conftest import SPECIAL

PARTS = ["<|im_", "end|>", "<|", "|>", "<", ">", "s", "/s>", "im_end", " ", "x", "\U00100000"]
FRAGMENTS = [*SPECIAL, *PARTS]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokens(tokenizer) -> SpecialTokens:
    return SpecialTokens(tokenizer)


def test_special_tokens_are_known(tokens, tokenizer):
    assert set(tokens.ids) == set(SPECIAL)
    assert SpecialTokens(BytesTokenizer()).ids == {}


@given(first=TEXTS, second=TEXTS)
def test_text_stays_text_beside_any_text(tokens, tokenizer, first, second):
    disguise = Disguise(tokens, [first, second])
    rendered = "<|im_start|>" + disguise.hide(first) + disguise.hide(second) + "<|im_end|>"
    ids = tokens.encode(rendered, disguise)
    opening, closing = tokens.ids["<|im_start|>"], tokens.ids["<|im_end|>"]
    assert ids == [opening, *tokenizer.encode(first + second), closing]


@given(text=TEXTS)
def test_text_between_halves_of_a_special_token_stays_text(tokens, tokenizer, text):
    disguise = Disguise(tokens, [text])
    ids = tokens.encode(f"<|{disguise.hide(text, whole=True)}|>", disguise)
    assert ids == tokenizer.encode(f"<|{text}|>")


@given(text=TEXTS)
def test_a_disguise_is_lifted(tokens, text):
    disguise = Disguise(tokens, [text])
    hidden = disguise.hide(text, whole=True)
    assert disguise.lift(hidden) == text
    assert not list(tokens.find(hidden))


def test_overlapping_tokens_are_all_hidden(inner):
    made = inner()
    made.add_special_tokens(["abab", "x"])
    tokens = SpecialTokens(JsonTokenizer(made, name="", eos_id=None, bos_id=None, fingerprint=""))
    disguise = Disguise(tokens, ["abababx"])
    assert not list(tokens.find(disguise.hide("abababx")))


def test_spaces_that_a_token_swallows_are_dropped(inner):
    made = inner()
    made.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True, lstrip=True)])
    ours = SpecialTokens(
        JsonTokenizer(inner_copy(made), name="", eos_id=None, bos_id=None, fingerprint="")
    )
    text = "a <|end|>  b"
    assert ours.encode(text, Disguise(ours, [])) == made.encode(text).ids


def test_a_space_before_the_first_word_only():
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", "\u2581", "a", "b", "\u2581a"])}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<s>"])
    tokens = SpecialTokens(
        JsonTokenizer(inner_copy(made), name="", eos_id=None, bos_id=None, fingerprint="")
    )
    for text in ("a<s>a", "<s>ab<s>a a", "a"):
        assert tokens.encode(text, Disguise(tokens, [])) == made.encode(text).ids


def inner_copy(made):
    return tokenizers.Tokenizer.from_str(made.to_str())
