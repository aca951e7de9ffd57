"""One token of each row by its probabilities: temperature, filters, and one uniform number.

Shapes: N rows, V columns of the logits, C groups of LANES columns.

The vocabulary is never sorted: a set of likeliest tokens is all that are at least as likely as a
threshold, which is found by bisection, so tokens of one probability are in it or out of it
together. On the CPU a row looks first at the groups of columns that hold its highest logits, and
at all of them only where those do not hold the set.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.inference.sampling import sampler_state as column
from jaxdist.inference.sampling.sampler_state import LANES

HIGHEST_GROUPS = 64  # looked at first


def draw(
    logits_NV: jax.Array, numbers: jax.Array, whole: jax.Array, position: jax.Array, by_row: bool
) -> jax.Array:
    """Tokens [N] by temperature, filters, seed and position."""
    temperature = jnp.maximum(numbers[:, column.TEMPERATURE], 1e-5)  # vLLM's least
    likeliest = jnp.maximum(jnp.max(logits_NV, axis=-1), -3e38)
    # Ratios of the probabilities to the likeliest's.
    ratio_NV = jnp.exp((logits_NV - likeliest[:, None]) / temperature[:, None])
    total = jnp.sum(ratio_NV, axis=-1)
    seed = jax.lax.bitcast_convert_type(whole[:, column.SEED :], jnp.uint32)
    uniform = jax.vmap(
        lambda seed, position: jax.random.uniform(
            jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        )
    )(seed, position)

    def everywhere() -> jax.Array:
        return _inverse(filtered(ratio_NV, total, numbers, whole), uniform)

    ratio_NCL = _groups(ratio_NV, 0)
    if not by_row or ratio_NCL.shape[1] <= HIGHEST_GROUPS:
        return everywhere()
    highest, group = jax.lax.top_k(jnp.max(ratio_NCL, axis=-1), HIGHEST_GROUPS + 1)
    border, group = highest[:, -1], jnp.sort(group[:, :-1], axis=-1)
    few = jnp.take_along_axis(ratio_NCL, group[:, :, None], axis=1).reshape(len(group), -1)

    def among_few() -> jax.Array:
        place = _inverse(filtered(few, total, numbers, whole), uniform)
        chosen = jnp.take_along_axis(group, place[:, None] // LANES, axis=-1)[:, 0]
        return chosen.astype(jnp.int32) * LANES + place % LANES

    all_held = _holds_all(few, border, total, numbers, whole)
    return jax.lax.cond(jnp.all(all_held), among_few, everywhere)


def _holds_all(
    few: jax.Array, border: jax.Array, total: jax.Array, numbers: jax.Array, whole: jax.Array
) -> jax.Array:
    """Whether all that the filters keep is in `few`, which has every ratio above `border` [N].

    top_p needs the sum of what the filters before it keep, so it decides only without them.
    """
    above = few > border[:, None]
    min_p, top_k, top_p = (
        numbers[:, column.MIN_P],
        whole[:, column.TOP_K],
        numbers[:, column.TOP_P],
    )
    alone = (min_p <= 0) & (top_k == column.ALL) & (top_p < 1)
    mass = jnp.sum(jnp.where(above, few, 0), axis=-1)
    enough = (jnp.sum(above, axis=-1) >= top_k) | (alone & (mass >= top_p * total))
    return (min_p > border) | enough


def filtered(
    ratio_NV: jax.Array, total: jax.Array, numbers: jax.Array, whole: jax.Array
) -> jax.Array:
    """`ratio_NV` with 0 for what min_p, top_k, top_p and typical_p leave out.

    ratio_NV: Of all columns, or of some that hold all that is kept. total: Of all columns.
    """

    def step(ratio_NV: jax.Array, applies: jax.Array, keep: Callable[..., jax.Array]) -> jax.Array:
        return jax.lax.cond(
            jnp.any(applies),
            lambda: jnp.where(applies[:, None] & ~keep(ratio_NV), 0, ratio_NV),
            lambda: ratio_NV,
        )

    min_p, top_p, typical_p = (
        numbers[:, i, None] for i in (column.MIN_P, column.TOP_P, column.TYPICAL_P)
    )
    top_k = whole[:, column.TOP_K, None]

    def likeliest(ratio_NV: jax.Array) -> jax.Array:
        def holds(least: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(ratio_NV >= least, 1.0, 0), axis=-1, keepdims=True) >= top_k

        return ratio_NV >= _largest(holds, len(ratio_NV), 1.0)

    def nucleus(ratio_NV: jax.Array) -> jax.Array:
        def mass(least: jax.Array | float) -> jax.Array:
            return jnp.sum(jnp.where(ratio_NV >= least, ratio_NV, 0), axis=-1, keepdims=True)

        unfiltered = (min_p <= 0) & (top_k == column.ALL)
        wanted = top_p * jnp.where(unfiltered, total[:, None], mass(0.0))
        return ratio_NV >= _largest(lambda least: mass(least) >= wanted, len(ratio_NV), 1.0)

    def typical(ratio_NV: jax.Array) -> jax.Array:
        kept = jnp.sum(ratio_NV, axis=-1, keepdims=True)
        log = jnp.log(jnp.where(ratio_NV > 0, ratio_NV, 1))
        distance = jnp.abs(log - jnp.sum(ratio_NV * log, axis=-1, keepdims=True) / kept)

        def holds(most: jax.Array) -> jax.Array:
            mass = jnp.sum(jnp.where(distance < most, ratio_NV, 0), axis=-1, keepdims=True)
            return mass < typical_p * kept

        return distance <= _largest(holds, len(ratio_NV), jnp.inf)

    ratio_NV = step(ratio_NV, min_p[:, 0] > 0, lambda ratio: ratio >= min_p)
    ratio_NV = step(ratio_NV, top_k[:, 0] < column.ALL, likeliest)
    ratio_NV = step(ratio_NV, top_p[:, 0] < 1, nucleus)
    return step(ratio_NV, typical_p[:, 0] < 1, typical)


def _largest(holds: Callable[[jax.Array], jax.Array], num: int, most: float) -> jax.Array:
    """The largest floats [num, 1] in [0, most] for which `holds`, which 0 does and growth ends.

    Floats that are not negative are in the order of their bits, of which it is a bisection: exact.
    """

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds, does not
        middle = low + (high - low) // 2
        yes = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    beyond = int(np.float32(most).view(np.int32)) + 1
    bounds = jnp.zeros((num, 1), jnp.int32), jnp.full((num, 1), beyond, jnp.int32)
    low, _ = jax.lax.fori_loop(0, beyond.bit_length(), narrow, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _inverse(ratio_NV: jax.Array, uniform: jax.Array) -> jax.Array:
    """Where the cumulated `ratio_NV` first exceeds the share `uniform` [N] of its sum.

    In two stages, among groups of columns and within one. Never a column of ratio 0 where there
    is another.
    """

    def stage(ratios: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        cumulated = jnp.cumsum(ratios, axis=-1)
        beyond = (cumulated > target[:, None]) & (ratios > 0)
        # By rounding the sum can end below the target: then the last one.
        last = ratios.shape[1] - 1 - jnp.argmax(ratios[:, ::-1] > 0, axis=-1)
        index = jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last)
        before = jnp.take_along_axis(cumulated - ratios, index[:, None], axis=-1)[:, 0]
        return index.astype(jnp.int32), jnp.maximum(target - before, 0)

    ratio_NCL = _groups(ratio_NV, 0)
    sums_NC = jnp.sum(ratio_NCL, axis=-1)
    group, rest = stage(sums_NC, uniform * jnp.sum(sums_NC, axis=-1))
    within = jnp.take_along_axis(ratio_NCL, group[:, None, None], axis=1)[:, 0]
    return group * LANES + stage(within, rest)[0]


def _groups(values_NV: jax.Array, filler: float) -> jax.Array:
    """[N, C, LANES]."""
    num, num_columns = values_NV.shape
    missing = -num_columns % LANES
    padded = jnp.pad(values_NV, ((0, 0), (0, missing)), constant_values=filler)
    return padded.reshape(num, -1, LANES)
