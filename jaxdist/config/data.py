"""Which text a run reads and how it becomes rows of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.config import limits
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.frozen import frozen


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, how it becomes tokens, and how tokens become rows.

    Attributes:
        sources: Files, globs, directories or dataset names, each a text or a mapping of path, weight
            (its part in the mixture) and field (the text's name in jsonl and parquet); `embedded` is
            the text inside the package, `synthetic` makes tokens up.
        tokenizer: bytes, or the path of a tokenizer.json, a SentencePiece model or a GGUF file.
        validation_fraction: Part of the documents that is held back for validation.
        pack: Whether several documents share a row (attention and loss do not cross their border).
        cache_dir: Where tokenized data is kept; null takes the user's cache directory.
    """

    sources: Sequence[str | Mapping[str, Any]] = ("embedded",)
    tokenizer: str = "bytes"
    validation_fraction: float = 0.05
    pack: bool = True
    cache_dir: str | None = None

    def __post_init__(self):
        sources = [self.sources] if isinstance(self.sources, (str, Mapping)) else self.sources
        if not isinstance(sources, (list, tuple)) or not sources:
            raise UsageError(f"data.sources={self.sources!r} must list at least one source")
        object.__setattr__(self, "sources", tuple(_checked_source(source) for source in sources))
        limits.text("data.tokenizer", self.tokenizer)
        limits.number("data.validation_fraction", self.validation_fraction, minimum=0, below=1)
        limits.flag("data.pack", self.pack)
        if self.cache_dir is not None:
            limits.text("data.cache_dir", self.cache_dir)


def _checked_source(source: Any) -> str | Mapping[str, Any]:
    """A source with its fields checked; a mapping comes back frozen."""
    if isinstance(source, str):
        limits.text("data.sources", source)
        return source
    if not isinstance(source, Mapping):
        raise UsageError(
            f"data.sources: {source!r} must be a path or a mapping of path, weight and field"
        )
    for key in source:
        if key not in ("path", "weight", "field"):
            hint = did_you_mean(str(key), ("path", "weight", "field"))
            raise UsageError(f"data.sources: {key!r} is not one of path, weight, field{hint}")
    limits.text("data.sources.path", source.get("path"))
    if source.get("weight") is not None:
        limits.number("data.sources.weight", source["weight"], above=0)
    if source.get("field") is not None:
        limits.text("data.sources.field", source["field"])
    return frozen(source)
