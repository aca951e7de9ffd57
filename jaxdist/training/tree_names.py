"""Stable names of a pytree's leaves: the vocabulary of checkpoints.

A name is the path of attributes, keys and indices joined by `/`, an `nnx.Param` being its value:
`params/layers/self_attn/q_proj/weight`, `opt_state/0/mu/embed_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx


def named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves of `tree` (arrays or abstract ones) by name, in the order of `jax.tree.leaves`."""
    paths = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, node in paths
        for leaf in jax.tree.leaves(node)
    }


def tree_of(named: Mapping[str, Any], like: Any) -> Any:
    """The tree of the structure of `like` whose leaves are those of `named`, by name."""
    return jax.tree.unflatten(jax.tree.structure(like), [named[n] for n in named_leaves(like)])
