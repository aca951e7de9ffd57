from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import MeshShape, ModelConfig, RunConfig, UsageError
from jaxdist.config.checks import check_mesh, fitting_meshes, fitting_tp, too_few_devices
from jaxdist.config.layers import build

BASE = RunConfig()
BF16_MOMENTS = {"moment_dtype": "bf16"}


def changed(**sections: Any) -> RunConfig:
    """`BASE` with fields of its sections replaced, checked as a whole."""
    fields = {
        name: replace(getattr(BASE, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return replace(BASE, **fields)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"mesh": "1x1x3"}, "num_attention_heads=8 is not divisible by tp=3; choose tp from 1, 2,"),
        ({"mesh": "1x5x1"}, "num_hidden_layers=4 is less than pp=5.*choose pp of at most 4$"),
        (
            {"mesh": "1x2x1", "parallel": {"schedule": "interleaved", "num_chunks": 3}},
            "=4 is less than pp=2 x num_chunks=3 = 6.*choose pp of at most 1, or fewer chunks",
        ),
        (
            {"mesh": "1x2x1", "parallel": {"layout": "1,1,2"}},
            "parallel.layout='1,1,2' has 3 counts, but pp=2 needs 2; null spreads",
        ),
        (
            {"mesh": "1x2x1", "parallel": {"layout": "1,4"}},
            "parallel.layout='1,4' adds up to 5 layers, but num_hidden_layers=4",
        ),
        (
            {
                "mesh": "1x1x4",
                "model": {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16},
            },
            "num_key_value_heads=6 and tp=4.*choose tp from 1, 2, 3, 6, 12",
        ),
        (
            {"mesh": "1x1x4", "model": {"intermediate_size": 130}},
            "intermediate_size=130 is not divisible by tp=4; choose tp from 1, 2",
        ),
        (
            {"mesh": "1x1x8", "model": {"vocab_multiple": 1}},
            "vocabulary of 257 rows is not divisible by pp.tp=8; set --model.vocab_multiple 8",
        ),
        (
            {"mesh": "4x1x1", "train": {"global_batch_size": 18}},
            "global_batch_size=18 is not divisible by dp=4 x num_microbatches=1 = 4; choose 16 or",
        ),
        (
            {"mesh": "4x1x1", "train": {"global_batch_size": 3}},
            "choose 4$",
        ),
        (
            {"parallel": {"num_microbatches": 5}},
            "num_microbatches=5 = 5; choose 15 or 20",
        ),
        ({"train": {"sequence_length": 2048}}, "sequence_length=2048 is longer.* 1024 positions"),
        (
            {
                "mesh": "1x1x4",
                "train": {"sequence_length": 30},
                "parallel": {"sequence_parallel": True},
            },
            "sequence_length=30 is not divisible by tp=4.* choose 32",
        ),
        ({"optimizer": {"warmup_steps": 2000}}, "warmup_steps=2000 is more than train.steps=1000"),
        (
            {"optimizer": {"schedule": "wsd", "warmup_steps": 600, "decay_steps": 500}},
            "decay_steps of at most 400",
        ),
        (
            {"optimizer": {"schedule": "cosine", "decay_steps": 500}},
            "decay_steps=500 goes with the schedule wsd; cosine has none",
        ),
        *(
            ({"optimizer": {"name": name, "beta2": 0.999}, "precision": BF16_MOMENTS}, words)
            for name, words in (
                ("adamw", "beta2=0.999 with precision.moment_dtype=bfloat16"),
                ("muon", "beta2=0.999 with precision.moment_dtype=bfloat16"),
                ("adafactor", "moment_dtype=bfloat16 does not go with adafactor"),
            )
        ),
        (
            {"eval": {"every": None}, "data": {"validation_sources": ["v.txt"]}},
            "data.validation_sources are named but eval.every=null never reads them",
        ),
        (
            {"eval": {"every": 10}, "data": {"validation_fraction": 0}},
            "validation_fraction",
        ),
        ({"profile": {"steps": "10:1001"}}, "profile.steps=10:1001"),
        ({"simulate": True}, "with --simulate there is no device count.*--mesh 2x1x1"),
    ],
)
def test_refused_with_the_fix(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        changed(**sections)


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x2", "1x4x1", "1x1x8", "2x1x4", "dp=2"])
def test_accepted(mesh: str, microbatches: int) -> None:
    changed(mesh=mesh, parallel={"num_microbatches": microbatches})


@pytest.mark.parametrize("optimizer", [{"beta2": 0.95}, {"name": "lion", "beta2": 0.999}])
def test_bf16_moments_that_move_are_accepted(optimizer: dict[str, Any]) -> None:
    changed(optimizer=optimizer, precision=BF16_MOMENTS)


def test_minus_one_is_checked_once_it_is_resolved() -> None:
    config = changed(mesh="1x1x-1")
    check_mesh(config, config.mesh_shape.resolve(8))
    with pytest.raises(UsageError, match="tp=3"):
        check_mesh(config, config.mesh_shape.resolve(3))


def test_kv_heads_are_split_or_repeated() -> None:
    assert fitting_tp(ModelConfig.from_preset("llama3_8b")) == [1, 2, 4, 8, 16, 32]
    assert fitting_tp(ModelConfig.from_preset("smollm2_135m")) == [1, 3]


@given(
    heads=st.integers(1, 64),
    groups=st.integers(1, 8),
    mlp=st.integers(1, 512),
    layers=st.integers(1, 32),
    multiple=st.integers(1, 256),
    mesh=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8)),
    batch=st.integers(1, 64),
    microbatches=st.integers(1, 8),
)
def test_accepted_means_that_everything_divides(
    heads: int,
    groups: int,
    mlp: int,
    layers: int,
    multiple: int,
    mesh: tuple[int, int, int],
    batch: int,
    microbatches: int,
) -> None:
    dp, pp, tp = mesh
    model = {
        "vocab_size": 257,
        "hidden_size": heads * groups * 2,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "vocab_multiple": multiple,
    }
    values = {
        "mesh": f"{dp}x{pp}x{tp}",
        "model": model,
        "parallel": {"num_microbatches": microbatches},
        "train": {"global_batch_size": batch},
    }
    try:
        config = build([values])
    except UsageError as error:
        assert "\n" not in str(error)
        return
    rest = [heads * groups % tp, mlp % tp, batch % (dp * microbatches)]
    assert not any(rest) and layers >= pp and (heads % tp == 0 or tp % heads == 0)
    assert config.model.padded_vocab_size % (pp * tp) == 0


def test_a_layout_waits_for_the_number_of_stages() -> None:
    config = changed(mesh="1x-1x1", parallel={"layout": "1,3"})
    check_mesh(config, MeshShape.parse("1x2x1"))
    with pytest.raises(UsageError, match="has 2 counts, but pp=4 needs 4"):
        check_mesh(config, MeshShape.parse("1x4x1"))


def test_too_few_devices_on_cpu_says_both_ways() -> None:
    message = str(too_few_devices(MeshShape.parse("4x4x4"), 1, "cpu"))
    assert "there is 1 (cpu)" in message and "--simulate" in message
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=64" in message


def test_too_few_devices_elsewhere_lists_meshes_that_fit() -> None:
    message = str(too_few_devices(MeshShape.parse("4x4x4"), 8, "gpu", BASE))
    assert "there are 8 (gpu)" in message and "--simulate" not in message
    fitting = [MeshShape.parse(word) for word in message.rsplit(": ", 1)[1].split(", ")]
    assert len(fitting) == 8
    for mesh in fitting:
        assert mesh.size == 8
        check_mesh(BASE, mesh)


def test_too_few_devices_where_nothing_fits() -> None:
    message = str(too_few_devices(MeshShape.parse("4x4x4"), 7, "gpu", BASE))
    assert "no mesh of 7 devices" in message


def test_fitting_meshes_without_a_config_are_all_factorisations() -> None:
    assert {mesh.size for mesh in fitting_meshes(8)} == {8}
    assert len(fitting_meshes(8)) == 10
