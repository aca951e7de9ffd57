"""A model whose weights stay in the blocks of their GGUF file.

The products of the layers are packed, in about 4 to 8 bits a weight, and multiplied by
`quantization.gguf_blocks`; embedding, head, routers and vectors are dense, as `source` loads them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape, UsageError
from jaxdist.interop.gguf.file import GGUFFile
from jaxdist.interop.leaves import layers_of, leaf_shapes, stack_of
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer
from jaxdist.models.layers import PerLayer
from jaxdist.quantization.gguf_blocks import PackedWeight


def load_packed_parameters(file: GGUFFile, like: Transformer) -> Transformer:
    """The parameters of `file`, with a `PackedWeight` in the Param of every weight that can be.

    A stack whose layers are of one packable type is one `PackedWeight`. Where types are mixed (as
    in files called Q4_K_M) it is `PerLayer`: each layer packed by itself, or dense where its type
    is none that can be packed. The model runs with a Context whose `dot` is `dot_of_either`; with
    experts, which are packed too, only in the engine.

    Args:
        file: Where the weights come from.
        like: A `Transformer` of `jax.ShapeDtypeStruct`s. Dense weights take its dtypes and
            shardings; packed ones shardings alike, with whole blocks on each device.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=_is_param)
    params = {jax.tree_util.keystr(p, simple=True, separator="/"): param for p, param in paths}
    names = {name for name in params if any(_types(file, name))}
    rest = [None if name in names else param for name, param in params.items()]
    dense = load_parameters(file, structure.unflatten(rest))
    filled = iter(jax.tree.leaves(dense, is_leaf=_is_param))
    return structure.unflatten(
        param.replace(_packed_stack(file, name, param.get_value()))
        if name in names
        else next(filled)
        for name, param in params.items()
    )


def check_packed(file: GGUFFile, mesh: MeshShape) -> None:
    """Refuse a mesh over whose stages the weights of a file cannot be spread packed."""
    if mesh.pp == 1:
        return
    for name in file.tensor_names:
        if len(kinds := sorted({str(kind) for kind in _types(file, name)})) > 1:
            raise UsageError(
                f"--quantization keep with pp={mesh.pp}: the layers of {file.header.path} are not "
                f"stored alike ({name} as {', '.join(kinds)}), so stages cannot be; choose pp=1"
            )


def _types(file: GGUFFile, name: str) -> list[str | None]:
    """In what each layer can be kept packed; (None,) of tables, vectors and routers."""
    is_vector = len(leaf_shapes(file.config)[name]) < 3
    if stack_of(name) is None or is_vector or name.endswith("/mlp/gate/weight"):
        return [None]
    return [file.packed_type(name, layer) for layer in layers_of(name, file.config)]


def _packed_stack(file: GGUFFile, name: str, like: jax.ShapeDtypeStruct) -> PackedWeight | PerLayer:
    types = _types(file, name)
    layers = [
        jnp.asarray(file.load(name, layer), like.dtype)
        if kind is None
        else file.load_packed(name, layer)
        for layer, kind in enumerate(types)
    ]
    if len(set(types)) > 1:
        return PerLayer(layers=tuple(_put(layer, like, 0) for layer in layers))
    return _put(jax.tree.map(lambda *parts: np.stack(parts), *layers), like, 1)


def _put(weight: Any, like: jax.ShapeDtypeStruct, lead: int) -> Any:
    """On the devices of `like`, a stack [L, ..., K, N]; `weight` lacks L where `lead` is 0."""
    if like.sharding is None:
        return jax.device_put(weight)
    assert isinstance(like.sharding, NamedSharding)
    mesh = like.sharding.mesh
    spec = (*like.sharding.spec, *(None,) * len(like.shape))[: len(like.shape)]
    *first, inputs, outputs = spec[1 - lead :]
    if not isinstance(weight, PackedWeight):
        return jax.device_put(weight, NamedSharding(mesh, P(*first, inputs, outputs)))
    blocks = next(iter(weight.parts.values())).shape[-3]
    size = 1 if inputs is None else mesh.shape[inputs]
    spec = P(*first, inputs if blocks % size == 0 else None, None, outputs)
    return jax.device_put(weight, NamedSharding(mesh, spec))


def _is_param(node: object) -> bool:
    return isinstance(node, nnx.Param)
