"""FLOPs of the model and of the machine: the two halves of MFU (model FLOPs utilization).

Only what the model asks for counts; recomputation and bubbles lower the MFU (arXiv 2204.02311,
appendix B). A multiply-add is two FLOPs.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import ModelConfig
from jaxdist.ops.product import product
from jaxdist.planner.hardware import hardware_named

_MEASURE_SECONDS = 0.1  # a size


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward pass per token of a row of `sequence_length` tokens.

    6 per weight that multiplies a token (blocks and head; neither the embedding, which is looked
    up, nor the padding of the vocabulary; of experts those that a token takes) and
    6 * layers * heads * (head_dim + value_dim) per attended token, of which causal attention has
    (T + 1) / 2 on average, a sliding window fewer. Packed documents attend to fewer still; they
    are counted as one.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    products = 2 if config.mlp == "gelu" else 3
    dense = config.first_k_dense_replace if config.num_experts else layers
    experts = config.num_experts_per_tok + config.n_shared_experts
    mlps = dense * products * hidden * config.intermediate_size
    routed = config.num_experts + products * experts * config.expert_size
    mlps += (layers - dense) * hidden * routed
    weights = layers * _attention_weights(config) + mlps + hidden * config.vocab_size
    heads = config.num_attention_heads * (config.head_dim + config.value_dim)
    local = sum(map(config.is_local, range(layers)))
    attended = local * _attended(sequence_length, config.sliding_window)
    attended += (layers - local) * _attended(sequence_length, None)
    return 6.0 * weights + 6.0 * heads * attended


def _attention_weights(config: ModelConfig) -> int:
    """Of one layer."""
    hidden, num_heads = config.hidden_size, config.num_attention_heads
    heads, out = num_heads * config.head_dim, hidden * num_heads * config.value_dim
    if not config.kv_lora_rank:
        return hidden * (heads + 2 * config.num_key_value_heads * config.head_dim) + out
    queries = config.q_lora_rank * (hidden + heads) if config.q_lora_rank else hidden * heads
    latent = hidden * (config.kv_lora_rank + config.qk_rope_head_dim)
    from_latent = num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return queries + latent + config.kv_lora_rank * from_latent + out


def _attended(length: int, window: int | None) -> float:
    """Tokens that a token of a row attends to, on average."""
    window = min(window or length, length)
    return (window * (window + 1) / 2 + (length - window) * window) / length


def peak_flops(num_devices: int, compute_dtype: Any) -> float:
    """FLOP/s that `num_devices` devices like the first one can do in `compute_dtype` matmuls.

    By the maker's data sheet, dense and summed up in fp32; NaN for an accelerator that is not in
    `planner/devices`. A TPU forms an fp32 product in six bf16 passes. On CPU the peak is measured,
    in about 0.3 s, for the whole machine: simulated devices share its cores.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measured_peak(compute_dtype)
    hardware = hardware_named(device.device_kind)
    if hardware is None:
        return float("nan")
    half = hardware.tflops["bf16"]
    single = hardware.tflops.get("fp32") or half / 6
    return num_devices * 1e12 * (single if compute_dtype == jnp.float32 else half)


@cache
def _measured_peak(compute_dtype: Any) -> float:
    """Best FLOP/s of square products, as the model forms them, of two sizes; once a process."""
    multiply = jax.jit(lambda a, b: product(a, b, ((1,), (0,)), compute_dtype=compute_dtype))
    best = 0.0
    for size in (512, 1024):
        square = jnp.ones((size, size), compute_dtype)
        multiply(square, square).block_until_ready()  # compiles
        end = time.perf_counter() + _MEASURE_SECONDS
        while (start := time.perf_counter()) < end:
            multiply(square, square).block_until_ready()
            best = max(best, 2.0 * size**3 / (time.perf_counter() - start))
    return best
