"""Which collectives of a scheduled program run beside computation: what lies between each
`-start` and its `-done`."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxdist.parallel.audit import Collective, collective_of
from jaxdist.parallel.hlo import Computation, Module

_WORK = ("fusion", "custom-call", "dot", "convolution", "while", "conditional", "call")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An asynchronous collective, and the instructions that run while it does."""

    collective: Collective
    beside: tuple[str, ...]  # opcodes, in the order of the schedule; empty where it is waited for


def pairs(hlo: str, mesh: Mapping[str, int]) -> list[Pair]:
    """The `-start` / `-done` pairs of a scheduled module, the text of `compiled.as_text()`.

    A pair that the compiler marks as synchronous has nothing beside it.
    """
    found = []
    for visit in Module(hlo).walk():
        instruction = visit.instruction
        if not instruction.opcode.endswith("-start"):
            continue
        collective = collective_of(visit, mesh)
        if collective is None:
            continue
        is_sync = '"is_sync":true' in instruction.attributes
        beside = () if is_sync else _between(visit.computation, instruction.name)
        found.append(Pair(collective=collective, beside=beside))
    return found


def _between(computation: Computation, start: str) -> tuple[str, ...]:
    opcodes, is_running = [], False
    for name, instruction in computation.items():
        if name == start:
            is_running = True
        elif is_running and start in instruction.operands:
            break
        elif is_running and instruction.opcode in _WORK:
            opcodes.append(instruction.opcode)
    return tuple(opcodes)
