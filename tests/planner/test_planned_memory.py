"""The planner's memory against what the program holds and what XLA allots to it."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.config import MeshShape
from jaxdist.config.command_line import parse
from jaxdist.ops import experts, product
from jaxdist.parallel.executor import Executor
from jaxdist.parallel.mesh import make_mesh
from jaxdist.parallel.microbatches import Microbatches
from jaxdist.planner.compiled import devices, has_cuda_compiler, kernels_of
from jaxdist.planner.hardware import Target
from jaxdist.planner.memory import Memory, estimate
from jaxdist.planner.parameters import Counts
from jaxdist.training import dry_run
from jaxdist.training.setup import Setup

SMALL = """--model.preset tiny --model.num_hidden_layers 4 --model.hidden_size 64 --model.head_dim 8
 --model.intermediate_size 160 --model.num_attention_heads 4 --model.num_key_value_heads 2
 --model.vocab_size 200 --train.sequence_length 64 --train.global_batch_size 64
 --precision.policy fp32 --parallel.num_microbatches 8""".split()

SCHEDULES = {
    "gpipe": ("--parallel.schedule", "gpipe"),
    "1f1b": (),
    "interleaved": ("--parallel.schedule", "interleaved", "--parallel.num_chunks", "2"),
    "zb": ("--parallel.schedule", "zb"),
}


def setup_of(mesh: str, *flags: str) -> Setup:
    return Setup.of(parse([*SMALL, "--mesh", mesh, *flags], "jaxdist train"))


def estimated(setup: Setup) -> Memory:
    return estimate(
        setup.config,
        setup.mesh_shape,
        setup.pipeline.schedule,
        platform=setup.mesh.devices.flat[0].platform,
        bf16_products=product.cpu_multiplies_bf16(),
    )


def held_in_rings(setup: Setup) -> int:
    """Bytes of the rings of activations and taps of one member, whole where tp shards them."""
    pipeline, params = setup.pipeline, setup.layout.target(setup.mesh).params
    shape = setup.abstract_batch().tokens.shape

    def rings(executor: Executor) -> list[Any]:
        return [*executor.empty_residuals(), *executor.empty_taps()]

    with jax.set_mesh(setup.mesh):
        found = pipeline.member_shapes(rings, params, Microbatches.abstract(shape))
    return sum(int(np.prod(ring.shape)) * ring.dtype.itemsize for ring in found)


@pytest.mark.parametrize(
    "schedule, remat",
    [
        pytest.param(
            schedule,
            remat,
            marks=() if schedule == "1f1b" or remat == "none" else pytest.mark.slow,
        )
        for schedule in SCHEDULES
        for remat in ("none", "full", "dots", "attn_out", "qkv,mlp_hidden")
    ],
)
def test_rings_are_counted_to_the_byte(schedule, remat):
    policy = ("--precision.policy", "bf16") if schedule == "1f1b" else ()
    setup = setup_of("2x2x1", *SCHEDULES[schedule], "--parallel.remat", remat, *policy)
    assert estimated(setup).activations == held_in_rings(setup)


def flags(text: str) -> list[str]:
    """Flags of the model, without their prefix."""
    return [f"--model.{word}" if n % 2 == 0 else word for n, word in enumerate(text.split())]


EXPERTS = flags("num_experts 4 moe_intermediate_size 96")
SHARED = EXPERTS + flags("n_shared_experts 1")
MANY = flags("num_experts 12 moe_intermediate_size 48 num_experts_per_tok 4 n_shared_experts 2")
LATENT = flags(
    "kv_lora_rank 24 qk_nope_head_dim 16 qk_rope_head_dim 8 v_head_dim 12 num_key_value_heads 4"
)
LATENTS = LATENT + flags("q_lora_rank 40")
DEEPSEEK = MANY + LATENTS + flags("scoring_func sigmoid n_group 4 topk_group 2")
BF16 = ["--precision.policy", "bf16"]
MODELS = {
    "experts": EXPERTS,
    "shared experts": SHARED,
    "raw shares": EXPERTS + flags("norm_topk_prob false"),
    "one latent": LATENT,
    "two latents": LATENTS,
    "both": DEEPSEEK,
    "normed heads": flags("qk_norm true"),
    "normed queries and keys": flags("qk_norm true qk_norm_width all"),
    "norms after": flags("norm_order post norm layernorm mlp gelu"),
    "norms around": [*SHARED, *flags("norm_order sandwich")],
}


@pytest.mark.parametrize(
    "model, schedule, remat",
    [
        ("experts", "1f1b", "none"),
        ("experts", "zb", "full"),
        ("shared experts", "1f1b", "none"),
        ("shared experts", "zb", "dots"),
        ("raw shares", "1f1b", "none"),
        ("one latent", "1f1b", "none"),
        ("one latent", "1f1b", "dots"),
        ("two latents", "1f1b", "none"),
        ("two latents", "1f1b", "qkv,attn_out"),
        ("two latents", "zb", "none"),
        ("two latents", "zb", "dots"),
        ("both", "zb", "none"),
        ("both", "zb", "full"),
        ("normed heads", "zb", "none"),
        ("normed heads", "zb", "dots"),
        ("normed queries and keys", "zb", "none"),
        ("normed queries and keys", "zb", "dots"),
        ("norms after", "zb", "none"),
        ("norms after", "zb", "full"),
        ("norms around", "zb", "none"),
        ("norms around", "zb", "dots"),
    ],
)
@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_so_they_are_in_other_models(model, schedule, remat, policy):
    options = *SCHEDULES[schedule], "--parallel.remat", remat, "--precision.policy", policy
    setup = setup_of("1x2x1", *MODELS[model], *options)
    assert estimated(setup).activations == held_in_rings(setup)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_on_tpus_weight_gradients_of_experts_wait_too(remat, monkeypatch):
    setup = setup_of("1x2x1", *SHARED, *BF16, *SCHEDULES["zb"], "--parallel.remat", remat)
    here = estimated(setup).activations, held_in_rings(setup)
    monkeypatch.setattr(experts, "platform", lambda: "tpu")
    setup = Setup(setup.config, setup.mesh)
    there = estimate(
        setup.config, setup.mesh_shape, setup.pipeline.schedule, platform="tpu"
    ).activations
    assert there == held_in_rings(setup)
    assert here[0] == here[1] < there


def test_offloaded_rings_are_the_hosts():
    setup = setup_of("1x2x1", "--parallel.offload_activations", "true")
    found = estimated(setup)
    assert found.activations == 0 and found.host == held_in_rings(setup)
    pipeline, spaces = setup.pipeline, set()

    def rings(executor: Executor) -> list[Any]:
        made = executor.empty_residuals()
        spaces.update(jax.typeof(ring).memory_space for ring in made)
        return made

    params = setup.layout.target(setup.mesh).params
    batch = Microbatches.abstract(setup.abstract_batch().tokens.shape)
    with jax.set_mesh(setup.mesh):
        pipeline.member_shapes(rings, params, batch)
    assert spaces == {jax.memory.Space.Host}


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs XLA's CUDA compiler")
def test_on_a_gpu_they_leave_the_devices_memory():
    target = Target.parse("h100:1x2")
    sizes = []
    for offload in ("false", "true"):
        flags = ("--parallel.offload_activations", offload, "--parallel.skip_bubbles", "false")
        config = setup_of("1x2x1", *flags, "--precision.policy", "bf16").config
        setup = Setup(config, make_mesh(config.mesh_shape, config, devices(target)))
        with kernels_of(target.hardware):
            sizes.append(setup.compile_train_step().memory_analysis())
    here, there = sizes
    moved = estimated(setup).host
    assert here.host_temp_size_in_bytes == 0
    assert there.host_temp_size_in_bytes == pytest.approx(moved, rel=0.1)
    # One layer's share is on the device all the same, on its way.
    assert there.temp_size_in_bytes < here.temp_size_in_bytes - 0.7 * moved


# Where a layer's arrays are large beside all else, and where the rings are beside a layer's.
WIDE = """--model.hidden_size 512 --model.intermediate_size 1536 --model.head_dim 64
 --train.sequence_length 1024 --model.max_position_embeddings 1024""".split()
DEEP = ["--model.num_hidden_layers", "16"]


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_compiler(), reason="needs XLA's CUDA compiler")
@pytest.mark.parametrize("flags", [WIDE, DEEP])
def test_the_peak_of_what_waits_in_the_hosts_memory_is_within_a_tenth(flags):
    target = Target.parse("h100:1x2")
    flags = [*flags, "--parallel.offload_activations", "true", "--parallel.skip_bubbles", "false"]
    config = setup_of("1x2x1", *flags, "--precision.policy", "bf16").config
    setup = Setup(config, make_mesh(config.mesh_shape, config, devices(target)))
    with kernels_of(target.hardware):
        memory = setup.compile_train_step().memory_analysis()
    assert estimated(setup).peak == pytest.approx(dry_run.peak_bytes(memory), rel=0.1)


@pytest.mark.parametrize(
    "flags",
    [
        ("--parallel.zero", "0"),
        ("--parallel.zero", "3", "--model.qk_norm", "true", "--model.qkv_bias", "true"),
        ("--optimizer.name", "lion", "--optimizer.ema_decay", "0.9"),
        ("--model.mlp", "gelu", "--model.norm", "layernorm", "--model.mlp_bias", "true"),
        ("--model.num_experts", "4", "--model.moe_intermediate_size", "32"),
    ],
)
def test_the_state_is_counted(flags):
    setup = setup_of("2x2x2", *flags)
    found, state, layout = estimated(setup), setup.layout.abstract, setup.layout
    params = dry_run._bytes(state.params, layout.state.params, setup)
    assert found.parameters == pytest.approx(params, rel=0.01)
    kept = dry_run._bytes(state.opt_state, layout.state.opt_state, setup)
    kept += 0 if state.ema is None else dry_run._bytes(state.ema, layout.state.ema, setup)
    assert found.optimizer == pytest.approx(kept, rel=0.01)


# Of one device; the peak is what XLA allots to the whole training step, optimizer included.
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        ("1f1b", "none"),
        ("1f1b", "full"),
        ("1f1b", "dots"),
        ("gpipe", "none"),
        ("gpipe", "full"),
        ("gpipe", "dots"),
        ("interleaved", "none"),
        ("interleaved", "full"),
        ("interleaved", "dots"),
        ("zb", "none"),
        ("zb", "full"),
    ],
)
def test_the_peak_is_within_a_tenth(schedule, remat, policy):
    # Two layers a stretch at least: XLA opens a loop of one, and forward and backward overlap.
    flags = ("--model.num_hidden_layers", "8") if schedule == "interleaved" else ()
    flags += ("--precision.policy", policy, "--parallel.remat", remat)
    setup = setup_of("1x2x1", *SCHEDULES[schedule], *flags)
    assert estimated(setup).peak == pytest.approx(dry_run.measure(setup).peak, rel=0.1)


FULL, DOTS = (["--parallel.remat", remat] for remat in ("full", "dots"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, model",
    [
        ("1x2x1", EXPERTS),
        ("2x2x1", [*MANY, *FULL, "--parallel.zero", "3"]),
        ("1x2x1", [*LATENTS, *DOTS, *BF16]),
        ("1x2x2", [*DEEPSEEK, *FULL, *BF16]),
        # MLPs much wider than the residual stream.
        ("1x2x1", [*flags("intermediate_size 1536"), *FULL, *BF16]),
        ("2x2x1", [*flags("intermediate_size 1536"), *FULL, "--parallel.zero", "3"]),
    ],
)
def test_so_it_is_in_other_models(mesh, model):
    setup = setup_of(mesh, *model)
    assert estimated(setup).peak == pytest.approx(dry_run.measure(setup).peak, rel=0.1)


def test_llama3_8b_is_counted_as_published():
    config = parse(["--model.preset", "llama3_8b"], "jaxdist train")
    counts = Counts.of(config.model, MeshShape(), config.model.num_hidden_layers)
    assert counts.total == 8_030_261_248
