"""A model whose weights stay in the blocks of their GGUF file.

The products of the layers are packed, in about 4 to 8 bits a weight, and multiplied by
`quantization.gguf_blocks`; embedding, head and vectors are dense, as `source` loads them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxdist.interop.gguf import GGUFFile
from jaxdist.interop.leaves import layers_of, stack_of
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer
from jaxdist.models.layers import PerLayer
from jaxdist.quantization.gguf_blocks import PackedWeight


def load_packed_parameters(file: GGUFFile, like: Transformer) -> Transformer:
    """The parameters of `file`, with a `PackedWeight` in the Param of every weight that can be.

    A stack whose layers are of one packable type is one `PackedWeight`. Where types are mixed (as
    in files called Q4_K_M) it is `PerLayer`: each layer packed by itself, or dense where its type
    is none that can be packed. The model runs with a Context whose `dot` is `dot_of_either`.

    Args:
        file: Where the weights come from.
        like: A `Transformer` of `jax.ShapeDtypeStruct`s. Dense weights take its dtypes and
            shardings; packed ones go to the default device.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_param)
    params = {jax.tree_util.keystr(p, simple=True, separator="/"): param for p, param in paths}
    names = {name for name, param in params.items() if _can_be_packed(file, name, param)}
    rest = [None if name in names else param for name, param in params.items()]
    dense = load_parameters(file, structure.unflatten(rest))
    filled = iter(jax.tree.leaves(dense, is_leaf=_is_param))
    return structure.unflatten(
        param.replace(_packed_stack(file, name)) if name in names else next(filled)
        for name, param in params.items()
    )


def _can_be_packed(file: GGUFFile, name: str, param: nnx.Param) -> bool:
    if stack_of(name) is None or len(param.shape) != 3:
        return False
    return any(_types(file, name))


def _types(file: GGUFFile, name: str) -> list[str | None]:
    return [file.packed_type(name, layer) for layer in layers_of(name, file.config)]


def _packed_stack(file: GGUFFile, name: str) -> PackedWeight | PerLayer:
    types = _types(file, name)
    layers = [
        jnp.asarray(file.load(name, layer)) if kind is None else file.load_packed(name, layer)
        for layer, kind in enumerate(types)
    ]
    if len(set(types)) > 1:
        return PerLayer(layers=tuple(map(jax.device_put, layers)))
    return jax.device_put(jax.tree.map(lambda *parts: np.stack(parts), *layers))


def _is_param(node: object) -> bool:
    return isinstance(node, nnx.Param)
