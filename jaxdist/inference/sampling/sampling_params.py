"""How the tokens of one request are chosen: vLLM's names and meanings.

Bad values are refused when the parameters are made, in one line with the field, the value and the
range; what depends on the vocabulary by `check_against`, before the device sees an id: there an id
out of range would silently be another one.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from jaxdist.config import UsageError, limits

MAX_N = 128  # continuations of one request, as OpenAI's
MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024  # texts, characters of one
MAX_BAD_WORDS = 256
LOGIT_BIASES = 1024  # ids in logit_bias; a slot of the sampler has room for as many
MAX_BIAS = 100.0  # OpenAI's; it forbids or forces a token
MAX_IDS = 1 << 20  # in a list of token ids


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What a text must conform to; exactly one is given.

    Attributes:
        json: A JSON schema, as an object or as text.
        json_object: Any JSON object.
        regex: A regular expression that the whole text matches.
        choice: One of these texts.
        grammar: A grammar in Lark's notation.
        whitespace_pattern: What may stand between the parts of JSON, a regular expression; by
            default any white space.
        disable_any_whitespace: Nothing may stand there.

    Raises UsageError where not exactly one is given, or it is of the wrong type.
    """

    json: Mapping | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self):
        limits.flag("json_object", self.json_object)
        limits.flag("disable_any_whitespace", self.disable_any_whitespace)
        given = [name for name in ("json", "regex", "choice", "grammar") if _is_set(self, name)]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise UsageError(
                "a structured output takes exactly one of json, json_object, regex, choice and "
                f"grammar; {', '.join(given) or 'none'} given"
            )
        if self.json is not None and not isinstance(self.json, (Mapping, str)):
            raise UsageError(
                f"json must be a schema, an object or its text; it is {_kind(self.json)}"
            )
        self._check_whitespace()
        for name in ("regex", "grammar"):
            if _is_set(self, name):
                limits.text(name, _type(name, getattr(self, name), str))
        if self.choice is not None:
            texts = _texts("choice", self.choice)
            if not texts or not all(texts):
                raise UsageError("choice must hold at least one text, and none that is empty")

    def _check_whitespace(self) -> None:
        names = ("whitespace_pattern", "disable_any_whitespace")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if self.whitespace_pattern is not None:
            _type("whitespace_pattern", self.whitespace_pattern, str)
        if len(given) > 1:
            raise UsageError(f"{given[0]} and {given[1]} exclude each other")
        if given and self.json is None and not self.json_object:
            raise UsageError(f"{given[0]} is only for json and json_object; leave it out")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """One request's sampling; the defaults sample from the model's own distribution.

    Attributes:
        n: Continuations of the prompt, each with a seed of its own.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_p: Smallest set of the likeliest tokens that holds this probability; 1 keeps all.
        top_k: Number of the likeliest tokens to keep; 0 or -1 keeps all.
        min_p: Least probability, as a share of the likeliest token's.
        typical_p: Smallest set of tokens of most typical surprise that holds this probability.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in
            prompt or output.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted once for each time a token is in the output.
        seed: With the position, all that a sampled token depends on; None draws one.
        logit_bias: Added to the logits, by token id.
        allowed_token_ids: No other token is chosen.
        bad_words: Texts that do not appear in the output.
        stop: Texts that end the output, and are left out of it; a single one may be given as it is.
        stop_token_ids: Token ids that end the output.
        include_stop_str_in_output: Keep the text that ended it.
        ignore_eos: Go on after the end-of-sequence token.
        min_tokens: Tokens before which no end-of-sequence or stop token is chosen.
        max_tokens: Most tokens to generate; None goes to the end of the context.
        logprobs: Number of likeliest tokens whose log-probability is told at each position, the
            chosen one's told besides; None tells nothing, 0 only the chosen one's. Of the raw
            logits: before temperature, penalties and masks.
        prompt_logprobs: The same for the prompt's tokens.
        skip_special_tokens: Leave special tokens out of the text.
        structured_outputs: What the text must conform to.

    As in vLLM, None stands for none where a list is asked for. Raises UsageError for a value out of
    its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self):
        for name in ("bad_words", "stop", "stop_token_ids"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        limits.whole("n", self.n, 1, MAX_N)
        limits.number("temperature", self.temperature, 0)
        limits.number("top_p", self.top_p, above=0, maximum=1)
        limits.whole("top_k", self.top_k, -1)
        limits.number("min_p", self.min_p, 0, 1)
        limits.number("typical_p", self.typical_p, above=0, maximum=1)
        limits.number("repetition_penalty", self.repetition_penalty, above=0)
        limits.number("presence_penalty", self.presence_penalty, -2, 2)
        limits.number("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            limits.whole("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_ids()
        self._check_texts()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            limits.flag(name, getattr(self, name))
        limits.whole("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            limits.whole("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise UsageError(
                    f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                limits.whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.structured_outputs is not None:
            _type("structured_outputs", self.structured_outputs, StructuredOutputsParams)

    def varied(self, **fields: Any) -> "SamplingParams":
        """A copy with other values, which are right: lists are long, and not checked again."""
        other = copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return other

    def check_against(self, vocab_size: int) -> None:
        """Raises UsageError for a token id that no vocabulary of this size has."""
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            ids = getattr(self, name) or ()
            if max(ids, default=0) >= vocab_size:
                raise UsageError(
                    f"{name} names the token {max(ids)}; the vocabulary has 0 to {vocab_size - 1}"
                )
            _most(name, ids, vocab_size)

    def _check_ids(self) -> None:
        if self.logit_bias is not None:
            biases = _type("logit_bias", self.logit_bias, Mapping)
            _most("logit_bias", biases, LOGIT_BIASES)
            for token, bias in biases.items():
                limits.whole("a token of logit_bias", token, 0)
                limits.number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        for name in ("allowed_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if ids is None and name == "allowed_token_ids":
                continue
            ids = _sequence(name, ids)
            _most(name, ids, MAX_IDS)
            _ids(name, ids)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise UsageError(
                "allowed_token_ids must hold at least one token id; leave it out to allow all"
            )

    def _check_texts(self) -> None:
        for name, most in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS)):
            texts = _texts(name, getattr(self, name))
            _most(name, texts, most)
            for text in texts:
                if not 0 < len(text) <= MAX_STOP_LENGTH:
                    raise UsageError(
                        f"a text of {name} has {len(text)} characters; it must have 1 to "
                        f"{MAX_STOP_LENGTH}"
                    )


def _is_set(structured: StructuredOutputsParams, name: str) -> bool:
    return getattr(structured, name) is not None


def _kind(value: Any) -> str:
    return type(value).__name__


def _type(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"{name} must be a {kind.__name__}; it is {_kind(value)}")
    return value


def _sequence(name: str, value: Any) -> Sequence[Any]:
    # A text is a sequence of texts too, and never what was meant.
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise UsageError(f"{name} must be a list; it is {_kind(value)}")
    return value


def _ids(name: str, ids: Sequence[Any]) -> None:
    """Looks at each only where one is wrong: a list may hold a whole vocabulary."""
    if {*map(type, ids)} <= {int} and (not ids or (min(ids) >= 0 and max(ids) < 2**31)):
        return
    for token in ids:
        limits.whole(f"a token of {name}", token, 0)


def _texts(name: str, value: Any) -> Sequence[str]:
    texts = _sequence(name, value)
    for text in texts:
        _type(f"each entry of {name}", text, str)
    return texts


def _most(name: str, values: Any, most: int) -> None:
    if len(values) > most:
        raise UsageError(f"{name} has {len(values)} entries; it may have at most {most}")
