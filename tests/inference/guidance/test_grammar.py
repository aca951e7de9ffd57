"""Texts drawn at random within a grammar conform to it; grammars that cannot work are refused."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from jaxdist.config import UsageError
from jaxdist.data.sources import EMBEDDED_FOLDER
from jaxdist.data.tokenizer import Tokenizer, load_tokenizer
from jaxdist.inference.guidance import grammar as grammars
from jaxdist.inference.guidance import grammar_checker
from jaxdist.inference.guidance.grammar import Grammar, Matcher
from jaxdist.inference.guidance.grammar_checker import Checker
from jaxdist.inference.guidance.token_bytes import token_bytes
from jaxdist.inference.sampling.sampling_params import StructuredOutputsParams

TEXT = (EMBEDDED_FOLDER / "tempest.txt").read_text()[:20_000] + '{"a": [1, true], "b": null} ' * 20
BYTES = load_tokenizer("bytes")
IM_START = 1  # a special token of `byte_level`


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A BPE of bytes with special, added and missing ids."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    inner.add_tokens([AddedToken("é€"), AddedToken('{"name"')])
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    inner.save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A SentencePiece model, as Llama's."""
    import sentencepiece

    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()),
            model_writer=file,
            model_type="bpe",
            vocab_size=600,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return load_tokenizer(str(path))


@pytest.fixture(scope="module")
def piece_json(pieces: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same vocabulary as a tokenizer.json with byte fallback."""
    tokens = [pieces._inner.id_to_piece(i) for i in range(pieces.vocab_size)]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Inner(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("piece-json") / "tokenizer.json"
    inner.save(str(path))
    return load_tokenizer(str(path))


@pytest.fixture(scope="module", params=["bytes", "byte_level", "pieces", "piece_json"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return BYTES if request.param == "bytes" else request.getfixturevalue(request.param)


def allowed_ids(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    flags = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not flags[vocab_size:].any()
    return np.flatnonzero(flags)


def write(
    grammar: Grammar, tokenizer: Tokenizer, seed: int, most: int = 300
) -> tuple[bytes, bool, list[int]]:
    """(what random logits that favour ends write, whether it ended itself, its tokens)."""
    rng, matcher, ids = np.random.default_rng(seed), grammar.matcher(), []
    closing = [i for i, t in enumerate(token_bytes(tokenizer).tokens) if t in b'"]}' and t]
    while len(ids) < most:
        masks, _ = matcher.masks()
        choice = allowed_ids(masks[0], tokenizer.vocab_size)
        if not len(choice):
            return text_of(tokenizer, ids), False, ids
        assert (tokenizer.eos_id in choice) == matcher.is_complete
        weights = np.where(np.isin(choice, [tokenizer.eos_id, *closing]), 20.0, 1.0)
        token = int(rng.choice(choice, p=weights / weights.sum()))
        matcher.advance([token])
        if token == tokenizer.eos_id:
            assert matcher.is_finished and not matcher.masks()[0].any()
            return text_of(tokenizer, ids), True, ids
        ids.append(token)
    return text_of(tokenizer, ids), False, ids


def text_of(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    tokens = token_bytes(tokenizer).tokens
    return b"".join(tokens[i] for i in ids)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["x", 'a "b"', "é", None, 1.5]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = """
start: "<" word ("," word)* ">"
word: /[a-z]{1,4}/
"""
CHOICES = ["yes", "no", 'a "b"\n\\', "\x00\x7f\u2028é😀", "a|b", "yes!"]
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "schema": ({"json": SCHEMA}, lambda s: jsonschema.validate(json.loads(s), SCHEMA) is None),
    "text": ({"json": json.dumps(SCHEMA)}, lambda s: json.loads(s)["age"] >= 0),
    "object": ({"json_object": True}, lambda s: isinstance(json.loads(s), dict)),
    "regex": (
        {"regex": r"[a-c]+[0-9]{2,3}(é|/)?"},
        re.compile(r"[a-c]+[0-9]{2,3}(é|/)?").fullmatch,
    ),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "lark": ({"grammar": LARK}, re.compile(r"<[a-z]{1,4}(,[a-z]{1,4})*>").fullmatch),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_conforms(tokenizer: Tokenizer, case: str):
    fields, conforms = CASES[case]
    grammar = grammars.compile(StructuredOutputsParams(**fields), tokenizer)
    ended = 0
    for seed in range(12):
        text, has_ended, _ = write(grammar, tokenizer, seed)
        ended += has_ended
        if has_ended:
            assert conforms(text.decode())
    assert ended


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_can_be_written(tokenizer: Tokenizer, choice: str):
    matcher = grammars.compile(StructuredOutputsParams(choice=CHOICES), tokenizer).matcher()
    tokens = token_bytes(tokenizer).tokens
    text = choice.encode()
    while text:
        allowed = allowed_ids(matcher.masks()[0][0], tokenizer.vocab_size)
        token = next(int(i) for i in allowed if tokens[i] and text.startswith(tokens[i]))
        matcher.advance([token])
        text = text[len(tokens[token]) :]
    assert matcher.is_complete


def test_masks_of_drafts_are_those_of_steps(byte_level: Tokenizer):
    grammar = grammars.compile(StructuredOutputsParams(json=SCHEMA), byte_level)
    _, has_ended, ids = next(w for s in range(50) if (w := write(grammar, byte_level, s))[1])
    slow, fast = grammar.matcher(), grammar.matcher()
    steps = []
    for token in ids:
        steps.append(slow.masks()[0][0])
        slow.advance([token])
    for start in range(0, len(ids), 3):
        drafts = ids[start : start + 5]
        for _ in range(2):  # looking ahead changes nothing
            masks, count = fast.masks(drafts)
            assert count == len(drafts)
            np.testing.assert_array_equal(masks[:-1], steps[start : start + 5])
        wrong = [*drafts[:1], IM_START, *drafts[1:]]
        masks, count = fast.masks(wrong)
        assert count == 1 and masks.shape[0] == 1 + len(wrong) and not masks[2:].any()
        masks, count = fast.masks([byte_level.eos_id, *drafts])
        assert count == 0
        fast.advance(ids[start : start + 3])
    assert has_ended and fast.is_complete


def test_a_text_that_leaves_the_grammar_is_at_a_dead_end():
    matcher = grammars.compile(StructuredOutputsParams(regex="ab"), BYTES).matcher()
    matcher.advance(b"ax")
    assert matcher.is_finished and not matcher.masks([98])[0].any()


@pytest.mark.parametrize(
    ("spaces", "fine"),
    [
        ({}, None),
        ({"whitespace_pattern": "[ ]?"}, ['{"a":1,"b":2}', '{"a": 1, "b": 2}']),
        ({"whitespace_pattern": "  "}, ['{"a":1,"b":2}', '{"a":  1,"b":2}']),
        ({"whitespace_pattern": ""}, ['{"a":1,"b":2}']),
        ({"disable_any_whitespace": True}, ['{"a":1,"b":2}']),
    ],
)
def test_the_white_space_of_json_is_said(spaces: dict[str, Any], fine: list[str] | None):
    schema = {"properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    fine = SPACED if fine is None else fine
    wish = StructuredOutputsParams(json=schema, **spaces)
    matches = [ends(grammars.compile(wish, BYTES), text) for text in SPACED]
    assert [text for text, fits in zip(SPACED, matches, strict=True) if fits] == fine
    free = grammars.compile(StructuredOutputsParams(json_object=True, **spaces), BYTES)
    assert [text for text in SPACED if ends(free, text)] == fine


SPACED = [
    '{"a":1,"b":2}',
    '{"a": 1, "b": 2}',
    '{"a":  1,"b":2}',
    '{ "a": 1,\n\t"b": 2 }',
]


def ends(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    matcher.advance(list(text.encode()))
    return matcher.is_complete


def test_any_of_several_ends_is_allowed_and_none_is_needed(byte_level: Tokenizer):
    regex = StructuredOutputsParams(regex="ab?")
    matcher = grammars.compile(regex, byte_level, [0, 1]).matcher()
    matcher.advance(byte_level.encode("a"))
    assert {0, 1} < set(allowed_ids(matcher.masks()[0][0], byte_level.vocab_size))
    matcher = grammars.compile(regex, byte_level, []).matcher()
    matcher.advance(byte_level.encode("ab"))
    assert matcher.is_finished and matcher.is_complete and not matcher.masks()[0].any()


def test_special_tokens_are_never_text(tokenizer: Tokenizer):
    matcher = grammars.compile(StructuredOutputsParams(regex="(?s:.*)"), tokenizer).matcher()
    allowed = set(allowed_ids(matcher.masks()[0][0], tokenizer.vocab_size).tolist())
    assert allowed & set(token_bytes(tokenizer).special) == {tokenizer.eos_id}


def test_token_bytes_are_what_is_decoded(byte_level: Tokenizer, pieces: Tokenizer):
    text = 'He said {"x": [1, "é€ 😀"]}\n\tend'
    for tokenizer in (byte_level, pieces, BYTES):
        ids = tokenizer.encode(text)
        assert text_of(tokenizer, ids).decode().removeprefix(" ") == text


def test_a_vocabulary_that_is_not_of_bytes_is_refused(tmp_path: Path):
    inner = Inner(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="structured output needs"):
        grammars.compile(StructuredOutputsParams(regex="a"), load_tokenizer(str(tmp_path)))


def _chain(wrap: Any, count: int) -> dict[str, Any]:
    links = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


def _nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(count):
        schema = {"type": "array", "items": schema}
    return schema


def _one_of(i: int) -> dict[str, Any]:
    options = [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(8)]
    return {"anyOf": [{"type": "object", **o, "required": [*o["properties"]]} for o in options]}


REFUSED: dict[str, dict[str, Any]] = {
    "type": {"json": {"type": "bogus"}},
    "not-json": {"json": "{"},
    "not-an-object": {"json": "[1]"},
    "set": {"json": {"x": {1, 2}}},
    "infinity": {"json": {"maximum": float("inf")}},
    "nan-text": {"json": '{"maximum": NaN}'},
    "surrogate-text": {"json": '{"const": "\\ud800"}'},
    "deeper-than-read": {"json": _nested(150)},
    "surrogate": {"regex": "a\ud800"},
    "keyword": {"json": {"not": {}}},
    "remote": {"json": {"$ref": "http://example.com/schema"}},
    "contradiction": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "deep": {"json": _nested(5000)},
    "deep-text": {"json": '{"items":' * 50_000},
    "deep-references": {"json": _chain(lambda ref: ref, 5000)},
    "self-reference": {"json": {"$ref": "#"}},
    "product": {"json": {"allOf": [_one_of(i) for i in range(9)]}},
    "properties": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(6000)}}},
    "huge": {"json": {"enum": ["x" * grammars.MAX_BYTES]}},
    "unclosed": {"regex": "(a"},
    "unclosed-spaces": {"json": {}, "whitespace_pattern": "(a"},
    "huge-spaces": {"json": {}, "whitespace_pattern": " " * grammars.MAX_BYTES},
    "look-around": {"regex": "(?=a)b"},
    "nothing": {"regex": r"[^\s\S]"},
    "deep-regex": {"regex": "(" * 60_000 + "a" + ")" * 60_000},
    "unknown": {"grammar": "start: other"},
    "deep-grammar": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "long-chain": {
        "grammar": "start: r0\n"
        + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(5000))
        + 'r5000: "x"'
    },
    "endless": {"grammar": "start: start"},
    "exponential": {
        "grammar": "start: T0\n"
        + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(25))
        + 'T25: "x"'
    },
}


@pytest.mark.parametrize(
    "case", [c if c != "exponential" else pytest.param(c, marks=pytest.mark.slow) for c in REFUSED]
)
def test_refused_in_one_line_and_in_time(case: str):
    begin = time.monotonic()
    for _ in range(2):  # remembered, too
        with pytest.raises(UsageError) as refused:
            grammars.compile(StructuredOutputsParams(**REFUSED[case]), BYTES)
    said = str(refused.value)
    assert "\n" not in said and len(said) < 300
    assert time.monotonic() - begin < 20
    assert grammars.compile(StructuredOutputsParams(regex="a"), BYTES).matcher().masks()[0].any()


def test_what_takes_too_long_is_given_up():
    slow = {"properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    source = grammars._source(StructuredOutputsParams(json=slow))[1]
    checker = Checker(*token_bytes(BYTES), [256])
    assert checker.check(source, seconds=0.01) == ("it takes more than 0.01 s to compile", False)
    assert checker.check(grammars._source(StructuredOutputsParams(regex="a"))[1]) == (None, True)


def test_slow_ones_hold_up_others_for_a_while_only(monkeypatch):
    monkeypatch.setattr(grammar_checker, "WAIT", 0.2)
    checkers = grammar_checker.Checkers(*token_bytes(BYTES), [256])
    quick = grammars._source(StructuredOutputsParams(regex="a"))[1]
    entered, go_on = threading.Barrier(5), threading.Event()

    def check(self, grammar):
        entered.wait(20)
        go_on.wait(20)
        return None, True

    with monkeypatch.context() as slow, ThreadPoolExecutor() as pool:
        slow.setattr(Checker, "check", check)
        held = [pool.submit(checkers.check, quick) for _ in range(4)]
        entered.wait(20)
        assert checkers.check(quick) is None  # no time was left for it
        go_on.set()
        assert [one.result() for one in held] == [(None, True)] * 4
    assert checkers.check(quick) == (None, True)


def test_true_and_false_are_schemas():
    any_json = grammars.compile(StructuredOutputsParams(json="true"), BYTES).matcher()
    any_json.advance(b"[1]")
    assert any_json.is_complete
    with pytest.raises(UsageError, match="the JSON schema cannot be followed"):
        grammars.compile(StructuredOutputsParams(json="false"), BYTES)


def test_depth_and_breadth_that_people_use_are_taken():
    wide = {f"property {i}": {"type": ["string", "null"]} for i in range(200)}
    for schema in (_nested(50), {"type": "object", "properties": wide}, _chain(lambda r: r, 50)):
        assert (
            grammars.compile(StructuredOutputsParams(json=schema), BYTES).matcher().masks()[0].any()
        )


def test_grammars_are_kept():
    first = grammars.compile(StructuredOutputsParams(regex="x+"), BYTES)
    assert grammars.compile(StructuredOutputsParams(regex="x+"), BYTES) is first
    one, other = first.matcher(), first.matcher()
    one.advance(b"x")
    assert one.is_complete and not other.is_complete
    assert isinstance(one, Matcher)


plain = st.sampled_from(["string", "integer", "number", "boolean", "null"])
names = st.text('ab"\\ é{', min_size=1, max_size=4)
leaves = st.one_of(
    st.builds(lambda kind: {"type": kind}, plain),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 200),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 4),
        st.integers(0, 4),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.none() | st.booleans() | st.integers(-999, 999) | names,
            min_size=1,
            max_size=4,
            unique_by=repr,
        ),
    ),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-z]+$", "b{2}", "^a|c$")]),
    st.builds(
        lambda low, more, key: {"type": "number", key: low, "maximum": low + more},
        st.integers(-20, 20) | st.floats(-9, 9, width=16),
        st.integers(1, 20) | st.just(0.25),
        st.sampled_from(["minimum", "exclusiveMinimum"]),
    ),
    st.builds(lambda m: {"type": "integer", "multipleOf": m}, st.integers(1, 40)),
    st.builds(lambda value: {"const": value}, names | st.just([1, {"a": None}])),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "uuid", "ipv4")]),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], data: int, extra: bool) -> dict[str, Any]:
        required = [name for i, name in enumerate(properties) if data >> i & 1]
        made = {"type": "object", "properties": properties, "required": required}
        return made if extra else made | {"additionalProperties": False}

    return st.builds(
        build, st.dictionaries(names, inner, max_size=4), st.integers(0, 15), st.booleans()
    )


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(
            lambda items, low, more: {
                "type": "array",
                "items": items,
                "minItems": low,
                "maxItems": low + more,
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 3),
        ),
        st.builds(
            lambda key, options: {key: options},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=6,
)


@given(schemas, st.integers(0, 2**32))
@settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_schema_is_refused_or_kept_to(byte_level: Tokenizer, schema: Any, seed: int):
    try:
        grammar = grammars.compile(StructuredOutputsParams(json=schema), byte_level)
    except UsageError as refused:
        assert "\n" not in str(refused)
        assume(False)
        raise
    text, has_ended, _ = write(grammar, byte_level, seed)
    if has_ended:
        value = json.loads(text)
        jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        ).validate(value)


@pytest.mark.parametrize("low", [-1, 0, 1, 0.5])
@pytest.mark.parametrize("width", [0.25, 1, 3])
def test_exclusive_bounds_are_not_reached(low: float, width: float):
    high = low + width
    schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    grammar = grammars.compile(StructuredOutputsParams(json=schema), BYTES)
    texts = [f"{low + width * i / 8:g}" for i in range(-4, 13)] + [f"{low:.2f}", f"{high:.2f}"]
    for text in texts:
        matcher = grammar.matcher()
        count = matcher.masks(text.encode())[1]
        matcher.advance(text.encode()[:count])
        accepted = count == len(text) and matcher.is_complete
        assert accepted == (low < float(text) < high), text
