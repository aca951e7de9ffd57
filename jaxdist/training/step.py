"""One training step: batch -> loss and gradients (pipeline) -> norm, clipping, update, metrics.

The update runs on logical arrays under plain `jit`: ZeRO is their sharding. Non-finite gradients
leave parameters, moments and the schedule as they were where the step is guarded (fp16, or
`train.on_nonfinite: skip`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jaxdist.config import RunConfig
from jaxdist.parallel.microbatches import Microbatches
from jaxdist.parallel.pipeline import Pipeline
from jaxdist.precision import Policy
from jaxdist.training.learning_rate import make_schedule
from jaxdist.training.optimizer import (
    ema_update,
    global_norm,
    num_updates,
    unscale_and_clip,
)
from jaxdist.training.state import StateLayout, TrainState

Metrics = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """A global batch on the device, [M, B, T] int32 each; dp shards dim 1."""

    tokens: Array
    labels: Array
    loss_mask: Array  # 1 where the label counts
    segment_ids: Array
    positions: Array

    def microbatches(self, scale: Array | float) -> tuple[Microbatches, Array]:
        """Tokens weighted by `scale` / (valid tokens of the global batch), and their count."""
        num_valid = self.loss_mask.sum()
        weight = scale / jnp.maximum(num_valid, 1).astype(jnp.float32)
        weighted = Microbatches(
            tokens=self.tokens,
            labels=self.labels,
            weights=self.loss_mask.astype(jnp.float32) * weight,
            segment_ids=self.segment_ids,
            positions=self.positions,
        )
        return weighted, num_valid


def make_train_step(
    config: RunConfig,
    policy: Policy,
    pipeline: Pipeline,
    optimizer: optax.GradientTransformation,
    layout: StateLayout,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step as a pure function, to be jitted with its state donated, under `jax.set_mesh`.

    Metrics are fp32 scalars: loss (mean cross entropy a valid token, nats), grad_norm (before
    clipping), learning_rate, num_tokens (valid ones), skipped (0 or 1) and, for fp16, loss_scale.
    """
    schedule = make_schedule(config.optimizer, config.train.steps)
    fp16 = policy.compute_dtype == jnp.float16
    guarded = fp16 or config.train.on_nonfinite == "skip"

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale.scale if state.loss_scale is not None else jnp.float32(1)
        microbatches, num_valid = batch.microbatches(scale)
        loss, gradients = pipeline.loss_and_gradients(state.params, microbatches)
        with jax.named_scope("gradient_norm"):
            norm = global_norm(gradients) / scale
        with jax.named_scope("update"):
            finite = jnp.isfinite(norm) & jnp.isfinite(loss)
            gradients = unscale_and_clip(gradients, norm, scale, config.optimizer.max_grad_norm)
            params, opt_state, ema = _update(state, gradients, finite if guarded else None)
        loss_scale = state.loss_scale
        if loss_scale is not None:
            loss_scale = loss_scale.update(finite, config.precision)
        metrics = {
            "loss": loss / scale,
            "grad_norm": norm,
            "learning_rate": schedule(num_updates(state.opt_state)),
            "num_tokens": num_valid.astype(jnp.float32),
            "skipped": jnp.where(finite, 0.0, 1.0) if guarded else jnp.float32(0),
        }
        if state.loss_scale is not None:
            metrics["loss_scale"] = state.loss_scale.scale
        state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            ema=ema,
            loss_scale=loss_scale,
            rng=state.rng,
        )
        return state, metrics

    def _update(state: TrainState, gradients: Any, accept: Array | None) -> tuple[Any, Any, Any]:
        """New parameters, optimizer state and EMA; the old ones where `accept` is false."""
        # ZeRO-1 and 2: each dp member updates its slice, and the slices are gathered.
        params = _constrain(state.params, layout.gradients)
        updates, opt_state = optimizer.update(gradients, state.opt_state, params)
        new = optax.apply_updates(params, updates), _constrain(opt_state, layout.state.opt_state)
        ema, decay = state.ema, config.optimizer.ema_decay
        if ema is not None and decay is not None:
            ema = ema_update(ema, new[0], decay)
        new = *new, ema
        if accept is not None:
            old = params, state.opt_state, state.ema
            new = jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, old)
        params, opt_state, ema = new
        return _constrain(params, layout.state.params), opt_state, ema

    return step


def make_eval_step(pipeline: Pipeline) -> Callable[[Any, Batch], Metrics]:
    """Sum of cross entropies (nats) and count of valid tokens of one batch, as fp32 scalars."""

    def step(params: Any, batch: Batch) -> Metrics:
        microbatches, num_valid = batch.microbatches(1.0)
        mean = pipeline.loss(params, microbatches)
        num_tokens = num_valid.astype(jnp.float32)
        return {"loss_sum": mean * num_tokens, "num_tokens": num_tokens}

    return step


def mean_loss(sums: Sequence[Metrics]) -> float:
    """Over all valid tokens of several batches (nats): not the mean of the batches' means."""
    loss_sum, num_tokens = (
        sum(float(batch[name]) for batch in sums) for name in ("loss_sum", "num_tokens")
    )
    return loss_sum / max(num_tokens, 1)


def _constrain(tree: Any, specs: Any) -> Any:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)
