"""Tiny models in a pipeline on a mesh, and the plain model on one device that they must equal."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig
from jaxdist.models import Transformer, default_context
from jaxdist.models.moe import balancing_loss
from jaxdist.parallel.layer_order import at_rest, in_models_order
from jaxdist.parallel.mesh import make_mesh
from jaxdist.parallel.microbatches import Microbatches
from jaxdist.parallel.pipeline import Pipeline
from jaxdist.parallel.schedules.named import open_schedule
from jaxdist.parallel.schedules.schedule import Schedule
from jaxdist.parallel.sharding import gradient_specs, layouts, parameter_specs, shardings

ROWS, LENGTH = 8, 12  # of a microbatch
EXACT = 1e-5  # of a leaf's largest entry, in fp32

# Heads and layers for every mesh of 8; 61 tokens, a prime, in 64 rows of the table.
TINY = ModelConfig(
    vocab_size=61,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    max_position_embeddings=64,
    vocab_multiple=16,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline and what it is to equal. `scale` multiplies every token's weight."""

    pipeline: Pipeline
    scale: float = 1.0

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return make_mesh(self.pipeline.mesh)

    @cached_property
    def parameters(self) -> Transformer:
        pipeline = self.pipeline
        parallel = pipeline.parallel
        resting = ParallelConfig(
            zero=parallel.zero,
            schedule="interleaved",
            num_chunks=parallel.num_chunks,
            layout=parallel.layout,
        )
        return placed_parameters(replace(pipeline, parallel=resting, schedule=None))

    @cached_property
    def layouts(self) -> Any:
        return layouts(self.parameters, self.pipeline.rules)

    @cached_property
    def gradient_shardings(self) -> Any:
        specs = gradient_specs(self.layouts, self.pipeline.parallel.zero)
        return shardings(self.mesh, specs)

    @cached_property
    def microbatches(self) -> Microbatches:
        whole = self._whole_microbatches
        return jax.device_put(whole, NamedSharding(self.mesh, P(None, "dp")))

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """`(parameters, microbatches) -> (loss, gradients)`"""
        return self._compile(self.pipeline.loss_and_gradients)

    def loss_and_gradients(self) -> tuple[jax.Array, Transformer]:
        loss, gradients = self.compiled(self.parameters, self.microbatches)
        return loss, in_models_order(gradients, self.pipeline.layers)

    def loss(self) -> jax.Array:
        return self._compile(self.pipeline.loss)(self.parameters, self.microbatches)

    def assert_agrees(self, tolerance: float = EXACT) -> None:
        """Loss, gradient norm and every gradient equal those of the plain model."""
        loss, gradients = self.loss_and_gradients()
        want_loss, want = self.plain()
        np.testing.assert_allclose(loss, want_loss, rtol=tolerance)
        np.testing.assert_allclose(_norm(gradients), _norm(want), rtol=tolerance)
        for (path, leaf), want_leaf in zip(
            jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(want), strict=True
        ):
            largest = np.abs(want_leaf).max()
            assert largest > 0, path
            difference = np.abs(np.asarray(leaf) - want_leaf).max() / largest
            assert difference < tolerance, (jax.tree_util.keystr(path), difference)

    def plain(self) -> tuple[jax.Array, Transformer]:
        """Loss and gradients of the plain model on one device, on the same numbers."""
        dtype = jnp.dtype(self.pipeline.compute_dtype)
        model = self.pipeline.model
        loss, gradients = plain_loss_and_gradients(model, self.num_microbatches, dtype)
        return loss * self.scale, jax.tree.map(lambda g: g * self.scale, gradients)

    @property
    def num_microbatches(self) -> int:
        return self.pipeline.schedule.num_microbatches

    @property
    def _whole_microbatches(self) -> Microbatches:
        whole = microbatches_of(self.pipeline.model, self.num_microbatches)
        return replace(whole, weights=whole.weights * np.float32(self.scale))

    def _compile(self, function: Callable[..., Any]) -> jax.stages.Compiled:
        with jax.set_mesh(self.mesh):
            lowered = jax.jit(function).lower(self.parameters, self.microbatches)
            return lowered.compile()


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """`make_case(mesh, zero=, schedule=, num_microbatches=, ...)`: see `_make_case`."""
    return _make_case


def _make_case(
    mesh: str,
    *,
    zero: int = 1,
    schedule: str = "1f1b",
    num_microbatches: int = 4,
    num_chunks: int = 1,
    table: Schedule | None = None,
    dtype: str = "float32",
    skip_bubbles: bool = True,
    scale: float = 1.0,
    model: dict[str, Any] | None = None,
    **parallel: Any,
) -> Case:
    shape = MeshShape.parse(mesh)
    fields = {"num_hidden_layers": 8 if shape.pp == 8 else 4, **(model or {})}
    pipeline = Pipeline(
        model=replace(TINY, **fields),
        parallel=ParallelConfig(
            zero=zero,
            schedule=schedule,
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
            **parallel,
        ),
        mesh=shape,
        schedule=table or open_schedule(schedule, shape.pp, num_microbatches, num_chunks),
        compute_dtype=jnp.dtype(dtype),
        reduce_dtype=jnp.float32,
        skip_bubbles=skip_bubbles,
    )
    return Case(pipeline=pipeline, scale=scale)


def _norm(tree: Any) -> np.float64:
    return np.sqrt(
        sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree))
    )


@cache
def parameters_of(config: ModelConfig) -> Transformer:
    """Random weights, gains around 1; larger than usual, so that every layer weighs in the loss.

    What a norm multiplies by is around 1, so where it adds one to its gain, that is around 0.
    """
    random = np.random.default_rng(1)
    abstract = jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0))

    def leaf(path: tuple[Any, ...], a: jax.ShapeDtypeStruct) -> jax.Array:
        is_gain = "norm" in jax.tree_util.keystr(path) and config.norm != "rmsnorm1p"
        mean = 1.0 if is_gain else 0.0
        return jnp.asarray(mean + 0.1 * random.standard_normal(a.shape), a.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract)


@cache
def placed_parameters(pipeline: Pipeline) -> Transformer:
    whole = at_rest(jax.tree.map(np.asarray, parameters_of(pipeline.model)), pipeline.layers)
    specs = parameter_specs(layouts(whole, pipeline.rules), pipeline.parallel.zero)
    return jax.device_put(whole, shardings(make_mesh(pipeline.mesh), specs))


@cache
def microbatches_of(config: ModelConfig, count: int) -> Microbatches:
    """Random documents with uneven masks, in numpy; microbatch 0 of several has no valid token."""
    random = np.random.default_rng(0)
    shape = (count, ROWS, LENGTH)
    share = np.linspace(0.9, 0.2, count)[:, None, None]
    mask = random.random(shape) < share
    if count > 1:
        mask[0] = False
    segments = np.sort(random.integers(1, 4, shape), axis=-1)
    starts = np.diff(segments, axis=-1, prepend=0) != 0
    index = np.arange(LENGTH)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=-1)
    tokens, labels = random.integers(0, config.vocab_size, (2, *shape))
    weights = (mask / mask.sum()).astype(np.float32)
    whole: dict[str, Any] = dict(
        tokens=tokens, labels=labels, segment_ids=segments, positions=positions
    )
    whole = {name: array.astype(np.int32) for name, array in whole.items()}
    return Microbatches(weights=weights, **whole)


@cache
def plain_loss_and_gradients(
    config: ModelConfig, count: int, dtype: jnp.dtype
) -> tuple[jax.Array, Transformer]:
    """One device, no microbatches, autodiff through the whole model."""
    rows = jax.tree.map(lambda a: a.reshape(-1, LENGTH), microbatches_of(config, count))
    ctx = default_context(config, rows.segment_ids, dtype)

    def loss(model: Transformer) -> jax.Array:
        logits, router = model.with_router(rows.tokens, rows.positions, rows.segment_ids, ctx)
        scores = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(scores, rows.labels[..., None], axis=-1)[..., 0]
        loss = -(picked * rows.weights).sum()
        if router is not None:
            loss += sum(balancing_loss(config, logits, rows.weights) for logits in router)
        return loss

    return jax.jit(jax.value_and_grad(loss))(parameters_of(config))
