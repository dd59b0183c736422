"""Bodies: ranks that call different things learn of it, all of them, and what each one called.

In all of them the last rank is the one that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from support.bodies.point_to_point import check_words, expect
from support.spmd_job import meet

import fsdpcore as fc

Call = Callable[[fc.Backend], Any]


def _ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def _twice(first: Call, second: Call) -> Call:
    def call(backend: fc.Backend) -> None:
        first(backend)
        second(backend)

    return call


def _all_reduce(**options: Any) -> Call:
    return lambda b: fc.all_reduce(_ones(3), b, **options)


# What differs: what most ranks call, what the last one does, and words from the two lines of the
# message. Where the counts must be as many as there are ranks, -1 stands for the number of ranks.
DIFFERENCES: dict[str, tuple[Call, Call, str, str]] = {
    "shape": (
        _all_reduce(),
        lambda b: fc.all_reduce(_ones(4), b),
        "all_reduce(sum, float32 of shape (3,))",
        "all_reduce(sum, float32 of shape (4,))",
    ),
    "dimensions": (
        lambda b: fc.all_gather(_ones(1), b),
        lambda b: fc.all_gather(np.float32(1), b),
        "of shape (1,)",
        "of shape ()",
    ),
    "dtype": (
        lambda b: fc.broadcast(_ones(3), b),
        lambda b: fc.broadcast(_ones(3, dtype=np.int32), b),
        "broadcast(float32",
        "broadcast(int32",
    ),
    "op": (_all_reduce(), _all_reduce(op="max"), "all_reduce(sum", "all_reduce(max"),
    "root": (
        lambda b: fc.reduce(_ones(3), b, root=0),
        lambda b: fc.reduce(_ones(3), b, root=1),
        "root 0",
        "root 1",
    ),
    "scatter's root": (
        lambda b: fc.scatter(_ones(4), b, root=0),
        lambda b: fc.scatter(_ones(4), b, root=b.world_size - 1),
        "scatter(root 0)",
        "scatter(root ",
    ),
    "operation": (
        _all_reduce(),
        lambda b: fc.all_gather(_ones(3), b),
        "all_reduce(",
        "all_gather(",
    ),
    "barrier": (lambda b: b.barrier(), _all_reduce(), "barrier()", "all_reduce("),
    "algorithm": (
        _all_reduce(algorithm="star"),
        _all_reduce(algorithm="direct"),
        "algorithm star",
        "algorithm direct",
    ),
    "order": (
        _twice(lambda b: fc.broadcast(_ones(3), b), lambda b: fc.barrier(b)),
        _twice(lambda b: fc.barrier(b), lambda b: fc.broadcast(_ones(3), b)),
        "broadcast(",
        "barrier()",
    ),
    "rows of a ragged one": (
        lambda b: fc.all_gather_v(_ones(2, 3), b),
        lambda b: fc.all_gather_v(_ones(2, 4), b),
        "(2, 3)",
        "(2, 4)",
    ),
    "counts": (
        lambda b: fc.reduce_scatter_v(_ones(b.world_size), b, [1] * b.world_size),
        lambda b: fc.reduce_scatter_v(
            _ones(b.world_size), b, [b.world_size] + [0] * (b.world_size - 1)
        ),
        "counts [1, ",
        ", 0]",
    ),
    "label": (_all_reduce(label="loss"), _all_reduce(label="norm"), "for loss", "for norm"),
    "started": (
        lambda b: fc.all_reduce(_ones(3), b, async_op=True).wait(),
        lambda b: fc.all_reduce(_ones(5), b, async_op=True).wait(),
        "(3,)",
        "(5,)",
    ),
}


def difference(backend: fc.Backend, what: str) -> None:
    """Every rank raises, and the message says which ranks called what."""
    me, p = backend.rank, backend.world_size
    most, last, words, other_words = DIFFERENCES[what]
    error = expect(fc.MismatchError, last if me == p - 1 else most, backend)
    _check_lines(error, list(range(p - 1)), words, p - 1, other_words)
    _check_stays_broken(backend, error)
    meet()


def _check_lines(
    error: BaseException, ranks: list[int], words: str, other: int, other_words: str
) -> None:
    several = "ranks" if len(ranks) > 1 else "rank"
    who = f"{several} {', '.join(map(str, ranks))}: "
    lines = str(error).splitlines()
    assert any(who in line and words in line for line in lines), f"{who}…{words} not in {error}"
    them = f"rank {other}: "
    assert any(them in line and other_words in line for line in lines), f"{them} not in {error}"


def _check_stays_broken(backend: fc.Backend, error: BaseException) -> None:
    """Whatever is called later raises the first cause, and at once."""
    me, p = backend.rank, backend.world_size
    peer, ones = (me + 1) % p, np.ones(2)
    group = backend.sub([me])
    calls: list[Callable[[], Any]] = [
        backend.barrier,
        lambda: fc.all_reduce(ones, backend),
        lambda: fc.all_reduce(ones, backend, async_op=True),
        lambda: fc.all_reduce(ones, group),
        lambda: backend.send(ones, peer),
        lambda: backend.recv(ones, peer),
        lambda: backend.isend(ones, peer),
        lambda: backend.irecv(ones, peer),
    ]
    for call in calls:
        assert str(expect(type(error), call)) == str(error)


def difference_in_a_group(backend: fc.Backend) -> None:
    """In a group the ranks are named by their numbers in the whole job."""
    me, p = backend.rank, backend.world_size
    group = backend.sub(list(reversed(range(p))))
    size = 3 if me else 4
    error = expect(fc.MismatchError, fc.all_reduce, _ones(size), group)
    check_words(error, "rank 0: all_reduce(sum, float32 of shape (4,))")
    meet()


def unexpected_rows(backend: fc.Backend) -> None:
    """Wrong recv_counts: all ranks raise, and it says whose and what came."""
    me, p = backend.rank, backend.world_size
    wrong = [2, *[1] * (p - 1)] if me == p - 1 else None
    error = expect(fc.MismatchError, fc.all_to_all_v, _ones(p), backend, [1] * p, recv_counts=wrong)
    check_words(error, f"rank {p - 1} expects rows [2, ", "send [1, ")
    meet()


def failure_of_started_work(backend: fc.Backend) -> None:
    """A started collective raises when it is waited for, as often as that is done."""
    size = 3 if backend.rank else 4
    work = fc.all_reduce(_ones(size), backend, async_op=True)
    first = expect(fc.MismatchError, work.wait)
    second = expect(fc.MismatchError, work.wait)
    assert work.done()
    assert str(first) == str(second)
    assert str(expect(fc.MismatchError, work.result)) == str(first)
    meet()


def long_counts_that_differ(backend: fc.Backend) -> None:
    """Calls whose words are too long for the message are still told apart."""
    me, p = backend.rank, backend.world_size
    rows = 10**6 * p
    counts = [10**6] * p
    if me == p - 1:
        counts[-2:] = [10**6 - 1, 10**6 + 1]
    array = np.broadcast_to(np.int8(0), (rows, 0))
    label = "a" * 160
    error = expect(fc.MismatchError, fc.reduce_scatter_v, array, backend, counts, label=label)
    lines = [line.partition(":")[0].strip() for line in str(error).splitlines()[1:]]
    others = ", ".join(map(str, range(p - 1)))
    assert lines == [f"rank{'s' if p > 2 else ''} {others}", f"rank {p - 1}"], str(error)
    meet()
