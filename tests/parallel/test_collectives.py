"""The compiled train step sends exactly what the design derives, and nothing that could deadlock.

The expected traffic is written down from the schedule and the layouts alone: a collective too
many, too few, over another axis or of another size fails.
"""

from collections import Counter

import jax
import pytest

from jaxdist.config import ModelConfig, ParallelConfig, PrecisionConfig, RunConfig, TrainConfig
from jaxdist.parallel.audit import collectives
from jaxdist.parallel.schedules.schedule import IDLE
from jaxdist.parallel.sharding import layouts
from jaxdist.training.setup import Setup

ROWS, LENGTH, HIDDEN = 8, 12, 16
MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=HIDDEN,
    intermediate_size=48,  # no layer's matrix is as large as a slice of a table
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=64,
    vocab_multiple=16,
)


@pytest.fixture(scope="module")
def compiled_step():
    """`compiled_step(mesh, ...) -> (setup, its compiled train step)`"""

    def build(mesh, *, num_microbatches=2, skip_bubbles=False, **parallel):
        config = RunConfig(
            mesh=mesh,
            model=MODEL,
            parallel=ParallelConfig(
                num_microbatches=num_microbatches, skip_bubbles=skip_bubbles, **parallel
            ),
            precision=PrecisionConfig(policy="fp32"),
            train=TrainConfig(
                steps=20, global_batch_size=ROWS * num_microbatches, sequence_length=LENGTH
            ),
        )
        setup = Setup.of(config)
        return setup, setup.compile_train_step()

    return build


def traffic(found):
    """{(kind, axes, bytes): executions} of all arrays but single numbers (losses, norms)."""
    counted = Counter()
    for collective in found:
        assert collective.count is not None, collective
        for payload in collective.payloads:
            if payload > 4:
                counted[collective.kind, collective.axes, payload] += collective.count
    return counted


class Expected:
    """The traffic of a step in fp32, by the design. Axes of size 1 send nothing."""

    def __init__(self, setup):
        self.pipeline, self.mesh = setup.pipeline, setup.mesh_shape
        schedule = self.pipeline.schedule
        self.num_microbatches = schedule.num_microbatches
        self.forwards = int((schedule.forward != IDLE).any(axis=1).sum())
        self.backwards = int((schedule.backward != IDLE).any(axis=1).sum())
        # With several chunks only those ticks embed that must, and a tick runs one chunk's layers.
        whole = schedule.num_chunks == 1
        self.embeds = self.forwards if whole else schedule.num_microbatches
        self.leaves = self.backwards if whole else schedule.num_microbatches
        self.layers = self.pipeline.layers.most
        self.whole = ROWS // self.mesh.dp * LENGTH * HIDDEN * 4
        self.counted = Counter()
        self.may_be_fewer = set()  # XLA moves a gather out of the loop, or keeps its result
        self.vocabulary()
        self.ring()
        self.tensor_parallel()
        self.zero(setup.layout.abstract.params)

    def send(self, kind, axes, payload, times):
        axes = tuple(axis for axis in axes if getattr(self.mesh, axis) > 1)
        if axes:
            self.counted[kind, axes, payload] += times

    @property
    def ends_without_loop(self):
        last = self.pipeline.schedule.loops[-1].phases[-1]
        return last.stop - last.start == 1

    @property
    def shards_sequence(self):
        return self.pipeline.parallel.sequence_parallel and self.mesh.tp > 1

    @property
    def residual(self):
        """Bytes of an activation between blocks."""
        return self.whole // (self.mesh.tp if self.shards_sequence else 1)

    def sum_of_members(self, times):
        """An activation summed over the vocabulary, back into the residual stream."""
        if self.shards_sequence:
            self.send("reduce-scatter", ("tp",), self.whole, times)
            self.send("all-reduce", ("pp",), self.residual, times)
        else:
            self.send("all-reduce", ("pp", "tp"), self.whole, times)

    def gather_sequence(self, times):
        if self.shards_sequence:
            self.send("all-gather", ("tp",), self.whole, times)

    def vocabulary(self):
        scores, numbers = self.num_microbatches, ROWS // self.mesh.dp * LENGTH * 4
        self.sum_of_members(self.embeds)
        self.send("all-reduce", ("pp",), self.residual, scores)  # the last stage's output to all
        self.gather_sequence(scores)
        self.send("all-reduce", ("pp", "tp"), numbers, 3 * scores)  # maximum, sum, label
        self.sum_of_members(scores)  # the output's gradient
        self.send("all-reduce", ("pp",), self.residual, self.leaves)  # the embedding's gradient
        if self.pipeline.schedule.name == "zb":
            # A tick that has a body of its own and takes nothing back: XLA sums no zeros.
            self.may_be_fewer.add(("all-reduce", ("pp",), self.residual))
        self.gather_sequence(self.leaves)
        if self.shards_sequence:
            self.send("all-reduce", ("tp",), HIDDEN * 4, scores)  # the final norm's gain

    def ring(self):
        # Nobody waits for what the last tick sends; XLA sees that where it is not in a loop.
        times = self.forwards + self.backwards - self.ends_without_loop
        self.send("collective-permute", ("pp",), self.residual, times)

    def tensor_parallel(self):
        """Per layer two sums forward and two backward; of the sequence, scattered and gathered."""
        forward, backward = self.layers * self.forwards, self.layers * self.backwards
        if not self.shards_sequence:
            self.send("all-reduce", ("tp",), self.whole, 2 * forward + 2 * backward)
            return
        self.send("all-gather", ("tp",), self.whole, 2 * forward)
        self.send("reduce-scatter", ("tp",), self.whole, 2 * forward + 2 * backward)
        # The cotangent of what joins the stream, and the input of what leaves it once more.
        self.send("all-gather", ("tp",), self.whole, 4 * backward)
        self.send("all-reduce", ("tp",), HIDDEN * 4, 2 * backward)  # gains of the norms

    def zero(self, parameters):
        stage = self.pipeline.parallel.zero
        if self.mesh.dp == 1:
            return
        tree = layouts(parameters, self.pipeline.rules)
        for (path, leaf), layout in zip(
            jax.tree_util.tree_leaves_with_path(parameters), jax.tree.leaves(tree), strict=True
        ):
            assert layout.dp_dim is not None
            members = 1
            for axes in layout.spec:
                for axis in axes if isinstance(axes, tuple) else (axes,) if axes else ():
                    members *= getattr(self.mesh, axis)
            name = jax.tree_util.keystr(path)
            self.zero_leaf(stage, name, leaf.size * 4 // members)

    def zero_leaf(self, stage, name, size):
        if stage == 0:
            self.send("all-reduce", ("dp",), size, 1)
            return
        if stage in (1, 2):
            self.send("all-gather", ("dp",), size, 1)  # the updated parameters
        if stage == 1:
            self.send("reduce-scatter", ("dp",), size, 1)
            return
        # Per layer or table, and as often as it is used.
        if "layers" in name:
            rows = self.layers * self.pipeline.schedule.num_chunks
            size, used, made = size // rows, self.forwards + self.backwards, self.backwards
            used, made = used * self.layers, made * self.layers
            # One layer ahead: the last of either way is gathered for nobody, which XLA sees of the
            # very last where no loop holds it.
            used += (2 - (self.ends_without_loop and self.layers == 1)) * (stage == 3)
        elif "embed_tokens" in name:
            used, made = self.embeds, self.leaves
        else:
            used = made = self.num_microbatches
        self.send("reduce-scatter", ("dp",), size, made)
        if stage == 3:
            self.send("all-gather", ("dp",), size, used)
            if "layers" not in name or "norm" in name:
                self.may_be_fewer.add(("all-gather", ("dp",), size))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "mesh, options",
    [
        ("2x2x2", dict(zero=1)),
        slow("2x2x2", dict(zero=3)),
        slow("1x1x4", dict(sequence_parallel=True)),
        slow("2x2x2", dict(zero=1, schedule="interleaved", num_chunks=2, num_microbatches=8)),
        slow("2x2x1", dict(zero=3, schedule="interleaved", num_chunks=2, num_microbatches=4)),
        slow("2x2x2", dict(zero=1, schedule="zb", num_microbatches=4)),
        slow("2x2x2", dict(zero=0)),
        slow("2x2x2", dict(zero=2)),
        slow("4x2x1", dict(zero=1, schedule="gpipe", num_microbatches=3)),
        slow("2x4x1", dict(zero=2, num_microbatches=5)),
        slow("2x2x2", dict(zero=3, sequence_parallel=True, schedule="gpipe")),
        slow("1x2x4", dict(num_microbatches=3)),
        slow("8x1x1", dict(zero=3)),
        slow("1x1x1", dict()),
    ],
)
def test_a_step_sends_what_the_design_says(compiled_step, mesh, options):
    setup, step = compiled_step(mesh, **options)
    found = traffic(collectives(step.as_text(), setup.mesh.shape))
    expected = Expected(setup)
    assert found - expected.counted == Counter(), "too much"
    missing = expected.counted - found
    assert missing.keys() <= expected.may_be_fewer, "too little"
    assert found.keys() == expected.counted.keys()


@pytest.mark.parametrize(
    "mesh, options",
    [
        ("2x2x2", dict(zero=1, num_microbatches=7)),  # compiled for test_pipeline.py as well
        slow("2x2x2", dict(zero=1)),
        slow("2x2x2", dict(zero=0, schedule="gpipe", remat="full")),
        slow("2x2x2", dict(zero=2)),
        slow("2x2x2", dict(zero=3, sequence_parallel=True)),
        slow("2x1x4", dict(zero=1, model=dict(num_key_value_heads=2))),
    ],
)
def test_nothing_can_deadlock(make_case, mesh, options):
    """Members of a group always come to its collective together, whatever their stage does."""
    case = make_case(mesh, **options)
    found = collectives(case.compiled.as_text(), case.mesh.shape)
    zero = case.pipeline.parallel.zero
    for collective in found:
        # A stage alone decides how often these run.
        if collective.in_branch or collective.count is None:
            assert "pp" not in collective.axes, collective
            assert collective.kind not in ("collective-permute", "all-to-all"), collective
        if "dp" in collective.axes and collective.in_loop:
            assert zero >= 2, collective
        if collective.kind == "all-gather" and "tp" in collective.axes:
            repeats_heads = case.pipeline.model.num_key_value_heads % case.mesh.shape["tp"] != 0
            assert case.pipeline.parallel.sequence_parallel or repeats_heads, collective
        assert collective.kind != "all-to-all"
    if zero < 2:
        sums = [c for c in found if "dp" in c.axes and c.bytes > 4]
        kind = "reduce-scatter" if zero else "all-reduce"
        assert {c.kind for c in sums} == {kind} and {c.count for c in sums} == {1}


@pytest.mark.slow
def test_recomputing_repeats_the_sums_of_the_forward_pass_only(compiled_step):
    """remat=full runs a second forward: its tp sums once more, and no other collective."""
    plain, again = (
        traffic(collectives(step.as_text(), setup.mesh.shape))
        for setup, step in (compiled_step("1x2x2", remat=remat) for remat in ("none", "full"))
    )
    setup, _ = compiled_step("1x2x2")
    expected = Expected(setup)
    more = again - plain
    (key,) = more
    assert key == ("all-reduce", ("tp",), expected.whole)
    # The block's last sum is not needed again: o_proj's is, for the MLP.
    assert more[key] == expected.layers * expected.backwards
    assert plain - again == Counter()
