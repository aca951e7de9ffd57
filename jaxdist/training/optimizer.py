"""Optimizers over the model's pytree, built from optax.

A leaf is seen as the model means it, not as it is stored: a stack [layers, in, out] is `layers`
matrices. Moments keep the tree, paths and shapes of the parameters, so that whatever shards a
parameter shards its moments. Gradients come in reduced and clipped; the learning rate is a
function of the updates made so far, which a skipped step does not advance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec

from jaxdist.config import OptimizerConfig
from jaxdist.precision import Policy
from jaxdist.training.learning_rate import make_schedule
from jaxdist.training.muon import scale_by_muon

Axes = tuple[str | None, ...]


def make_optimizer(
    config: OptimizerConfig, total_steps: int, policy: Policy
) -> optax.GradientTransformation:
    """The optimizer of a run, for trees of `nnx.Param` that carry their logical `axes`.

    Matrices and embeddings decay, gains and biases do not (the usual choice since GPT-2). The
    decay is decoupled from the gradient and multiplied by the learning rate; `adam` has none.
    `adafactor` steps relative to each matrix's RMS, so its learning rates are about 10 times
    AdamW's. The state's last entry counts the updates made.
    """
    decay = 0.0 if config.name == "adam" else config.weight_decay
    return optax.chain(
        _held_in(policy.moment_dtype, _direction(config)),
        optax.add_decayed_weights(decay, mask=_decayed),
        optax.scale_by_learning_rate(make_schedule(config, total_steps)),
    )


def num_updates(opt_state: Any) -> jax.Array:
    """Updates that `opt_state` has seen: a scalar int32, what the schedule is a function of."""
    return opt_state[-1].count


def global_norm(tree: Any) -> jax.Array:
    """L2 norm over all leaves, accumulated in fp32 whatever their dtype: a scalar."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def unscale_and_clip(
    grads: Any, norm: jax.Array, scale: jax.typing.ArrayLike, max_norm: float | None
) -> Any:
    """`grads` of a loss scaled by `scale`, taken back to true ones of norm `max_norm` at most.

    `norm` is the true one; `max_norm` None clips nothing. The result is fp32: what the scale has
    kept within fp16's range may be below it once unscaled.
    """
    factor = 1 / jnp.asarray(scale, jnp.float32)
    if max_norm is not None:
        factor *= max_norm / jnp.maximum(norm, max_norm)
    return jax.tree.map(lambda grad: grad.astype(jnp.float32) * factor, grads)


def ema_update(ema: Any, params: Any, decay: float) -> Any:
    """`decay * ema + (1 - decay) * params`, in the dtype of `ema`: fp32, or it stands still."""
    return jax.tree.map(
        lambda old, new: decay * old + (1 - decay) * new.astype(old.dtype), ema, params
    )


def state_axes(opt_state: Any, params: Any) -> Any:
    """Logical axes of each leaf of `opt_state`, as one PartitionSpec of logical names per leaf.

    A leaf that sits at the path of a parameter and has its shape has its axes; all else (counts,
    Adafactor's factored rows) has none and is to be replicated. Both trees may be abstract.
    """
    known = {
        jax.tree_util.keystr(path): (leaf.shape, axes)
        for (path, leaf), axes in zip(
            jax.tree_util.tree_leaves_with_path(params), _axes(params), strict=True
        )
    }

    def axes_of(path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        tails = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        shape, axes = next((known[tail] for tail in tails if tail in known), ((), ()))
        return PartitionSpec(*(axes if shape == leaf.shape else (None,) * leaf.ndim))

    return jax.tree_util.tree_map_with_path(axes_of, opt_state)


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    """What each optimizer makes of the gradients, before decay and learning rate."""
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
    if config.name in ("adamw", "adam"):
        return adam
    if config.name == "lion":
        return optax.scale_by_lion(config.beta1, config.beta2)
    if config.name == "sgd":
        return optax.trace(config.momentum) if config.momentum else optax.identity()
    if config.name == "muon":
        muon = scale_by_muon(config.momentum)
        return optax.partition({"matrix": muon, "other": adam}, _muon_labels)
    if config.name == "adafactor":
        stacked = _per_layer(_adafactor())
        return optax.partition({"layers": stacked, "other": _adafactor()}, _stack_labels)
    raise ValueError(f"optimizer.name={config.name!r} has no update rule")


def _adafactor() -> optax.GradientTransformation:
    """Adafactor with external learning rate (arXiv 1804.04235, algorithms 4 and 5)."""
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


def _per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on each layer of stacks [layers, ...], as if they were stored one by one."""
    return optax.GradientTransformation(jax.vmap(inner.init), jax.vmap(inner.update))


def _held_in(dtype: Any, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` computed in fp32, with its moments held in `dtype` from one update to the next."""

    def init(params: Any) -> Any:
        return _cast(inner.init(_cast(params, jnp.float32)), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state, params = (_cast(tree, jnp.float32) for tree in (updates, state, params))
        updates, state = inner.update(updates, state, params)
        return updates, _cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def _axes(tree: Any) -> list[Axes]:
    """Logical axes of each parameter, in the order of the tree's leaves."""
    params = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [param.get_metadata("axes") for param in params if jax.tree.leaves(param)]


def _map_axes(rule: Callable[[Axes], Any], tree: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), [rule(axes) for axes in _axes(tree)])


def _decayed(tree: Any) -> Any:
    return _map_axes(_is_matrix, tree)


def _is_matrix(axes: Axes) -> bool:
    return len(axes) - (axes[0] == "layers") >= 2


def _stack_labels(tree: Any) -> Any:
    return _map_axes(lambda axes: "layers" if axes[0] == "layers" else "other", tree)


def _muon_labels(tree: Any) -> Any:
    """Muon is for hidden matrices; embedding, head, gains and biases go by AdamW."""
    return _map_axes(
        lambda axes: "matrix" if _is_matrix(axes) and "vocab" not in axes else "other", tree
    )
