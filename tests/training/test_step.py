"""The train step: the same curve under every sharding, right norms, clipping, and skipped steps."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from jaxdist.models import default_context
from jaxdist.training.optimizer import num_updates
from jaxdist.training.setup import Setup
from jaxdist.training.step import Batch, mean_loss

STEPS, COUNT, ROWS, LENGTH = 20, 2, 8, 12
MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=64,
    vocab_multiple=16,
)
GUARDED: dict[str, Any] = dict(on_nonfinite="skip", optimizer=dict(ema_decay=0.9))
PLAIN_SGD = dict(name="sgd", momentum=0.0, schedule="constant", learning_rate=1.0, warmup_steps=0)


class Trainer:
    """A compiled step with the state it has reached."""

    def __init__(self, mesh: str, zero: int = 1, on_nonfinite: str = "stop", **sections: Any):
        optimizer = {"warmup_steps": 2, "learning_rate": 1e-2, **sections.get("optimizer", {})}
        config = RunConfig(
            mesh=mesh,
            model=MODEL,
            parallel=ParallelConfig(zero=zero, num_microbatches=COUNT, skip_bubbles=False),
            precision=PrecisionConfig(**{"policy": "fp32", **sections.get("precision", {})}),
            optimizer=OptimizerConfig(**optimizer),
            train=TrainConfig(
                steps=STEPS,
                global_batch_size=COUNT * ROWS,
                sequence_length=LENGTH,
                on_nonfinite=on_nonfinite,
            ),
        )
        self.setup, self.step = compiled(config)
        self.state = self.setup.initial_state()

    def train(self, number: int) -> dict[str, float]:
        """One step on batch `number`; its metrics."""
        shardings = jax.tree.map(lambda a: a.sharding, self.setup.abstract_batch())
        batch = jax.device_put(batch_of(number), shardings)
        self.state, metrics = self.step(self.state, batch)
        return {name: float(value) for name, value in metrics.items()}

    def parameters(self) -> list[np.ndarray]:
        """Gathered, as float64."""
        return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(self.state.params)]


@cache
def compiled(config: RunConfig) -> tuple[Setup, Any]:
    """A run's setup and its train step."""
    setup = Setup.of(config)
    return setup, setup.compile_train_step()


def batch_of(number: int) -> Batch:
    """Tokens that partly foretell their labels, with masks that differ between microbatches."""
    random = np.random.default_rng(number)
    shape = (COUNT, ROWS, LENGTH)
    tokens = random.integers(0, 8, shape)
    labels = (3 * tokens + random.integers(0, 2, shape)) % MODEL.vocab_size
    mask = random.random(shape) < np.linspace(0.9, 0.3, COUNT)[:, None, None]
    segments = np.sort(random.integers(1, 3, shape), axis=-1)
    positions = np.broadcast_to(np.arange(LENGTH), shape)
    whole = tokens, labels, mask, segments, positions
    names = ("tokens", "labels", "loss_mask", "segment_ids", "positions")
    return Batch(**{n: jnp.asarray(a, jnp.int32) for n, a in zip(names, whole, strict=True)})


@cache
def curve(mesh: str, zero: int) -> np.ndarray:
    """[steps, 2] loss and gradient norm."""
    trainer = Trainer(mesh, zero)
    rows = [trainer.train(number) for number in range(STEPS)]
    return np.array([[row["loss"], row["grad_norm"]] for row in rows])


def norm(leaves):
    return np.sqrt(sum(np.square(leaf).sum() for leaf in leaves))


@pytest.mark.parametrize(
    "mesh, zero",
    [
        *(pytest.param("2x2x2", zero, marks=pytest.mark.slow) for zero in (0, 1, 2, 3)),
        *(pytest.param("4x1x2", zero, marks=pytest.mark.slow) for zero in (0, 1, 2, 3)),
        pytest.param("1x4x2", 1, marks=pytest.mark.slow),
    ],
)
def test_twenty_steps_are_those_of_one_device(mesh, zero):
    want = curve("1x1x1", 1)
    assert want[-1, 0] < 0.8 * want[0, 0]
    np.testing.assert_allclose(curve(mesh, zero), want, rtol=5e-5)


@pytest.mark.slow
def test_zero_stages_give_one_curve():
    """The same sums in another order: what one stage leaks into the next step would show."""
    first, *others = (curve("2x2x2", zero) for zero in (0, 1, 2, 3))
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5)


def test_the_loss_is_the_mean_of_all_valid_tokens():
    """Of training and of evaluation: microbatches that hold more of them weigh more."""
    trainer = Trainer("1x1x1", **GUARDED)
    for number in range(1, 10):  # until the tokens' losses differ
        trainer.train(number)
    batch, params = batch_of(0), trainer.state.params
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, LENGTH), batch)
    ctx = default_context(MODEL, rows.segment_ids)
    logits = jax.jit(lambda model, tokens: model(tokens, rows.positions, rows.segment_ids, ctx=ctx))
    scores = np.asarray(jax.nn.log_softmax(logits(params, rows.tokens)), np.float64)
    picked = -np.take_along_axis(scores, np.asarray(rows.labels)[..., None], -1).reshape(COUNT, -1)
    mask = np.asarray(batch.loss_mask).reshape(COUNT, -1)
    want = (picked * mask).sum() / mask.sum()
    of_means = ((picked * mask).sum(1) / mask.sum(1)).mean()
    assert abs(of_means / want - 1) > 1e-3
    sums = trainer.setup.compile_eval_step()(params, batch)
    assert sums["num_tokens"] == mask.sum()
    np.testing.assert_allclose(sums["loss_sum"] / mask.sum(), want, rtol=1e-5)
    np.testing.assert_allclose(trainer.train(0)["loss"], want, rtol=1e-5)


def test_batches_weigh_as_many_tokens_as_they_have():
    batches = [{"loss_sum": 10.0, "num_tokens": 1.0}, {"loss_sum": 1.0, "num_tokens": 9.0}]
    assert mean_loss(batches) == 1.1
    assert mean_loss([{"loss_sum": 0.0, "num_tokens": 0.0}]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, zero",
    [
        *(("2x2x2", zero) for zero in (0, 1, 2, 3)),
        ("1x4x2", 1),
    ],
)
def test_the_norm_is_numpys_over_the_gathered_gradients(mesh, zero):
    """With plain SGD at rate 1 a step moves the parameters by the gradients themselves."""
    sgd = dict(PLAIN_SGD, weight_decay=0.0, max_grad_norm=None)
    trainer = Trainer(mesh, zero, optimizer=sgd)
    before = trainer.parameters()
    metrics = trainer.train(0)
    moved = [a - b for a, b in zip(before, trainer.parameters(), strict=True)]
    np.testing.assert_allclose(metrics["grad_norm"], norm(moved), rtol=1e-5)
    assert metrics["num_tokens"] == batch_of(0).loss_mask.sum()
    assert metrics["skipped"] == 0


@pytest.mark.slow
def test_clipping_scales_the_whole_gradient():
    """To the limit exactly, which takes the norm of all shards."""
    limit = 0.01
    trainer = Trainer("2x2x2", 3, optimizer=dict(PLAIN_SGD, weight_decay=0.0, max_grad_norm=limit))
    before = trainer.parameters()
    metrics = trainer.train(0)
    moved = [a - b for a, b in zip(before, trainer.parameters(), strict=True)]
    assert metrics["grad_norm"] > 10 * limit  # of the gradients as they were
    np.testing.assert_allclose(norm(moved), limit, rtol=1e-4)


def test_a_skipped_step_leaves_everything_as_it_was():
    """But its number, which says what data comes next."""
    trainer = Trainer("1x1x1", **GUARDED)
    trainer.train(0)
    # A gain so large that the loss overflows.
    gain = trainer.state.params.norm.weight
    trainer.state.params.norm.weight = gain.replace(jnp.full_like(gain[...], 1e38))
    before = numbers(trainer.state)
    metrics = trainer.train(1)
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"])
    assert int(num_updates(trainer.state.opt_state)) == 1
    after = numbers(trainer.state)
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed == [".step"] and after[".step"] == 2


def numbers(state):
    """{name: array} of a state."""
    plain = replace(state, rng=jax.random.key_data(state.rng))
    return {
        jax.tree_util.keystr(path): np.array(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(plain)
    }


@pytest.mark.slow
def test_fp16_finds_a_scale_and_trains_as_fp32():
    """Overflows halve the scale and skip; after that the curve is fp32's within fp16's rounding."""
    precision = dict(
        policy="fp16",
        loss_scale_init=2.0**24,
        loss_scale_hysteresis=1,
        loss_scale_growth_interval=1000,
    )
    trainer = Trainer("2x1x1", precision=precision)
    metrics = first = trainer.train(0)
    skipped = 0
    while metrics["skipped"]:
        skipped += 1
        assert metrics["loss_scale"] == 2.0 ** (25 - skipped)
        assert int(num_updates(trainer.state.opt_state)) == 0
        metrics = trainer.train(0)
        assert metrics["learning_rate"] == first["learning_rate"]  # of the warm-up's first step
    assert 0 < skipped < 12
    loss_scale = trainer.state.loss_scale
    assert loss_scale is not None and int(loss_scale.overflows) == skipped
    rows = [metrics, *(trainer.train(number) for number in range(1, 5))]
    found = np.array([[row["loss"], row["grad_norm"]] for row in rows])
    np.testing.assert_allclose(found, curve("1x1x1", 1)[:5], rtol=16 * 2.0**-10)
