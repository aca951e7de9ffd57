"""A mixture of experts in place of the MLP: a router gives each token some of many MLPs.

Shapes: B batch rows, T tokens, D hidden size, E experts, K experts a token takes, G groups of
experts, F features of an expert, L layers.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jaxdist.config import ModelConfig
from jaxdist.models.layers import Context, Initializer
from jaxdist.models.mlp import GATED, MLP
from jaxdist.ops.dot import dot


class Router(nnx.Module):
    """Scores the experts in fp32, whatever the model computes in."""

    def __init__(self, config: ModelConfig, *, key: jax.Array, init: Initializer):
        experts = config.num_experts
        self.weight = init.normal(key, (config.hidden_size, experts), ("embed", "router"))
        biased = config.scoring_func == "sigmoid"
        self.e_score_correction_bias = init.zeros((experts,), ("norm",)) if biased else None
        self.config = config

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits [B, T, E], and each token's experts and their weights, [B, T, K]."""
        # Kept for the backward pass as they come, not in fp32.
        logits_BTE: Any = dot(x_BTD, self.weight[...], jnp.float32)
        # Whole, where x is sharded over its sequence: choosing from them would gather them often.
        logits_BTE = ctx.constrain(logits_BTE, ("batch", "length", "router"))
        scores_BTE = _scores(self.config, logits_BTE)
        chosen_BTK = self._choose(jax.lax.stop_gradient(scores_BTE))
        shares_BTK = jnp.take_along_axis(scores_BTE, chosen_BTK, axis=-1)
        if self.config.norm_topk_prob:
            tiny = 1e-20 if self.config.scoring_func == "sigmoid" else 0.0
            shares_BTK = shares_BTK / (shares_BTK.sum(axis=-1, keepdims=True) + tiny)
        return logits_BTE, chosen_BTK, shares_BTK * self.config.routed_scaling_factor

    def _choose(self, scores_BTE: jax.Array) -> jax.Array:
        """The best experts by corrected score, in the groups whose two best sum to the most."""
        config = self.config
        if self.e_score_correction_bias is not None:
            bias_E = jax.lax.stop_gradient(self.e_score_correction_bias[...])
            scores_BTE = scores_BTE + bias_E.astype(jnp.float32)[None, None]
        if config.n_group > 1:
            in_groups = rearrange(scores_BTE, "b t (g e) -> b t g e", g=config.n_group)
            best_BTG = jax.lax.top_k(in_groups, 2)[0].sum(axis=-1)
            groups_BTx = jax.lax.top_k(best_BTG, config.topk_group)[1]
            taken_BTG = jax.nn.one_hot(groups_BTx, config.n_group, dtype=bool).any(axis=2)
            in_groups = jnp.where(taken_BTG[..., None], in_groups, -jnp.inf)
            scores_BTE = in_groups.reshape(scores_BTE.shape)
        return jax.lax.top_k(scores_BTE, config.num_experts_per_tok)[1]


class Experts(nnx.Module):
    """The weights of all experts, [E, D, F] and [E, F, D]."""

    def __init__(self, config: ModelConfig, *, key: jax.Array, init: Initializer):
        num, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        gate_key, up_key, down_key = jax.random.split(key, 3)
        into, out_of = ("experts", "embed", "features"), ("experts", "features", "embed")
        self.gate_proj = init.normal(gate_key, (num, hidden, inner), into)
        self.up_proj = init.normal(up_key, (num, hidden, inner), into)
        self.down_proj = init.normal(down_key, (num, inner, hidden), out_of)

    @property
    def weights(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `ops.experts` takes them."""
        return self.gate_proj[...], self.up_proj[...], self.down_proj[...]


class MoE(nnx.Module):
    """Router and experts, and an MLP beside them that every token takes where there is one."""

    def __init__(self, config: ModelConfig, *, key: jax.Array, init: Initializer):
        router_key, experts_key, shared_key = jax.random.split(key, 3)
        self.gate = Router(config, key=router_key, init=init)
        self.experts = Experts(config, key=experts_key, init=init)
        shared = None
        if config.n_shared_experts:
            width = config.n_shared_experts * config.expert_size
            shared = MLP(replace(config, intermediate_size=width), key=shared_key, init=init)
        self.shared_experts = shared
        self.activation = config.mlp

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """The block's output [B, T, D], and the router's logits [B, T, E]."""
        logits_BTE, chosen_BTK, shares_BTK = self.gate(x_BTD, ctx)
        routed = x_BTD, self.experts.weights, chosen_BTK, shares_BTK
        shared, activation = self.shared_experts, GATED[self.activation]
        how = {"activation": activation, "compute_dtype": ctx.compute_dtype}
        if shared is not None and ctx.all_experts is not None:
            out_BTD = ctx.all_experts(*routed, shared.weights, **how)
            return out_BTD.astype(x_BTD.dtype), logits_BTE
        out_BTD = ctx.experts(*routed, **how).astype(x_BTD.dtype)
        if shared is not None:
            out_BTD = out_BTD + shared(x_BTD, ctx)
        return out_BTD, logits_BTE


def balancing_loss(config: ModelConfig, logits_BTE: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """What one layer adds to the training loss so that experts are used alike, [].

    A row's loss is E * sum over experts of (its share of the row's tokens) * (its mean
    probability), as in the Switch Transformer (arXiv 2101.03961, equations 4 to 6). Rows count by
    their `weights`, with which their tokens enter the cross entropy, and layers by 1 / L. Kept to
    a row and a layer it does not depend on how a batch is cut and spread; of one row and one layer
    it is transformers', see `load_balancing_loss`.
    """
    weight_B1 = weights_BT.sum(axis=1, keepdims=True)
    mean_BT = weights_BT / jnp.where(weight_B1 > 0, weight_B1, 1.0)
    share_BE, probability_BE = _usage(config, logits_BTE, mean_BT)
    loss_B = config.num_experts * (share_BE * probability_BE).sum(axis=-1)
    layers = config.num_hidden_layers - config.first_k_dense_replace
    return config.router_aux_loss_coef / layers * (weight_B1[:, 0] * loss_B).sum()


def load_balancing_loss(
    config: ModelConfig, logits_LBTE: jax.Array, mask_BT: jax.Array | None = None
) -> jax.Array:
    """The auxiliary loss as transformers computes it, over all layers and rows at once, []."""
    flat = rearrange(logits_LBTE, "l b t e -> 1 (l b t) e")
    mask_BT = jnp.ones(logits_LBTE.shape[1:3]) if mask_BT is None else mask_BT
    mask = jnp.tile(mask_BT.reshape(-1), logits_LBTE.shape[0])[None]
    share_1E, probability_1E = _usage(config, flat, mask / mask.sum())
    return config.num_experts * (share_1E * probability_1E).sum()


def _usage(
    config: ModelConfig, logits_BTE: jax.Array, mean_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """By expert: the share of tokens that take it (summing to K) and its mean probability."""
    scores_BTE = _scores(config, logits_BTE)
    if config.scoring_func == "sigmoid":
        scores_BTE = scores_BTE / scores_BTE.sum(axis=-1, keepdims=True)
    chosen_BTK = jax.lax.top_k(jax.lax.stop_gradient(scores_BTE), config.num_experts_per_tok)[1]
    taken_BTE = jax.nn.one_hot(chosen_BTK, config.num_experts).sum(axis=2)
    mean = partial(jnp.einsum, "bte,bt->be", precision=jax.lax.Precision.HIGHEST)
    return mean(taken_BTE, mean_BT), mean(scores_BTE, mean_BT)


def _scores(config: ModelConfig, logits_BTE: jax.Array) -> jax.Array:
    if config.scoring_func == "sigmoid":
        return jax.nn.sigmoid(logits_BTE)
    return jax.nn.softmax(logits_BTE, axis=-1)
