"""jaxdist as a contender: the trainer's own set-up and compiled step, fed from memory."""

from typing import Any

import numpy as np

from bench.spec import BETAS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Feed, Shape, Spec
from bench.worker import Run
from jaxdist import platform
from jaxdist.config import (
    MeshShape,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)


def start(spec: Spec) -> tuple[Run, dict]:
    """Compile the step and make the state; see `bench.worker`."""
    if spec.device == "cpu":
        platform.simulate_devices(MeshShape.parse(spec.mesh).size)
        platform.keep_freed_memory()
    import jax

    from jaxdist.training.flops import flops_per_token, peak_flops
    from jaxdist.training.setup import Setup

    config = run_config(spec)
    if spec.job == "compile":
        jax.config.update("jax_enable_compilation_cache", False)
        return _compiler(config), {"losses": [], "num_parameters": None}
    setup = Setup.of(config)
    state = setup.initial_state()
    step = setup.compile_train_step()
    feed = Feed(_placed(spec.shape, setup.abstract_batch().tokens))

    def run(steps: int) -> list[float]:
        nonlocal state
        losses = []
        for batch in feed.take(steps):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        jax.block_until_ready(state)
        return [float(loss) for loss in losses]

    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    about = {"losses": [], "num_parameters": count, "jax": jax.__version__}
    if spec.device == "gpu":
        about["device"] = jax.devices()[0].device_kind
        about["flops_per_token"] = flops_per_token(config.model, spec.shape.length)
        about["peak_flops"] = peak_flops(1, setup.policy.compute_dtype)
    return run, about


def run_config(spec: Spec) -> RunConfig:
    """The run that `spec` describes."""
    shape = spec.shape
    return RunConfig(
        mesh=spec.mesh,
        simulate=spec.device == "cpu",
        model=ModelConfig(**shape.model_fields()),
        parallel=ParallelConfig(zero=1, num_microbatches=spec.num_microbatches, remat="none"),
        precision=PrecisionConfig(policy=spec.precision),
        optimizer=OptimizerConfig(
            name="adamw",
            learning_rate=LEARNING_RATE,
            schedule="constant",
            warmup_steps=0,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
        ),
        train=TrainConfig(global_batch_size=shape.rows, sequence_length=shape.length),
    )


def _placed(shape: Shape, like: Any) -> list:
    """The batches on the devices, shaped and sharded as the array `like`; no row has padding."""
    import jax

    from jaxdist.training.step import Batch

    def place(rows: np.ndarray) -> jax.Array:
        return jax.device_put(rows.astype(np.int32).reshape(like.shape), like.sharding)

    size = (shape.rows, shape.length)
    ones, positions = place(np.ones(size)), place(np.broadcast_to(np.arange(shape.length), size))
    return [
        Batch(
            tokens=place(tokens),
            labels=place(labels),
            loss_mask=ones,
            segment_ids=ones,
            positions=positions,
        )
        for tokens, labels in shape.batches()
    ]


def _compiler(config: RunConfig) -> Run:
    """A turn traces, lowers and compiles the step from nothing."""
    import jax

    from jaxdist.training.setup import Setup

    def run(steps: int) -> list[float]:
        for _ in range(steps):
            jax.clear_caches()
            Setup.of(config).compile_train_step()
        return []

    return run
