"""Vocabulary parallelism: all pipeline stages hold a slice of the embedding and of the head, and
embed and score each microbatch together (arXiv 2411.05288).

The last stage is then no slower than the others, and no stage holds a table that it does not use.

Shapes: B batch rows, T tokens, D hidden size, V vocabulary rows of this stage.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops.cross_entropy import VocabularyShards, cross_entropy
from jaxdist.parallel.collectives import pmax, psum, vary

Norm = Any  # the final norm, a Module called on x


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A scored microbatch: the weighted loss, and its gradients where they were asked for."""

    loss: Array  # []
    cotangent: Array | None = None  # [B, T, D] of the last stage's output, the same on every stage
    norm_gradients: Norm | None = None
    head_gradient: Array | None = None  # [V, D], what was given plus this microbatch's


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """This stage's rows of the vocabulary and how they join with the other stages'."""

    vocab_size: int  # rows that are tokens; the rest is padding
    rows_per_stage: int
    compute_dtype: DTypeLike
    masked: bool  # rows are sharded over tp as well
    residual_spec: P  # tp sharding of activations [B, T, D] between blocks

    def embed(self, table_VD: Array, tokens_BT: Array) -> Array:
        """Embedding [B, T, D] of tokens, the same on every stage."""
        row_BT, inside_BT = self._rows(tokens_BT)
        x_BTD = jnp.where(inside_BT[..., None], table_VD[row_BT], 0).astype(self.compute_dtype)
        return psum(self._constrain(x_BTD), "pp", self.residual_spec)

    def add_embed_gradient(self, total_VD: Array, tokens_BT: Array, cotangent_BTD: Array) -> Array:
        """`total` with the gradient of this stage's rows; `cotangent` is the same on each stage."""
        row_BT, inside_BT = self._rows(tokens_BT)
        update_BTD = jnp.where(inside_BT[..., None], cotangent_BTD.astype(total_VD.dtype), 0)
        return total_VD.at[row_BT].add(update_BTD)

    def score(
        self,
        norm: Norm,
        head_VD: Array,
        x_BTD: Array,
        labels_BT: Array,
        weights_BT: Array,
        head_gradient_VD: Array | None,
    ) -> Scored:
        """Sum of weighted cross entropies of the last stage's output `x`, same on every stage.

        Gradients are made where `head_gradient`, to which the head's is added, is given.
        """
        y_BTD, norm_vjp = jax.vjp(lambda norm, x: norm(x), norm, x_BTD)
        whole = P(*(None,) * y_BTD.ndim)
        y_BTD = lax.with_sharding_constraint(y_BTD, whole)
        first_row = lax.axis_index("pp") * self.rows_per_stage
        vector = P(None)
        loss, dy_ND, dhead_VD = cross_entropy(
            vary(y_BTD.reshape(-1, y_BTD.shape[-1])),
            head_VD,
            vary(labels_BT.reshape(-1)) - first_row,
            vary(weights_BT.reshape(-1)),
            self.vocab_size - first_row,
            compute_dtype=self.compute_dtype,
            shards=VocabularyShards(
                max=lambda x: vary(pmax(x, "pp", vector)),
                sum=lambda x: vary(psum(x, "pp", vector)),
                masked=self.masked,
            ),
            dhead_VD=head_gradient_VD,
        )
        # Every stage has computed the same loss; one of them counts.
        loss = jnp.where(lax.axis_index("pp") == 0, loss, 0.0)
        if dy_ND is None:
            return Scored(loss=loss)
        dy_BTD = dy_ND.reshape(y_BTD.shape).astype(y_BTD.dtype)
        dy_BTD = psum(self._constrain(dy_BTD), "pp", self.residual_spec)
        norm_gradients, cotangent_BTD = norm_vjp(dy_BTD)
        return Scored(
            loss=loss,
            cotangent=cotangent_BTD,
            norm_gradients=norm_gradients,
            head_gradient=dhead_VD,
        )

    def _rows(self, tokens_BT: Array) -> tuple[Array, Array]:
        row_BT = vary(tokens_BT) - lax.axis_index("pp") * self.rows_per_stage
        inside_BT = (row_BT >= 0) & (row_BT < self.rows_per_stage)
        return jnp.clip(row_BT, 0, self.rows_per_stage - 1), inside_BT

    def _constrain(self, x_BTD: Array) -> Array:
        return lax.with_sharding_constraint(x_BTD, self.residual_spec)


def last_stage_to_all(x: Array, spec: P) -> Array:
    """The last stage's `x` on every stage."""
    is_last = lax.axis_index("pp") == lax.axis_size("pp") - 1
    return psum(jnp.where(is_last, x, jnp.zeros_like(x)), "pp", spec)


def first_stage_to_all(x: Array, spec: P) -> Array:
    """The first stage's `x` on every stage."""
    return psum(jnp.where(lax.axis_index("pp") == 0, x, jnp.zeros_like(x)), "pp", spec)
