"""A step compiled for TPUs that are not here."""

import importlib.util
import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="pip install libtpu")
@pytest.mark.parametrize("target", ["v5e:2x4", "v6e:2x4"])
def test_the_report_is_all_that_is_printed(target):
    command = [sys.executable, "-m", "jaxdist.plan", "--compile-for", target, "--json"]
    command += ["--config", "configs/tiny_debug.yaml", "--mesh", "2x2x2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found = json.loads(done.stdout)
    assert found["memory"]["compiled_bytes"] > found["memory"]["parts"]["parameters"] > 0
    kinds = {kind for one in found["collectives"] for kind in one["kinds"]}
    assert {"reduce-scatter", "all-gather", "collective-permute"} <= kinds
