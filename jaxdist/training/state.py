"""The training state and where each of its arrays lives."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.config import RunConfig
from jaxdist.models.transformer import Transformer
from jaxdist.parallel.layer_order import LayerOrder, at_rest
from jaxdist.parallel.sharding import (
    Rules,
    layouts,
    layouts_of,
    optimizer_specs,
    parameter_specs,
    shardings,
)
from jaxdist.precision import LossScale, Policy
from jaxdist.training.optimizer import state_axes

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step changes, and that a checkpoint holds."""

    step: Array  # [] int32, steps done, skipped ones included; also the data's position
    params: Transformer
    opt_state: Tree
    ema: Transformer | None  # fp32 average of the parameters
    loss_scale: LossScale | None  # fp16 only
    rng: Array  # [] typed key


def initial_state(
    config: RunConfig,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    params: Tree = None,
    *,
    layers: LayerOrder | None = None,
) -> TrainState:
    """The state before the first step; a pure function of `config.seed`, to be jitted.

    `params` is a Transformer to start from; by default a random one, put in the order `layers`.
    """
    rng, key = jax.random.split(jax.random.key(config.seed))
    if params is None:
        params = Transformer(config.model, key=key, param_dtype=policy.param_dtype)
        params = params if layers is None else at_rest(params, layers)
    ema = None
    if config.optimizer.ema_decay is not None:
        ema = jax.tree.map(lambda a: a.astype(jnp.float32), params)
    fp16 = policy.compute_dtype == jnp.float16
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimizer.init(params),
        ema=ema,
        loss_scale=LossScale.initial(config.precision) if fp16 else None,
        rng=rng,
    )


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """PartitionSpecs of the state, and of the gradients on their way into the optimizer."""

    state: Tree  # a TrainState of specs
    gradients: Tree  # like params
    abstract: TrainState

    @classmethod
    def of(
        cls,
        config: RunConfig,
        policy: Policy,
        optimizer: optax.GradientTransformation,
        rules: Rules,
        layers: LayerOrder | None = None,
    ) -> "StateLayout":
        """Layout of a run's state; allocates nothing."""
        init = partial(initial_state, config, policy, optimizer, layers=layers)
        abstract = jax.eval_shape(init)
        tree = layouts(abstract.params, rules)
        moments = layouts_of(
            abstract.opt_state, state_axes(abstract.opt_state, abstract.params), rules
        )
        sharded = optimizer_specs(tree, rules.zero)
        specs = replace(
            jax.tree.map(lambda _: P(), abstract),
            params=parameter_specs(tree, rules.zero),
            opt_state=optimizer_specs(moments, rules.zero),
            ema=None if abstract.ema is None else sharded,
        )
        return cls(state=specs, gradients=sharded, abstract=abstract)

    def shardings(self, mesh: Mesh) -> Tree:
        """`NamedSharding`s of the state."""
        return shardings(mesh, self.state)

    def target(self, mesh: Mesh) -> TrainState:
        """The abstract state with its shardings: what a checkpoint is restored onto."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            self.abstract,
            self.shardings(mesh),
        )
