"""A layer's backward cut in two: what the stage before waits for, and the weight gradients.

The cut is made in the jaxpr of the whole backward, so it fits every layer: the first half is what
the cotangent of the layer's input (and the gradients of gains and biases, sums that cost nothing)
depends on; the second is the rest, the products that give the gradients of matrices. What the
second takes of the first are the taps, in the main the cotangent of each product's output.

Gradients that the first half makes whatever is asked of it (those of experts whose rows a loop or
a region takes both ways at once) come with it: as taps they would wait for nothing, one for each
microbatch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.extend.core import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

Tree = Any

# Calls whose inside is looked into: else one of them may hold both halves.
_INLINED = {"jit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "closed_call": "call_jaxpr"}


@dataclass(frozen=True, kw_only=True)
class Split:
    """The two halves of one backward, as functions of traced arrays.

    Attributes:
        early: (known, cotangents) -> (cotangent of x, gradients that come early, taps).
        late: (known, taps) -> gradients that come late.
        is_late: For each parameter leaf whether its gradient comes late.
    """

    early: Callable[[Sequence[Array], Sequence[Array]], tuple[Array, list[Array], list[Array]]]
    late: Callable[[Sequence[Array], Sequence[Array]], list[Array]]
    is_late: list[bool]


def split_backward(
    backward: Callable[[Sequence[Array], Sequence[Array]], tuple[Sequence[Array], Array]],
    known: Sequence[Array],
    cotangents: Sequence[Array],
    is_late: list[bool],
) -> Split:
    """Cut `backward`: (known, cotangents) -> (gradients, cotangent of x), traced on these arrays.

    `known` is what the halves can both be given: residuals, parameters and inputs; `is_late` is
    which gradients may come late.
    """

    def flat(known: Sequence[Array], cotangents: Sequence[Array]) -> list[Array]:
        jaxpr = jax.make_jaxpr(lambda *args: _flat(backward(*args)))(known, cotangents)
        return _inlined(jaxpr.jaxpr, jaxpr.consts, [*known, *cotangents])

    closed = jax.make_jaxpr(flat)(known, cotangents)
    jaxpr = closed.jaxpr
    known_vars, given = jaxpr.invars[: len(known)], jaxpr.invars[len(known) :]
    *gradients, dx = jaxpr.outvars
    asked = [g for g, late in zip(gradients, is_late, strict=True) if not late]
    anyway = {var for eqn in _needed(jaxpr, [dx, *asked], ()) for var in eqn.outvars}
    casts = _casts(jaxpr)
    is_late = [
        late and _uncast(g, casts) not in anyway for g, late in zip(gradients, is_late, strict=True)
    ]
    early_out = [g for g, late in zip(gradients, is_late, strict=True) if not late]
    late_out = [g for g, late in zip(gradients, is_late, strict=True) if late]
    first = _needed(jaxpr, [dx, *early_out], ())
    made = {var for eqn in first for var in eqn.outvars} | set(given)
    second = _needed(jaxpr, late_out, first)
    used = {v for eqn in second for v in eqn.invars if isinstance(v, Var)}
    used |= {v for v in late_out if isinstance(v, Var)}
    taps = [v for v in (*given, *(v for eqn in first for v in eqn.outvars)) if v in made & used]

    first_half = _function(jaxpr, [*known_vars, *given], first, [dx, *early_out, *taps])
    second_half = _function(jaxpr, [*known_vars, *taps], second, late_out)
    num_early = len(early_out)

    def early(
        known: Sequence[Array], cotangents: Sequence[Array]
    ) -> tuple[Array, list[Array], list[Array]]:
        dx, *rest = first_half(closed.consts, [*known, *cotangents])
        return dx, rest[:num_early], rest[num_early:]

    def late(known: Sequence[Array], tapped: Sequence[Array]) -> list[Array]:
        return second_half(closed.consts, [*known, *tapped])

    return Split(early=early, late=late, is_late=is_late)


def _flat(out: tuple[Sequence[Array], Array]) -> list[Array]:
    return [*out[0], out[1]]


def _casts(jaxpr: Jaxpr) -> dict[Var, Any]:
    """By what a change of dtype gives: what it is given."""
    return {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "convert_element_type"
    }


def _uncast(value: Any, casts: dict[Var, Any]) -> Any:
    while isinstance(value, Var) and value in casts:
        value = casts[value]
    return value


def _needed(jaxpr: Jaxpr, outs: Iterable[Any], without: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations that `outs` depend on, but for those of `without`, in their order."""
    wanted = {v for v in outs if isinstance(v, Var)}
    left_out = {id(eqn) for eqn in without}
    found = []
    for eqn in reversed(jaxpr.eqns):
        if id(eqn) not in left_out and wanted & set(eqn.outvars):
            found.append(eqn)
            wanted |= {v for v in eqn.invars if isinstance(v, Var)}
    return found[::-1]


def _function(
    jaxpr: Jaxpr, args: Sequence[Var], eqns: Sequence[JaxprEqn], outs: Sequence[Any]
) -> Callable[[Sequence[Array], Sequence[Array]], list[Array]]:
    """(values of `jaxpr.constvars`, values of `args`) -> values of `outs`."""
    part = jaxpr.replace(
        constvars=[], invars=[*jaxpr.constvars, *args], outvars=list(outs), eqns=list(eqns)
    )
    run = jaxpr_as_fun(ClosedJaxpr(part, ()))
    return lambda consts, values: run(*consts, *values)


def _inlined(jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    """Run a jaxpr with the calls of `_INLINED` opened."""
    env: dict[Var, Array] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )

    def read(variables: Iterable[Any]) -> list[Any]:
        return [v.val if isinstance(v, Literal) else env[v] for v in variables]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _INLINED:
            inner = eqn.params[_INLINED[eqn.primitive.name]]
            closed = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            env |= zip(eqn.outvars, _inlined(*closed, read(eqn.invars)), strict=True)
        else:
            own = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
            kept = [v for v in eqn.outvars if not isinstance(v, DropVar)]
            run = _function(jaxpr.replace(constvars=[]), own, [eqn], kept)
            env |= zip(kept, run((), read(own)), strict=True)
    return read(jaxpr.outvars)
