"""What a compiled step really sends: the collectives in its HLO text, by mesh axis.

Read by `--dry-run`, by the tests that hold the step to the design's traffic, and wherever traffic
is compared with theory. Nothing here runs or compiles anything.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "collective-broadcast",
    "ragged-all-to-all",
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction of a compiled program.

    `bytes` is the payload of one execution on one device: the array that the operation is about as
    the group sees it, so the operand of an all-reduce, reduce-scatter, permute or all-to-all, and
    the result of an all-gather; arrays that the compiler combined are added up.
    """

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # mesh axes that its groups span, in the mesh's order
    group_size: int  # members of a group; of a permute the places in its ring
    bytes: int
    num_arrays: int  # combined in this one instruction
    count: int | None  # executions in a step, None where a loop's trip count is unknown
    in_branch: bool  # inside a conditional; `count` then is as if its branch was always taken
    scope: str  # JAX's name stack, e.g. "jit(step)/shard_map/while/body/psum"

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in one execution by the bandwidth-optimal (ring) algorithm.

        With group size n: 2 (n-1)/n of the payload for an all-reduce, all of it for a permute or
        a broadcast, (n-1)/n for the others (Patarasuk & Yuan, 2009).
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        share = (self.group_size - 1) / self.group_size * self.bytes
        return 2 * share if self.kind == "all-reduce" else share


def collectives(hlo: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of an optimized HLO module, `compiled.as_text()`.

    `mesh` gives the axis sizes in order, as `Mesh.shape` does: HLO counts devices by their place
    in the mesh, whatever their ids. Groups of one device are left out, as they send nothing.
    Loops are multiplied out. Raises `ValueError` on groups in a spelling that is not known here.
    """
    return list(_Module(hlo, mesh).walk())


@dataclass(frozen=True)
class _Instruction:
    """`%name = type opcode(operands), attributes`"""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses: a constant's or a parameter's number
    attributes: str

    def attribute(self, pattern: str) -> str | None:
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None


_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)(?= [a-z])|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


class _Module:
    """The computations of a module and the walk from its entry."""

    def __init__(self, hlo: str, mesh: Mapping[str, int]):
        self.axes, self.sizes = tuple(mesh), tuple(mesh.values())
        self.computations: dict[str, dict[str, _Instruction]] = {}
        self.entry = ""
        current: dict[str, _Instruction] = {}
        for line in hlo.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations[header.group(2)] = {}
                self.entry = header.group(2) if header.group(1) else self.entry
            elif found := _INSTRUCTION.match(line):
                name, type_, opcode, rest = found.groups()
                inside, attributes = _split_at_closing(rest)
                operands = tuple(_NAME.findall(inside))
                current[name] = _Instruction(name, type_, opcode, operands, inside, attributes)

    def walk(self) -> Iterator[Collective]:
        return self._walk(self.entry, 1, False)

    def _walk(self, name: str, count: int | None, in_branch: bool) -> Iterator[Collective]:
        for instruction in self.computations[name].values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                yield from self._collective(kind, name, instruction, count, in_branch)
            elif instruction.opcode == "while":
                trips = self._trip_count(name, instruction)
                inner = None if trips is None or count is None else trips * count
                body = instruction.attribute(r"\bbody=%([\w.\-]+)")
                condition = instruction.attribute(r"\bcondition=%([\w.\-]+)")
                # The condition is asked once more than the body runs.
                asked = None if inner is None or count is None else inner + count
                yield from self._walk(str(condition), asked, in_branch)
                yield from self._walk(str(body), inner, in_branch)
            elif instruction.opcode == "conditional":
                for branch in _branches(instruction):
                    yield from self._walk(branch, count, True)
            elif called := instruction.attribute(r"\bcalls=%([\w.\-]+)"):
                yield from self._walk(called, count, in_branch)
            elif instruction.opcode == "call":
                called = instruction.attribute(r"\bto_apply=%([\w.\-]+)")
                yield from self._walk(str(called), count, in_branch)

    def _collective(
        self,
        kind: str,
        computation: str,
        instruction: _Instruction,
        count: int | None,
        in_branch: bool,
    ) -> Iterator[Collective]:
        groups = self._groups(instruction)
        axes = self._axes(groups)
        if not axes:
            return
        if kind == "collective-permute":
            size = math.prod(self.sizes[self.axes.index(axis)] for axis in axes)
        else:
            size = groups.shape[1]
        table = self.computations[computation]
        arrays = list(
            chain.from_iterable(_ARRAY.findall(table[name].type) for name in instruction.operands)
        )
        payload = sum(_num_bytes(*array) for array in arrays)
        yield Collective(
            kind=kind,
            axes=axes,
            group_size=size,
            bytes=payload * size if kind == "all-gather" else payload,
            num_arrays=len(arrays),
            count=count,
            in_branch=in_branch,
            scope=instruction.attribute(r'op_name="([^"]*)"') or "",
        )

    def _groups(self, instruction: _Instruction) -> np.ndarray:
        """[groups, members] places in the mesh; of a permute [pairs, 2]."""
        text = instruction.attributes
        if pairs := instruction.attribute(r"source_target_pairs=\{(\{[\d,{}]*\})\}"):
            return _listed(pairs)
        if groups := instruction.attribute(r"replica_groups=\{(\{[\d,{}]*\})\}"):
            return _listed(groups)
        if "replica_groups={}" in text:
            return np.arange(math.prod(self.sizes))[None]
        iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
        if iota is None:
            raise ValueError(f"{instruction.opcode} with groups in an unknown spelling: {text}")
        shape, dims, order = (_numbers(part) if part else None for part in iota.groups())
        places = np.arange(math.prod(dims or ())).reshape(dims or ())
        return places.transpose(order).reshape(shape or ())

    def _axes(self, groups: np.ndarray) -> tuple[str, ...]:
        """The mesh axes along which the members of some group differ."""
        coordinates = np.stack(np.unravel_index(groups, self.sizes))
        differ = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
        return tuple(axis for axis, differs in zip(self.axes, differ, strict=True) if differs)

    # -- loops ------------------------------------------------------------------------------

    def _trip_count(self, computation: str, loop: _Instruction) -> int | None:
        known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}')
        return int(known) if known else self._counted(computation, loop)

    def _counted(self, computation: str, loop: _Instruction) -> int | None:
        """Trips of a loop that counts from a constant by a constant up to a constant, else None."""
        condition = self.computations[str(loop.attribute(r"\bcondition=%([\w.\-]+)"))]
        body = self.computations[str(loop.attribute(r"\bbody=%([\w.\-]+)"))]
        compare = list(condition.values())[-1]
        if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
            return None
        counter, bound = (condition[name] for name in compare.operands)
        index = counter.attribute(r"\bindex=(\d+)")
        start_tuple = self.computations[computation][loop.operands[0]]
        if index is None or start_tuple.opcode != "tuple":
            return None
        start = self.computations[computation][start_tuple.operands[int(index)]]
        result = list(body.values())[-1]
        update = body[result.operands[int(index)]] if result.opcode == "tuple" else result
        if update.opcode != "add":
            return None
        old, step = sorted((body[name] for name in update.operands), key=_is_constant)
        constants = (start, step, bound)
        if old.attribute(r"\bindex=(\d+)") != index or not all(map(_is_constant, constants)):
            return None
        first, by, end = (int(constant.literal) for constant in constants)
        return max(0, -(-(end - first) // by)) if by > 0 else None


def _is_constant(instruction: _Instruction) -> bool:
    return instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal) is not None


def _branches(conditional: _Instruction) -> list[str]:
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


def _num_bytes(kind: str, bits: str, dims: str) -> int:
    """Size of an array; `pred` and the like take a byte, `token` has no shape and is no array."""
    return math.ceil(math.prod(_numbers(dims)) * int(bits or 8) / 8)


def _listed(groups: str) -> np.ndarray:
    return np.array([_numbers(group) for group in re.findall(r"\{([\d,]*)\}", groups)])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
