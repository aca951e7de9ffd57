"""Attention over pages, and the writing of new ones, without a copy of either.

The pages of some keys are widened into a core's cache and multiplied there with all queries of a
row that share them. A query sees the same sums in the same order however many others there are: a
prefix that is cached, or a prompt that is cut, changes no bit.

Shapes: as in `ops.paged_attention`; keys lie by column, [P, K, H, C].
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.ops.kernels.calls import (
    call,
    compiled,
    floats,
    half_word,
    halves,
    integers,
    njit,
    operand,
    result,
    size,
)
from jaxdist.ops.kernels.numbers import add, clear, exp, from_bf16, put, to_bf16
from jaxdist.ops.kernels.tiles import COLUMNS, strip, vector_size
from jaxdist.ops.paged_attention import Pages, Rows

CHUNK = 64  # keys looked at together
QUERIES = 48  # rows of queries, of all heads that share their keys, looked at together
_ALL = 2**30  # keys: more than there are
_LOWEST = np.float32(-1e30)  # below every score
_MASKED = np.float32(-3e30)  # of weight 0 whatever the highest score is


def write_pages(pages: Pages, k_BTKH: jax.Array, v_BTKH: jax.Array, rows: Rows) -> Pages:
    """`pages` of fp32 or of bf16's bits with those of the rows' queries; padding is left out."""
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pages]
    new = (x.astype(jnp.float32) for x in (k_BTKH, v_BTKH))
    operation = _write(pages.keys.dtype == jnp.uint16)
    return Pages(*call(operation, pools, *pages, *new, *rows, in_place={0: 0, 1: 1}))


def paged_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    *,
    sliding_window: int | None = None,
    is_local: bool | jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """[B, T, N, Hv], from pages of fp32 or of bf16's bits; 0 for queries that are padding."""
    factor = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    scaled_BTNH = q_BTNH.astype(jnp.float32) * factor
    window = _ALL if sliding_window is None else sliding_window
    if is_local is not None:
        window = jnp.where(is_local, window, _ALL)
    out = jax.ShapeDtypeStruct((*q_BTNH.shape[:-1], pages.values.shape[-1]), jnp.float32)
    operation = _attend(pages.keys.dtype == jnp.uint16, softcap, vector_size())
    windows = jnp.asarray(window, jnp.int32).reshape(1)
    results = [out, _scratch(q_BTNH.shape, pages)]
    return call(operation, results, scaled_BTNH, *pages, *rows, windows)[0].astype(q_BTNH.dtype)


def _scratch(q_shape: tuple[int, ...], pages: Pages) -> jax.ShapeDtypeStruct:
    """What the kernel keeps of a chunk: keys, values, and of its queries scores, sums and state."""
    _, kv_heads, width, page_size = pages.keys.shape
    group = q_shape[2] // kv_heads
    together, chunk, k_columns, v_columns = _sizes.py_func(group, page_size, pages.values.shape[-1])
    rows = together * group
    numbers = (width + rows) * k_columns + (chunk + 2 * rows) * v_columns + 3 * rows
    return jax.ShapeDtypeStruct((numbers,), jnp.float32)


@compiled
def _sizes(group: int, page_size: int, value_width: int) -> tuple[int, ...]:
    """Queries and keys looked at together; columns of keys and values, in whole strips."""
    together = max(1, QUERIES // group)
    chunk = max(1, CHUNK // page_size) * page_size
    return together, chunk, -(-chunk // COLUMNS) * COLUMNS, -(-value_width // COLUMNS) * COLUMNS


def _dtype(of_bits: bool) -> str:
    return "bf16" if of_bits else "fp32"


@functools.cache
def _write(of_bits: bool) -> Callable[[int], None]:
    pool, number_size = (halves, 2) if of_bits else (floats, 4)

    @compiled
    def stored(number: Any) -> Any:
        if of_bits:
            return to_bf16(number)
        return number if np.isfinite(number) else np.float32(0)

    @compiled
    def put_numbers(target: int, step: int, source: int, count: int) -> None:
        """At every `step`-th place from an address."""
        numbers, given = pool(target, count * step), floats(source, count)
        for h in range(count):
            numbers[h * step] = stored(given[h])

    def write_pages(frame: int) -> None:
        heads, width, page_size = size(frame, 0, 1), size(frame, 0, 2), size(frame, 0, 3)
        rows, queries, value_width = size(frame, 2, 0), size(frame, 2, 1), size(frame, 1, 3)
        keys, values = result(frame, 0), result(frame, 1)
        positions, counts = integers(operand(frame, 4), rows), integers(operand(frame, 5), rows)
        tables, table_size = operand(frame, 6), size(frame, 6, 1)
        for row in range(rows):
            # No further than the table goes: a kernel writes wherever it is told to.
            for query in range(min(counts[row], table_size * page_size - positions[row])):
                position = positions[row] + query
                page = half_word(tables + 4 * (row * table_size + position // page_size))
                place = position % page_size
                for head in range(heads):
                    new = 4 * ((row * queries + query) * heads + head)
                    key = (page * heads + head) * width * page_size + place
                    k = operand(frame, 2) + new * width
                    put_numbers(keys + number_size * key, page_size, k, width)
                    value = ((page * page_size + place) * heads + head) * value_width
                    v = operand(frame, 3) + new * value_width
                    put_numbers(values + number_size * value, 1, v, value_width)

    write_pages.__name__ = f"write_pages_{_dtype(of_bits)}"
    return compiled(write_pages)


def _widening(of_bits: bool) -> Callable[..., None]:
    """A function that brings the keys and values of some pages to the scratch."""
    pool, number_size = (halves, 2) if of_bits else (floats, 4)

    @compiled
    def widen(source: int, target: int, count: int) -> None:
        stored, numbers = pool(source, count), floats(target, count)
        for i in range(count):
            numbers[i] = from_bf16(stored[i]) if of_bits else stored[i]

    @compiled
    def widen_chunk(
        keys: int,
        values: int,
        pages: int,
        num_keys: int,
        head: int,
        dims: Any,
        k_here: int,
        v_here: int,
    ) -> None:
        kv_heads, page_size, width, value_width, k_row, v_row = dims
        for place in range(0, num_keys, page_size):
            page = half_word(pages + 4 * (place // page_size))
            source = keys + number_size * (page * kv_heads + head) * width * page_size
            for h in range(width):
                own = source + number_size * h * page_size
                widen(own, k_here + h * k_row + 4 * place, page_size)
            source = values + number_size * (page * page_size * kv_heads + head) * value_width
            for c in range(page_size):
                own = source + number_size * c * kv_heads * value_width
                widen(own, v_here + (place + c) * v_row, value_width)

    return widen_chunk


def _softmax(softcap: float) -> Callable[..., Any]:
    """A function that makes a query's scores of a chunk weights."""
    cap = np.float32(softcap)

    @njit(nogil=True, error_model="numpy", fastmath={"contract", "nnan", "nsz", "reassoc"})
    def softmax(
        address: int, count: int, most: Any, total: Any, start: int, earliest: int, latest: int
    ) -> Any:
        """The new maximum, the new sum, and what older weights shrink to."""
        scores = floats(address, count)
        if cap > 0:
            for s in range(count):
                scores[s] = cap * np.float32(math.tanh(scores[s] / cap))
        if start < earliest or latest < start + count - 1:
            for s in range(count):
                scores[s] = scores[s] if earliest <= start + s <= latest else _MASKED
        higher = most
        for s in range(count):
            higher = max(higher, scores[s])
        shrink, added = exp(most - higher), np.float32(0)
        for s in range(count):
            scores[s] = exp(scores[s] - higher)
            added += scores[s]
        return higher, total * shrink + added, shrink

    return softmax


@functools.cache
def _attend(of_bits: bool, softcap: float | None, lanes: int) -> Callable[[int], None]:
    multiply = strip("fp32", lanes)
    widen_chunk, softmax = _widening(of_bits), _softmax(softcap or 0.0)

    def attention(frame: int) -> None:
        rows, queries = size(frame, 0, 0), size(frame, 0, 1)
        heads, width = size(frame, 0, 2), size(frame, 0, 3)
        kv_heads, page_size = size(frame, 1, 1), size(frame, 1, 3)
        value_width, table_size = size(frame, 2, 3), size(frame, 5, 1)
        keys, values = operand(frame, 1), operand(frame, 2)
        positions, counts = integers(operand(frame, 3), rows), integers(operand(frame, 4), rows)
        window = half_word(operand(frame, 6))

        group = heads // kv_heads
        together, chunk, k_columns, v_columns = _sizes(group, page_size, value_width)
        k_row, v_row = 4 * k_columns, 4 * v_columns
        dims = (kv_heads, page_size, width, value_width, k_row, v_row)
        k_here = result(frame, 1)
        v_here = k_here + width * k_row
        scores = v_here + chunk * v_row
        sums = scores + together * group * k_row
        added = sums + together * group * v_row
        states = floats(added + together * group * v_row, (3, together * group))
        most, total, shrink = states[0], states[1], states[2]
        clear(k_here, width * k_columns)
        clear(v_here, chunk * v_columns)
        for row in range(rows):
            count = max(0, min(counts[row], table_size * page_size - positions[row]))
            table = operand(frame, 5) + 4 * row * table_size
            # Queries of a head lie heads * width apart, and so do its results.
            q_row, out_row = 4 * heads * width, 4 * heads * value_width
            q = operand(frame, 0) + row * queries * q_row
            out = result(frame, 0) + row * queries * out_row
            clear(out + count * out_row, (queries - count) * heads * value_width)
            for head in range(kv_heads):
                for first in range(0, count, together):
                    num_queries = min(together, count - first)
                    num_rows = num_queries * group
                    position = positions[row] + first
                    end = position + num_queries
                    clear(sums, num_rows * v_columns)
                    for r in range(num_rows):
                        most[r], total[r] = _LOWEST, 0
                    start = max(0, position - window + 1) // chunk * chunk
                    while start < end:
                        num_keys = min(chunk, end - start)
                        pages = table + 4 * (start // page_size)
                        widen_chunk(keys, values, pages, num_keys, head, dims, k_here, v_here)
                        for query in range(num_queries):
                            own = q + (first + query) * q_row + 4 * head * group * width
                            own_scores = scores + query * group * k_row
                            for column in range(0, k_row, 4 * COLUMNS):
                                multiply(
                                    own,
                                    k_here + column,
                                    own_scores + column,
                                    group,
                                    width,
                                    4 * width,
                                    k_row,
                                    k_row,
                                )
                        for r in range(num_rows):
                            latest = position + r // group
                            most[r], total[r], shrink[r] = softmax(
                                scores + r * k_row,
                                chunk,
                                most[r],
                                total[r],
                                start,
                                latest - window + 1,
                                latest,
                            )
                        for column in range(0, v_row, 4 * COLUMNS):
                            multiply(
                                scores,
                                v_here + column,
                                added + column,
                                num_rows,
                                num_keys,
                                k_row,
                                v_row,
                                v_row,
                            )
                        for r in range(num_rows):
                            add(sums + r * v_row, shrink[r], added + r * v_row, v_columns)
                        start += chunk
                    for r in range(num_rows):
                        own = out + (first + r // group) * out_row
                        own += 4 * (head * group + r % group) * value_width
                        scale = 1 / max(total[r], np.float32(1e-30))
                        put(own, scale, sums + r * v_row, value_width)

    attention.__name__ = f"paged_attention_{_dtype(of_bits)}_{softcap}_{lanes}"
    return compiled(attention)
