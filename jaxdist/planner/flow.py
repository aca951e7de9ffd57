"""What is sent over some mesh axes, as `traffic.py` adds it up: flows, and how often they run."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What one part of the step has to send over some mesh axes, in bytes of one device a step."""

    axes: tuple[str, ...]
    part: str  # the scope that the program gives it
    least: float = 0.0
    in_bubbles: float = 0.0  # on top of it, by slots that are empty
    formula: str


@dataclass(frozen=True)
class Turns:
    """How often something is done in a step: for a microbatch, and in an empty slot."""

    useful: float
    idle: float = 0.0


ONCE = Turns(1.0)


def half(members: int) -> float:
    """What a member sends of a payload in half an all-reduce."""
    return (members - 1) / members


def add(flow: Flow, unit: float, turns: Iterable[Turns]) -> Flow:
    """`flow` with `unit` bytes for each turn."""
    useful, idle = (sum(getattr(t, name) for t in turns) for name in ("useful", "idle"))
    return replace(flow, least=flow.least + unit * useful, in_bubbles=flow.in_bubbles + unit * idle)


def joined(one: Flow, other: Flow) -> Flow:
    """Two flows of one part over the same axes."""
    return replace(
        one,
        least=one.least + other.least,
        in_bubbles=one.in_bubbles + other.in_bubbles,
        formula=f"{one.formula}, {other.formula}",
    )
