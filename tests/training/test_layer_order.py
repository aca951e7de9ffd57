"""Whatever the order of layers in a run, its checkpoints hold the model's own."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxdist.config import CheckpointConfig
from jaxdist.config.command_line import parse
from jaxdist.training import layer_order
from jaxdist.training.checkpoint import Checkpointer
from jaxdist.training.loop import run
from jaxdist.training.setup import Setup
from jaxdist.training.tree_names import named_leaves

FIVE = """--model.preset tiny --model.num_hidden_layers 5 --model.hidden_size 16
 --model.intermediate_size 32 --model.num_attention_heads 2 --model.num_key_value_heads 2
 --model.vocab_multiple 24 --train.sequence_length 16 --train.global_batch_size 8
 --precision.policy fp32 --parallel.num_microbatches 4""".split()

ORDERS = {
    "plain": ("2x1x1",),
    "uneven": ("1x2x1",),
    "chunks": ("2x2x1", "--parallel.schedule", "interleaved", "--parallel.num_chunks", "2"),
    "layout": ("1x3x2", "--parallel.layout", "1,3,1", "--parallel.zero", "3"),
}


def setup_of(order: str, *flags: str) -> Setup:
    mesh, *options = ORDERS[order]
    return Setup.of(parse([*FIVE, "--mesh", mesh, *options, *flags], "jaxdist train"))


def values(tree) -> dict[str, np.ndarray]:
    return {
        name: np.asarray(jax.random.key_data(leaf) if name == "rng" else leaf)
        for name, leaf in named_leaves(tree).items()
    }


def numbered(a: jax.Array) -> jax.Array:
    """Moments that differ from layer to layer."""
    return jax.device_put(np.arange(a.size, dtype=a.dtype).reshape(a.shape), a.sharding)


def test_no_leaf_is_begun_before_the_one_before_it_is_done(monkeypatch):
    """Over eight simulated devices the third round of twenty leaves waited for ever."""
    setup = setup_of("chunks", "--mesh", "2x2x2", "--optimizer.ema_decay", "0.9")
    order, begun, real = setup.pipeline.layers, [], layer_order._program

    def program(*how):
        def run_one(leaf):
            assert leaf.is_ready() and all(array.is_ready() for array in begun)
            begun.append(real(*how)(leaf))
            return begun[-1]

        return run_one

    monkeypatch.setattr(layer_order, "_program", program)
    first = state = setup.initial_state()
    for _ in range(5):
        plain = layer_order.in_models_order(state, order)
        state = layer_order.at_rest(plain, first, order)
    assert len(begun) > 100
    for name, value in values(first).items():
        np.testing.assert_array_equal(values(state)[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_one_order_restores_what_another_has_saved(tmp_path: Path, optimizer: str):
    flags = ("--optimizer.name", optimizer, "--optimizer.ema_decay", "0.9")
    orders = ORDERS if optimizer == "adafactor" else ("plain", "layout")
    setups = {order: setup_of(order, *flags) for order in orders}
    first = setups["plain"].initial_state()
    first = replace(first, opt_state=jax.tree.map(numbered, first.opt_state))
    checkpoints = Checkpointer(tmp_path, CheckpointConfig(keep_last=10))
    want, state = values(first), first
    for step, (order, setup) in enumerate(setups.items(), 1):
        setup.save(checkpoints, step, state, {"order": order})
        following = list(setups.values())[step % len(setups)]
        state, extra = following.restore(checkpoints, step)
        assert extra["order"] == order
        rows = following.pipeline.layers.num_rows
        assert state.params.layers.input_layernorm.weight.shape[0] == rows
    saved, _ = checkpoints.restore(len(setups), setups["plain"].layout.target(setups["plain"].mesh))
    checkpoints.close()
    for name, value in values(saved).items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


@pytest.mark.slow
def test_the_first_state_is_the_same_model():
    want = values(setup_of("plain").initial_state().params)
    setup = setup_of("chunks")
    places = setup.pipeline.layers.places
    for name, value in values(setup.initial_state().params).items():
        if name.startswith("layers/"):
            assert not np.any(np.delete(value, places, axis=0))
            value = value[places]
        np.testing.assert_array_equal(value, want[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_under_another_schedule(tmp_path: Path, optimizer: str):
    def losses(folder: str, order: str, steps: str, *flags: str) -> list[float]:
        target = tmp_path / folder
        common = ("--train.steps", "6", "--train.stop_after", steps, "--output-dir", str(target))
        setup = setup_of(order, *common, "--optimizer.name", optimizer, *flags)
        assert run(setup.config) == 0
        rows = (target / "metrics.jsonl").read_text().splitlines()
        return [json.loads(row)["loss"] for row in rows]

    want = losses("whole", "plain", "6")
    losses("parts", "chunks", "2")
    losses("parts", "layout", "4")
    np.testing.assert_allclose(losses("parts", "uneven", "6"), want, rtol=2e-5)
