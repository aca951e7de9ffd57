"""Learning-rate schedules: pure functions of the count of updates made so far.

All have the same warm-up: update `s` (from 0) of `W` warm-up updates runs at
`peak * (s + 1) / (W + 1)`, so the first update is not wasted at zero and update `W` has exactly
the peak. Decays reach their minimum at `total_steps`, one past the last update, for the same
reason.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxdist.config import OptimizerConfig

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def make_schedule(config: OptimizerConfig, total_steps: int) -> Schedule:
    """The learning rate as a function of the count of updates made, an fp32 scalar.

    With `min = min_learning_rate_ratio * learning_rate` and `x` the part done of the decay, from
    0 to 1: `constant` stays, `linear` is `peak + (min - peak) x`, `cosine` is
    `min + (peak - min) (1 + cos(pi x)) / 2` (arXiv 1608.03983), both from warm-up's end on; `wsd`
    stays and decays linearly over the last `decay_steps` updates (arXiv 2405.18392). Where they
    are None, `warmup_steps` is 5 % and `decay_steps` 10 % of `total_steps`.
    """
    warmup = total_steps // 20 if config.warmup_steps is None else config.warmup_steps
    peak = config.learning_rate
    floor = config.min_learning_rate_ratio * peak
    start, shape = _decay(config, warmup, total_steps)
    length = max(total_steps - start, 1)

    def learning_rate(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32)
        rising = peak * (step + 1) / (warmup + 1)
        done = jnp.clip((step - start) / length, 0.0, 1.0)
        return jnp.where(step < warmup, rising, floor + (peak - floor) * shape(done))

    return learning_rate


def _decay(
    config: OptimizerConfig, warmup: int, total_steps: int
) -> tuple[int, Callable[[jax.Array], jax.Array]]:
    """First decaying step, and what is left of (peak - min) when a part in [0, 1] is done."""
    if config.schedule == "constant":
        return warmup, jnp.ones_like
    if config.schedule == "linear":
        return warmup, _linear
    if config.schedule == "cosine":
        return warmup, _cosine
    if config.schedule == "wsd":
        length = total_steps // 10 if config.decay_steps is None else config.decay_steps
        return max(total_steps - length, warmup), _linear
    raise ValueError(f"optimizer.schedule={config.schedule!r} has no formula")


def _linear(done: jax.Array) -> jax.Array:
    return 1 - done


def _cosine(done: jax.Array) -> jax.Array:
    return (1 + jnp.cos(jnp.pi * done)) / 2
