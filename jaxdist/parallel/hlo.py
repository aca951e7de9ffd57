"""Reading the text of an optimized HLO module: its computations, and how often its loops turn."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)(?= [a-z])|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """`%name = type opcode(operands), attributes`"""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # all that stands between the parentheses: of a constant, its value
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        """The first group of `pattern` in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    def called(self, role: str) -> str:
        """Name of the computation that this instruction calls as its `role`, e.g. "body"."""
        return self.attribute(rf"\b{role}=%([\w.\-]+)") or ""

    def array_bytes(self) -> list[int]:
        """Bytes of each array of the result; a tuple has several. `pred` takes a byte."""
        return [
            math.ceil(math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) / 8)
            for _, bits, dims in _ARRAY.findall(self.type)
        ]


Computation = dict[str, Instruction]


class Module:
    """The computations of a module; `walk` visits what a run of its entry executes."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations[header.group(2)] = {}
                self.entry = header.group(2) if header.group(1) else self.entry
            elif found := _INSTRUCTION.match(line):
                name, type_, opcode, rest = found.groups()
                inside, attributes = _split_at_closing(rest)
                current[name] = Instruction(
                    name=name,
                    type=type_,
                    opcode=opcode,
                    operands=tuple(_NAME.findall(inside)),
                    literal=inside,
                    attributes=attributes,
                )

    def walk(self) -> Iterator["Visit"]:
        """Every instruction that is executed, in program order, called computations included."""
        yield from self._walk(self.entry, Place())

    def _walk(self, name: str, place: "Place") -> Iterator["Visit"]:
        computation = self.computations[name]
        begun: set[str] = set()
        for instruction in computation.values():
            yield Visit(instruction, computation, place)
            if instruction.opcode == "while":
                trips = self._trip_count(computation, instruction)
                # The condition is asked once more than the body runs.
                asked = None if trips is None else trips + 1
                yield from self._walk(instruction.called("condition"), place.repeated(asked))
                yield from self._walk(instruction.called("body"), place.repeated(trips))
            elif instruction.opcode == "conditional":
                for branch in _branches(instruction):
                    yield from self._walk(branch, replace(place, in_branch=True))
            elif instruction.opcode == "call":
                yield from self._walk(instruction.called("to_apply"), place)
            elif instruction.opcode in ("fusion", "async-start"):
                inside = self._walk(instruction.called("calls"), place)
                yield from (visit for visit in inside if not _goes_on(visit.instruction, begun))

    # -- loops ------------------------------------------------------------------------------

    def _trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
        return int(known) if known else self._counted(computation, loop)

    def _counted(self, computation: Computation, loop: Instruction) -> int | None:
        """Trips of a loop that goes from one constant to another in steps of a third, else None."""
        condition = self.computations[loop.called("condition")]
        body = self.computations[loop.called("body")]
        compare, (counter, bound) = self._root(condition, [*condition.values()][-1])
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            return None
        place = counter.attribute(r"\bindex=(\d+)")
        results, initial = [*body.values()][-1], computation[loop.operands[0]]
        if place is None or results.opcode != "tuple" or initial.opcode != "tuple":
            return None
        start = _through_copies(computation, initial.operands[int(place)])
        update, terms = self._root(body, _through_copies(body, results.operands[int(place)]))
        if update.opcode != "add":
            return None
        old, step = sorted(terms, key=lambda term: term.opcode == "constant")
        if old.attribute(r"\bindex=(\d+)") != place:
            return None
        if any(value.opcode != "constant" for value in (start, bound, step)):
            return None
        first, last, by = (int(value.literal) for value in (start, bound, step))
        return max(0, -(-(last - first) // by)) if by > 0 else None

    def _root(
        self, computation: Computation, instruction: Instruction
    ) -> tuple[Instruction, list[Instruction]]:
        """An operation of two scalars and its operands, looked up inside a fusion that wraps it."""
        operands = [_through_copies(computation, name) for name in instruction.operands]
        if instruction.opcode != "fusion":
            return instruction, (operands * 2)[:2]
        inner = self.computations[instruction.called("calls")]
        root = [*inner.values()][-1]
        outer = []
        for name in root.operands:
            operand = _through_copies(inner, name)
            is_parameter = operand.opcode == "parameter"
            outer.append(operands[int(operand.literal)] if is_parameter else operand)
        return root, (outer * 2)[:2]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where in a run an instruction is executed, and how often."""

    count: int | None = 1  # executions in a run, None where a loop's trip count is unknown
    in_loop: bool = False
    in_branch: bool = False  # inside a conditional; `count` is as if its branch was always taken

    def repeated(self, trips: int | None) -> "Place":
        count = None if trips is None or self.count is None else trips * self.count
        return replace(self, count=count, in_loop=True)


@dataclass(frozen=True)
class Visit:
    """One instruction where it is executed."""

    instruction: Instruction
    computation: Computation  # that holds it: where its operands are found
    place: Place


def _goes_on(instruction: Instruction, begun: set[str]) -> bool:
    """Whether it is a collective of `begun`, to which it is added otherwise.

    XLA:TPU runs a collective beside the fusions of a chain, and names it again in each of them.
    """
    chain = instruction.attribute(r'\bchain_id="(\w+)"')
    if chain is None or chain not in begun:
        begun.update(() if chain is None else (chain,))
        return False
    return True


def _through_copies(computation: Computation, name: str) -> Instruction:
    while computation[name].opcode == "copy":
        name = computation[name].operands[0]
    return computation[name]


def _branches(conditional: Instruction) -> list[str]:
    if listed := conditional.attribute(r"branch_computations=\{([^}]*)\}"):
        return _NAME.findall(listed)
    return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", conditional.attributes)


def _split_at_closing(text: str) -> tuple[str, str]:
    """What precedes and what follows the parenthesis that closes one opened before `text`."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""
