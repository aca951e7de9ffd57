"""A source as one long array of token ids, kept on disk and mapped into memory.

The folder of a source holds `tokens.bin` (all documents, one after another; uint16 where the
vocabulary allows, else uint32), `offsets.npy` (where each begins, int64, and the end of the last)
and `about.json`. A document is `bos_id`, where the tokenizer has one, its text, and `eos_id`, where
there is one.
"""

import hashlib
import json
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdist.config.errors import UsageError
from jaxdist.data.cache import build_once
from jaxdist.data.readers import Part
from jaxdist.data.sources import Source
from jaxdist.data.tokenizer import Tokenizer

FORMAT = 1  # raised when the files below change their meaning
# Text is tokenized in batches of about this many characters: enough for all cores, little for the
# memory.
BATCH_CHARACTERS = 1 << 23
SPEAK_EVERY = 10.0  # seconds


@dataclass(frozen=True, kw_only=True)
class TokenizedSource:
    """The tokens of a source.

    Attributes:
        name: The source's name.
        tokens: All documents' tokens.  # [tokens]
        offsets: Begin of each document in `tokens`, and the end of the last.  # [documents + 1]
        fingerprint: Of the tokens and borders themselves: the same on every machine that holds the
            same text.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    fingerprint: str


def tokenized(source: Source, tokenizer: Tokenizer, root: Path) -> TokenizedSource:
    """The source's tokens, from the cache under `root` or else put there.

    Raises UsageError for a source without text, and what the source's reader raises.
    """
    identity = source.identity

    def build(temporary: Path) -> None:
        _write(source, tokenizer, temporary)
        if source.identity != identity:
            raise UsageError(
                f"{source.option}: {source.name} changed while it was read; start again"
            )

    named = json.dumps([FORMAT, identity, tokenizer.fingerprint])
    folder = build_once(root / f"tokens-{hashlib.sha256(named.encode()).hexdigest()[:32]}", build)
    try:
        return _read(source.name, folder)
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"data.cache_dir: {folder} is damaged ({error}); remove it, it is then made anew"
        ) from error


def _read(name: str, folder: Path) -> TokenizedSource:
    about = json.loads((folder / "about.json").read_text())
    # Viewed as plain arrays: slicing a memmap object costs ten times as much.
    tokens = np.memmap(folder / "tokens.bin", dtype=about["dtype"], mode="r").view(np.ndarray)
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    if len(tokens) != offsets[-1]:
        raise ValueError(f"tokens.bin has {len(tokens)} tokens instead of {offsets[-1]}")
    return TokenizedSource(
        name=name, tokens=tokens, offsets=offsets, fingerprint=about["fingerprint"]
    )


def _write(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    digest, lengths, total = hashlib.sha256(), array("q"), 0
    began = spoke = time.monotonic()
    with open(folder / "tokens.bin", "wb") as stream:
        for ids, ended in _encoded(source, tokenizer):
            data = ids.astype(dtype).tobytes()
            stream.write(data)
            digest.update(data)
            lengths.extend(ended)
            total += len(ids)
            if time.monotonic() - spoke > SPEAK_EVERY:
                spoke = time.monotonic()
                rate = f"{total:,} tokens, {total / (spoke - began):,.0f} a second"
                print(f"jaxdist: tokenizing {source.name}: {rate}", file=sys.stderr, flush=True)
    if total == 0:
        raise UsageError(f"{source.option}: {source.name} holds no text; leave it out")
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.frombuffer(lengths, np.int64), out=offsets[1:])
    digest.update(offsets.tobytes())
    np.save(folder / "offsets.npy", offsets)
    about = {"source": source.name, "tokenizer": tokenizer.name, "dtype": dtype.name}
    (folder / "about.json").write_text(
        json.dumps({**about, "fingerprint": digest.hexdigest()[:16]})
    )


def _encoded(source: Source, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Batches of (ids, lengths of the documents that end in them), empty documents left out."""
    opening = np.asarray([] if tokenizer.bos_id is None else [tokenizer.bos_id], np.int32)
    closing = np.asarray([] if tokenizer.eos_id is None else [tokenizer.eos_id], np.int32)
    length = 0  # of the document that is open; a long one reaches over several batches
    for batch in _batches(source.parts()):
        pieces, ended = [], []
        for part, ids in zip(
            batch, tokenizer.encode_batch([part.text for part in batch]), strict=True
        ):
            if len(ids):
                pieces += [ids] if length else [opening, ids]
                length += len(ids) if length else len(opening) + len(ids)
            if part.ends and length:
                pieces.append(closing)
                ended.append(length + len(closing))
                length = 0
        if pieces:
            yield np.concatenate(pieces), ended


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
