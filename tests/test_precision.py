import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxdist.config import PrecisionConfig
from jaxdist.precision import LossScale, Policy

CONFIG = PrecisionConfig(
    policy="fp16",
    loss_scale_init=16.0,
    loss_scale_growth_interval=3,
    loss_scale_hysteresis=2,
    loss_scale_min=2.0,
)


def run(finite: str, config: PrecisionConfig = CONFIG, start: LossScale | None = None) -> LossScale:
    """State after one step per letter: `.` finite, `x` overflow."""
    state = LossScale.initial(config) if start is None else start
    update = jax.jit(lambda state, finite: state.update(finite, config))
    for letter in finite:
        state = update(state, jnp.bool_(letter == "."))
    return state


@pytest.mark.parametrize(
    ("policy", "compute"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_policies_keep_fp32_masters_reductions_and_moments(policy, compute):
    dtypes = Policy.from_config(PrecisionConfig(policy=policy))
    assert dtypes.compute_dtype == jnp.dtype(compute)
    assert dtypes.param_dtype == dtypes.reduce_dtype == dtypes.moment_dtype == jnp.float32


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "reduce_dtype", "moment_dtype"])
def test_each_field_of_a_policy_can_be_set_alone(field):
    default = Policy.from_config(PrecisionConfig(policy="fp32"))
    config = dataclasses.replace(PrecisionConfig(policy="fp32"), **{field: "bfloat16"})
    changed = Policy.from_config(config)
    assert changed == dataclasses.replace(default, **{field: jnp.dtype("bfloat16")})


def test_hysteresis_forgives_overflows_before_the_scale_halves():
    assert run("x").scale == 16
    assert run("xx").scale == 8
    assert run("xxx").scale == 4  # used up: each further one halves
    assert run("x.x").scale == 8  # good steps alone do not give it back


def test_growth_after_an_interval_of_good_steps_in_a_row():
    assert run("..").scale == 16
    assert run("...").scale == 32
    assert run("..x...").scale == 32  # an overflow starts the count anew
    assert run("..x..").scale == 16
    assert run("x...").hysteresis_left == 2  # growth gives the hysteresis back


def test_scale_stays_at_its_floor_and_leaves_it_again():
    state = run("x" * 20)
    assert state.scale == 2 and state.at_floor(CONFIG)
    assert run("...", start=state).scale == 4


def test_scale_is_capped_above():
    config = dataclasses.replace(CONFIG, loss_scale_init=2.0**23, loss_scale_growth_interval=1)
    assert run("...", config).scale == 2.0**24


def test_overflows_are_counted_over_the_run():
    assert run("x.x...x").overflows == 3


def test_state_is_four_scalars_that_continue_where_they_were():
    state = run("..x.xx.")
    leaves, structure = jax.tree.flatten(state)
    assert [(leaf.shape, str(leaf.dtype)) for leaf in leaves] == [
        ((), "float32"),
        ((), "int32"),
        ((), "int32"),
        ((), "int32"),
    ]
    saved = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
    whole = run("..x.xx." + "...x.")
    assert jax.tree.leaves(run("...x.", start=saved)) == jax.tree.leaves(whole)
