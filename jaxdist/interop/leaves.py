"""The weights of a model by name: what every foreign format is a table from and to.

A name is the path of attributes joined by `/` (`layers/self_attn/q_proj/weight`), as in our
checkpoints. What lies under `layers/` is a stack, and is moved one layer at a time; so is what lies
under `dense_layers/`, the first blocks of a model whose others have experts.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import jax
from flax import nnx

from jaxdist.config import ModelConfig
from jaxdist.models import Transformer

STACK, DENSE = "layers/", "dense_layers/"
TABLES = ("embed_tokens", "lm_head")  # [V, D], by rows of the vocabulary


@lru_cache(maxsize=16)
def leaf_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Shape of every weight by name; tables without the rows that pad the vocabulary."""
    abstract = jax.eval_shape(lambda: Transformer(config, key=jax.random.key(0)))
    paths = jax.tree_util.tree_leaves_with_path(
        abstract, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in paths
    }
    for name in TABLES:
        if name in shapes:
            shapes[name] = (config.vocab_size, config.hidden_size)
    return MappingProxyType(shapes)


def stack_of(name: str) -> str | None:
    """The prefix of the stack that a weight lies in; None outside of stacks."""
    return next((stack for stack in (STACK, DENSE) if name.startswith(stack)), None)


def layers_of(name: str, config: ModelConfig) -> Sequence[int | None]:
    """The layers of the weight's stack, from 0; (None,) outside of stacks."""
    return (None,) if stack_of(name) is None else range(leaf_shapes(config)[name][0])
