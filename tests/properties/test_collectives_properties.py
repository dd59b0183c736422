"""Random programs of collectives and messages, on ranks that are delayed at random.

A program is a list of steps that every rank carries out; each step compares its own result with
the oracle. Programs are drawn by hypothesis, so a failure comes down to the shortest one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import oracle
from support.arrays import Array, array_of, check_same
from support.bodies.movement import ALGORITHMS
from support.bodies.reductions import CANONICAL
from support.cases import only_if_asked_for
from support.spmd import run

import fsdpcore as fc

SETTINGS = settings(
    deadline=None,
    max_examples=150,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Step:
    """One collective of one group.

    ``members`` are ranks of the job; ``rows`` those of each member (all the same, except in ragged
    collectives); ``number`` salts the values; ``root`` is a rank of the group.
    """

    kind: str
    members: tuple[int, ...]
    rows: tuple[int, ...]
    columns: int
    dtype: str
    op: str
    algorithm: str
    root: int
    started: bool
    number: int


KINDS = [*CANONICAL, *ALGORITHMS, "all_gather_v", "reduce_scatter_v", "all_to_all_v", "messages"]
_NAMES = {dtype.name: dtype for dtype in oracle.DTYPES}


@st.composite
def _steps(draw: st.DrawFn, size: int, number: int) -> Step:
    kind = draw(st.sampled_from(KINDS))
    everybody = tuple(range(size))
    members = draw(
        st.just(everybody)
        | st.lists(st.sampled_from(everybody), min_size=1, unique=True).map(tuple)
    )
    count = len(members)
    ragged = kind.endswith("_v")
    row = st.integers(0, 6) if ragged else st.integers(0, 3 * size)
    rows = tuple(draw(row) for _ in members) if ragged else (draw(row),) * count
    dtype, op = draw(st.sampled_from(oracle.COMBINATIONS))
    table = {**CANONICAL, **ALGORITHMS, "messages": ["auto"]}
    return Step(
        kind,
        members,
        rows,
        draw(st.sampled_from([0, 1, 3, 300])),
        dtype.name,
        op,
        draw(st.sampled_from(table[kind.removesuffix("_v")])),
        draw(st.integers(0, count - 1)),
        draw(st.booleans()),
        number,
    )


@st.composite
def _programs(draw: st.DrawFn) -> tuple[int, list[Step]]:
    size = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]))
    length = draw(st.integers(1, 8))
    return size, [draw(_steps(size, number)) for number in range(length)]


ARGUMENTS = {
    "program": _programs(),
    "seed": st.integers(0, 1000),
    "max_delay": st.sampled_from([0.0, 0.0005]),
    "eager_bytes": st.sampled_from([0, 100, 4096]),
}


@SETTINGS
@given(**ARGUMENTS)
def test_programs(
    program: tuple[int, list[Step]], seed: int, max_delay: float, eager_bytes: int
) -> None:
    _run(program, seed=seed, max_delay=max_delay, eager_bytes=eager_bytes)


@pytest.mark.campaign
def test_many_programs(request: pytest.FixtureRequest) -> None:
    only_if_asked_for(request)

    @settings(SETTINGS, max_examples=5000, derandomize=False)
    @given(**ARGUMENTS)
    def search(program: tuple[int, list[Step]], **options: Any) -> None:
        _run(program, **options)

    search()


def _run(program: tuple[int, list[Step]], **options: Any) -> None:
    size, steps = program
    run(carry_out, transport="sim", world_size=size, args=(steps,), **options)


def carry_out(backend: fc.Backend, steps: list[Step]) -> None:
    """Take part in all steps of which this rank is a member."""
    groups: dict[tuple[int, ...], fc.Backend] = {tuple(range(backend.world_size)): backend}
    started = []
    for step in steps:
        if backend.rank not in step.members:
            continue
        if step.members not in groups:
            groups[step.members] = backend.sub(step.members)
        group = groups[step.members]
        expected, call = _STEPS[step.kind](step, group)
        if step.kind == "messages" or not step.started:
            _check(step, expected, call())
        else:
            started.append((step, expected, call(async_op=True)))
    for step, expected, work in started:
        _check(step, expected, work.wait())


def _check(step: Step, expected: Array | None, result: Any) -> None:
    if expected is None:
        assert result is None, f"{step}: returned something on a rank that is not the root"
    else:
        check_same(result, expected, str(step))


Prepared = tuple[Any, Callable[..., Any]]


def _sources(step: Step) -> list[Array]:
    return [
        array_of(rank, (rows, step.columns), _NAMES[step.dtype], str(step.number))
        for rank, rows in zip(step.members, step.rows, strict=True)
    ]


def _reducing(step: Step, group: fc.Backend) -> Prepared:
    parts, me = _sources(step), group.rank
    total: Any = oracle.reduced(parts, step.op)
    options: dict[str, Any] = {"op": step.op, "algorithm": step.algorithm}
    if step.kind == "reduce_scatter":
        total = oracle.pieces(total, len(parts))[me]
    if step.kind == "reduce":
        options["root"] = step.root
        total = total if me == step.root else None
    function = getattr(fc, step.kind)
    return total, lambda **more: function(parts[me], group, **options, **more)


def _moving(step: Step, group: fc.Backend) -> Prepared:
    parts, me, root = _sources(step), group.rank, step.root
    options: dict[str, Any] = {"algorithm": step.algorithm}
    expected: Any
    if step.kind == "broadcast":
        expected = parts[root]
    elif step.kind == "scatter":
        expected = oracle.pieces(parts[root], len(parts))[me]
    elif step.kind == "all_to_all":
        expected = oracle.joined([oracle.pieces(part, len(parts))[me] for part in parts])
    else:
        expected = oracle.joined(parts)
    if step.kind in ("broadcast", "scatter", "gather"):
        options["root"] = root
    if step.kind == "gather" and me != root:
        expected = None
    function = getattr(fc, step.kind)
    return expected, lambda **more: function(parts[me], group, **options, **more)


def _ragged_reduction(step: Step, group: fc.Backend) -> Prepared:
    shape = (sum(step.rows), step.columns)
    dtype = _NAMES[step.dtype]
    parts = [array_of(rank, shape, dtype, str(step.number)) for rank in step.members]
    start = sum(step.rows[: group.rank])
    own = oracle.reduced(parts, step.op)[start : start + step.rows[group.rank]]
    return own, lambda **more: fc.reduce_scatter_v(
        parts[group.rank], group, step.rows, op=step.op, algorithm=step.algorithm, **more
    )


def _ragged_exchange(step: Step, group: fc.Backend) -> Prepared:
    size, dtype = len(step.members), _NAMES[step.dtype]
    counts = [[(step.rows[s] * (r + 1) + r) % 5 for r in range(size)] for s in range(size)]
    sources = [
        array_of(rank, (sum(counts[s]), step.columns), dtype, str(step.number))
        for s, rank in enumerate(step.members)
    ]
    me = group.rank
    expected = oracle.exchanged(sources, counts, me)
    return expected, lambda **more: fc.all_to_all_v(sources[me], group, counts[me], **more)


def _messages(step: Step, group: fc.Backend) -> Prepared:
    """Every member sends to all others; what arrives is joined in rank order."""
    parts, me = _sources(step), group.rank
    others = [rank for rank in range(group.world_size) if rank != me]

    def call() -> Array:
        rooms = {rank: np.empty_like(parts[rank]) for rank in others}
        works = [group.irecv(rooms[rank], rank, tag=step.number) for rank in others]
        works += [group.isend(parts[me], rank, tag=step.number) for rank in reversed(others)]
        for work in reversed(works):
            work.wait()
        return oracle.joined([parts[me], *(rooms[rank] for rank in others)])

    return oracle.joined([parts[me], *(parts[rank] for rank in others)]), call


_STEPS: dict[str, Callable[[Step, fc.Backend], Prepared]] = {
    **dict.fromkeys(CANONICAL, _reducing),
    **dict.fromkeys(ALGORITHMS, _moving),
    "all_gather_v": _moving,
    "reduce_scatter_v": _ragged_reduction,
    "all_to_all_v": _ragged_exchange,
    "messages": _messages,
}
