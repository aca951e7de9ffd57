"""From text to token ids and back: the first stage of the data's way, also used by generation.

`load_tokenizer` takes what `data.tokenizer` says: `bytes`, a `tokenizer.json`, a SentencePiece
`.model`, a `.gguf` file, or a folder that holds one of them. Text given to `encode` never becomes a
special (control) token; those enter only as the `bos_id` and `eos_id` that the data pipeline or a
chat template sets.
"""

import hashlib
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.config.json_text import read_object

BYTES = "bytes"
ABSENT = -1  # how SentencePiece says that its vocabulary lacks a token
# Files looked for in a folder, best first.
FILES_IN_FOLDER = ("tokenizer.json", "tokenizer.model", "*.gguf")
# End-of-document tokens of well-known vocabularies, for a tokenizer.json that lies alone.
USUAL_EOS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|eot_id|>",
)


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        name: What the user wrote, for messages.
        vocab_size: Highest id + 1.
        eos_id: Closes each document; None where the vocabulary has no such token.
        bos_id: Opens each document; None where the tokenizer opens with nothing.
        fingerprint: Changes when any text may be encoded differently.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without `bos_id` and `eos_id`."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        skip_special_tokens: False writes special tokens by their names.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, as int32 arrays."""
        return [np.asarray(self.encode(text), np.int32) for text in texts]


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    def __init__(self):
        self.name, self.vocab_size, self.eos_id, self.bos_id = BYTES, 257, 256, None
        self.fingerprint = "bytes-1"

    def encode(self, text: str) -> list[int]:
        return list(_utf8(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        del skip_special_tokens  # the only one has no name
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(_utf8(text), np.uint8).astype(np.int32) for text in texts]


class JsonTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`, from a tokenizer.json or rebuilt from a GGUF file."""

    def __init__(
        self, inner: Any, *, name: str, eos_id: int | None, bos_id: int | None, fingerprint: str
    ):
        # Text that spells a special token is then encoded like any other text.
        inner.encode_special_tokens = True
        self._inner = inner
        self.name, self.eos_id, self.bos_id = name, eos_id, bos_id
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(f"{fingerprint} {bos_id} {eos_id}".encode()).hexdigest()[
            :16
        ]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # Runs on all cores, without the interpreter lock.
        try:
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise UsageError(
                f"data.tokenizer: {self.name} cannot encode the text ({error}); mend its vocabulary"
            ) from error
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, as its serialized protocol buffer. Text never gives control pieces."""

    def __init__(
        self, model: bytes, *, name: str, eos_id: int | None = None, bos_id: int | None = None
    ):
        sentencepiece = require("sentencepiece", "sentencepiece", name)
        try:
            self._inner = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UsageError(
                f"data.tokenizer: {name} is not a SentencePiece model ({error})"
            ) from error
        self.name, self.vocab_size = name, self._inner.get_piece_size()
        if not self.vocab_size:
            raise UsageError(f"data.tokenizer: {name} is empty; choose another file")
        eos_id = self._inner.eos_id() if eos_id is None else eos_id
        bos_id = self._inner.bos_id() if bos_id is None else bos_id
        self.eos_id = None if eos_id == ABSENT else eos_id
        self.bos_id = None if bos_id == ABSENT else bos_id
        self.fingerprint = hashlib.sha256(
            model + f"{self.bos_id} {self.eos_id}".encode()
        ).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        ids = [int(i) for i in ids]
        if skip_special_tokens or not any(map(self._inner.is_control, ids)):
            return self._inner.decode(ids)
        parts, run = [], []
        for i in ids:
            if self._inner.is_control(i):
                parts += self._inner.decode(run), self._inner.id_to_piece(i)
                run = []
            else:
                run.append(i)
        return "".join((*parts, self._inner.decode(run)))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.asarray(ids, np.int32) for ids in self._inner.encode(list(texts))]


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises UsageError where the file is missing, is of no known kind, or its package is not
    installed.
    """
    if name_or_path == BYTES:
        return BytesTokenizer()
    path = Path(os.path.expanduser(name_or_path))
    if path.is_dir():
        path = _file_in(path)
    if path.exists() and not path.is_file():
        # Not opened: one that nobody writes to would block.
        raise UsageError(
            f"data.tokenizer: {path} is a pipe, a socket or a device, which can be read only once; "
            "name a file"
        )
    if not path.is_file():
        raise UsageError(
            f"data.tokenizer: no file or folder {name_or_path}; give {BYTES}, a tokenizer.json, "
            "a SentencePiece .model, a .gguf file, or a folder that holds one"
        )
    if path.suffix == ".json":
        return _from_json(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path.read_bytes(), name=str(path))
    if path.suffix == ".gguf":
        from jaxdist.data.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    raise UsageError(
        f"data.tokenizer: {path} must end in .json, .model or .gguf, or be the word {BYTES}"
    )


def check_fits(tokenizer: Tokenizer, model: ModelConfig) -> None:
    """Refuse a tokenizer whose ids reach beyond the model's vocabulary; a smaller one is fine."""
    if tokenizer.vocab_size > model.vocab_size:
        raise UsageError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, more than "
            f"model.vocab_size={model.vocab_size}; set model.vocab_size to at least "
            f"{tokenizer.vocab_size}, or choose another data.tokenizer"
        )


def _utf8(text: str) -> bytes:
    # JSON may spell a lone surrogate ("\ud800"), which has no UTF-8 form: it becomes "?".
    return text.encode("utf-8", errors="replace")


def _file_in(folder: Path) -> Path:
    for pattern in FILES_IN_FOLDER:
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    raise UsageError(
        f"data.tokenizer: the folder {folder} holds none of {', '.join(FILES_IN_FOLDER)}"
    )


def require(module: str, package: str, name: str) -> Any:
    """Import `module`, or refuse what `name` asks for with the `pip install` that provides it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"data.tokenizer: {name} needs the package {package}: pip install {package}"
        ) from error


def _from_json(path: Path) -> JsonTokenizer:
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"data.tokenizer: {path} is not a tokenizer.json ({error})") from error
    if not inner.get_vocab():
        raise UsageError(f"data.tokenizer: {path} holds no tokens; choose another file")
    # A file may ask for truncation or padding of single requests: a document is taken whole.
    inner.no_truncation()
    inner.no_padding()
    # A tokenizer that opens documents says so in its template, not in its vocabulary.
    opening = inner.encode("", add_special_tokens=True).ids
    fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
    bos_id = opening[0] if len(opening) == 1 else None
    return JsonTokenizer(
        inner, name=str(path), eos_id=_eos_id(inner, path), bos_id=bos_id, fingerprint=fingerprint
    )


def _eos_id(inner: Any, path: Path) -> int | None:
    names: list[str] = []
    for sibling in ("tokenizer_config.json", "special_tokens_map.json"):
        file = path.with_name(sibling)
        if file.is_file():
            where = f"data.tokenizer: {file}"
            token = read_object(file.read_bytes(), where).get("eos_token")
            name = token.get("content") if isinstance(token, dict) else token
            if not isinstance(name, str | None):
                raise UsageError(f"{where}: eos_token must be a text; mend it or leave it out")
            names.append(name or "")
    for token in (*names, *USUAL_EOS):
        found = inner.token_to_id(token) if token else None
        if found is not None:
            return found
    return None
