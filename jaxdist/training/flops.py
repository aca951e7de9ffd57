"""FLOPs of the model and of the machine: the two halves of MFU (model FLOPs utilization).

Only what the model asks for counts; recomputation and bubbles lower the MFU (arXiv 2204.02311,
appendix B). A multiply-add is two FLOPs.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import ModelConfig
from jaxdist.ops.product import product

# Part of `device_kind` -> dense TFLOP/s of 16-bit matmuls with fp32 accumulation, and of fp32
# ones (GPU: CUDA cores; TPU: six bf16 passes). Makers' data sheets. The first match counts.
_TFLOPS = {
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "B200": (2250.0, 75.0),
    "A100": (312.0, 19.5),
    "TPU v4": (275.0, 275 / 6),
    "TPU v5 lite": (197.0, 197 / 6),
    "TPU v5e": (197.0, 197 / 6),
    "TPU v5": (459.0, 459 / 6),  # v5p
    "TPU v6": (918.0, 918 / 6),  # v6e
}
_MEASURE_SECONDS = 0.1  # a size


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """FLOPs of forward and backward pass per token of a row of `sequence_length` tokens.

    6 per weight that multiplies a token (blocks and head; neither the embedding, which is looked
    up, nor the padding of the vocabulary) and 12 * layers * (heads * head_dim) per attended
    token, of which causal attention has (T + 1) / 2 on average, a sliding window fewer. Packed
    documents attend to fewer still; they are counted as one.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads = config.num_attention_heads * config.head_dim
    kv_heads = config.num_key_value_heads * config.head_dim
    attention = hidden * (2 * heads + 2 * kv_heads)
    mlp = hidden * config.intermediate_size * (2 if config.mlp == "gelu" else 3)
    weights = layers * (attention + mlp) + hidden * config.vocab_size
    window = min(config.sliding_window or sequence_length, sequence_length)
    attended = (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length
    return 6.0 * weights + 12.0 * layers * heads * attended


def peak_flops(num_devices: int, compute_dtype: Any) -> float:
    """FLOP/s that `num_devices` devices like the first one can do in `compute_dtype` matmuls.

    NaN for an accelerator that is not in the table. On CPU the peak is measured, in about 0.3 s,
    for the whole machine: simulated devices share its cores.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measured_peak(compute_dtype)
    known = (peaks for kind, peaks in _TFLOPS.items() if kind in device.device_kind)
    half, single = next(known, (float("nan"), float("nan")))
    return num_devices * 1e12 * (single if compute_dtype == jnp.float32 else half)


def _measured_peak(compute_dtype: Any) -> float:
    """Best FLOP/s seen in square products, as the model forms them, of two sizes."""
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
