import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.config import OptimizerConfig, PrecisionConfig
from jaxdist.precision import Policy
from jaxdist.training.optimizer import (
    ema_update,
    global_norm,
    make_optimizer,
    num_updates,
    state_axes,
    unscale_and_clip,
)

LAYERS, WIDTH, HIDDEN, VOCAB = 2, 8, 16, 32
NAMES = ["adamw", "adam", "lion", "adafactor", "sgd", "muon"]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
FP32 = Policy.from_config(PrecisionConfig(policy="fp32"))


class Block(nnx.Module):
    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = nnx.Param(
            jax.random.normal(up, (WIDTH, HIDDEN)) / 4, axes=("layers", "embed", "mlp")
        )
        self.down = nnx.Param(
            jax.random.normal(down, (HIDDEN, WIDTH)) / 4, axes=("layers", "mlp", "embed")
        )
        self.bias = nnx.Param(jnp.full(HIDDEN, 0.5), axes=("layers", "mlp"))
        self.norm = nnx.Param(jnp.ones(WIDTH), axes=("layers", "norm"))


class Model(nnx.Module):
    def __init__(self, key):
        embed, layers = jax.random.split(key)
        self.embed_tokens = nnx.Param(
            jax.random.normal(embed, (VOCAB, WIDTH)), axes=("vocab", "embed")
        )
        self.layers = jax.vmap(Block)(jax.random.split(layers, LAYERS))
        self.norm = nnx.Param(jnp.ones(WIDTH), axes=("norm",))
        self.lm_head = None


def config(name: str, **fields) -> OptimizerConfig:
    defaults = {
        "learning_rate": 0.01,
        "schedule": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "momentum": 0.9,
    }
    return OptimizerConfig(name=name, **{**defaults, **fields})


def model() -> Any:
    return Model(jax.random.key(0))


def gradients(params, count: int):
    """`count` trees of made-up gradients of various sizes."""
    leaves, structure = jax.tree.flatten(params)
    draw = np.random.default_rng(0)
    for step in range(count):
        yield jax.tree.unflatten(
            structure,
            [
                jnp.asarray(draw.normal(size=leaf.shape) * 0.3 ** (step % 3), leaf.dtype)
                for leaf in leaves
            ],
        )


@functools.cache
def compiled(cfg: OptimizerConfig, policy: Policy):
    optimizer = make_optimizer(cfg, 100, policy)

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(optimizer.init), step


def train(cfg, params, grads_of_steps=None, policy: Policy = FP32):
    init, step = compiled(cfg, policy)
    state = init(params)
    for grads in grads_of_steps or gradients(params, 5):
        params, state = step(params, state, grads)
    return params, state


def arrays(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


TORCH = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
}


# In the order of the leaves: embedding; bias, down, norm, up of the layers; final norm.
DECAYED = [True, False, True, False, True, False]


@pytest.mark.parametrize("name", TORCH)
def test_twenty_steps_equal_torch(name):
    params = model()
    theirs = [torch.tensor(leaf, requires_grad=True) for leaf in arrays(params)]
    decay = 0.1 if name == "adamw" else 0.0
    optimizer = TORCH[name](
        [{"params": [p], "weight_decay": decay * d} for p, d in zip(theirs, DECAYED, strict=True)]
    )
    for grads in gradients(params, 20):
        for param, grad in zip(theirs, arrays(grads), strict=True):
            param.grad = torch.tensor(grad)
        optimizer.step()
    ours, _ = train(config(name, weight_decay=decay), params, gradients(params, 20))
    for got, want in zip(arrays(ours), theirs, strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_decoupled_and_of_matrices_and_embeddings_only(name):
    params = model()
    grads = list(gradients(params, 1))
    with_decay, _ = train(config(name), params, grads)
    without, _ = train(config(name, weight_decay=0.0), params, grads)
    for got, base, start, decayed in zip(
        *map(arrays, (with_decay, without, params)), DECAYED, strict=True
    ):
        decay = 0.1 if decayed and name != "adam" else 0.0
        np.testing.assert_allclose(got - base, -0.01 * decay * start, atol=1e-6)


def test_lion_equals_its_definition():
    params = model()
    want, moment = arrays(params), [np.zeros_like(leaf) for leaf in arrays(params)]
    for grads in gradients(params, 5):
        for i, grad in enumerate(arrays(grads)):
            decay = 0.1 * DECAYED[i]
            sign = np.sign(0.9 * moment[i] + 0.1 * grad)
            want[i] = want[i] - 0.01 * (sign + decay * want[i])
            moment[i] = 0.99 * moment[i] + 0.01 * grad
    for ours, theirs in zip(arrays(train(config("lion"), params)[0]), want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def one_by_one(cfg, params):
    """Trains each layer as a model of its own, a stack of one; stacked again."""
    results = []
    for layer in range(LAYERS):

        def cut(tree, layer=layer):
            return {
                name: nnx.Param(param[layer : layer + 1], axes=param.get_metadata("axes"))
                for name, param in vars(tree.layers).items()
                if isinstance(param, nnx.Variable)
            }

        results.append(train(cfg, cut(params), map(cut, gradients(params, 5)))[0])
    return jax.tree.map(lambda *layers: np.concatenate(layers), *results)


@pytest.mark.parametrize("name", ["muon", slow("adafactor")])
def test_stacked_layers_are_updated_as_matrices_of_their_own(name):
    params = model()
    ours = train(config(name), params)[0].layers
    for field, want in one_by_one(config(name), params).items():
        np.testing.assert_allclose(getattr(ours, field)[...], want[...], atol=1e-6, err_msg=field)


def test_muon_updates_matrices_only_and_the_rest_as_adamw():
    params = model()
    muon, adamw = (train(config(name), params)[0] for name in ("muon", "adamw"))
    for path in ("embed_tokens", "norm"):
        np.testing.assert_array_equal(getattr(muon, path)[...], getattr(adamw, path)[...])
    assert not np.allclose(muon.layers.up[...], adamw.layers.up[...], atol=1e-3)


@pytest.mark.parametrize(
    "name",
    # Adafactor is sharded below; the others work element by element, as adamw does.
    ["adamw", "muon", *(slow(name) for name in ("adafactor", "adam", "lion", "sgd"))],
)
def test_sharded_update_equals_unsharded(name):
    params = model()
    mesh = jax.make_mesh(
        (2, 2, 2), ("dp", "pp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    places = {"layers": "pp", "embed": "dp", "norm": "dp", "mlp": "tp", "vocab": "tp"}

    def shard(leaf, axes):
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*(places[a] for a in axes))))

    axes = [leaf.get_metadata("axes") for leaf in variables(params)]
    sharded = jax.tree.unflatten(
        jax.tree.structure(params), list(map(shard, jax.tree.leaves(params), axes))
    )
    for ours, want in zip(
        arrays(train(config(name), sharded)[0]), arrays(train(config(name), params)[0]), strict=True
    ):
        np.testing.assert_allclose(ours, want, atol=2e-6, rtol=1e-5)


def test_adafactor_factors_each_matrix_of_a_stack_and_survives_sharding():
    wide = jax.random.normal(jax.random.key(1), (2, 128, 160))
    params = {"w": nnx.Param(wide, axes=("layers", "embed", "mlp"))}
    alone, state = train(config("adafactor"), params)
    rows = {leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert rows == {(2, 128), (2, 160), (2, 1), (2,)}  # the vectors, and no moment of full size
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec(None, "dp"))
    sharded = train(config("adafactor"), jax.device_put(params, place))[0]
    np.testing.assert_allclose(arrays(sharded)[0], arrays(alone)[0], atol=2e-6)


def variables(tree) -> list[nnx.Variable]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))


@pytest.mark.parametrize("name", NAMES)
def test_state_axes_fit_every_leaf(name):
    params = model()
    state = jax.eval_shape(make_optimizer(config(name), 100, FP32).init, params)
    axes = state_axes(state, params)
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(axes), strict=True):
        assert len(spec) == leaf.ndim
    if name == "adamw":
        up = PartitionSpec("layers", "embed", "mlp")
        moments = axes[0].mu.layers.up, axes[0].nu.layers.up
        assert [moment.get_value() for moment in moments] == [up, up]
        assert axes[0].count == PartitionSpec()


def test_updates_are_counted():
    assert num_updates(train(config("muon"), model(), gradients(model(), 3))[1]) == 3


def test_schedule_is_a_function_of_the_updates_made():
    params = model()
    rates = config("sgd", momentum=0.0, weight_decay=0.0, warmup_steps=3, learning_rate=1.0)
    grads = jax.tree.map(jnp.ones_like, params)
    want = float(params.norm[0])
    for count, rate in enumerate((0.25, 0.5, 0.75, 1.0, 1.0), start=1):
        want -= rate
        assert float(train(rates, params, [grads] * count)[0].norm[0]) == pytest.approx(want)


def test_moments_are_held_in_their_dtype_and_computed_in_fp32():
    policy = Policy.from_config(PrecisionConfig(policy="bf16", moment_dtype="bfloat16"))
    exact, _ = train(config("adamw"), model())
    params, state = train(config("adamw"), model(), policy=policy)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert {str(leaf.dtype) for leaf in moments} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
    for ours, want in zip(arrays(params), arrays(exact), strict=True):
        np.testing.assert_allclose(ours, want, atol=5 * 0.01 * 2**-7)


def test_bf16_masters_have_fp32_moments():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model())
    trained, state = train(config("adamw"), params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.ndim} == {"float32"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(trained)} == {"bfloat16"}


def test_global_norm_and_clipping_equal_numpy():
    grads = next(gradients(model(), 1))
    want = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in arrays(grads)))
    norm = jax.jit(global_norm)(grads)
    clip = jax.jit(unscale_and_clip, static_argnums=3)
    assert norm.dtype == jnp.float32 and float(norm) == pytest.approx(want, rel=1e-6)
    assert float(jax.jit(global_norm)(clip(grads, norm, 1.0, 1.5))) == pytest.approx(1.5, rel=1e-6)
    untouched = clip(grads, norm, 1.0, 1e6)
    assert all(map(np.array_equal, arrays(untouched), arrays(grads)))


def test_norm_of_half_precision_gradients_does_not_overflow():
    assert float(global_norm({"w": jnp.full(4, 300, jnp.float16)})) == 600


def test_clipping_zero_gradients_leaves_zeros():
    zeros = {"w": jnp.zeros(3)}
    assert not np.any(arrays(unscale_and_clip(zeros, global_norm(zeros), 1.0, 1.0)))


def test_unscaling_comes_before_clipping():
    grads = next(gradients(model(), 1))
    norm = global_norm(grads)
    scaled = jax.tree.map(lambda grad: 1024 * grad, grads)
    want = unscale_and_clip(grads, norm, 1.0, 0.5)
    got = unscale_and_clip(scaled, norm, 1024.0, 0.5)
    assert all(map(np.array_equal, arrays(got), arrays(want)))
    untouched = unscale_and_clip(scaled, norm, 1024.0, None)
    assert all(map(np.array_equal, arrays(untouched), arrays(grads)))


def test_unscaling_keeps_what_fp16_cannot_hold():
    grads = {"w": jnp.full(4, 2.0**-14, jnp.float16)}  # of a loss scaled by 2^16
    clipped = unscale_and_clip(grads, global_norm(grads) / 2**16, 2.0**16, 1.0)
    np.testing.assert_array_equal(clipped["w"], np.full(4, 2.0**-30, np.float32))


def test_ema_follows_slowly_in_fp32():
    ema, params = {"w": jnp.zeros(2)}, {"w": jnp.ones(2, jnp.bfloat16)}
    for _ in range(10):
        ema = ema_update(ema, params, 0.999)
    assert ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(ema["w"], 1 - 0.999**10, rtol=1e-5)
