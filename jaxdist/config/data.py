"""Which text a run reads and how it becomes rows of tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.config import limits
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.frozen import frozen

SOURCE_KEYS = ("path", "weight", "field", "separator", "subset", "split")
SYNTHETIC = "synthetic"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, how it becomes tokens, and how tokens become rows.

    Attributes:
        sources: Each a path or a mapping of path and options. A path is a .txt, .jsonl or .parquet
            file (the first two also .gz), a glob, a folder, hf:NAME for a Hugging Face dataset,
            `embedded` (the text inside the package), or `synthetic` (random tokens). Options:
            weight, its part in the mixture (of every source, or of none: all rows are then
            shuffled together); field, the text's name in jsonl and parquet (text); separator, a
            line that ends a document of a .txt file (none: a file is a document); subset and
            split of a dataset.
        tokenizer: bytes, or the path of a tokenizer.json, a SentencePiece model or a GGUF file.
        validation_fraction: Part of each source's tokens that is held back for validation.
        validation_sources: Sources like those above that are read for validation instead; nothing
            is then held back from the others.
        pack: Whether several documents share a row (attention and loss do not cross their border).
        cache_dir: Where tokenized data is kept; null takes the user's cache directory.
    """

    sources: Sequence[str | Mapping[str, Any]] = ("embedded",)
    tokenizer: str = "bytes"
    validation_fraction: float = 0.05
    validation_sources: Sequence[str | Mapping[str, Any]] = ()
    pack: bool = True
    cache_dir: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "sources", _checked_sources("data.sources", self.sources))
        if not self.sources:
            raise UsageError(f"data.sources={self.sources!r} must list at least one source")
        checked = _checked_sources("data.validation_sources", self.validation_sources)
        object.__setattr__(self, "validation_sources", checked)
        limits.path("data.tokenizer", self.tokenizer)
        limits.number("data.validation_fraction", self.validation_fraction, minimum=0, below=1)
        limits.flag("data.pack", self.pack)
        if self.cache_dir is not None:
            limits.path("data.cache_dir", self.cache_dir)


def source_path(source: str | Mapping[str, Any]) -> str:
    """The path of an entry of `sources`."""
    return source if isinstance(source, str) else source["path"]


def _checked_sources(name: str, given: Any) -> tuple[str | Mapping[str, Any], ...]:
    """The sources one by one and together: mixtures need all weights, made-up rows stand alone."""
    listed = [given] if isinstance(given, (str, Mapping)) else given
    if not isinstance(listed, (list, tuple)):
        raise UsageError(f"{name}={given!r} must be a list of paths, or of mappings with a path")
    sources = tuple(_checked_source(name, source) for source in listed)
    if len(sources) > 1 and SYNTHETIC in map(source_path, sources):
        raise UsageError(f"{name}: {SYNTHETIC} cannot be mixed with other sources; name it alone")
    weighted = [
        not isinstance(source, str) and source.get("weight") is not None for source in sources
    ]
    if any(weighted) and not all(weighted):
        without = source_path(sources[weighted.index(False)])
        raise UsageError(f"{name}: {without} has no weight; give one to every source or to none")
    return sources


def _checked_source(name: str, source: Any) -> str | Mapping[str, Any]:
    """A source with its options checked; a mapping comes back frozen."""
    if isinstance(source, str):
        limits.path(name, source)
        return source
    if not isinstance(source, Mapping):
        raise UsageError(f"{name}: {source!r} must be a path, or a mapping of path and options")
    for key in source:
        if key not in SOURCE_KEYS:
            hint = did_you_mean(str(key), SOURCE_KEYS)
            raise UsageError(f"{name}: {key!r} is not one of {', '.join(SOURCE_KEYS)}{hint}")
    limits.path(f"{name}.path", source.get("path"))
    if source.get("weight") is not None:
        limits.number(f"{name}.weight", source["weight"], above=0)
    for option in SOURCE_KEYS[2:]:
        if source.get(option) is not None:
            limits.text(f"{name}.{option}", source[option])
        if source.get(option) is not None and source["path"] == SYNTHETIC:
            raise UsageError(f"{name}: {SYNTHETIC} rows have no {option}; leave it out")
    return frozen(source)
