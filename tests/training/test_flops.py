import dataclasses
import math
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.training import flops
from jaxdist.training.flops import flops_per_token, peak_flops

MODEL = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def test_equals_a_count_of_every_product():
    tokens, head_dim = 8, 16
    products = 3 * [
        (64, 4 * head_dim),  # q
        *[(64, 2 * head_dim)] * 2,  # k, v
        (4 * head_dim, 64),  # o
        *[(64, 160)] * 3,  # gate, up, down
    ] + [(64, 97)]  # head
    forward = sum(2 * rows * columns for rows, columns in products) * tokens
    pairs = np.tril(np.ones((tokens, tokens))).sum()  # of a query and a key it may see
    forward += 3 * 2 * (2 * pairs * 4 * head_dim)  # scores and their use, in each layer
    assert flops_per_token(MODEL, tokens) * tokens == pytest.approx(3 * forward)


def test_a_window_sees_fewer_tokens():
    narrow = dataclasses.replace(MODEL, sliding_window=3)
    pairs = sum(min(t + 1, 3) for t in range(8))
    full = sum(t + 1 for t in range(8))
    saved = flops_per_token(MODEL, 8) - flops_per_token(narrow, 8)
    assert saved == pytest.approx(12 * 3 * 64 * (full - pairs) / 8)
    wide = dataclasses.replace(MODEL, sliding_window=100)
    assert flops_per_token(wide, 8) == flops_per_token(MODEL, 8)


def test_an_mlp_without_gate_has_two_products():
    plain = dataclasses.replace(MODEL, mlp="gelu")
    assert flops_per_token(MODEL, 8) - flops_per_token(plain, 8) == 6 * 3 * 64 * 160


def test_of_experts_those_count_that_a_token_takes():
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=40)
    routed = dataclasses.replace(MODEL, **experts, n_shared_experts=1)
    saved = flops_per_token(MODEL, 8) - flops_per_token(routed, 8)
    assert saved == 6 * 3 * (64 * 3 * (160 - 3 * 40) - 64 * 8)
    mixed = dataclasses.replace(routed, first_k_dense_replace=1)
    assert flops_per_token(MODEL, 8) - flops_per_token(mixed, 8) == pytest.approx(saved * 2 / 3)


def test_latent_attention_counts_each_of_its_products():
    latent = dict(kv_lora_rank=8, q_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4)
    latent = dataclasses.replace(MODEL, num_key_value_heads=4, head_dim=0, v_head_dim=10, **latent)
    products = [(64, 12), (12, 4 * 10), (64, 8 + 4), (8, 4 * (6 + 10)), (4 * 10, 64)]
    products += [(64, 160)] * 3
    weights = 3 * sum(rows * columns for rows, columns in products) + 64 * 97
    attended = (1 + 8) / 2
    assert flops_per_token(latent, 8) == 6 * weights + 6 * 3 * 4 * (10 + 10) * attended


def test_layers_without_a_window_see_all_tokens():
    mixed = dataclasses.replace(MODEL, sliding_window=3, sliding_window_pattern=3)  # the last one
    narrow = dataclasses.replace(MODEL, sliding_window=3)
    full, third = flops_per_token(MODEL, 8), flops_per_token(mixed, 8)
    assert full - third == pytest.approx((full - flops_per_token(narrow, 8)) * 2 / 3)


def test_llama_2_7b_is_near_its_six_n():
    llama = ModelConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
    )
    assert flops_per_token(llama, 4096) / (6 * 6.74e9) == pytest.approx(1.06, abs=0.02)


@pytest.mark.parametrize(
    ("kind", "bf16", "fp32"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GH200 480GB", 989e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40", 181e12, 90.5e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA A40", 149.7e12, 37.4e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("TPU v4", 275e12, 275e12 / 6),
        ("TPU v5 lite", 197e12, 197e12 / 6),
        ("TPU v5", 459e12, 459e12 / 6),
        ("TPU v6 lite", 918e12, 918e12 / 6),
    ],
)
def test_peaks_of_known_accelerators(monkeypatch, kind, bf16, fp32):
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    monkeypatch.setattr(flops.jax, "devices", lambda: [device])
    assert peak_flops(4, jnp.bfloat16) == pytest.approx(4 * bf16)
    assert peak_flops(4, jnp.dtype("float32")) == pytest.approx(4 * fp32)


@pytest.mark.parametrize(
    "kind",
    [
        "Abacus 3000",
        "NVIDIA RTX A1000",  # no A100
        "NVIDIA A10G",  # no A10
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a slice of one
    ],
)
def test_an_unknown_accelerator_has_no_peak(monkeypatch, kind):
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    monkeypatch.setattr(flops.jax, "devices", lambda: [device])
    assert math.isnan(peak_flops(1, jnp.bfloat16))


def test_a_cpu_is_measured_as_one_machine():
    assert jax.devices()[0].platform == "cpu"
    start = time.perf_counter()
    peak = peak_flops(8, jnp.float32)
    assert time.perf_counter() - start < 5  # a quarter of a second where no one else computes
    assert 1e9 < peak < 1e14
