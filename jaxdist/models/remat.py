"""Which activations a block keeps for its backward pass, and which are computed again.

The names are those that layers, and the ops with residuals of their own, give with
`checkpoint_name`.
"""

from collections.abc import Callable
from typing import Any

import jax

# Outputs of the weighted products. `ops.dot` hides them in a custom_vjp, where JAX's own policies
# for dots do not see them, so they are saved by name.
DOT_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rematerialised(function: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`function` under a remat setting: "none" keeps all, "full" keeps only the inputs.

    Else a comma-separated list of names to keep, in which "dots" stands for `DOT_NAMES`.
    There must be one such boundary around a block: two would cost a fourth forward.
    """
    if remat == "none":
        return function
    if remat == "full":
        return jax.checkpoint(function)
    names: list[str] = []
    for name in remat.split(","):
        names += DOT_NAMES if name.strip() == "dots" else (name.strip(),)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(function, policy=policy)
