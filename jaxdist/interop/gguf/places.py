"""Where the weights of a model lie in a GGUF file, by the table of its architecture."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.interop.gguf.architectures import OUTSIDE, Architecture
from jaxdist.interop.leaves import DENSE, leaf_shapes, stack_of

KEYS_AND_VALUES = "self_attn/kv_b_proj/weight"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of our weights (or one layer of a stack) lies in a file."""

    tensor: str  # `{layer}` stands for the layer's number
    start: int = 0  # outputs [start, stop) of the tensor
    stop: int
    joined: int = 1  # how many of ours share the tensor
    transposed: bool = False  # ours is [in, out], or of experts [E, in, out]
    interleaved_heads: int = 0  # heads whose rows are interleaved
    plus_one: bool = False  # the file holds 1 + ours
    first_layer: int = 0  # the model's number of the stack's first layer
    num_layers: int = 0  # of the stack; 0 outside of stacks
    experts: bool = False

    @property
    def layers(self) -> Sequence[int | None]:
        """The layers of the stack; (None,) outside of stacks."""
        return range(self.num_layers) if self.num_layers else (None,)

    def tensor_of(self, layer: int | None) -> str:
        """The tensor for layer `layer` of the stack."""
        return self.tensor.format(layer=None if layer is None else self.first_layer + layer)

    def stored_rows(self, raw: np.ndarray) -> np.ndarray:
        """Of a tensor's bytes [out, ...] those of our outputs, in our order."""
        if self.experts:
            return raw
        rows = raw[self.start : self.stop]
        if not self.interleaved_heads:
            return rows
        # Each head's halves after one another, as our RoPE turns them.
        heads = rows.reshape(self.interleaved_heads, -1, 2, *rows.shape[1:])
        return heads.swapaxes(1, 2).reshape(rows.shape)

    def ours(self, rows: np.ndarray) -> np.ndarray:
        """Ours of fp32 rows by outputs."""
        rows = rows.swapaxes(-1, -2) if self.transposed else rows
        return rows - np.float32(1) if self.plus_one else rows

    def theirs(self, array: np.ndarray) -> np.ndarray:
        """By outputs and in the order of the file; of `array`, which is ours."""
        rows = array.swapaxes(-1, -2) if self.transposed else array
        if self.interleaved_heads:
            heads = rows.reshape(self.interleaved_heads, 2, -1, *rows.shape[1:])
            rows = heads.swapaxes(1, 2).reshape(rows.shape)
        return rows + np.float32(1) if self.plus_one else rows


@dataclass(frozen=True, kw_only=True)
class HeadsApart:
    """Latent attention's `kv_b_proj`, which lies in a tensor of keys and one of values.

    Shapes: N heads, C latent width, P plain width of a key, V width of a value. Ours is
    [C, N * (P + V)]; keys are stored [N, C, P], as they are multiplied with queries, and values
    [N, V, C].
    """

    first_layer: int
    num_layers: int
    heads: int
    plain: int

    @property
    def layers(self) -> Sequence[int]:
        """The layers of the stack."""
        return range(self.num_layers)

    def tensors_of(self, layer: int) -> tuple[str, str]:
        """The tensors of keys and of values for layer `layer` of the stack."""
        number = self.first_layer + layer
        return f"blk.{number}.attn_k_b.weight", f"blk.{number}.attn_v_b.weight"

    def ours(self, keys_NCP: np.ndarray, values_NVC: np.ndarray) -> np.ndarray:
        """Ours of both."""
        both_NCx = np.concatenate([keys_NCP, values_NVC.swapaxes(1, 2)], axis=2)
        return both_NCx.swapaxes(0, 1).reshape(both_NCx.shape[1], -1)

    def theirs(self, array_CE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of ours."""
        both_NCx = array_CE.reshape(len(array_CE), self.heads, -1).swapaxes(0, 1)
        return both_NCx[..., : self.plain], both_NCx[..., self.plain :].swapaxes(1, 2)


def places(architecture: Architecture, config: ModelConfig) -> dict[str, Place | HeadsApart]:
    """Where each of our weights lies, by our names in the model's order."""
    found: dict[str, Place | HeadsApart] = {}
    for leaf, shape in leaf_shapes(config).items():
        stack = stack_of(leaf)
        if stack is None:
            plus_one = architecture.gains_from_one and leaf.startswith("norm/")
            found[leaf] = Place(tensor=OUTSIDE[leaf], stop=shape[0], plus_one=plus_one)
        else:
            found[leaf] = _in_block(architecture, config, stack, leaf.removeprefix(stack))
    return found


def _in_block(
    architecture: Architecture, config: ModelConfig, stack: str, name: str
) -> Place | HeadsApart:
    shapes = leaf_shapes(config)
    shape = shapes[f"{stack}{name}"]
    first = 0 if stack == DENSE else config.first_k_dense_replace
    if architecture.heads_apart and name == KEYS_AND_VALUES:
        return HeadsApart(
            first_layer=first,
            num_layers=shape[0],
            heads=config.num_attention_heads,
            plain=config.qk_nope_head_dim,
        )
    if name in architecture.experts:
        return Place(
            tensor=f"blk.{{layer}}.{architecture.experts[name]}.weight",
            stop=shape[1],
            transposed=True,
            first_layer=first,
            num_layers=shape[0],
            experts=True,
        )
    module, _, kind = name.rpartition("/")
    base, together = architecture.home(module)
    outputs = [shapes[f"{stack}{other}/{kind}"][-1] for other in together]
    index = together.index(module)
    if kind == "e_score_correction_bias":
        base, kind = "exp_probs_b", "bias"
    heads = {
        "self_attn/q_proj": config.num_attention_heads,
        "self_attn/k_proj": config.num_key_value_heads,
    }
    return Place(
        tensor=f"blk.{{layer}}.{base}.{kind}",
        start=sum(outputs[:index]),
        stop=sum(outputs[: index + 1]),
        joined=len(together),
        transposed=len(shape) == 3,
        interleaved_heads=heads.get(module, 0) if architecture.interleaved else 0,
        plus_one=architecture.gains_from_one and module.endswith("norm"),
        first_layer=first,
        num_layers=shape[0],
    )


def tensor_shapes(architecture: Architecture, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape, in numpy's order, of every tensor that a file of this model holds."""
    shapes = leaf_shapes(config)
    found: dict[str, tuple[int, ...]] = {}
    for leaf, place in places(architecture, config).items():
        shape = shapes[leaf]
        if isinstance(place, HeadsApart):
            (latent, width), heads = shape[1:], place.heads
            for layer in place.layers:
                keys, values = place.tensors_of(layer)
                found[keys] = (heads, latent, place.plain)
                found[values] = (heads, width // heads - place.plain, latent)
            continue
        for layer in place.layers:
            if place.experts:
                _, experts, inputs, outputs = shape
                found[place.tensor_of(layer)] = (experts, outputs, inputs)
            elif layer is None:
                found[place.tensor_of(layer)] = shape
            else:  # the last of those that are joined has the whole height
                found[place.tensor_of(layer)] = (place.stop, *shape[1:-1])
    return found
