"""The decoder as a pytree: metadata, scan against a loop, remat, packing, padding, compile size."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxdist.models import Transformer, default_context
from jaxdist.ops.rope import rope_table

EVERYTHING = {
    "qkv_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "norm": "layernorm",
}
AXES = {
    "embed_tokens": ("vocab", "embed"),
    "lm_head": ("vocab", "embed"),
    "norm.weight": ("norm",),
    "norm.bias": ("norm",),
    "layers.input_layernorm.weight": ("layers", "norm"),
    "layers.input_layernorm.bias": ("layers", "norm"),
    "layers.self_attn.q_proj.weight": ("layers", "embed", "heads"),
    "layers.self_attn.q_proj.bias": ("layers", "heads"),
    "layers.self_attn.k_proj.weight": ("layers", "embed", "kv_heads"),
    "layers.self_attn.k_proj.bias": ("layers", "kv_heads"),
    "layers.self_attn.v_proj.weight": ("layers", "embed", "kv_heads"),
    "layers.self_attn.v_proj.bias": ("layers", "kv_heads"),
    "layers.self_attn.o_proj.weight": ("layers", "heads", "embed"),
    "layers.self_attn.o_proj.bias": ("layers", "embed"),
    "layers.self_attn.q_norm.weight": ("layers", "norm"),
    "layers.self_attn.k_norm.weight": ("layers", "norm"),
    "layers.post_attention_layernorm.weight": ("layers", "norm"),
    "layers.post_attention_layernorm.bias": ("layers", "norm"),
    "layers.mlp.gate_proj.weight": ("layers", "embed", "mlp"),
    "layers.mlp.gate_proj.bias": ("layers", "mlp"),
    "layers.mlp.up_proj.weight": ("layers", "embed", "mlp"),
    "layers.mlp.up_proj.bias": ("layers", "mlp"),
    "layers.mlp.down_proj.weight": ("layers", "mlp", "embed"),
    "layers.mlp.down_proj.bias": ("layers", "embed"),
}


def axes_of(model: Transformer) -> dict[str, tuple[str, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(
        model, is_leaf=lambda node: isinstance(node, nnx.Param)
    )
    named = {}
    for path, param in leaves:
        assert len(param.axes) == len(param.shape)
        named[jax.tree_util.keystr(path, simple=True, separator=".")] = param.axes
    return named


def tokens_and_positions(shape=(2, 24)) -> tuple[jax.Array, jax.Array]:
    tokens = jax.random.randint(jax.random.key(1), shape, 0, 61)
    return tokens, jnp.broadcast_to(jnp.arange(shape[1]), shape)


@partial(jax.jit, static_argnames=("ctx", "remat"))
def forward(model: Transformer, *arrays: jax.Array, ctx=None, remat="none") -> jax.Array:
    return model(*arrays, ctx=ctx, remat=remat)


def mean_square(model: Transformer, remat: str = "none") -> jax.Array:
    return jnp.mean(forward(model, *tokens_and_positions(), remat=remat) ** 2)


def count_products(jaxpr) -> int:
    """dot_general equations, those of inner jaxprs included; a scan's body counts once."""
    return sum(
        (equation.primitive.name == "dot_general")
        + sum(map(count_products, jaxprs_in_params(equation.params)))
        for equation in jaxpr.eqns
    )


def test_logical_axes_survive_every_transform(tiny_config, tiny_model):
    config = tiny_config(**EVERYTHING)

    def make(key: jax.Array) -> Transformer:
        return Transformer(config, key=key)

    model = tiny_model(**EVERYTHING)
    through_jit = jax.jit(lambda model: model)(model)
    gradients = jax.eval_shape(jax.grad(mean_square), model)
    optimizer = optax.adamw(1e-3)
    moments = jax.eval_shape(optimizer.init, model)[0].mu
    updated = jax.eval_shape(
        lambda: optax.apply_updates(model, optimizer.update(model, optimizer.init(model), model)[0])
    )
    mapped = jax.tree.map(np.asarray, model)
    abstract = jax.eval_shape(make, jax.random.key(0))
    for tree in (model, abstract, through_jit, mapped, gradients, moments, updated):
        assert isinstance(tree, Transformer)
        assert axes_of(tree) == AXES
        assert jax.tree.structure(tree) == jax.tree.structure(model)


def test_layers_keep_their_metadata_inside_scan(tiny_model):
    seen = []
    scan = partial(jax.lax.scan, lambda carry, block: (carry, seen.append(block)), 0.0)
    jax.eval_shape(scan, tiny_model().layers)
    assert seen[0].mlp.up_proj.weight.axes == ("layers", "embed", "mlp")
    assert seen[0].mlp.up_proj.weight.shape == (32, 48)


def test_abstract_model_holds_no_array(tiny_config):
    config = tiny_config(vocab_size=2**17, hidden_size=2**14, intermediate_size=2**16)  # 25 GB
    model = jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0))
    leaves = jax.tree.leaves(model)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert sum(leaf.size for leaf in leaves) > 6e9


def test_initial_weights_are_hugging_faces(tiny_config):
    """normal(0, 0.02), zero biases, gains of one; no two layers alike."""
    make = jax.jit(partial(Transformer, tiny_config(qkv_bias=True), param_dtype=jnp.bfloat16))
    model = make(key=jax.random.key(0))
    attention = model.layers.self_attn
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    for weight in (attention.q_proj.weight, model.embed_tokens, model.layers.mlp.down_proj.weight):
        assert np.std(np.asarray(weight[...], np.float32)) == pytest.approx(0.02, rel=0.08)
    assert not np.asarray(attention.q_proj.bias[...]).any()
    assert (np.asarray(model.norm.weight[...]) == 1).all()
    assert not np.array_equal(*np.asarray(attention.q_proj.weight[...]))


def test_scan_over_layers_equals_a_loop(tiny_model):
    @jax.jit
    def loop(model: Transformer, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        ctx = default_context(model.config)
        rope = rope_table(model.config, positions)
        x = model.embed(tokens, ctx)
        for layer in range(model.config.num_hidden_layers):
            block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], model.layers)
            x, _ = block(x, rope, ctx)
        return model.logits(x, ctx)

    arrays = (tiny_model(), *tokens_and_positions())
    np.testing.assert_allclose(forward(*arrays), loop(*arrays), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots", "qkv,attn_out,mlp_hidden"])
def test_remat_changes_no_value(remat, tiny_model):
    model = tiny_model()
    plain, kept = (
        jax.jit(jax.grad(mean_square), static_argnums=1)(model, r) for r in ("none", remat)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7, rtol=1e-5), plain, kept)


def test_remat_computes_again_what_it_says(tiny_model):
    model = tiny_model()
    products = {
        remat: count_products(
            jax.make_jaxpr(jax.grad(lambda m, remat=remat: mean_square(m, remat)))(model).jaxpr
        )
        for remat in ("none", "full", "dots", "qkv", "mlp_hidden", "dots,attn_out")
    }
    # q, k, v, o, gate and up; the down projection's output is not needed by its own backward.
    assert products["full"] - products["dots"] == 6
    assert products["full"] - products["qkv"] == 3
    assert products["full"] > products["dots"] > products["none"]
    assert products["dots,attn_out"] == products["none"]
    assert products["mlp_hidden"] == products["full"]  # gate and up are still needed for theirs


def test_packed_documents_do_not_see_each_other(tiny_model):
    model = tiny_model(initializer_range=0.2)
    tokens, _ = tokens_and_positions((1, 24))
    positions = jnp.concatenate([jnp.arange(9), jnp.arange(15)])[None]
    segments = jnp.repeat(jnp.array([1, 2]), jnp.array([9, 15]), total_repeat_length=24)[None]
    packed = forward(model, tokens, positions, segments)
    alone = [forward(model, tokens[:, a:b], positions[:, a:b]) for a, b in ((0, 9), (9, 24))]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, axis=1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_is_cut(tied, tiny_model):
    model = tiny_model(tie_word_embeddings=tied)
    assert model.embed_tokens.shape == (64, 32)
    loud = jax.tree.map(lambda x: x.at[61:].set(1e6) if x.shape == (64, 32) else x, model)
    logits = forward(model, *tokens_and_positions())
    assert logits.shape == (2, 24, 61)
    np.testing.assert_array_equal(logits, forward(loud, *tokens_and_positions()))


def test_bf16_computes_in_bf16_and_scores_in_fp32(tiny_model):
    model = tiny_model(initializer_range=0.1, **EVERYTHING)
    tokens, positions = tokens_and_positions()
    ctx = default_context(model.config, compute_dtype=jnp.bfloat16)
    assert jax.eval_shape(lambda: model.embed(tokens, ctx)).dtype == jnp.bfloat16
    logits = forward(model, tokens, positions, ctx=ctx)
    assert logits.dtype == jnp.float32
    exact = forward(model, tokens, positions)
    assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()
    gradients = jax.eval_shape(jax.grad(lambda m: m(tokens, positions, ctx=ctx).sum()), model)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


def test_the_program_does_not_grow_with_depth(tiny_config):
    """The lowered gradient of 32 layers is that of 4 but for shapes, so compilation is too."""

    def size(num_layers: int) -> int:
        config = tiny_config(num_hidden_layers=num_layers)
        model = jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0))
        return len(jax.jit(jax.grad(mean_square)).lower(model).as_text())

    assert size(32) < 1.02 * size(4)
