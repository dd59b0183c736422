"""Ranks that call different things, where only messages tell: every pair of calls is found out.

Nothing is exchanged ahead of the data, so some ranks may be through with a call before anybody can
know. All of them get the same error in words, in that call or in the next one; no rank ever gets
data of another call.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support.bodies.point_to_point import expect
from support.counting import CountingSim
from support.spmd import meet, run, run_on

import fsdpcore as fc
from fsdpcore.collectives.agreement import FREE_CALLS

# They wait, for half a second each, until somebody asks.
pytestmark = pytest.mark.side_by_side(24)

Call = Callable[[fc.Backend], Any]
P = 3


def _of(name: str, size: int = 6, dtype: Any = np.float32, **options: Any) -> Call:
    return lambda b: getattr(fc, name)(np.full(size, b.rank + 1, dtype), b, **options)


def _batch(b: fc.Backend) -> None:
    with fc.coalesce(b) as batch:
        batch.all_reduce(np.ones(3))


# What ranks call, with words of it from an error.
CALLS: dict[str, tuple[Call, str]] = {
    "sum": (_of("all_reduce"), "all_reduce(sum, float32 of shape (6,))"),
    "other shape": (_of("all_reduce", 7), "float32 of shape (7,)"),
    "other dtype": (_of("all_reduce", dtype=np.int32), "all_reduce(sum, int32"),
    "other op": (_of("all_reduce", op="max"), "all_reduce(max"),
    "mean of integers": (
        _of("all_reduce", dtype=np.int64, op=fc.ReduceOp.mean_as(np.float64)),
        "int64 of shape (6,)",
    ),
    "other algorithm": (_of("all_reduce", algorithm="star"), "algorithm star"),
    "ring": (_of("all_reduce", algorithm="ring"), "algorithm ring"),
    "label": (_of("all_reduce", label="loss"), "for loss"),
    "empty": (_of("all_reduce", 0), "float32 of shape (0,)"),
    "broadcast": (_of("broadcast", root=0), "broadcast(float32 of shape (6,), root 0)"),
    "other root": (_of("broadcast", root=2), "broadcast(float32 of shape (6,), root 2)"),
    "large": (_of("broadcast", 10**4, root=0), "broadcast(float32 of shape (10000,), root 0)"),
    "gather": (_of("gather", root=1), "gather("),
    "scatter": (_of("scatter", root=0), "scatter(root 0)"),
    "ragged": (_of("all_gather_v"), "all_gather_v("),
    "exchange": (_of("all_to_all"), "all_to_all("),
    "scan": (_of("scan"), "scan("),
    "batch": (_batch, "coalesce("),
    "barrier": (lambda b: b.barrier(), "barrier()"),
}


def _differ(backend: fc.Backend, who: int, most: str, one: str, before: int) -> str:
    """All call the same ``before`` times; then rank ``who`` calls something else."""
    for _ in range(before):
        total = fc.all_reduce(np.ones(2), backend)
        assert (total == P).all()
    call = CALLS[one if backend.rank == who else most][0]

    def both() -> None:
        call(backend)
        backend.barrier()

    error = expect(fc.MismatchError, both)
    assert str(expect(fc.MismatchError, fc.all_reduce, np.ones(2), backend)) == str(error)
    return str(error)


PAIRS = [*itertools.combinations(CALLS, 2)]


@pytest.mark.parametrize(("most", "one"), PAIRS)
def test_every_pair_of_calls(most: str, one: str) -> None:
    number = PAIRS.index((most, one))
    who, before = number % P, number % 2
    args = (who, most, one, before)
    texts = run_on(SimBackend, _differ, world_size=P, args=args, shm="off", hosts=1 + number % 2)
    assert len(set(texts)) == 1, texts
    title, *lines = texts[0].splitlines()
    assert title.startswith(f"collective #{before + 1} does not fit together")
    others = ", ".join(str(rank) for rank in range(P) if rank != who)
    said = {f"  ranks {others}: ": CALLS[most][1], f"  rank {who}: ": CALLS[one][1]}
    for start, words in said.items():
        assert any(line.startswith(start) and words in line for line in lines), texts[0]


def _two_levels(backend: fc.Backend, who: int, one: str) -> str:
    """Memory inside of hosts, messages between them."""
    fc.all_reduce(np.ones(9), backend, algorithm="hierarchical")

    def both() -> None:
        if backend.rank == who:
            CALLS[one][0](backend)
        else:
            fc.all_reduce(np.ones(9), backend, algorithm="hierarchical")
        backend.barrier()

    return str(expect(fc.MismatchError, both))


@pytest.mark.parametrize("one", CALLS)
def test_ranks_that_wait_in_memory(one: str) -> None:
    who = [*CALLS].index(one) % 4
    texts = run_on(SimBackend, _two_levels, world_size=4, args=(who, one), hosts=2)
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith("collective #2 does not fit together")
    assert f"rank {who}: " in texts[0]
    assert CALLS[one][1] in texts[0]
    assert "algorithm hierarchical" in texts[0]


def _sequence(backend: fc.Backend, lists: Sequence[Sequence[str]], words: Sequence[str]) -> str:
    def everything() -> None:
        for name in lists[backend.rank]:
            CALLS[name][0](backend)
        backend.barrier()

    error = str(expect(fc.MismatchError, everything))
    for each in words:
        assert each in error, error
    return error


# What each rank calls, and words of the error: the first call that differs is named.
PROGRAMS: dict[str, tuple[list[list[str]], list[str]]] = {
    "one skips a call": (
        [["sum", "broadcast", "sum"], ["sum", "sum"], ["sum", "broadcast", "sum"]],
        ["collective #2", "rank 1: all_reduce"],
    ),
    "one is a call ahead": (
        [["broadcast", "sum"], ["broadcast", "sum"], ["sum"]],
        ["collective #1", "rank 2: all_reduce"],
    ),
    "two orders": (
        [["sum", "scan"], ["scan", "sum"], ["sum", "scan"]],
        ["collective #1", "rank 1: scan("],
    ),
    "two believe that they are the root": (
        [["broadcast"], ["other root"], ["other root"]],
        ["collective #1", "rank 0: broadcast(float32 of shape (6,), root 0)"],
    ),
    "all differ": (
        [["broadcast"], ["gather"], ["other root"]],
        ["rank 0: broadcast(", "rank 1: gather(", "rank 2: broadcast("],
    ),
    "long ago": (
        [["broadcast"] * 41, ["broadcast"] * 41, ["other root"]],
        ["collective #1", "root 0", "root 2"],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_differ(name: str) -> None:
    texts = run_on(SimBackend, _sequence, world_size=P, args=PROGRAMS[name], shm="off")
    assert len(set(texts)) == 1, texts


def _root_goes_on(backend: fc.Backend) -> None:
    """A rank that has only sent hears of it in its next call."""
    fc.all_reduce(np.ones(1), backend)  # the first one sets things up, for which all wait
    size = 3 if backend.rank == 0 else 4
    if backend.rank == 0:
        fc.broadcast(np.ones(size), backend, algorithm="star")
        time.sleep(1.5)
        error = expect(fc.MismatchError, backend.send, np.ones(1), 1)
    else:
        error = expect(fc.MismatchError, fc.broadcast, np.ones(size), backend, algorithm="star")
    assert "rank 0: broadcast(float64 of shape (3,), root 0, algorithm star)" in str(error)
    meet()


@pytest.mark.parametrize("transport", ["sim", "zmq", "mpi"])
def test_ranks_that_only_send(transport: str) -> None:
    run(_root_goes_on, transport=transport, world_size=3, shm="off")


@pytest.mark.parametrize("transport", ["zmq", "mpi"])
def test_two_roots(transport: str) -> None:
    run(_two_roots, transport=transport, world_size=2, shm="off")


def _two_roots(backend: fc.Backend) -> None:
    fc.broadcast(np.ones(3), backend, root=backend.rank, algorithm="star")  # neither waits
    error = expect(fc.MismatchError, fc.all_reduce, np.ones(3), backend)
    assert "collective #1 does not fit" in str(error)
    meet()


def _one_comes_late(backend: fc.Backend) -> str:
    if backend.rank == 2:
        time.sleep(0.9)  # the others know for a while that they differ
    return str(expect(fc.MismatchError, fc.all_reduce, np.ones(3 + backend.rank), backend))


def test_who_comes_late_is_named_too() -> None:
    texts = run_on(SimBackend, _one_comes_late, world_size=P, shm="off")
    assert len(set(texts)) == 1
    assert [line.split(":")[0] for line in texts[0].splitlines()[1:]] == [
        "  rank 0",
        "  rank 1",
        "  rank 2",
    ]


def _in_a_group_that_one_has_closed(backend: fc.Backend) -> str:
    def in_group() -> None:
        with backend.sub(range(P)) as group:
            fc.broadcast(np.ones(3 + (backend.rank == 0)), group, algorithm="star")
        del group
        time.sleep(1.5)
        backend.barrier()

    return str(expect(fc.MismatchError, in_group))


def test_a_group_that_one_has_closed() -> None:
    texts = run_on(SimBackend, _in_a_group_that_one_has_closed, world_size=P, shm="off")
    assert len(set(texts)) == 1
    assert "rank 0: broadcast(float64 of shape (4,)" in texts[0]


# Ranks that are ahead.


def _runs_ahead(backend: Any) -> int:
    """The root sends as much as it may to ranks that sleep."""
    if backend.rank:
        time.sleep(1.0)
        for number in range(3 * FREE_CALLS):
            got = fc.broadcast(np.zeros(2), backend, algorithm="star")
            assert (got == number).all()
        return 0
    start = time.monotonic()
    for number in range(3 * FREE_CALLS):
        fc.broadcast(np.full(2, float(number)), backend, algorithm="star")
        if time.monotonic() < start + 0.5:
            ahead = number + 1
    return ahead


def test_nobody_runs_away() -> None:
    ahead, *_ = run_on(CountingSim, _runs_ahead, world_size=3, shm="off")
    assert ahead == FREE_CALLS - 1


def _leaves(backend: fc.Backend, elements: int) -> None:
    """The root is gone before the others begin to receive."""
    backend.barrier()
    meet()
    if backend.rank:
        time.sleep(0.3)
    for _ in range(3):
        got = fc.broadcast(np.full(elements, backend.rank + 1.0), backend, algorithm="star")
        assert (got == 1).all()
    backend.close()
    meet()


@pytest.mark.parametrize("elements", [3, 300_000])
@pytest.mark.parametrize("transport", ["sim", "zmq", "mpi"])
def test_a_root_that_leaves_at_once(transport: str, elements: int) -> None:
    run(_leaves, transport=transport, world_size=3, args=(elements,), shm="off")


def _slow(backend: fc.Backend) -> None:
    """Asking a rank that is only late does no harm."""
    if backend.rank == 1:
        time.sleep(2.5)
    assert (fc.all_reduce(np.ones(4), backend) == backend.world_size).all()
    got = fc.broadcast(np.full(4, backend.rank), backend, root=1)
    assert (got == 1).all()


@pytest.mark.parametrize("transport", ["sim", "zmq", "mpi"])
def test_a_rank_that_is_late(transport: str) -> None:
    run(_slow, transport=transport, world_size=3, shm="off")


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(300))
def test_random_programs(seed: int) -> None:
    """One rank calls something else somewhere in a long program."""
    rng = random.Random(seed)
    program = rng.choices([*CALLS], k=rng.randint(1, 150))
    where, who = rng.randrange(len(program)), rng.randrange(P)
    other = rng.choice([name for name in CALLS if name != program[where]])
    lists = [list(program) for _ in range(P)]
    lists[who][where] = other
    words = [f"collective #{where + 1}", f"rank {who}: ", CALLS[other][1]]
    texts = run_on(SimBackend, _sequence, world_size=P, args=(lists, words), shm="off")
    assert len(set(texts)) == 1, texts
