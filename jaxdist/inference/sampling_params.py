"""How the tokens of one request are chosen: vLLM's names and meanings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What a text must conform to; exactly one is given.

    Attributes:
        json: A JSON schema, as an object or as text.
        json_object: Any JSON object.
        regex: A regular expression that the whole text matches.
        choice: One of these texts.
        grammar: A grammar in Lark's notation.
    """

    json: Mapping | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None


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
        stop: Texts that end the output, and are left out of it.
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
        structured: What the text must conform to.
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
    structured: StructuredOutput | None = None
