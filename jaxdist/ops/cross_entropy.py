"""Cross entropy with its gradients made on the way, so that logits are never stored.

N tokens, V vocabulary rows held here (one shard of the vocabulary), D hidden size, C tokens of a
chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxdist.ops.product import multiplied_dtype, product


@dataclass(frozen=True)
class VocabularyShards:
    """How the holders of the other vocabulary rows join in: identities where there are none."""

    max: Callable[[Array], Array] = lambda x: x
    sum: Callable[[Array], Array] = lambda x: x


def cross_entropy(
    x_ND: Array,
    head_VD: Array,
    labels_N: Array,
    weights_N: Array,
    num_rows: Array | int | None,
    *,
    compute_dtype: DTypeLike,
    shards: VocabularyShards = VocabularyShards(),
    chunk_size: int = 512,
    dhead_VD: Array | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array | None, Array | None]:
    """Sum of `weights * -log softmax(x @ head.T)[labels]`, and its gradients by x and head.

    `labels` count from this shard's first row (others' labels lie outside [0, V)); rows from
    `num_rows` on are padding and get no probability; None says that there are none. Gradients are
    made where `dhead`, to which the head's is added, is given; they are of this shard's logits
    alone, so summing dx over the shards is the caller's part. Returns (loss, dx_ND, dhead_VD), None
    for what is not made, loss and dx in fp32. Statistics are fp32; the exponentials are
    rounded to the dtype of the products once, unnormalised, so that rounding cannot unbalance
    their sum.
    """
    times = partial(product, compute_dtype=compute_dtype)
    dtype = multiplied_dtype(compute_dtype)
    head = head_VD.astype(dtype)
    end = head.shape[0] if num_rows is None else jnp.minimum(head.shape[0], num_rows)
    chunk = min(chunk_size, x_ND.shape[0])
    padding = -x_ND.shape[0] % chunk

    def score(dhead_VD: Array | None, inputs: tuple[Array, Array, Array]):
        x_CD, labels_C, weights_C = inputs
        x_CD = x_CD.astype(dtype)
        logits_CV = times(x_CD, head, ((1,), (1,)))
        if softcap is not None:
            tanh_CV = jnp.tanh(logits_CV / softcap)
            logits_CV, slope_CV = softcap * tanh_CV, 1.0 - tanh_CV * tanh_CV
        if num_rows is not None:
            is_row_V = lax.broadcasted_iota(jnp.int32, (head.shape[0],), 0) < end
            logits_CV = jnp.where(is_row_V[None, :], logits_CV, -jnp.inf)
        # A shard of nothing but padding has no maximum of its own.
        own_max_C = jnp.maximum(logits_CV.max(axis=1), jnp.finfo(jnp.float32).min)
        exp_CV = jnp.exp(logits_CV - own_max_C[:, None]).astype(dtype)
        own_sum_C = exp_CV.sum(axis=1, dtype=jnp.float32)
        inside_C = (labels_C >= 0) & (labels_C < end)
        index_C = jnp.clip(labels_C, 0, head.shape[0] - 1)
        picked_C = jnp.take_along_axis(logits_CV, index_C[:, None], axis=1)[:, 0]
        label_C = jnp.where(inside_C, picked_C, 0.0)
        max_C = shards.max(own_max_C)
        rescale_C = jnp.exp(own_max_C - max_C)
        sum_C = shards.sum(own_sum_C * rescale_C)
        loss = (weights_C * (max_C + jnp.log(sum_C) - shards.sum(label_C))).sum()
        if dhead_VD is None:
            return None, (loss, None)
        # d logits = weight * (softmax - onehot), where softmax = exp * (rescale / sum).
        scale_C = weights_C * (rescale_C / sum_C)
        # The common part of the scale stays outside of the product, within fp16's range.
        top = jnp.maximum(scale_C.max(), jnp.finfo(jnp.float32).tiny)
        scaled_x_CD = (x_CD * (scale_C / top)[:, None]).astype(dtype)
        label_weight_C1 = jnp.where(inside_C, weights_C, 0.0)[:, None]
        if softcap is not None:
            exp_CV = (exp_CV * slope_CV).astype(exp_CV.dtype)
            label_weight_C1 *= jnp.take_along_axis(slope_CV, index_C[:, None], axis=1)
        dx_CD = times(exp_CV, head, ((1,), (0,))) * scale_C[:, None]
        dx_CD -= head[index_C].astype(jnp.float32) * label_weight_C1
        label_update_CD = -x_CD.astype(jnp.float32) * label_weight_C1
        dhead_VD += (times(exp_CV, scaled_x_CD, ((0,), (0,))) * top).astype(dhead_VD.dtype)
        dhead_VD = dhead_VD.at[index_C].add(label_update_CD.astype(dhead_VD.dtype))
        return dhead_VD, (loss, dx_CD)

    def chunks(a: Array) -> Array:
        padded = jnp.pad(a, ((0, padding),) + ((0, 0),) * (a.ndim - 1))
        return padded.reshape(-1, chunk, *a.shape[1:])

    inputs = jax.tree.map(chunks, (x_ND, labels_N, weights_N))
    if padding == 0 and chunk == x_ND.shape[0]:
        dhead_VD, (loss, dx_CD) = score(dhead_VD, jax.tree.map(lambda a: a[0], inputs))
        return loss, dx_CD, dhead_VD
    dhead_VD, (losses, dx) = lax.scan(score, dhead_VD, inputs)
    if dx is not None:
        dx = dx.reshape(-1, x_ND.shape[1])[: x_ND.shape[0]]
    return losses.sum(), dx, dhead_VD
