"""A tokenizer as the metadata of a GGUF file: the way back from `gguf_tokenizer`.

llama.cpp rebuilds a tokenizer from its vocabulary and the name of the rules by which it splits
text. A tokenizer.json does not know that name, so it is found by what the tokenizer does.
"""

import json
from typing import Any

from jaxdist.config.errors import UsageError
from jaxdist.data.gguf_tokenizer import CONTROL, PRE_TOKENIZERS, UNKNOWN, USER_DEFINED
from jaxdist.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, Tokenizer, require

NORMAL, UNUSED, BYTE = 1, 5, 6  # more values of tokenizer.ggml.token_type
# Text on which any two sets of rules differ: contractions, digits, line ends, spaces, symbols,
# and a letter with a combining accent.
PROBE = (
    "I'LL don't it's we'Re x9y87 1234567 12.5\r\n\n  def f(x):\n\treturn  x**2 # na\u00efve "
    "cafe\u0301 \u65e5\u672c\u8a9e \U0001f389!!\n \n\n   end ...\t\u0663\u0664 "
)


def tokenizer_entries(tokenizer: Tokenizer, chat_template: str | None = None) -> dict[str, Any]:
    """Metadata `tokenizer.*` of a GGUF file that holds this tokenizer.

    Raises UsageError for a tokenizer whose kind or rules have no name in GGUF.
    """
    if isinstance(tokenizer, JsonTokenizer):
        entries = _of_json(tokenizer)
    elif isinstance(tokenizer, SentencePieceTokenizer):
        entries = _of_sentencepiece(tokenizer)
    else:
        raise UsageError(
            f"the tokenizer {tokenizer.name} has no form in GGUF; write the file without one, or "
            "give a tokenizer.json or a SentencePiece model"
        )
    if tokenizer.bos_id is not None:
        entries["bos_token_id"] = tokenizer.bos_id
    if tokenizer.eos_id is not None:
        entries["eos_token_id"] = tokenizer.eos_id
    entries["add_bos_token"] = tokenizer.bos_id is not None
    prefixed = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    if chat_template is not None:
        prefixed["tokenizer.chat_template"] = chat_template
    return prefixed


def _of_json(tokenizer: JsonTokenizer) -> dict[str, Any]:
    inner = tokenizer._inner
    content = json.loads(inner.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise UsageError(
            f"the tokenizer {tokenizer.name} is of kind {model['type']}, which has no form in "
            "GGUF; only BPE has"
        )
    tokens = [f"[UNUSED{i}]" for i in range(tokenizer.vocab_size)]
    types = [UNUSED] * len(tokens)
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    if model.get("byte_fallback"):
        return _pieces(inner, tokens, types, merges, model.get("unk_token"))
    return {
        "model": "gpt2",
        "pre": _rules(tokenizer.name, inner, bool(model.get("ignore_merges"))),
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in merges],
    }


def _rules(name: str, inner: Any, ignore_merges: bool) -> str:
    """The name of the rules that split the probe as `inner` does."""

    def split(normalizer: Any, pre_tokenizer: Any) -> Any:
        text = PROBE if normalizer is None else normalizer.normalize_str(PROBE)
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    if inner.pre_tokenizer is not None:
        wanted = split(inner.normalizer, inner.pre_tokenizer)
        for pre, build in PRE_TOKENIZERS.items():
            if split(*build()) == wanted and ignore_merges == (pre == "llama-bpe"):
                return pre
    raise UsageError(
        f"the tokenizer {name} splits text by rules that have no name here for GGUF; known: "
        f"{', '.join(PRE_TOKENIZERS)}"
    )


def _pieces(
    inner: Any, tokens: list[str], types: list[int], merges: list[list[str]], unknown: str | None
) -> dict[str, Any]:
    """A SentencePiece BPE that was turned into merges: their order becomes the scores."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    for i, token in enumerate(tokens):
        if token == unknown:
            types[i] = UNKNOWN
        elif types[i] == NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[i] = BYTE
    entries = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        # A piece that no merge makes is never chosen for its score.
        "scores": [-float(ranks.get(token, len(ranks))) for token in tokens],
        "add_space_prefix": inner.encode("a", add_special_tokens=False).tokens[0] != "a",
    }
    if unknown in tokens:
        entries["unknown_token_id"] = tokens.index(unknown)
    return entries


def _of_sentencepiece(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    protocol: Any = require("sentencepiece.sentencepiece_model_pb2", "sentencepiece", "GGUF")
    model = protocol.ModelProto.FromString(tokenizer._inner.serialized_model_proto())
    if model.trainer_spec.model_type != protocol.TrainerSpec.BPE:
        raise UsageError(
            f"the tokenizer {tokenizer.name} is a SentencePiece model but no BPE; only BPE has a "
            "form in GGUF"
        )
    return {
        "model": "llama",
        "tokens": [piece.piece for piece in model.pieces],
        "token_type": [int(piece.type) for piece in model.pieces],
        "scores": [float(piece.score) for piece in model.pieces],
        "add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "remove_extra_whitespaces": model.normalizer_spec.remove_extra_whitespaces,
        "unknown_token_id": tokenizer._inner.unk_id(),
    }
