"""The weights of a model by name: what every foreign format is a table from and to.

A name is the path of attributes joined by `/` (`layers/self_attn/q_proj/weight`), as in our
checkpoints. What lies under `layers/` is a stack, and is moved one layer at a time.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import jax
from flax import nnx

from jaxdist.config import ModelConfig
from jaxdist.models import Transformer

STACK = "layers/"
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
