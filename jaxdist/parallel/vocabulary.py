"""Vocabulary parallelism: all members of pp and tp hold a slice of the embedding and of the head,
and embed and score each microbatch together (arXiv 2411.05288).

The last stage is then no slower than the others, and no stage holds a table that it does not use.
The work on a slice runs in a small `shard_map` that makes tp manual too: left to the partitioner,
a table is gathered where activations are sharded over their sequence, and every sum over the
vocabulary is made twice, over tp and over pp.

Shapes: B batch rows, T tokens, D hidden size, V vocabulary rows: of this stage, or where tp is
manual of this member.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops.cross_entropy import VocabularyShards, cross_entropy
from jaxdist.parallel.collectives import psum, sum_into, vary

Norm = Any  # the final norm, a Module called on x

_MEMBERS = ("pp", "tp")
_ROWS = P("tp", None)  # of a table [V, D]
_WHOLE = P(None, None, None)  # of activations [B, T, D]


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
    compute_dtype: DTypeLike
    residual_spec: P  # tp sharding of activations [B, T, D] between blocks
    softcap: float | None = None  # of the logits

    @jax.named_scope("embed")
    def embed(self, table_VD: Array, tokens_BT: Array) -> Array:
        """Embedding [B, T, D] of tokens, the same on every stage."""

        def own_rows(table_VD: Array, tokens_BT: Array) -> Array:
            row_BT, inside_BT = _rows(table_VD, tokens_BT)
            x_BTD = jnp.where(inside_BT[..., None], table_VD[row_BT], 0)
            return sum_into(self.residual_spec, x_BTD.astype(self.compute_dtype), _MEMBERS)

        return _over_tp(own_rows, (_ROWS, P()), self.residual_spec)(table_VD, vary(tokens_BT))

    @jax.named_scope("embed_backward")
    def add_embed_gradient(self, total_VD: Array, tokens_BT: Array, cotangent_BTD: Array) -> Array:
        """`total` with the gradient of this stage's rows; `cotangent` is the same on each stage."""

        def own_rows(total_VD: Array, tokens_BT: Array, cotangent_BTD: Array) -> Array:
            row_BT, inside_BT = _rows(total_VD, tokens_BT)
            update_BTD = jnp.where(inside_BT[..., None], cotangent_BTD.astype(total_VD.dtype), 0)
            return total_VD.at[row_BT].add(update_BTD)

        whole_BTD = lax.with_sharding_constraint(cotangent_BTD, _WHOLE)
        return _over_tp(own_rows, (_ROWS, P(), _WHOLE), _ROWS)(total_VD, vary(tokens_BT), whole_BTD)

    @jax.named_scope("score")
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
        whole_BTD = lax.with_sharding_constraint(y_BTD, _WHOLE)
        arguments = (head_VD, whole_BTD, labels_BT, weights_BT)
        in_specs = (_ROWS, _WHOLE, P(), P())
        # Every stage computes the same loss; one of them counts.
        counts = lax.axis_index("pp") == 0
        if head_gradient_VD is None:
            loss = _over_tp(self._loss, in_specs, P())(*arguments)
            return Scored(loss=jnp.where(counts, loss, 0.0))
        loss, dy_BTD, head_gradient_VD = _over_tp(
            self._loss_and_gradients, (*in_specs, _ROWS), (P(), self.residual_spec, _ROWS)
        )(*arguments, head_gradient_VD)
        norm_gradients, cotangent_BTD = norm_vjp(dy_BTD)
        return Scored(
            loss=jnp.where(counts, loss, 0.0),
            cotangent=cotangent_BTD,
            norm_gradients=norm_gradients,
            head_gradient=head_gradient_VD,
        )

    # -- where tp is manual -------------------------------------------------------------------

    def _loss(self, head_VD: Array, y_BTD: Array, labels_BT: Array, weights_BT: Array) -> Array:
        return self._cross_entropy(head_VD, y_BTD, labels_BT, weights_BT, None)[0]

    def _loss_and_gradients(
        self,
        head_VD: Array,
        y_BTD: Array,
        labels_BT: Array,
        weights_BT: Array,
        dhead_VD: Array,
    ) -> tuple[Array, Array, Array]:
        arguments = (head_VD, y_BTD, labels_BT, weights_BT, dhead_VD)
        loss, dy_ND, dhead_VD = self._cross_entropy(*arguments)
        dy_BTD = dy_ND.reshape(y_BTD.shape).astype(y_BTD.dtype)
        return loss, sum_into(self.residual_spec, dy_BTD, _MEMBERS), dhead_VD

    def _cross_entropy(
        self,
        head_VD: Array,
        y_BTD: Array,
        labels_BT: Array,
        weights_BT: Array,
        dhead_VD: Array | None,
    ) -> tuple[Array, Any, Any]:
        first_row = _first_row(head_VD)
        members = lax.axis_size("pp") * lax.axis_size("tp")
        padded = self.vocab_size < members * head_VD.shape[0]
        return cross_entropy(
            y_BTD.reshape(-1, y_BTD.shape[-1]),
            head_VD,
            labels_BT.reshape(-1) - first_row,
            weights_BT.reshape(-1),
            self.vocab_size - first_row if padded else None,
            compute_dtype=self.compute_dtype,
            shards=VocabularyShards(
                max=lambda x: lax.pmax(x, _MEMBERS), sum=lambda x: lax.psum(x, _MEMBERS)
            ),
            dhead_VD=dhead_VD,
            softcap=self.softcap,
        )


@jax.named_scope("score")
def last_stage_to_all(x: Array, spec: P) -> Array:
    """The last stage's `x` on every stage."""
    is_last = lax.axis_index("pp") == lax.axis_size("pp") - 1
    return psum(jnp.where(is_last, x, jnp.zeros_like(x)), "pp", spec)


@jax.named_scope("embed_backward")
def first_stage_to_all(x: Array, spec: P) -> Array:
    """The first stage's `x` on every stage."""
    return psum(jnp.where(lax.axis_index("pp") == 0, x, jnp.zeros_like(x)), "pp", spec)


def _over_tp(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(function, axis_names={"tp"}, in_specs=in_specs, out_specs=out_specs)


def _first_row(table_VD: Array) -> Array:
    """Where this member's rows begin in the vocabulary, which is cut over pp, then over tp."""
    member = lax.axis_index("pp") * lax.axis_size("tp") + lax.axis_index("tp")
    return member * table_VD.shape[0]


def _rows(table_VD: Array, tokens_BT: Array) -> tuple[Array, Array]:
    """Each token's row in this member's table, and whether it has one."""
    row_BT = tokens_BT - _first_row(table_VD)
    inside_BT = (row_BT >= 0) & (row_BT < table_VD.shape[0])
    return jnp.clip(row_BT, 0, table_VD.shape[0] - 1), inside_BT
