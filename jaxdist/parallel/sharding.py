"""The rules: which mesh axis shards which logical axis of a parameter or activation, and where
the dp axis goes in each ZeRO stage (arXiv 1910.02054).

A ZeRO stage is nothing but which of parameters, gradients and optimizer state carry dp.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig

Tree = Any  # a pytree: the model, its gradients, or an optimizer state over them


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Logical axis -> mesh axes, for one model on one mesh."""

    table: dict[str, str | tuple[str, ...] | None]
    dp: int
    zero: int

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig, mesh: MeshShape) -> "Rules":
        kv_heads = model.num_key_value_heads
        table = {
            "layers": "pp",
            "vocab": ("pp", "tp"),
            "heads": "tp",
            # Fewer kv heads than tp: every member keeps them all.
            "kv_heads": "tp" if kv_heads % mesh.tp == 0 else None,
            "mlp": "tp",
            "experts": "tp",
            "sequence": "tp" if parallel.sequence_parallel else None,
        }
        return cls(table=table, dp=mesh.dp, zero=parallel.zero)

    def spec(self, axes: tuple[str | None, ...]) -> P:
        """PartitionSpec of an array whose dims carry these logical axes (without dp)."""
        return P(*(self.table.get(axis) if axis else None for axis in axes))

    def constrain(self, x: Array, axes: tuple[str | None, ...]) -> Array:
        """Ask the partitioner for the tp sharding of an activation, where dp and pp are manual."""
        return jax.lax.with_sharding_constraint(x, only(self.spec(axes), "tp"))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where one parameter lives: its model-parallel spec, and the dim that ZeRO shards over dp."""

    spec: P
    dp_dim: int | None
    stacked: bool  # dim 0 counts the layers

    def at(self, sharded: bool) -> P:
        """Full spec, with dp on `dp_dim` where `sharded`."""
        if not sharded or self.dp_dim is None:
            return self.spec
        return P(*("dp" if dim == self.dp_dim else axis for dim, axis in enumerate(self.spec)))


def layouts(parameters: Tree, rules: Rules) -> Tree:
    """A `Layout` for each array of a tree of `nnx.Param`s, concrete or abstract."""
    nodes = jax.tree.leaves(parameters, is_leaf=lambda node: isinstance(node, nnx.Variable))
    axes = [P(*node.get_metadata("axes")) for node in nodes if jax.tree.leaves(node)]
    return layouts_of(parameters, jax.tree.unflatten(jax.tree.structure(parameters), axes), rules)


def layouts_of(tree: Tree, axes: Tree, rules: Rules) -> Tree:
    """A `Layout` for each array of `tree`, whose logical axes `axes` spells as PartitionSpecs."""
    return jax.tree.map(lambda a, logical: _layout(a.shape, tuple(logical), rules), tree, axes)


def _layout(shape: tuple[int, ...], axes: tuple[str | None, ...], rules: Rules) -> Layout:
    """dp goes on the largest dim that nothing else shards and that dp divides; else nowhere."""
    spec = rules.spec(axes)
    free = [
        dim
        for dim, axis in enumerate(spec)
        if axis is None and axes[dim] and rules.dp > 1 and shape[dim] % rules.dp == 0
    ]
    dp_dim = max(free, key=lambda dim: shape[dim]) if free else None
    return Layout(spec=spec, dp_dim=dp_dim, stacked=axes[:1] == ("layers",))


def parameter_specs(layout_tree: Tree, zero: int) -> Tree:
    """Specs of the parameters at rest: sharded over dp from ZeRO-3 on."""
    return jax.tree.map(lambda layout: layout.at(zero >= 3), layout_tree)


def gradient_specs(layout_tree: Tree, zero: int) -> Tree:
    """Specs of the reduced gradients: sharded over dp from ZeRO-1 on."""
    return jax.tree.map(lambda layout: layout.at(zero >= 1), layout_tree)


def optimizer_specs(layout_tree: Tree, zero: int) -> Tree:
    """Specs of the optimizer's moments: sharded over dp from ZeRO-1 on."""
    return gradient_specs(layout_tree, zero)


def shardings(mesh: Mesh, specs: Tree) -> Tree:
    """`NamedSharding`s of a tree of specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def only(spec: P, *axes: str) -> P:
    """`spec` with every mesh axis but `axes` dropped."""
    return P(*(_only(entry, axes) for entry in spec))


def _only(entry: str | tuple[str, ...] | None, axes: tuple[str, ...]) -> Any:
    if isinstance(entry, tuple):
        kept = tuple(axis for axis in entry if axis in axes)
        return kept if len(kept) > 1 else (kept[0] if kept else None)
    return entry if entry in axes else None
