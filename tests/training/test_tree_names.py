from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxdist.training.tree_names import named_leaves, tree_of


class Linear(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(jnp.ones((2, 3)), axes=("embed", "mlp"))
        self.bias = None


class Model(nnx.Module):
    def __init__(self):
        self.embed_tokens = nnx.Param(jnp.zeros((4, 2)), axes=("vocab", "embed"))
        self.q_proj = Linear()


def test_names_are_paths_without_the_parameters_inner_field():
    params: Any = Model()
    optimizer = optax.adam(0.1)
    state = {"params": params, "opt_state": optimizer.init(params), "step": jnp.int32(0)}
    assert sorted(named_leaves(state)) == [
        "opt_state/0/count",
        "opt_state/0/mu/embed_tokens",
        "opt_state/0/mu/q_proj/weight",
        "opt_state/0/nu/embed_tokens",
        "opt_state/0/nu/q_proj/weight",
        "params/embed_tokens",
        "params/q_proj/weight",
        "step",
    ]


def test_names_of_abstract_trees_are_the_same():
    assert list(named_leaves(jax.eval_shape(Model))) == list(named_leaves(Model()))


def test_a_tree_comes_back_from_its_names_in_any_order():
    model = Model()
    shuffled = dict(reversed(named_leaves(model).items()))
    back = tree_of(shuffled, jax.eval_shape(Model))
    assert jax.tree.structure(back) == jax.tree.structure(model)
    assert jax.tree.leaves(back)[1] is jax.tree.leaves(model)[1]
    assert back.q_proj.weight.get_metadata("axes") == ("embed", "mlp")
