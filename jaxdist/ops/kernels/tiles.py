"""Products of some rows and columns that stay in the processor's registers while they add up.

A tile is written as a loop of LLVM's, since whether a compiler would have kept sums in registers
is nothing to hope for. Each sum is added in the order of k, in every tile: a row of x gives the
same bits among any number of rows.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from jaxdist.ops.kernels.calls import compiled, intrinsic

# What is multiplied: two bf16 at a time by the processor; two bf16, widened; one fp32.
Kind = Literal["bf16", "widened", "fp32"]

MOST = 6  # rows of a tile
COLUMNS = 64  # of a strip
_FLOAT, _INT, _WORD = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


@functools.cache
def features() -> frozenset[str]:
    """What the processor that numba compiles for can, in LLVM's names."""
    context: Any = cpu_target.target_context
    _, _, listed = context.codegen().magic_tuple()
    return frozenset(name[1:] for name in listed.split(",") if name.startswith("+"))


def vector_size() -> int:
    """Numbers of 32 bits in a register."""
    return 16 if "avx512f" in features() else 8


@functools.cache
def strip(kind: Kind, lanes: int) -> Callable[..., None]:
    """f(x, w, out, rows, depth, x_stride, w_stride, out_stride), as `tile` for any number of rows.

    It has COLUMNS columns.
    """
    one, two, three, four, five, six = (
        _beside_one_another(kind, rows, lanes) for rows in range(1, MOST + 1)
    )

    def strip(
        x: int,
        w: int,
        out: int,
        rows: int,
        depth: int,
        x_stride: int,
        w_stride: int,
        out_stride: int,
    ) -> None:
        while rows > 0:
            now = -(-rows // -(-rows // MOST))  # as even as can be: 8 rows are 4 and 4
            if now == 6:
                six(x, w, out, depth, x_stride, w_stride, out_stride)
            elif now == 5:
                five(x, w, out, depth, x_stride, w_stride, out_stride)
            elif now == 4:
                four(x, w, out, depth, x_stride, w_stride, out_stride)
            elif now == 3:
                three(x, w, out, depth, x_stride, w_stride, out_stride)
            elif now == 2:
                two(x, w, out, depth, x_stride, w_stride, out_stride)
            else:
                one(x, w, out, depth, x_stride, w_stride, out_stride)
            rows -= now
            x += now * x_stride
            out += now * out_stride

    return compiled(strip)


def _beside_one_another(kind: Kind, rows: int, lanes: int) -> Callable[..., None]:
    """Tiles of these rows for all columns of a strip."""
    # 512 bits have 32 registers, up to 24 of which hold sums; 256 bits have 16, up to 12.
    vectors = 4 if lanes == 16 else {1: 8, 2: 4, 3: 4}.get(rows, 2)
    multiply, width = tile(kind, rows, vectors, lanes), 4 * lanes * vectors

    def tiles(
        x: int, w: int, out: int, depth: int, x_stride: int, w_stride: int, out_stride: int
    ) -> None:
        for offset in range(0, 4 * COLUMNS, width):
            multiply(x, w + offset, out + offset, depth, x_stride, w_stride, out_stride)

    return compiled(tiles)


@functools.cache
def tile(kind: Kind, rows: int, vectors: int, lanes: int) -> Callable[..., None]:
    """f(x, w, out, depth, x_stride, w_stride, out_stride): out [rows, vectors * lanes].

    x, w and out are addresses, strides the bytes from one row to the next, depth the number of k.
    x [rows, depth] is bf16 for "bf16", else fp32; w [depth, columns] fp32 or, for pairs of bf16,
    [depth / 2, columns] of their 32 bits, the earlier k in the lower 16; out fp32.
    """

    @intrinsic
    def in_registers(
        typing: Any, x: Any, w: Any, out: Any, depth: Any, x_stride: Any, w_stride: Any, stride: Any
    ) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _Loop(builder, kind, rows, vectors, lanes).write(*arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), code

    return in_registers


class _Loop:
    """Writes a tile's loop over k."""

    def __init__(self, builder: Any, kind: Kind, rows: int, vectors: int, lanes: int) -> None:
        self.builder, self.kind, self.rows, self.vectors = builder, kind, rows, vectors
        self.lanes = lanes
        self.floats = ir.VectorType(_FLOAT, self.lanes)
        self.bits = ir.VectorType(_INT, self.lanes)

    def write(
        self, x: Any, w: Any, out: Any, depth: Any, x_stride: Any, w_stride: Any, out_stride: Any
    ) -> None:
        builder = self.builder
        step = 1 if self.kind == "fp32" else 2
        x_rows = [
            builder.inttoptr(builder.add(x, builder.mul(x_stride, _WORD(row))), _BYTES)
            for row in range(self.rows)
        ]
        w_start = builder.inttoptr(w, _BYTES)
        before, loop = builder.block, builder.append_basic_block("k")
        builder.branch(loop)
        builder.position_at_end(loop)
        k, w_offset = builder.phi(_WORD), builder.phi(_WORD)
        sums = [[builder.phi(self.floats) for _ in range(self.vectors)] for _ in range(self.rows)]
        weights = [
            builder.gep(w_start, [builder.add(w_offset, _WORD(4 * self.lanes * vector))])
            for vector in range(self.vectors)
        ]
        added = self._added(sums, x_rows, weights, k)
        k_next = builder.add(k, _WORD(step))
        w_next = builder.add(w_offset, w_stride)
        for phi, later in ((k, k_next), (w_offset, w_next)):
            phi.add_incoming(_WORD(0), before)
            phi.add_incoming(later, loop)
        for row, later in zip(sums, added, strict=True):
            for phi, value in zip(row, later, strict=True):
                phi.add_incoming(ir.Constant(self.floats, None), before)
                phi.add_incoming(value, loop)
        after = builder.append_basic_block("sums")
        builder.cbranch(builder.icmp_signed("<", k_next, depth), loop, after)
        builder.position_at_end(after)
        for row, values in enumerate(added):
            start = builder.add(out, builder.mul(out_stride, _WORD(row)))
            for vector, value in enumerate(values):
                place = builder.add(start, _WORD(4 * self.lanes * vector))
                pointer = builder.inttoptr(place, self.floats.as_pointer())
                builder.store(value, pointer, align=4)

    def _added(self, sums: Any, x_rows: Any, weights: Any, k: Any) -> list[list[Any]]:
        if self.kind == "bf16":
            pairs = [self._load(place, self.bits) for place in weights]
            return [
                self._plus(row, pairs, self._everywhere(x, k, 2, _INT), self._bf16_products)
                for row, x in zip(sums, x_rows, strict=True)
            ]
        if self.kind == "fp32":
            halves = [([self._load(place, self.floats) for place in weights], k)]
        else:
            pairs = [self._load(place, self.bits) for place in weights]
            earlier = [self._earlier(pair) for pair in pairs]
            later = [self._later(pair) for pair in pairs]
            halves = [(earlier, k), (later, self.builder.add(k, _WORD(1)))]
        for values, place in halves:
            sums = [
                self._plus(row, values, self._everywhere(x, place, 4, _FLOAT), self._products)
                for row, x in zip(sums, x_rows, strict=True)
            ]
        return sums

    def _plus(self, row: Any, weights: Any, x: Any, products: Callable[..., Any]) -> list[Any]:
        return [products(value, x, w) for value, w in zip(row, weights, strict=True)]

    def _bf16_products(self, value: Any, x: Any, w: Any) -> Any:
        """Two products of each lane added to it (VDPBF16PS)."""
        bits = 32 * self.lanes
        name = f"llvm.x86.avx512bf16.dpbf16ps.{bits}"
        kind = ir.FunctionType(self.floats, [self.floats, self.bits, self.bits])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name), [value, x, w]
        )

    def _products(self, value: Any, x: Any, w: Any) -> Any:
        name = f"llvm.fma.v{self.lanes}f32"
        kind = ir.FunctionType(self.floats, [self.floats] * 3)
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, kind, name), [x, w, value]
        )

    def _earlier(self, pairs: Any) -> Any:
        return self._as_floats(self.builder.shl(pairs, self._splat(16)))

    def _later(self, pairs: Any) -> Any:
        return self._as_floats(self.builder.and_(pairs, self._splat(0xFFFF0000)))

    def _as_floats(self, bits: Any) -> Any:
        return self.builder.bitcast(bits, self.floats)

    def _splat(self, number: int) -> Any:
        return ir.Constant(self.bits, [number] * self.lanes)

    def _load(self, place: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=4)

    def _everywhere(self, x_row: Any, k: Any, num_bytes: int, kind: Any) -> Any:
        """x[k], of 32 bits, in every lane."""
        builder = self.builder
        place = builder.gep(x_row, [builder.mul(k, _WORD(num_bytes))])
        value = builder.load(builder.bitcast(place, kind.as_pointer()), align=2)
        vector = ir.VectorType(kind, self.lanes)
        nothing = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(nothing, value, _INT(0))
        return builder.shuffle_vector(first, nothing, ir.Constant(self.bits, [0] * self.lanes))
