"""A step compiled for TPUs that are not here."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install libtpu"),
]


def planned(target: str, *flags: str, config: str = "tiny_debug") -> dict[str, Any]:
    """What `jaxdist plan --json` prints; nothing else may be printed."""
    command = [sys.executable, "-m", "jaxdist.plan", "--compile-for", target, "--json"]
    command += ["--config", f"configs/{config}.yaml", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", ["v5e:2x4", "v6e:2x4"])
def test_the_report_is_all_that_is_printed(target):
    found = planned(target, "--mesh", "2x2x2")
    assert found["memory"]["compiled_bytes"] > found["memory"]["parts"]["parameters"] > 0
    kinds = {kind for one in found["collectives"] for kind in one["kinds"]}
    assert {"reduce-scatter", "all-gather", "collective-permute"} <= kinds


def test_a_sharded_sequence_sends_the_least_over_tp():
    """Its gathers run beside chains of fusions, each of which names them again."""
    wide = """--model.hidden_size 512 --model.intermediate_size 1024 --model.num_attention_heads 4
 --model.num_key_value_heads 4 --train.sequence_length 256 --precision.policy bf16""".split()
    found = planned("v5e:2x4", "--mesh", "2x1x4", "--parallel.sequence_parallel", "true", *wide)
    rows = [row for row in found["collectives"] if row["axes"] == ["tp"]]
    sent = sum(row["sent_bytes"] - row["bubble_bytes"] for row in rows)
    assert 1 <= sent / sum(row["least_bytes"] or 0 for row in rows) <= 1.05
    assert all(row["ratio"] <= 1.05 for row in rows if row["part"] in ("attention", "mlp"))


@pytest.mark.parametrize("target, remat", [("v5p:4x4x4", "none"), ("v6e:8x8", "full")])
def test_memory_is_what_the_estimate_says(target, remat):
    """Of the real step for 64 chips, which is compiled in two minutes."""
    flags = "--mesh", "8x4x2", "--parallel.sequence_parallel", "true", "--parallel.remat", remat
    memory = planned(target, *flags, config="llama3_8b")["memory"]
    assert memory["ratio"] == pytest.approx(1, abs=0.1)
    assert memory["compiled_bytes"] < memory["device_bytes"]
