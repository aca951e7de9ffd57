"""What a training step takes of one device's memory, by formula: no device, no compiler, no JAX.

Every term is an array that the program really holds: parameters, gradients and moments in the
layout of the ZeRO stage; the rings of the schedule, whose slots the simulator counts; and what one
layer's backward and one scored microbatch need while they run.

XLA:CPU works on 16-bit numbers as fp32: what is kept has its 16 bits there too, but the layer and
the microbatch at work take as much as with fp32, but for what a layer makes again to keep it for
its weight gradients, and for operands of products on CPUs that multiply bf16. XLA:TPU (libtpu
0.0.42) makes weights of 16 bits of all layers before the loops over them, where the others make
those of the layer at work, and copies parameters that a gather is to replace before it runs
anything.

Shapes: B rows of a microbatch on this dp member, T tokens, D hidden size, K rows of a stretch.
"""

from dataclasses import dataclass, replace

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig, RunConfig
from jaxdist.config.compute import POLICIES
from jaxdist.ops.row_blocks import rows_of_block
from jaxdist.parallel.schedules.schedule import Schedule
from jaxdist.planner.activations import Layer
from jaxdist.planner.parameters import Counts

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WIDE = 4  # bytes of the numbers that a CPU works with
_MOMENTS = {"adamw": 2, "adam": 2, "muon": 1, "lion": 1, "sgd": 1, "adafactor": 0}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device."""

    parameters: int
    gradients: int  # the accumulators, and the shards that they are reduced into
    optimizer: int  # moments, and the EMA if there is one
    activations: int  # saved from forward to backward on the device
    host: int  # the same, where they wait in the host's memory
    handed_on: int  # activations and cotangents between ticks and between stages
    working: int  # what one layer and one scored microbatch need while they run
    converted: int  # on TPUs the weights in the compute dtype, where it is another
    copied: int  # on TPUs the parameters that are gathered anew (ZeRO-1 and 2)
    starting: int  # before them: rings of zeros on their way to the host
    updating: int  # after them: new parameters, gathered beside the old ones (ZeRO-1 and 2)

    @property
    def peak(self) -> int:
        """The most that the device holds at once."""
        kept = self.parameters + self.gradients + self.optimizer
        running = self.activations + self.handed_on + self.working
        running += self.converted + self.copied
        return kept + max(self.starting, running, self.updating)


def estimate(
    config: RunConfig,
    mesh: MeshShape,
    schedule: Schedule,
    *,
    platform: str = "gpu",
    bf16_products: bool = False,
) -> Memory:
    """The memory of a step of `config` on `mesh` (without -1) by `schedule`.

    platform: JAX's name. bf16_products: Whether a CPU multiplies bf16 as it is (`ops/product.py`).
    """
    parallel, train = config.parallel, config.train
    dtypes = _dtypes(config)
    rows = train.global_batch_size // (mesh.dp * parallel.num_microbatches)
    layer = Layer(
        model=config.model,
        rows=rows,
        length=train.sequence_length,
        tp=mesh.tp,
        sequence_parallel=parallel.sequence_parallel,
        bytes=dtypes["compute"],
        row_block=_row_block(config.model, rows * train.sequence_length, mesh.tp, platform),
    )
    at_work = layer
    if platform == "cpu":
        narrow_products = bf16_products and _compute_dtype(config) == "bfloat16"
        operand = layer.bytes if narrow_products else None
        wide = max(layer.bytes, _WIDE)
        at_work = replace(layer, bytes=wide, operand=operand, stored=layer.bytes)
    narrow = 0
    if schedule.taps is not None:
        narrow = at_work.made_again(parallel.remat) - layer.made_again(parallel.remat)
    most = _longest_stretch(config.model, mesh, schedule, parallel.layer_counts)
    saved = schedule.residuals.size * most * layer.saved(parallel.remat)
    taps = 0 if schedule.taps is None else schedule.taps.size * most * layer.taps(parallel.remat)
    counts = Counts.of(config.model, mesh, most * schedule.num_chunks)
    states = _states(config, counts, mesh.dp, dtypes)
    on_tpu, in_16_bits = platform == "tpu", dtypes["compute"] < dtypes["param"]
    gathered = states["parameters"] if parallel.zero in (1, 2) and mesh.dp > 1 else 0
    return Memory(
        **states,
        activations=taps + (0 if parallel.offload_activations else saved),
        host=saved if parallel.offload_activations else 0,
        handed_on=_handed_on(schedule) * layer.stream,
        working=max(
            at_work.working(parallel.remat) - narrow,
            at_work.scoring(config.model.padded_vocab_size // (mesh.pp * mesh.tp)),
        )
        + counts.in_passing(parallel.zero, mesh.dp, dtypes["compute"], dtypes["reduce"]),
        converted=states["parameters"] // 2 if on_tpu and in_16_bits else 0,
        copied=gathered if on_tpu else 0,
        starting=_starting(layer, parallel, schedule.residuals.size * most),
        updating=gathered,
    )


def _row_block(model: ModelConfig, tokens: int, tp: int, platform: str) -> int:
    """To how many rows a member's experts are padded each."""
    if not model.num_experts:
        return 1
    choices = tokens * model.num_experts_per_tok
    return rows_of_block(choices, model.num_experts // tp, platform)


def _states(config: RunConfig, counts: Counts, dp: int, dtypes: dict[str, int]) -> dict[str, int]:
    zero, optimizer = config.parallel.zero, config.optimizer
    whole, shard = counts.total, counts.shard(dp)
    moments = _MOMENTS[optimizer.name]
    if optimizer.name == "sgd" and not optimizer.momentum:
        moments = 0
    kept = shard if zero >= 1 else whole
    averages = 4 * kept if optimizer.ema_decay is not None else 0
    accumulators = (shard if zero >= 2 else whole) * dtypes["reduce"]
    return {
        "parameters": (shard if zero >= 3 else whole) * dtypes["param"],
        "gradients": accumulators + (shard * dtypes["reduce"] if zero == 1 and dp > 1 else 0),
        "optimizer": moments * kept * dtypes["moment"] + averages,
    }


def _starting(layer: Layer, parallel: ParallelConfig, rows: int) -> int:
    """The two largest rings: XLA makes one while the one before it is sent to the host."""
    if not parallel.offload_activations:
        return 0
    return rows * sum(layer.largest_saved(parallel.remat)[:2])


def _handed_on(schedule: Schedule) -> int:
    """Arrays [B, T, D] that wait between ticks: what has arrived, and rings of what came early."""
    rings = (schedule.down_inbox, schedule.up_inbox, schedule.waiting)
    return 2 + 2 * schedule.lead + sum(ring.size for ring in rings if ring is not None)


def _longest_stretch(
    model: ModelConfig, mesh: MeshShape, schedule: Schedule, counts: tuple[int, ...] | None
) -> int:
    if counts is not None:
        return max(counts)
    return -(-model.num_hidden_layers // (mesh.pp * schedule.num_chunks))


def _dtypes(config: RunConfig) -> dict[str, int]:
    """Bytes of a number in each role."""
    precision = config.precision
    roles = {
        "param": precision.param_dtype or "float32",
        "compute": _compute_dtype(config),
        "reduce": precision.reduce_dtype or "float32",
        "moment": precision.moment_dtype or "float32",
    }
    return {role: _BYTES[dtype] for role, dtype in roles.items()}


def _compute_dtype(config: RunConfig) -> str:
    return config.precision.compute_dtype or POLICIES[config.precision.policy]
