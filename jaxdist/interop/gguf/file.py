"""Reading a GGUF file: its config, and its weights by our names, one at a time.

The file is mapped, so that opening it costs nothing and a weight costs its own size. The tokenizer
inside is read by `jaxdist.data.tokenizer.load_tokenizer`.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf import rope
from jaxdist.interop.gguf.architectures import Architecture
from jaxdist.interop.gguf.config import architecture_of, read_config
from jaxdist.interop.gguf.fields import Fields
from jaxdist.interop.gguf.header import GGUFHeader, read_header
from jaxdist.interop.gguf.places import HeadsApart, Place, places, tensor_shapes
from jaxdist.interop.leaves import layers_of
from jaxdist.quantization.gguf_blocks import LAYOUTS, PackedWeight, pack
from jaxdist.quantization.gguf_dequantize import dequantize

IGNORED = ".attn_rot_embd"  # a table that old converters wrote and nothing reads


def open_gguf(path: str | Path) -> "GGUFFile":
    """Open a GGUF file. UsageError, naming file, field and rule, where it is not a sound one."""
    return GGUFFile(header=read_header(Path(path).expanduser()))


@dataclass(frozen=True)
class GGUFFile:
    """A model in a GGUF file.

    Weights are named as in our checkpoints (`layers/self_attn/q_proj/weight`, see `leaves`) and
    have our orientation, [in, out]; those of a stack are asked for by layer.
    """

    header: GGUFHeader

    @cached_property
    def config(self) -> ModelConfig:
        """The model's shape. UsageError where the file's model is none of ours."""
        return read_config(self.header)

    @cached_property
    def architecture(self) -> Architecture:
        """Its entry in our table."""
        return architecture_of(self.header)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template of chats, which is untrusted text; None where there is none."""
        return Fields(self.header, "tokenizer.").text("chat_template", None)

    @property
    def types(self) -> Counter[str]:
        """How many tensors there are of each block type, as {"Q4_K": 120, "F32": 61}."""
        return Counter(info.type.name for info in self.header.tensors.values())

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Our names of the weights."""
        return tuple(self._places)

    def load(self, name: str, layer: int | None = None) -> np.ndarray:
        """A weight in fp32: [in, out], of experts [E, in, out], of tables [V, D], or [size]."""
        place = self._places[name]
        if isinstance(place, HeadsApart):
            assert layer is not None
            return place.ours(*map(self._dequantized, place.tensors_of(layer)))
        tensor = place.tensor_of(layer)
        raw = self.header.raw(tensor)
        if raw.ndim == 1:  # a vector's values are its rows
            return place.ours(place.stored_rows(self._dequantized(tensor)))
        rows = place.stored_rows(raw)
        return place.ours(dequantize(rows, self.header.tensors[tensor].type, tensor))

    def packed_type(self, name: str, layer: int | None = None) -> str | None:
        """The block type in which the weight can be kept packed, or None."""
        place = self._places[name]
        if isinstance(place, HeadsApart):  # blocks of keys do not run along our inputs
            return None
        type_name = self.header.tensors[place.tensor_of(layer)].type.name
        return type_name if type_name in LAYOUTS else None

    def load_packed(self, name: str, layer: int | None = None) -> PackedWeight:
        """A weight as its stored integers, of a type that `packed_type` gives."""
        place = self._places[name]
        assert isinstance(place, Place)
        tensor = place.tensor_of(layer)
        rows = place.stored_rows(self.header.raw(tensor))
        return pack(rows, self.header.tensors[tensor].type.name)

    def weights(self) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """(name, layer or None, fp32 array) of every weight, a whole stack after the other."""
        for name in self.tensor_names:
            for layer in layers_of(name, self.config):
                yield name, layer, self.load(name, layer)

    def _dequantized(self, tensor: str) -> np.ndarray:
        return dequantize(self.header.raw(tensor), self.header.tensors[tensor].type, tensor)

    @cached_property
    def _places(self) -> dict[str, Place | HeadsApart]:
        """Where our weights lie, once the file is known to hold them all and nothing else."""
        expected = tensor_shapes(self.architecture, self.config)
        present = self.header.tensors
        missing = [name for name in expected if name not in present]
        extra = [
            name
            for name in present
            if name not in expected and name not in rope.TENSORS and IGNORED not in name
        ]
        for kind, names in (("missing", missing), ("not part of the model", extra)):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise UsageError(
                    f"{self.header.path}: tensor {names[0]!r}{more}: {kind} of architecture "
                    f"{self.architecture.name}"
                )
        for name, shape in expected.items():
            if present[name].shape != shape:
                raise UsageError(
                    f"{self.header.path}: tensor {name!r} has shape {present[name].shape}, but "
                    f"the metadata ask for {shape}"
                )
        return places(self.architecture, self.config)
