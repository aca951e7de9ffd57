"""The tokenizer inside a GGUF file, rebuilt from the file's metadata (keys `tokenizer.ggml.*`).

Two kinds exist in decoder models: `gpt2`, a byte-level BPE whose merges and pre-tokenizer are
named, and `llama`, a SentencePiece model whose pieces carry scores. The first is rebuilt with the
tokenizers library, the second as the SentencePiece protocol buffer that it once was, so that both
encode as the original does. Source of the keys and of the kinds' names: the GGUF specification
(ggml, docs/gguf.md).
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.data.tokenizer import ABSENT, JsonTokenizer, SentencePieceTokenizer, Tokenizer, require
from jaxdist.interop.gguf.header import Strings, read_header

# Values of tokenizer.ggml.token_type; SentencePiece's ModelProto.SentencePiece.Type has the same
# numbers.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
# Contractions, then a word or a run of symbols with the space before it, then line ends and spaces.
# `digits` is what a number is split into; cl100k-like vocabularies differ in nothing else.
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%(digits)s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Rebuild the tokenizer of a GGUF file.

    Raises UsageError for a damaged file, one without a tokenizer, or with one of a kind not known
    here (named in the message).
    """
    metadata = read_header(path).metadata

    def read(key: str, default: Any = None) -> Any:
        value = metadata.get(f"tokenizer.ggml.{key}", default)
        if isinstance(value, np.ndarray):
            return value.tolist()
        return list(value) if isinstance(value, Strings) else value

    kind = read("model")
    if kind is None:
        raise UsageError(f"data.tokenizer: {path} holds no tokenizer (no key tokenizer.ggml.model)")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UsageError(
            f"data.tokenizer: {path} has a tokenizer of kind {kind!r}; known kinds: "
            f"{', '.join(KINDS)}"
        )
    try:
        return KINDS[kind](read, str(path))
    except UsageError:
        raise
    except Exception as error:  # the library raises plain Exception
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"data.tokenizer: the vocabulary in {path} does not fit together ({reason:.200})"
        ) from error


def _special_ids(read: Callable[..., Any], bos_by_default: bool) -> tuple[int | None, int | None]:
    """(bos_id, eos_id); bos only where the file says that documents open with it."""
    bos = read("bos_token_id") if read("add_bos_token", bos_by_default) else None
    return bos, read("eos_token_id")


def _byte_level(read: Callable[..., Any], path: str) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Inner

    tokens, merges, types = read("tokens"), read("merges", []), read("token_type") or []
    pre = read("pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise UsageError(
            f"data.tokenizer: {path} splits text by the rules {pre!r}, which are not known here"
            f"{did_you_mean(pre, PRE_TOKENIZERS)}; known: {', '.join(PRE_TOKENIZERS)}; "
            "use the model's tokenizer.json"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    # Llama 3 takes a word that is a token whole, without going through the merges.
    inner = Inner(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    inner.normalizer, inner.pre_tokenizer = PRE_TOKENIZERS[pre]()
    inner.decoder = decoders.ByteLevel()
    # In the order of their ids, which they keep because they are in the vocabulary already.
    inner.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    bos_id, eos_id = _special_ids(read, bos_by_default=pre == "llama-bpe")
    content = hashlib.sha256(repr((pre, tokens, merges, types)).encode()).hexdigest()
    return JsonTokenizer(inner, name=path, eos_id=eos_id, bos_id=bos_id, fingerprint=content)


def _sentencepiece(read: Callable[..., Any], path: str) -> Tokenizer:
    protocol: Any = require("sentencepiece.sentencepiece_model_pb2", "sentencepiece", path)
    tokens, scores, types = read("tokens"), read("scores"), read("token_type")
    if scores is None or types is None:
        raise UsageError(
            f"data.tokenizer: {path} lacks the scores or token types of its SentencePiece pieces"
        )
    model = protocol.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = protocol.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_piece = tokens[read("unknown_token_id", 0)]
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(read("add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = bool(read("remove_extra_whitespaces", False))
    model.normalizer_spec.escape_whitespaces = True
    bos_id, eos_id = _special_ids(read, bos_by_default=True)
    return SentencePieceTokenizer(
        model.SerializeToString(),
        name=path,
        eos_id=ABSENT if eos_id is None else eos_id,
        bos_id=ABSENT if bos_id is None else bos_id,
    )


def _gpt2() -> tuple[Any, Any]:
    from tokenizers import pre_tokenizers

    return None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> tuple[Any, Any]:
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return None, pre_tokenizers.Sequence([digits, _gpt2()[1]])


def _cl100k(digits: str, normalize: bool) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        from tokenizers import Regex, normalizers, pre_tokenizers

        split = pre_tokenizers.Split(Regex(CL100K % {"digits": digits}), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return (normalizers.NFC() if normalize else None), pre_tokenizers.Sequence([split, level])

    return build


# tokenizer.ggml.pre -> () -> (normalizer or None, pre-tokenizer)
PRE_TOKENIZERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _cl100k(r"\p{N}{1,3}", normalize=False),
    "qwen2": _cl100k(r"\p{N}", normalize=True),
}
KINDS: dict[str, Callable[[Callable[..., Any], str], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
