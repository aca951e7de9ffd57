"""Reading a Hugging Face folder: its config, and its weights by our names, without a copy.

The files are mapped: `load` gives a view, and reads nothing until (a part of) it is copied, so a
host that holds a shard of a weight reads that shard. Tokenizer and generation config beside the
weights are the business of `jaxdist.data.tokenizer_files`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.interop.huggingface_config import architecture_of, read_config
from jaxdist.interop.huggingface_families import FAMILIES, Place, places, tensor_shapes
from jaxdist.interop.leaves import STACK
from jaxdist.interop.safetensors_file import open_safetensors, read_json

CONFIG = "config.json"
LARGEST_CONFIG = 10_000_000  # bytes
IGNORED = ".rotary_emb.inv_freq"  # a table that old versions saved and nothing reads
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

    def load(self, name: str, layer: int | None = None) -> np.ndarray:
        """A weight in its stored dtype as a view of the file, [in, out], [V, D] or [size]."""
        found, tensors = self._checked
        place = found[name]
        tensor = tensors[place.tensor.format(layer=layer)]
        own = slice(place.start, place.stop)
        part = tensor[own] if place.outputs_first else tensor[..., own]
        return part.T if place.transposed else part

    def weights(self) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """(name, layer or None, array) of every weight, a whole stack after the other."""
        for name in self.tensor_names:
            if name.startswith(STACK):
                for layer in range(self.config.num_hidden_layers):
                    yield name, layer, self.load(name, layer)
            else:
                yield name, None, self.load(name)

    @cached_property
    def _checked(self) -> tuple[dict[str, Place], Mapping[str, np.ndarray]]:
        """Where our weights lie, once the folder is known to hold them all and nothing else."""
        architecture = architecture_of(self.values, str(self.folder / CONFIG))
        family = FAMILIES[architecture]
        tensors = open_safetensors(self.folder)
        layers = self.config.num_hidden_layers
        if layers > len(tensors):  # before anything as long as that is made
            raise UsageError(
                f"{self.folder / CONFIG}: num_hidden_layers={layers} is more than the "
                f"{len(tensors)} tensors there are"
            )
        expected = tensor_shapes(family, self.config)
        _refuse("missing", [name for name in expected if name not in tensors], self.folder)
        extra = [name for name in tensors if name not in expected and not name.endswith(IGNORED)]
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


def _refuse(what: str, names: list[str], folder: Path) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise UsageError(f"{folder}: tensor {names[0]!r}{more}: {what}")
