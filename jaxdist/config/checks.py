"""What the sections of a config must agree on, and what to say when devices are too few."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxdist.config.compute import ParallelConfig, PrecisionConfig
from jaxdist.config.errors import UsageError
from jaxdist.config.mesh_shape import MeshShape
from jaxdist.config.model import ModelConfig
from jaxdist.config.training import OptimizerConfig, TrainConfig

if TYPE_CHECKING:
    from jaxdist.config.run import RunConfig


def check_run(config: "RunConfig") -> None:
    """Refuse a config whose sections cannot work together.

    Axes that are -1 are not looked at here; `check_mesh` is to be called with the resolved mesh.
    """
    mesh = config.mesh_shape
    if config.simulate and not mesh.is_resolved:
        raise UsageError(
            f"mesh {mesh}: with --simulate there is no device count that could fill the -1; "
            f"write the number, for example --mesh {str(mesh).replace('-1', '2')}"
        )
    check_mesh(config, mesh)
    _check_length(config.model, config.train)
    _check_schedule(config.optimizer, config.train)
    _check_moments(config.optimizer, config.precision)
    held_back = config.data.validation_fraction > 0 or config.data.validation_sources
    if config.eval.every is not None and not held_back:
        raise UsageError(
            "eval.every is set but data.validation_fraction=0 holds no text back; "
            "set --data.validation_fraction 0.05, or --eval.every null"
        )
    if config.data.validation_sources and config.eval.every is None:
        raise UsageError(
            "data.validation_sources are named but eval.every=null never reads them; "
            "set --eval.every 100, or leave them out"
        )
    traced = config.profile.first_and_last
    if traced and traced[1] > config.train.steps:
        raise UsageError(
            f"profile.steps={config.profile.steps} ends past train.steps={config.train.steps}; "
            f"choose steps within the run"
        )


def check_mesh(config: "RunConfig", mesh: MeshShape) -> None:
    """Refuse a mesh that the model and the batch do not divide over; axes of -1 are skipped."""
    dp, pp, tp = (max(degree, 1) for degree in mesh.degrees)
    _check_layers(config.model)
    _check_tensor_parallel(config.model, tp)
    if mesh.pp != -1:
        _check_pipeline(config.model, config.parallel, pp)
    _check_vocabulary(config.model, pp, tp)
    _check_batch(config.train, config.parallel, dp)
    length = config.train.sequence_length
    if config.parallel.sequence_parallel and length % tp:
        raise UsageError(
            f"train.sequence_length={length} is not divisible by tp={tp}, as sequence_parallel "
            f"asks; choose {_next_multiple(length, tp)}, or --parallel.sequence_parallel false"
        )


def check_model_on_mesh(model: ModelConfig, mesh: MeshShape) -> None:
    """Refuse a mesh that the model's heads, MLP and layers do not divide over."""
    _check_tensor_parallel(model, mesh.tp)
    layers = model.num_hidden_layers
    if layers % mesh.pp:
        raise UsageError(
            f"num_hidden_layers={layers} is not divisible by pp={mesh.pp}; "
            f"choose pp from {_listed(_divisors(layers))}"
        )


def fitting_tp(model: ModelConfig) -> list[int]:
    """Tensor-parallel degrees that the model's heads and MLP divide over.

    Key/value heads are split where tp divides them and repeated where they divide tp.
    """
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    return [
        tp
        for tp in _divisors(heads)
        if (kv_heads % tp == 0 or tp % kv_heads == 0)
        and all(width % tp == 0 for width in _split_over_tp(model).values())
    ]


def _split_over_tp(model: ModelConfig) -> dict[str, int]:
    """What tp divides besides the heads, by name."""
    if not model.num_experts:
        return {"intermediate_size": model.intermediate_size}
    widths = {"num_experts": model.num_experts}
    if model.first_k_dense_replace:
        widths["intermediate_size"] = model.intermediate_size
    if model.n_shared_experts:
        widths["n_shared_experts * moe_intermediate_size"] = (
            model.n_shared_experts * model.expert_size
        )
    return widths


def _check_layers(model: ModelConfig) -> None:
    if model.first_k_dense_replace:
        raise UsageError(
            f"model.first_k_dense_replace={model.first_k_dense_replace}: training runs layers that "
            "are all alike; such a model can be converted and served, or trained with "
            "--model.first_k_dense_replace 0"
        )


def _check_tensor_parallel(model: ModelConfig, tp: int) -> None:
    fitting = fitting_tp(model)
    if tp in fitting:
        return
    choose = f"choose tp from {_listed(fitting)}"
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % tp:
        raise UsageError(f"num_attention_heads={heads} is not divisible by tp={tp}; {choose}")
    if kv_heads % tp and tp % kv_heads:
        raise UsageError(
            f"num_key_value_heads={kv_heads} and tp={tp}: neither divides the other, so they can "
            f"be neither split nor repeated; {choose}"
        )
    name, width = next(item for item in _split_over_tp(model).items() if item[1] % tp)
    raise UsageError(f"{name}={width} is not divisible by tp={tp}; {choose}")


def _check_pipeline(model: ModelConfig, parallel: ParallelConfig, pp: int) -> None:
    layers, chunks, counts = model.num_hidden_layers, parallel.num_chunks, parallel.layer_counts
    parts = pp * chunks
    over = f"pp={pp}" if chunks == 1 else f"pp={pp} x num_chunks={chunks} = {parts}"
    if layers < parts:
        raise UsageError(
            f"num_hidden_layers={layers} is less than {over}, so a stage would hold none; "
            f"choose pp of at most {max(layers // chunks, 1)}"
            + (", or fewer chunks" * (chunks > 1))
        )
    if counts is not None and len(counts) != parts:
        raise UsageError(
            f"parallel.layout={parallel.layout!r} has {len(counts)} counts, but {over} needs "
            f"{parts}; null spreads the layers evenly"
        )
    if counts is not None and sum(counts) != layers:
        raise UsageError(
            f"parallel.layout={parallel.layout!r} adds up to {sum(counts)} layers, but "
            f"num_hidden_layers={layers}"
        )


def _check_vocabulary(model: ModelConfig, pp: int, tp: int) -> None:
    padded, parts = model.padded_vocab_size, pp * tp
    if padded % parts:
        raise UsageError(
            f"the padded vocabulary of {padded} rows is not divisible by pp*tp={parts}; "
            f"set --model.vocab_multiple {math.lcm(model.vocab_multiple, parts)}"
        )


def _check_batch(train: TrainConfig, parallel: ParallelConfig, dp: int) -> None:
    batch, microbatches = train.global_batch_size, parallel.num_microbatches
    parts = dp * microbatches
    if batch % parts:
        below, above = batch // parts * parts, _next_multiple(batch, parts)
        sizes = f"{below} or {above}" if below else str(above)
        raise UsageError(
            f"train.global_batch_size={batch} is not divisible by "
            f"dp={dp} x num_microbatches={microbatches} = {parts}; choose {sizes}"
        )


def _check_length(model: ModelConfig, train: TrainConfig) -> None:
    if train.sequence_length > model.max_sequence_length:
        raise UsageError(
            f"train.sequence_length={train.sequence_length} is longer than the model's "
            f"{model.max_sequence_length} positions; choose at most that, raise "
            f"--model.max_position_embeddings, or set --model.rope_scaling"
        )


def _check_schedule(optimizer: OptimizerConfig, train: TrainConfig) -> None:
    if optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        raise UsageError(
            f"optimizer.decay_steps={optimizer.decay_steps} goes with the schedule wsd; "
            f"{optimizer.schedule} has none: leave it null, or set --optimizer.schedule wsd"
        )
    warmup, decay = optimizer.warmup_steps or 0, optimizer.decay_steps or 0
    if warmup > train.steps:
        raise UsageError(
            f"optimizer.warmup_steps={warmup} is more than train.steps={train.steps}, so the peak "
            f"is never reached; choose at most {train.steps}, or null for 5 % of the steps"
        )
    if warmup + decay > train.steps:
        raise UsageError(
            f"optimizer.warmup_steps={warmup} and decay_steps={decay} do not fit into "
            f"train.steps={train.steps}; choose decay_steps of at most {train.steps - warmup}"
        )


def _check_moments(optimizer: OptimizerConfig, precision: PrecisionConfig) -> None:
    dtype = precision.moment_dtype
    if dtype in (None, "float32"):
        return
    if optimizer.name == "adafactor":
        raise UsageError(
            f"precision.moment_dtype={dtype} does not go with adafactor, whose factored moments "
            "are small and change slowly; choose float32"
        )
    # A bf16 number moves by 2^-8 of itself at least: a smaller step of the average is rounded away.
    if optimizer.name in ("adamw", "adam", "muon") and 1 - optimizer.beta2 < 2**-7:
        raise UsageError(
            f"optimizer.beta2={optimizer.beta2} with precision.moment_dtype={dtype}: its second "
            "moment would stand still; choose beta2 of at most 0.99, or float32"
        )


def too_few_devices(
    mesh: MeshShape, num_devices: int, platform: str, config: "RunConfig | None" = None
) -> UsageError:
    """The error for a `mesh` that needs more than the `num_devices` there are, with the fix.

    Args:
        mesh: The resolved mesh.
        num_devices: Devices over all processes.
        platform: JAX's name of theirs: cpu, gpu, tpu.
        config: The run, if there is one: meshes that are proposed then divide its model and batch.
    """
    rule = (
        f"mesh {mesh} needs {mesh.size} devices, but there {'is' if num_devices == 1 else 'are'} "
        f"{num_devices} ({platform})"
    )
    if platform == "cpu":
        return UsageError(
            f"{rule}; add --simulate, which lets the CPU stand in for {mesh.size} devices, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}"
        )
    fitting = fitting_meshes(num_devices, config)
    if not fitting:
        return UsageError(f"{rule}; no mesh of {num_devices} devices divides this model and batch")
    return UsageError(f"{rule}; meshes of {num_devices} that fit: {_listed(fitting[:8])}")


def fitting_meshes(num_devices: int, config: "RunConfig | None" = None) -> list[MeshShape]:
    """Meshes of exactly `num_devices`, most dp first; with a config those that it divides over."""
    found = []
    for tp in _divisors(num_devices):
        for pp in _divisors(num_devices // tp):
            mesh = MeshShape(dp=num_devices // tp // pp, pp=pp, tp=tp)
            try:
                if config is not None:
                    check_mesh(config, mesh)
            except UsageError:
                continue
            found.append(mesh)
    return sorted(found, key=lambda mesh: (-mesh.dp, mesh.pp))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _listed(numbers: Iterable[object]) -> str:
    return ", ".join(map(str, numbers))
