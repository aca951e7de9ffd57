"""`jaxdist plan --audit` and `--compile-for`, from the command line's words to what is printed."""

import importlib.util
import json

import pytest

from jaxdist import plan
from jaxdist.config.command_line import parse
from jaxdist.training import planned

TINY = """--model.preset tiny --model.num_hidden_layers 2 --model.hidden_size 32
 --model.intermediate_size 64 --model.num_attention_heads 2 --model.num_key_value_heads 2
 --train.sequence_length 32 --train.global_batch_size 8 --parallel.num_microbatches 2
 --precision.policy bf16""".split()


def test_audit(capsys):
    found = planned.compile_here(parse([*TINY, "--mesh", "2x1x2"], "jaxdist plan"))
    planned.report(found, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"] == {"dp": 2, "pp": 1, "tp": 2}
    memory = report["memory"]
    parts = memory["parts"]
    kept = parts["parameters"] + parts["gradients"] + parts["optimizer"]
    loop = parts["activations"] + parts["handed_on"] + parts["working"]
    assert memory["estimated_bytes"] == kept + max(loop, parts["updating"])
    assert memory["compiled_bytes"] > memory["parts"]["parameters"]
    assert report["compile_seconds"] > 0
    rows = {(*row["axes"], row["part"]): row for row in report["collectives"]}
    assert rows["tp", "mlp"]["ratio"] == pytest.approx(1)
    assert rows["dp", "update"]["kinds"] == ["all-gather"]
    planned.report(found, as_json=False)
    text = capsys.readouterr().out
    for words in ("peak, estimated", "reduce_gradients", "2 M L all-reduces of A", "as fp32"):
        assert words in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["--compile-for", "h200:8x8"], "pip install --no-deps jax-cuda12-plugin=="),
        (["--compile_for=tpu v6e:16x16"], "pip install libtpu"),
        (["--compile-for", "h20:8x8"], "'h20' is not a known device"),
        (["--audit", "--parallel.zer", "1"], "--parallel.zer is not an option"),
        (["--audit", "--mesh", "3x1x1", "--simulate"], "global_batch_size"),
    ],
)
def test_what_cannot_be_planned(words, message, monkeypatch, capsys):
    find = importlib.util.find_spec
    hidden = ("libtpu", "jax_plugins")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in hidden else find(name, *a)
    )
    with pytest.raises(SystemExit) as left:
        plan.main([*TINY, *words])
    assert left.value.code == 2
    assert message in capsys.readouterr().err
