"""Which dtype each number of a training step lives in, and the dynamic loss scale of fp16.

`PrecisionConfig` is the user's wish, `Policy` the resolved dtypes that models, reductions and
optimizers are given. Losses, softmax and norm statistics are fp32 under every policy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import PrecisionConfig

_COMPUTE = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
_MAX_SCALE = 2.0**24  # beyond it the scaled loss itself, not its gradient, nears fp32's rounding


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Resolved dtypes of one run."""

    param_dtype: Any
    """Of the master weights, which the optimizer updates."""
    compute_dtype: Any
    """Of activations and of weights inside a product; products accumulate in fp32."""
    reduce_dtype: Any
    """In which gradients are accumulated over microbatches and reduced over the mesh."""
    moment_dtype: Any
    """Of the optimizer's moments between two steps; the update itself is computed in fp32."""

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> Policy:
        """Dtypes of `config.policy`, each replaced by the field of its name where that is set.

        16-bit policies compute in 16 bits and keep masters, reductions and moments in fp32.
        """
        return cls(
            param_dtype=jnp.dtype(config.param_dtype or "float32"),
            compute_dtype=jnp.dtype(config.compute_dtype or _COMPUTE[config.policy]),
            reduce_dtype=jnp.dtype(config.reduce_dtype or "float32"),
            moment_dtype=jnp.dtype(config.moment_dtype or "float32"),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """State of dynamic loss scaling (Micikevicius et al., arXiv 1710.03740, section 3.2).

    A pytree of scalars that is checkpointed with the rest of the state. A step whose gradients
    are not finite is an overflow: the caller skips it and counts it here.
    """

    scale: jax.Array  # [] f32, what the loss is multiplied with
    good_steps: jax.Array  # [] i32, finite steps since the scale last moved or overflowed
    hysteresis_left: jax.Array  # [] i32, overflows (this one included) until the scale is halved
    overflows: jax.Array  # [] i32, of the whole run

    @classmethod
    def initial(cls, config: PrecisionConfig) -> LossScale:
        """The state before the first step."""
        return cls(
            scale=jnp.float32(config.loss_scale_init),
            good_steps=jnp.int32(0),
            hysteresis_left=jnp.int32(config.loss_scale_hysteresis),
            overflows=jnp.int32(0),
        )

    def update(self, finite: jax.Array, config: PrecisionConfig) -> LossScale:
        """State after a step whose gradients were all `finite` (a bool scalar).

        Overflow: hysteresis counts down; once used up, this and each further overflow halves the
        scale, never below `loss_scale_min`. `loss_scale_growth_interval` finite steps in a row
        double it, up to 2^24, and give the hysteresis back.
        """
        return jax.tree.map(
            lambda good, bad: jnp.where(finite, good, bad),
            self._after_finite(config),
            self._after_overflow(config),
        )

    def at_floor(self, config: PrecisionConfig) -> jax.Array:
        """Whether no smaller scale is left, so that an overflow now is not the scale's fault."""
        return self.scale <= config.loss_scale_min

    def _after_finite(self, config: PrecisionConfig) -> LossScale:
        grow = self.good_steps + 1 >= config.loss_scale_growth_interval
        grown = jnp.minimum(self.scale * 2, _MAX_SCALE)
        return replace(
            self,
            scale=jnp.where(grow, grown, self.scale),
            good_steps=jnp.where(grow, 0, self.good_steps + 1),
            hysteresis_left=jnp.where(grow, config.loss_scale_hysteresis, self.hysteresis_left),
        )

    def _after_overflow(self, config: PrecisionConfig) -> LossScale:
        left = jnp.maximum(self.hysteresis_left - 1, 0)
        halved = jnp.maximum(self.scale / 2, config.loss_scale_min)
        return replace(
            self,
            scale=jnp.where(left == 0, halved, self.scale),
            good_steps=jnp.zeros_like(self.good_steps),
            hysteresis_left=left,
            overflows=self.overflows + 1,
        )
