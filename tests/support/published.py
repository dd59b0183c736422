"""Collectives on arrays that some ranks publish and others do not: calls, and their results.

A ``Case`` is the same on all ranks. Each rank puts its arrays where the case says: into memory of
``backend.empty``, which the others read in place, or elsewhere.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support import oracle
from support.arrays import Array, array_of, check_same

import fsdpcore as fc

KINDS = [
    "all_reduce",
    "reduce_scatter",
    "reduce",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "all_gather_v",
    "gather_v",
    "reduce_scatter_v",
    "scatter_v",
    "all_to_all_v",
]
ROOTED = ("reduce", "broadcast", "gather", "scatter", "gather_v", "scatter_v")
_DTYPES = {dtype.name: dtype for dtype in oracle.DTYPES}
_GARBAGE = 0xA5

Place = Callable[[fc.Backend, Array], Array]


def _private(backend: fc.Backend, values: Array) -> Array:
    return values.copy()


def _published(backend: fc.Backend, values: Array) -> Array:
    array = backend.empty(values.shape, values.dtype)
    array[...] = values
    return array


def _within(backend: fc.Backend, values: Array) -> Array:
    """In the middle of a published array, at an odd place."""
    room = backend.empty(values.size + 5, values.dtype)
    array = room[3 : 3 + values.size].reshape(values.shape)
    array[...] = values
    return array


def _unaligned(backend: fc.Backend, values: Array) -> Array:
    room = backend.empty(values.nbytes + 1, np.uint8)
    array = room[1:].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array


def _strided(backend: fc.Backend, values: Array) -> Array:
    spread = backend.empty((*values.shape, 2), values.dtype)[..., 0]
    spread[...] = values
    return spread


def _read_only(backend: fc.Backend, values: Array) -> Array:
    array = _published(backend, values)
    array.flags.writeable = False
    return array


OUTS: dict[str, Place] = {
    "private": _private,
    "published": _published,
    "within": _within,
    "unaligned": _unaligned,
    "strided": _strided,
}
SOURCES: dict[str, Place] = {**OUTS, "read-only": _read_only}
NEW, IN_PLACE = "new", "in place"  # further ways of out


@functools.cache
def _table(dtype: np.dtype[Any]) -> Array:
    return array_of(0, (10_007,), dtype)


def values_of(rank: int, shape: tuple[int, ...], dtype: np.dtype[Any], salt: str = "") -> Array:
    """Do as ``array_of``, quickly for large arrays: values that repeat after some thousands."""
    shift = zlib.crc32(f"{rank}/{salt}".encode())
    table = np.roll(_table(dtype), shift % _table(dtype).size)
    return np.resize(table, math.prod(shape)).reshape(shape)


@dataclass(frozen=True)
class Case:
    """One collective.

    Attributes:
        kind: a name of ``KINDS``.
        rows: of axis 0 of the input; for ragged calls, every rank's own number.
        columns: of its axis 1.
        dtype, op, root: of the call.
        sources, outs: for each rank, where its input and its output lie.
    """

    kind: str
    rows: tuple[int, ...]
    columns: int
    dtype: str
    op: str
    root: int
    sources: tuple[str, ...]
    outs: tuple[str, ...]


def run_case(backend: fc.Backend, case: Case, salt: str = "") -> None:
    """Call it; check the result and the input, which is overwritten as soon as that is allowed."""
    me = backend.rank
    call = _Call(backend, case, salt)
    given, expected = call.given, call.expected
    source = None if given is None else SOURCES[case.sources[me]](backend, given)
    out = _out(backend, case, call, source)
    result = call.function(source, backend, out=out, **call.options)
    if source is not None and not (out is not None and np.may_share_memory(source, out)):
        kept = source.copy()
        if source.flags.writeable:
            source[...] = _garbage(source)
        check_same(kept, given, f"the input of {case}")  # type: ignore[arg-type]
    if expected is None:
        assert result is None, case
        return
    assert out is None or result is out, case
    check_same(np.array(result), expected, f"{case}")


def _garbage(array: Array) -> Array:
    """Something of its dtype that no test has."""
    return np.full(array.itemsize, _GARBAGE, np.uint8).view(array.dtype)[:1].reshape(())


def _out(backend: fc.Backend, case: Case, call: _Call, source: Array | None) -> Array | None:
    place, expected = case.outs[backend.rank], call.expected
    if expected is None or place == NEW:
        return None
    if place != IN_PLACE:
        return OUTS[place](backend, np.zeros_like(expected))
    if source is None or not source.flags.writeable:
        return None
    if source.shape == expected.shape:
        return source
    if call.chunk is not None and source.flags.c_contiguous:
        return source[call.chunk]
    return None


class _Call:
    """What this rank passes, and what it must get."""

    def __init__(self, backend: fc.Backend, case: Case, salt: str) -> None:
        me, p, kind = backend.rank, backend.world_size, case.kind
        dtype, rows, columns = _DTYPES[case.dtype], case.rows, case.columns
        self.function: Callable[..., Any] = getattr(fc, kind)
        self.options: dict[str, Any] = {"root": case.root} if kind in ROOTED else {}
        self.chunk: slice | None = None
        ragged = kind.endswith("_v")
        sizes = [rows[rank % len(rows)] for rank in range(p)] if ragged else [rows[0]] * p
        counts = [sizes[(rank + 1) % p] for rank in range(p)]
        lengths = [sum(sizes)] * p if kind in ("reduce_scatter_v", "scatter_v") else sizes
        table = [[sizes[(s + r) % p] // 2 for r in range(p)] for s in range(p)]
        if kind == "all_to_all_v":
            lengths = [sum(row) for row in table]
        parts = [values_of(r, (length, columns), dtype, salt) for r, length in enumerate(lengths)]
        self.given: Array | None = parts[me]
        self.expected: Array | None = None
        if kind in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_v"):
            self.options["op"] = case.op
            total = oracle.reduced(parts, case.op)
        if kind == "all_reduce" or (kind == "reduce" and me == case.root):
            self.expected = total
        elif kind in ("reduce_scatter", "reduce_scatter_v"):
            counts = counts if ragged else [len(piece) for piece in oracle.pieces(total, p)]
            if ragged:
                self.options["counts"] = counts
            self.chunk = slice(sum(counts[:me]), sum(counts[: me + 1]))
            self.expected = total[self.chunk]
        elif kind in ("all_gather", "all_gather_v") or (
            kind in ("gather", "gather_v") and me == case.root
        ):
            self.expected = oracle.joined(parts)
        elif kind == "broadcast":
            self.expected = parts[case.root]
        elif kind == "scatter":
            self.given = parts[me] if me == case.root else None
            self.expected = oracle.pieces(parts[case.root], p)[me]
        elif kind == "scatter_v":
            self.given = parts[me] if me == case.root else None
            self.options["counts"] = counts if me == case.root else None
            low = sum(counts[:me])
            self.expected = parts[case.root][low : low + counts[me]]
        elif kind == "all_to_all":
            arriving = [oracle.pieces(part, p)[me] for part in parts]
            self.expected = oracle.joined(arriving)
        elif kind == "all_to_all_v":
            self.options["send_counts"] = table[me]
            self.expected = oracle.exchanged(parts, table, me)
