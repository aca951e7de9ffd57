"""What a compiled step really sends: the collectives in its HLO text, by mesh axis.

Read by `--dry-run`, by the tests that hold the step to the design's traffic, and wherever traffic
is compared with theory. Nothing here compiles or runs anything.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxdist.parallel.hlo import Instruction, Module, Visit

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

    A payload is the array that the operation is about, as a member of the group sees it: the
    operand of an all-reduce, reduce-scatter, permute or all-to-all, the result of an all-gather.
    Its dtype is the compiled one: XLA:CPU, for one, reduces bf16 as fp32.
    """

    kind: str  # one of KINDS
    axes: tuple[str, ...]  # mesh axes that its groups span, in the mesh's order
    group_size: int  # members of a group; of a permute, places in its ring
    payloads: tuple[int, ...]  # bytes of each array on one device; a compiler may combine several
    count: int | None  # executions in a step, None where a loop's trip count is unknown
    in_loop: bool
    in_branch: bool  # inside a conditional; `count` then is as if its branch was always taken
    scope: str  # JAX's name stack, e.g. "jit(step)/shard_map/while/body/psum"

    @property
    def bytes(self) -> int:
        """Payload of one execution on one device."""
        return sum(self.payloads)

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends in one execution by a bandwidth-optimal algorithm.

        With n members: 2 (n-1)/n of the payload for an all-reduce, all of it for a permute or a
        broadcast, (n-1)/n for the others (Patarasuk & Yuan, doi:10.1016/j.jpdc.2008.09.002).
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        share = self.bytes * (self.group_size - 1) / self.group_size
        return 2 * share if self.kind == "all-reduce" else share


def collectives(hlo: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of an optimized HLO module, the text of `compiled.as_text()`.

    `mesh` gives the axis sizes in order, as `Mesh.shape` does: HLO names a device by its place in
    the mesh, whatever its id. Loops are multiplied out; groups of one device are left out, as
    they send nothing. Raises `ValueError` on groups in a spelling that is not known here.
    """
    found = (collective_of(visit, mesh) for visit in Module(hlo).walk())
    return [collective for collective in found if collective is not None]


def collective_of(visit: Visit, mesh: Mapping[str, int]) -> Collective | None:
    """The collective that a visited instruction is, or begins; None where it is something else."""
    instruction = visit.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = _groups(instruction, math.prod(mesh.values()))
    axes = _axes(groups, mesh)
    if not axes:
        return None
    permutes = kind == "collective-permute"
    group_size = math.prod(mesh[axis] for axis in axes) if permutes else groups.shape[1]
    operands = (visit.computation[name] for name in instruction.operands)
    sizes = [size for operand in operands for size in operand.array_bytes()]
    return Collective(
        kind=kind,
        axes=axes,
        group_size=group_size,
        payloads=tuple(size * (group_size if kind == "all-gather" else 1) for size in sizes),
        count=visit.place.count,
        in_loop=visit.place.in_loop,
        in_branch=visit.place.in_branch,
        scope=instruction.attribute(r'op_name="([^"]*)"') or "",
    )


def _groups(instruction: Instruction, num_devices: int) -> np.ndarray:
    """[groups, members] places in the mesh; of a permute [pairs, 2]."""
    text = instruction.attributes
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", text):
        return np.array([_numbers(group) for group in re.findall(r"\{([\d,]*)\}", found.group(1))])
    if "replica_groups={}" in text:
        return np.arange(num_devices)[None]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?)(?:,? |,$|$)", text):
        return _places(found.group(2)).reshape(_numbers(found.group(1)))
    if found := _MESH_GROUPS.search(text):
        return _mesh_groups(*found.groups())
    raise ValueError(
        f"{instruction.opcode} %{instruction.name} spells its groups in an unknown way: {text}"
    )


# mesh['a'=2,'b'=4], device_ids=(...) {'b'}: the groups lie along axis b of a mesh of XLA's own.
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}"
)


def _mesh_groups(mesh: str, device_ids: str | None, along: str) -> np.ndarray:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    # 'b' is all of axis b; 'b':(2)4 that digit of it which counts to 4, with 2 above it.
    for name, above, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", along):
        base = sizes[name] // (int(above) * int(size)) if size else 1
        digit = coordinates[name] // base % (int(size) if size else sizes[name])
        coordinates[name] = coordinates[name] - digit * base
    # What is left of the coordinates is common to a group.
    group = np.ravel_multi_index(tuple(coordinates.values()), tuple(sizes.values())).reshape(-1)
    places = _places(device_ids or f"[{group.size}]").reshape(-1)
    return places[np.argsort(group, kind="stable")].reshape(len(np.unique(group)), -1)


def _places(text: str) -> np.ndarray:
    """`[dims]T(order)`: places counted over dims, then transposed; or a list of places."""
    if not text.startswith("["):
        return np.array(_numbers(text))
    dims, order = (re.findall(rf"{opening}([\d,]+)", text) for opening in (r"\[", r"T\("))
    shape = _numbers(dims[0])
    places = np.arange(math.prod(shape)).reshape(shape)
    return places.transpose(_numbers(order[0])) if order else places


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of some group differ."""
    coordinates = np.stack(np.unravel_index(groups, tuple(mesh.values())))
    differ = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return tuple(axis for axis, differs in zip(mesh, differ, strict=True) if differs)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))
