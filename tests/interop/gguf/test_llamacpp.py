"""What llama.cpp computes from the files that we write: logits and greedy tokens, in fp32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.interop.gguf.file import open_gguf
from tests.interop.conftest import GGUF_MODELS

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parents[3] / "scripts/llamacpp_worker.py"
LONGROPE = {
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1 + i / 8 for i in range(8)],
        "long_factor": [1.5 + i for i in range(8)],
        "original_max_position_embeddings": 256,  # less than llama.cpp makes room for is long
        "attention_factor": 1.25,
    },
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = [
    *((name, {}) for name in GGUF_MODELS),
    ("phi3", LONGROPE),
    ("llama", LONGROPE),
    ("llama", {"rope_scaling": LLAMA3}),
    ("qwen2", {"rope_scaling": YARN}),
    ("gemma3", {"sliding_window_pattern": None}),
    ("deepseek2", {"q_lora_rank": 0, "first_k_dense_replace": 0, "rope_scaling": None}),
]
COUNT = 6
# llama.cpp looks GELU up in a table of fp16.
GELU = 5e-3


@pytest.fixture(scope="module")
def llama_python() -> str:
    """An interpreter that has llama-cpp-python."""
    python = os.environ.get("JAXDIST_LLAMA_PYTHON")
    if python is None:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python comes with jaxdist[bench]")
    return python or sys.executable


@pytest.mark.parametrize(("model", "changes"), CASES)
def test_it_computes_the_same(
    model: str, changes: dict[str, Any], llama_python: str, small, tmp_path: Path
):
    path, prompt = tmp_path / "m.gguf", np.random.default_rng(7).integers(0, 96, 24).tolist()
    small.write(path, model, **changes)
    request = {"model": str(path), "prompts": [prompt], "tokens": COUNT, "windows": []}
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = [llama_python, str(WORKER), str(tmp_path / "request.json"), str(tmp_path / "a.npz")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    answer = np.load(tmp_path / "a.npz")
    continued = answer["continued"][0].tolist()
    ours = small.logits(open_gguf(path), np.array([prompt + continued]))[0]
    largest = np.abs(ours).max()
    tolerance = GELU if small.config(model).mlp in ("geglu", "gelu") else 1e-4
    np.testing.assert_allclose(
        ours[: len(prompt)], answer["logits"], rtol=0, atol=tolerance * largest
    )
    for logits, token in zip(ours[len(prompt) - 1 :], continued, strict=False):
        assert logits.max() - logits[token] <= tolerance * largest
