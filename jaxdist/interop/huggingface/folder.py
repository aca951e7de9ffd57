"""Reading a Hugging Face folder: its config, and its weights by our names, without a copy.

The files are mapped: `load` gives a view, and reads nothing until (a part of) it is copied, so a
host that holds a shard of a weight reads that shard. Tokenizer and generation config beside the
weights are the business of `jaxdist.data.tokenizer_files`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.interop.huggingface.config import architecture_of, read_config
from jaxdist.interop.huggingface.families import FAMILIES
from jaxdist.interop.huggingface.places import Place, places, tensor_shapes
from jaxdist.interop.huggingface.safetensors_file import open_safetensors, read_json

CONFIG = "config.json"
LARGEST_CONFIG = 10_000_000  # bytes
TIED = "lm_head.weight"  # may be saved although it is the embedding


def open_huggingface(folder: str | Path) -> "HuggingFaceFolder":
    """Open a folder by its config.json; weights are looked at when the first is asked for.

    UsageError, naming file and rule, where the config is none of ours.
    """
    folder = Path(folder).expanduser()
    values = read_json(folder / CONFIG, LARGEST_CONFIG)
    config = read_config(values, str(folder / CONFIG))
    return HuggingFaceFolder(folder=folder, values=values, config=config)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A model in a Hugging Face folder; weights are named and oriented as in our checkpoints.

    Attributes:
        folder: Where it is.
        values: The content of its config.json.
        config: The model's shape.
    """

    folder: Path
    values: Mapping[str, Any]
    config: ModelConfig

    @property
    def types(self) -> Counter[str]:
        """How many tensors there are of each dtype, as {"bfloat16": 120}."""
        return Counter(str(tensor.dtype) for tensor in self._checked[1].values())

    @property
    def dtype(self) -> str:
        """In which most of the weights are stored: float32, bfloat16 or float16."""
        most = self.types.most_common(1)[0][0]
        return "float32" if most == "float64" else most

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Our names of the weights."""
        return tuple(self._checked[0])

    def load(self, name: str, layer: int | None = None) -> "np.ndarray | StackOfViews":
        """A weight in its stored dtype as a view of the file, [in, out], [V, D] or [size].

        Experts, [E, in, out], are a tensor each: only those that are indexed are read.
        """
        found, tensors = self._checked
        place = found[name]
        own = slice(place.start, place.stop)
        parts = []
        for tensor in (tensors[name] for name in place.tensors(layer)):
            part = tensor[own] if place.outputs_first else tensor[..., own]
            parts.append(part.T if place.transposed else part)
        return StackOfViews(parts) if place.num_experts else parts[0]

    def weights(self) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """(name, layer or None, array) of every weight, a whole stack after the other."""
        for name, place in self._checked[0].items():
            for layer in place.layers:
                yield name, layer, np.asarray(self.load(name, layer))

    @cached_property
    def _checked(self) -> tuple[dict[str, Place], Mapping[str, np.ndarray]]:
        """Where our weights lie, once the folder is known to hold them all and nothing else."""
        architecture = architecture_of(self.values, str(self.folder / CONFIG))
        family = FAMILIES[architecture]
        tensors = _with_prefix(open_safetensors(self.folder), family.layers.partition(".")[0])
        layers = self.config.num_hidden_layers
        if layers > len(tensors):  # before anything as long as that is made
            raise UsageError(
                f"{self.folder / CONFIG}: num_hidden_layers={layers} is more than the "
                f"{len(tensors)} tensors there are"
            )
        expected = tensor_shapes(family, self.config)
        _refuse("missing", [name for name in expected if name not in tensors], self.folder)
        extra = [n for n in tensors if n not in expected and not n.endswith(family.buffers)]
        if self.config.tie_word_embeddings:
            extra = [name for name in extra if name != TIED]
        _refuse(f"not part of {architecture}", extra, self.folder)
        for name, shape in expected.items():
            if tensors[name].shape != shape:
                raise UsageError(
                    f"{self.folder}: tensor {name!r} has shape {list(tensors[name].shape)}, but "
                    f"{CONFIG} asks for {list(shape)}"
                )
        return places(family, self.config), tensors


class StackOfViews:
    """Views of one shape as an array with one dim more, of which indexing copies what it takes."""

    def __init__(self, views: Sequence[np.ndarray]):
        self._views = views
        self.shape = (len(views), *views[0].shape)
        self.dtype = views[0].dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        first, *rest = index
        return np.stack([view[tuple(rest)] for view in self._views[first]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.stack(self._views).astype(dtype or self.dtype, copy=False)


def _with_prefix(tensors: Mapping[str, np.ndarray], base: str) -> Mapping[str, np.ndarray]:
    """The tensors by a whole model's names, where they were saved without its head's class."""
    if any(name.startswith(f"{base}.") for name in tensors):
        return tensors
    return {name if name == TIED else f"{base}.{name}": t for name, t in tensors.items()}


def _refuse(what: str, names: list[str], folder: Path) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise UsageError(f"{folder}: tensor {names[0]!r}{more}: {what}")
