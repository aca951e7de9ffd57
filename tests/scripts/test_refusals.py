"""What a script cannot do is one line, not a traceback."""

import sys

import pytest

from tests.scripts.programs import run
from tests.small_run import small_model, write_run


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench_load.py nowhere", "bench_load: error: nowhere/config.json cannot be read"),
        ("bench_host.py nowhere", "bench_host: error: data.tokenizer: no file or folder nowhere"),
        (
            f"compare_llamacpp.py nowhere.gguf --llama-python {sys.executable}.none",
            "compare_llamacpp: error:",
        ),
        ("malformed.py http://127.0.0.1:1", "malformed: no server answers at http://127.0.0.1:1"),
        ("malformed.py nowhere", "malformed: no server answers at nowhere"),
        ("ask.py --model nowhere --prompt x", "jaxdist: error: --model nowhere is no model"),
    ],
)
def test_a_refusal_is_one_line(command: str, said: str):
    script, *arguments = command.split()
    refused = run(script, *arguments)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert said in line


@pytest.mark.parametrize("script", ["bench_host.py", "bench_load.py", "compare_llamacpp.py"])
def test_help_of_a_script_is_its_purpose(script: str):
    assert run(script, "--help").stdout.startswith(f"usage: {script}")


@pytest.mark.slow
def test_ask_says_why_the_server_refused(tmp_path):
    folder = write_run(tmp_path, small_model())
    config = tmp_path / "config.yaml"  # ask.py serves 256 tokens
    longer = "max_position_embeddings: 256"
    config.write_text(config.read_text().replace("max_position_embeddings: 64", longer))
    refused = run("ask.py", "--model", folder, "--prompt", "")
    assert refused.returncode == 2
    assert "ask: error: " in refused.stderr and "Traceback" not in refused.stderr
