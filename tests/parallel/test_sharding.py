"""The rules name mesh axes, and ZeRO really shards: seen on the arrays that lie on the devices."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig
from jaxdist.models import Transformer
from jaxdist.parallel.sharding import (
    Rules,
    gradient_specs,
    layouts,
    layouts_of,
    only,
    optimizer_specs,
    parameter_specs,
)

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_multiple=16,
    qkv_bias=True,
)
ABSTRACT = jax.eval_shape(lambda key: Transformer(MODEL, key=key), jax.random.key(0))


def rules(mesh="2x2x2", **parallel):
    return Rules.of(MODEL, ParallelConfig(**parallel), MeshShape.parse(mesh))


def specs_of(tree):
    """{parameter's name: its PartitionSpec}"""
    return {
        jax.tree_util.keystr(path).removesuffix(".value"): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(
            tree, is_leaf=lambda x: isinstance(x, P)
        )
    }


def test_model_parallel_specs():
    specs = specs_of(parameter_specs(layouts(ABSTRACT, rules(zero=0)), 0))
    assert specs[".embed_tokens"] == P(("pp", "tp"), None)
    assert specs[".lm_head"] == P(("pp", "tp"), None)
    assert specs[".norm.weight"] == P(None)
    assert specs[".layers.self_attn.q_proj.weight"] == P("pp", None, "tp")
    assert specs[".layers.self_attn.q_proj.bias"] == P("pp", "tp")
    assert specs[".layers.self_attn.o_proj.weight"] == P("pp", "tp", None)
    assert specs[".layers.mlp.up_proj.weight"] == P("pp", None, "tp")
    assert specs[".layers.mlp.down_proj.weight"] == P("pp", "tp", None)
    assert specs[".layers.input_layernorm.weight"] == P("pp", None)


@pytest.mark.parametrize("tp, axis", [(1, "tp"), (2, "tp"), (4, "tp"), (8, None)])
def test_kv_heads_that_tp_does_not_divide_are_whole_on_every_member(tp, axis):
    specs = specs_of(parameter_specs(layouts(ABSTRACT, rules(f"1x1x{tp}")), 0))
    assert specs[".layers.self_attn.k_proj.weight"] == P("pp", None, axis)
    assert specs[".layers.self_attn.v_proj.bias"] == P("pp", axis)
    assert specs[".layers.self_attn.q_proj.weight"] == P("pp", None, "tp")


def test_the_sequence_is_sharded_between_blocks_only_where_asked():
    residual, inside = ("batch", "sequence", "embed"), ("batch", "length", "embed")
    assert rules().spec(residual) == P(None, None, None)
    assert rules(sequence_parallel=True).spec(residual) == P(None, "tp", None)
    assert rules(sequence_parallel=True).spec(inside) == P(None, None, None)


def test_dp_goes_on_the_largest_free_dim_it_divides():
    def spec(shape, axes, mesh="2x2x2"):
        array = jax.ShapeDtypeStruct(shape, np.float32)
        return layouts_of([array], [P(*axes)], rules(mesh))[0].at(sharded=True)

    assert spec((4, 16, 32), ("layers", "embed", "mlp")) == P("pp", "dp", "tp")
    assert spec((6, 8), ("norm", "embed")) == P(None, "dp")
    assert spec((6, 9), ("norm", "embed")) == P("dp", None)
    assert spec((7, 9), ("norm", "embed")) == P(None, None)
    assert spec((16,), ("norm",), "1x2x2") == P(None)
    assert spec((16,), (None,)) == P(None)  # no parameter's dim: counts, factored rows


@pytest.mark.parametrize("zero", (0, 1, 2, 3))
def test_what_each_stage_shards(zero):
    tree = layouts(ABSTRACT, rules(zero=zero))
    carries_dp = [
        any("dp" in spec for spec in specs_of(make(tree, zero)).values())
        for make in (parameter_specs, gradient_specs, optimizer_specs)
    ]
    assert carries_dp == [zero >= 3, zero >= 1, zero >= 1]
    # dp=2 divides every width; only a bias over tp has no dim left.
    whole = {name for name, spec in specs_of(gradient_specs(tree, 1)).items() if "dp" not in spec}
    assert whole == {f".layers.self_attn.{name}_proj.bias" for name in "qkv"}


def test_only_drops_other_axes():
    assert only(P(("pp", "tp"), "dp", None), "tp") == P("tp", None, None)
    assert only(P(("pp", "tp"), "dp"), "pp", "tp") == P(("pp", "tp"), None)
    assert only(P("dp", "tp"), "pp") == P(None, None)


def bytes_on(tree, device):
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("zero", (3, *(pytest.param(z, marks=pytest.mark.slow) for z in (0, 1, 2))))
def test_parameters_and_gradients_lie_in_shards(make_case, zero):
    case = make_case("4x2x1", zero=zero, num_microbatches=1)
    _, gradients = case.loss_and_gradients()
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(case.parameters))
    norm = case.parameters.norm.weight[...].nbytes  # the only parameter that pp does not shard
    share = (whole - norm) // 2 + norm
    for device in jax.devices():
        assert bytes_on(case.parameters, device) == (share // 4 if zero >= 3 else share)
        assert bytes_on(gradients, device) == (share // 4 if zero >= 1 else share)
    for leaf, sharding in zip(
        jax.tree.leaves(gradients), jax.tree.leaves(case.gradient_shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
