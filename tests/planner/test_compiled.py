"""Steps compiled for GPUs that are not here. Skipped only where XLA's CUDA compiler is missing."""

import pytest

from jaxdist.config.command_line import parse
from jaxdist.parallel.overlap import Pair, pairs
from jaxdist.planner import compiled
from jaxdist.planner.hardware import Target
from jaxdist.training import planned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not compiled.has_cuda_compiler(),
        reason="pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt (of jaxlib's version)",
    ),
]

SMALL = """--model.preset tiny --model.num_hidden_layers 8 --model.hidden_size 512
 --model.intermediate_size 2048 --model.num_attention_heads 8 --model.num_key_value_heads 4
 --train.sequence_length 1024 --train.global_batch_size 16 --parallel.num_microbatches 4
 --model.max_position_embeddings 1024 --model.tie_word_embeddings false""".split()


@pytest.fixture(scope="module")
def zero3() -> planned.Planned:
    config = parse([*SMALL, "--mesh", "2x2x2", "--parallel.zero", "3"], "jaxdist plan")
    return planned.compile_for(config, Target.parse("h100:1x8"))


@pytest.fixture(scope="module")
def found(zero3) -> list[Pair]:
    return pairs(zero3.hlo, zero3.setup.mesh.shape)


def test_a_layer_is_gathered_beside_the_work_of_the_one_before(found):
    # Those of a layer, whose seven matrices XLA combines; embedding and head are two.
    gathers = [
        pair
        for pair in found
        if pair.collective.kind == "all-gather"
        and pair.collective.axes == ("dp",)
        and pair.collective.in_loop
        and len(pair.collective.payloads) >= 7
    ]
    assert len(gathers) >= 4  # forwards and backwards of the schedule's phases
    # Kernels of a layer's work, its products among them, and not one or two small ones.
    assert all(len(pair.beside) >= 5 for pair in gathers), [pair.beside for pair in gathers]


def test_rings_turn_beside_work(found):
    rings = [
        pair
        for pair in found
        if pair.collective.kind == "collective-permute" and pair.collective.in_loop
    ]
    assert rings
    assert all(pair.beside for pair in rings)


def test_attention_is_cudnns_and_runs_once_each_way(zero3):
    """With remat none: no forward kernel in a backward pass."""
    forward, backward = (
        zero3.hlo.count(f'custom_call_target="__cudnn$fmhaScaleBiasSoftmax{way}"')
        for way in ("", "Backward")
    )
    assert forward == backward > 0


def test_traffic_and_memory(zero3):
    assert all(row.count is not None for row in zero3.traffic)
    assert zero3.ratio == pytest.approx(1, abs=0.1)
    text = zero3.as_dict()
    assert text["memory"]["device_bytes"] == 80 * 2**30
    assert {"compiled_bytes", "estimated_bytes"} <= text["memory"].keys()
