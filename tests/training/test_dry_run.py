"""`--dry-run`: figures that are right, and nothing written."""

from pathlib import Path

import jax
import pytest

from jaxdist.config.command_line import parse
from jaxdist.training import dry_run
from jaxdist.training.loop import run
from jaxdist.training.setup import Setup

TINY = """--model.preset tiny --model.num_hidden_layers 4 --model.hidden_size 16
 --model.intermediate_size 32 --model.num_attention_heads 2 --model.num_key_value_heads 2
 --train.sequence_length 16 --train.global_batch_size 8 --parallel.num_microbatches 2
 --precision.policy fp32""".split()


def setup_of(mesh: str, *flags: str) -> Setup:
    return Setup.of(parse([*TINY, "--mesh", mesh, *flags], "jaxdist train"))


@pytest.fixture(scope="module")
def figures() -> dict[str, dry_run.DryRun]:
    return {
        zero: dry_run.measure(setup_of("2x2x1", "--parallel.zero", zero)) for zero in ("0", "3")
    }


@pytest.mark.slow
def test_zero_shards_over_dp(figures):
    assert figures["3"].parameters * 2 == figures["0"].parameters
    assert figures["3"].gradients * 2 == figures["0"].gradients
    # The optimizer's step count, 4 bytes each, is whole everywhere.
    assert figures["3"].optimizer == pytest.approx(figures["0"].optimizer / 2, abs=16)
    assert figures["0"].activations == figures["3"].activations
    assert figures["0"].peak > figures["0"].temporary > figures["0"].activations


@pytest.mark.slow
def test_bytes_are_those_of_the_arrays(figures):
    state = setup_of("2x2x1", "--parallel.zero", "3").initial_state()
    device = jax.devices()[0]

    def held(tree) -> int:
        shards = (s for a in jax.tree.leaves(tree) for s in a.addressable_shards)
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    assert figures["3"].parameters == held(state.params)
    assert figures["3"].optimizer == held(state.opt_state)


@pytest.mark.slow
def test_every_loop_is_counted(figures):
    assert all(one.count is not None for one in figures["0"].traffic)
    over_dp = {one.kind for one in figures["3"].traffic if one.axes == ("dp",)}
    assert {"all-gather", "reduce-scatter"} <= over_dp


def test_prints_and_writes_nothing(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(setup_of("2x2x1", "--dry-run").config) == 0
    text = capsys.readouterr().out
    for word in ("parameters", "optimizer state", "peak (XLA)", "collective-permute", "KiB"):
        assert word in text
    assert not list(tmp_path.iterdir())
