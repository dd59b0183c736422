"""Bodies: arrays that are not contiguous, and outputs that share memory with inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from support import oracle
from support.arrays import (
    LAYOUTS,
    WRITABLE,
    Array,
    arrays_of,
    check_same,
    check_surroundings,
)
from support.bodies.movement import ALGORITHMS
from support.bodies.reductions import CANONICAL

import fsdpcore as fc

Call = Callable[..., Any]


def _calls(backend: fc.Backend, parts: list[Array]) -> dict[str, tuple[Call, Array | None]]:
    """Every collective on equal shapes: how to call it, and its result on this rank."""
    me, p = backend.rank, backend.world_size
    total, joined = oracle.reduced(parts, "sum"), oracle.joined(parts)
    root = p - 1
    return {
        "all_reduce": (fc.all_reduce, total),
        "reduce_scatter": (fc.reduce_scatter, oracle.pieces(total, p)[me]),
        "all_gather": (fc.all_gather, joined),
        "all_gather_v": (fc.all_gather_v, joined),
        "broadcast": (_rooted(fc.broadcast, root), parts[root]),
        "reduce": (_rooted(fc.reduce, root), total if me == root else None),
        "gather": (_rooted(fc.gather, root), joined if me == root else None),
        "scatter": (_rooted(fc.scatter, root), oracle.pieces(parts[root], p)[me]),
        "all_to_all": (
            fc.all_to_all,
            oracle.joined([oracle.pieces(part, p)[me] for part in parts]),
        ),
    }


def _rooted(function: Call, root: int) -> Call:
    return lambda array, backend, **options: function(array, backend, root=root, **options)


def every_layout(backend: fc.Backend) -> None:
    """Inputs and outputs of all layouts; nothing but the output changes."""
    me, p = backend.rank, backend.world_size
    parts = arrays_of(p, (p + 1, 3))
    outs = itertools.cycle(WRITABLE)
    for name, make in LAYOUTS.items():
        for call, (function, expected) in _calls(backend, parts).items():
            mine = make(parts[me])
            what = f"{call} of a {name} array"
            result = function(mine, backend)
            if expected is not None:
                check_same(result, expected, what)
            check_same(mine, parts[me], f"the input of {what}")
            layout = next(outs)
            _into(backend, function, mine, expected, layout, f"{what} into a {layout} one")
            check_same(mine, parts[me], f"the input of {what}")


def _into(
    backend: fc.Backend, function: Call, mine: Array, expected: Array | None, layout: str, what: str
) -> None:
    if expected is None:
        assert function(mine, backend, out=None) is None
        return
    out = WRITABLE[layout](np.zeros_like(expected))
    result = function(mine, backend, out=out)
    assert result is out, f"{what}: the result is not out"
    check_same(out, expected, what)
    check_surroundings(out, what)


def odd_strides(backend: fc.Backend) -> None:
    """Arrays of which NumPy says that they are contiguous, though their strides are unusual."""
    p = backend.world_size
    one, none = np.arange(20.0)[::7][:1], np.zeros((0, 3)).T
    wide = np.broadcast_to(np.float32(3), (4, 2))
    check_same(fc.all_reduce(one, backend), np.zeros(1), "one element")
    check_same(fc.all_reduce(none, backend), np.zeros((3, 0)), "no element")
    check_same(fc.all_reduce(wide, backend), np.full((4, 2), 3 * p, np.float32), "zero strides")
    check_same(fc.all_gather(np.arange(9.0)[::-1][:1], backend), np.full(p, 8.0), "reversed")


# Sharing memory.


def out_is_input(backend: fc.Backend) -> None:
    """The whole input as the output, where shapes allow it."""
    me, p = backend.rank, backend.world_size
    parts = arrays_of(p, (2 * p, 3))
    calls = _calls(backend, parts)
    for call in ("all_reduce", "broadcast", "reduce", "all_to_all"):
        function, expected = calls[call]
        for algorithm in _algorithms(call):
            for layout in ("plain", "strided", "fortran"):
                mine = WRITABLE[layout](parts[me])
                result = function(mine, backend, out=mine, algorithm=algorithm)
                if expected is not None:
                    assert result is mine
                    check_same(mine, expected, f"{call} in place, {algorithm}, {layout}")


def _algorithms(call: str) -> list[str]:
    return CANONICAL.get(call) or ALGORITHMS[call.removesuffix("_v")]


def own_chunk_in_place(backend: fc.Backend) -> None:
    """A rank's chunk inside of the long array: all_gather from it, reduce_scatter into it."""
    me, p = backend.rank, backend.world_size
    for rows in (1, 4):
        parts = arrays_of(p, (rows, 3), salt="chunk")
        for algorithm in ALGORITHMS["all_gather"]:
            for function in (fc.all_gather, fc.all_gather_v):
                whole = np.zeros((p * rows, 3), np.float32)
                chunk = whole[me * rows : (me + 1) * rows]
                chunk[...] = parts[me]
                function(chunk, backend, out=whole, algorithm=algorithm)
                check_same(whole, oracle.joined(parts), f"all_gather in place, {algorithm}")
    for rows in (p, 2 * p + 1):
        parts = arrays_of(p, (rows, 3), salt="whole")
        expected = oracle.pieces(oracle.reduced(parts, "sum"), p)
        for algorithm in CANONICAL["reduce_scatter"]:
            whole = parts[me].copy()
            chunk = np.array_split(whole, p)[me]
            fc.reduce_scatter(whole, backend, out=chunk, algorithm=algorithm)
            check_same(chunk, expected[me], f"reduce_scatter in place, {algorithm}")
        whole = parts[me].copy()
        fc.reduce_scatter(whole, backend, out=np.array_split(whole, p)[me], algorithm="ring")
    _rooted_in_place(backend)


def _rooted_in_place(backend: fc.Backend) -> None:
    me, p, root = backend.rank, backend.world_size, backend.world_size // 2
    parts = arrays_of(p, (2, 3), salt="gather")
    long = arrays_of(p, (2 * p + 1, 3), salt="scatter")[root]
    for algorithm in ALGORITHMS["gather"]:
        whole = np.zeros((2 * p, 3), np.float32)
        chunk = whole[2 * me : 2 * me + 2]
        chunk[...] = parts[me]
        out = whole if me == root else None
        fc.gather(chunk, backend, root=root, out=out, algorithm=algorithm)
        if me == root:
            check_same(whole, oracle.joined(parts), f"gather in place, {algorithm}")
        source = long.copy()
        piece = np.array_split(source, p)[me]
        kept = source if me == root else None
        out = piece if me == root else np.empty_like(piece)
        fc.scatter(kept, backend, root=root, out=out, algorithm=algorithm)
        check_same(out, np.array_split(long, p)[me], f"scatter in place, {algorithm}")


def partial_overlap(backend: fc.Backend) -> None:
    """An output that covers some of its input, shifted: as if the input had been copied first."""
    me, p = backend.rank, backend.world_size
    parts = arrays_of(p, (2 * p, 3))
    for call, (function, expected) in _calls(backend, parts).items():
        for algorithm in _algorithms(call):
            for shift in (1, 2, 2 * p - 1):
                for backwards in (False, True):
                    what = f"{call}, {algorithm}, out shifted by {shift}, backwards {backwards}"
                    _overlapping(
                        backend, function, parts[me], expected, shift, backwards, algorithm, what
                    )


def _overlapping(
    backend: fc.Backend,
    function: Call,
    values: Array,
    expected: Array | None,
    shift: int,
    backwards: bool,
    algorithm: str,
    what: str,
) -> None:
    rows = 0 if expected is None else expected.shape[0]
    base = np.zeros((max(rows, values.shape[0]) + shift, 3), values.dtype)
    first, second = (shift, 0) if backwards else (0, shift)
    mine = base[first : first + values.shape[0]]
    mine[...] = values
    out = None if expected is None else base[second : second + rows]
    result = function(mine, backend, out=out, algorithm=algorithm)
    if expected is not None:
        check_same(result, expected, what)
