"""Device files, targets, and what is said where a compiler is missing."""

import importlib.util

import pytest

from jaxdist.config import UsageError
from jaxdist.planner import compiled
from jaxdist.planner.hardware import Target, hardware_named, kinds, read_hardware

GPUS = [kind for kind in kinds() if read_hardware(kind).platform == "cuda"]


def test_every_device_is_whole():
    gpus = "a10 a100 a100_40gb a40 b200 gh200 h100 h100_nvl h100_pcie h200 l4 l40 l40s".split()
    assert kinds() == [*gpus, "v4", "v5e", "v5p", "v6e"]
    for kind in kinds():
        hardware = read_hardware(kind)
        assert hardware.kind == kind and hardware.sources
        assert all(source.startswith("https://") for source in hardware.sources)
        assert hardware.tflops["bf16"] > 100
        if hardware.platform == "cuda":  # fp32 has the plain cores, half of it the tensor cores
            assert hardware.tflops["bf16"] == hardware.tflops["fp16"]
            assert hardware.tflops["bf16"] > 1.9 * hardware.tflops["fp32"]
        assert 10 < hardware.memory_gib < 200
        # Links inside a host or slice are faster than those between, and memory faster than both.
        assert hardware.network_gb_per_second < hardware.link_gb_per_second
        assert hardware.link_gb_per_second < hardware.memory_gb_per_second
        assert (hardware.gpu is not None) == (hardware.platform == "cuda")


def test_figures_of_a_gpu_agree_with_each_other():
    """Cores x clock x 2 is the sheet's fp32 rate."""
    for kind in GPUS:
        hardware = read_hardware(kind)
        assert hardware.gpu is not None
        cores = hardware.gpu.multiprocessors * hardware.gpu.cores_per_multiprocessor
        rate = 2 * cores * hardware.gpu.clock_ghz / 1000
        assert rate == pytest.approx(hardware.tflops["fp32"], rel=0.02)


def test_a_device_is_found_by_its_driver_s_name():
    for kind in GPUS:
        found = hardware_named(read_hardware(kind).name)
        assert found is not None and found.kind == kind
    assert hardware_named("TPU v5 lite") == read_hardware("v5e")
    assert hardware_named("TPU v5") == read_hardware("v5p")
    assert hardware_named("NVIDIA A1000") == hardware_named("cpu") is None


@pytest.mark.parametrize(
    "text, kind, shape, size",
    [
        ("h100:8x8", "h100", (8, 8), 64),
        ("H200:4", "h200", (1, 4), 4),
        ("v5p:4x4x4", "v5p", (4, 4, 4), 64),
        ("tpu v6e:16x16", "v6e", (16, 16), 256),
    ],
)
def test_targets(text, kind, shape, size):
    target = Target.parse(text)
    assert (target.hardware.kind, target.shape, target.num_devices) == (kind, shape, size)


@pytest.mark.parametrize(
    "text, words",
    [
        ("h10:8x8", "'h10' is not a known device; choose a10, a100, .* did you mean h100"),
        ("h100", "after h100 comes HOSTSxDEVICES, as in h100:8x8"),
        ("h100:8x8x8", "HOSTSxDEVICES"),
        ("v5p:4xx4", "after v5p comes a torus, as in v5p:4x4x4"),
        ("h100:0x8", "HOSTSxDEVICES"),
        ("h100:9999x8", "has 79992 devices; the most is 8192"),
    ],
)
def test_what_is_no_target(text, words):
    with pytest.raises(UsageError, match=words):
        Target.parse(text)


@pytest.mark.parametrize(
    "target, words",
    [
        ("h100:8x8", r"pip install --no-deps jax-cuda12-plugin==\S+ jax-cuda12-pjrt==\S+$"),
        ("v5p:4x4x4", "pip install libtpu$"),
    ],
)
def test_a_missing_compiler_is_named(target, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=words):
        compiled.devices(Target.parse(target))


def test_a_gpu_is_described_to_xla():
    text = compiled.target_config(read_hardware("h100"))
    for line in (
        "core_count: 132",
        "shared_memory_per_block_optin: 232448",
        "cuda_compute_capability { major: 9 minor: 0 }",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):
        assert line in text
    with pytest.raises(ValueError, match="v5p is not a GPU"):
        compiled.target_config(read_hardware("v5p"))
