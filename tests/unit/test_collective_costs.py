"""What the algorithms send, counted, against the formulas in their modules' docstrings.

p is the number of ranks and n the bytes of the array at the collective's own size: per rank for
all_reduce, reduce and broadcast, in total for the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from fsdpcore.transports.simulated import SimBackend
from support import oracle
from support.spmd import run_on

import fsdpcore as fc
from fsdpcore.backend import Envelope
from fsdpcore.buffers import Bytes
from fsdpcore.work import Pending


class Traffic(NamedTuple):
    """Messages and bytes."""

    messages: int | Fraction
    bytes: int | Fraction


class CountingSim(SimBackend):
    """Counts what this rank sends and receives."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: list[int] = []
        self.received: list[int] = []

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        self.sent.append(data.size)
        return super().post_send(data, dst, envelope)

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        self.received.append(out.size)
        return super().post_recv(out, src, envelope)


def _call(backend: Any, collective: str, algorithm: str, rows: int, dtype: Any, root: int) -> None:
    p = backend.world_size
    options: dict[str, Any] = {"algorithm": algorithm}
    if collective in ("broadcast", "reduce", "gather", "scatter"):
        options["root"] = root
    if collective in ("all_gather", "gather"):
        rows //= p
    getattr(fc, collective)(np.zeros(rows, dtype), backend, **options)


def _count(
    backend: Any, collective: str, algorithm: str, rows: int, dtype: Any, root: int
) -> tuple[Traffic, Traffic]:
    """Send and receive traffic of one call, without what it takes for an empty array."""
    _call(backend, collective, algorithm, 0, dtype, root)
    fixed = len(backend.sent), sum(backend.sent), len(backend.received), sum(backend.received)
    backend.sent.clear()
    backend.received.clear()
    _call(backend, collective, algorithm, rows, dtype, root)
    sent = Traffic(len(backend.sent) - fixed[0], sum(backend.sent) - fixed[1])
    received = Traffic(len(backend.received) - fixed[2], sum(backend.received) - fixed[3])
    return sent, received


Measured = list[tuple[Traffic, Traffic]]


def _measure(
    collective: str, algorithm: str, p: int, *, dtype: Any = np.float32, root: int = 0
) -> tuple[int, Measured]:
    rows = 24 * p
    args = (collective, algorithm, rows, dtype, root)
    return rows * np.dtype(dtype).itemsize, run_on(CountingSim, _count, world_size=p, args=args)


SIZES = pytest.mark.parametrize("p", [2, 3, 4, 5, 8])


def _depth(p: int) -> int:
    """The smallest k with 2**k >= p."""
    k = 0
    while 2**k < p:
        k += 1
    return k


@SIZES
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        *itertools.product(["reduce_scatter", "all_gather", "all_reduce"], ["direct", "ring"]),
        ("all_to_all", "direct"),
    ],
)
def test_direct_and_ring(collective: str, algorithm: str, p: int) -> None:
    n, ranks = _measure(collective, algorithm, p)
    times = 2 if collective == "all_reduce" else 1
    expected = Traffic(times * (p - 1), Fraction(times * (p - 1) * n, p))
    for sent, received in ranks:
        assert sent == expected
        assert received == expected


STAR: dict[str, Callable[[int], tuple[int, Fraction]]] = {
    "all_reduce": lambda p: (2 * (p - 1), Fraction(2 * (p - 1))),
    "reduce_scatter": lambda p: (2 * (p - 1), (p - 1) * (1 + Fraction(1, p))),
    "all_gather": lambda p: (2 * (p - 1), (p - 1) * (1 + Fraction(1, p))),
    "broadcast": lambda p: (p - 1, Fraction(p - 1)),
    "reduce": lambda p: (p - 1, Fraction(p - 1)),
    "gather": lambda p: (p - 1, Fraction(p - 1, p)),
    "scatter": lambda p: (p - 1, Fraction(p - 1, p)),
}


@SIZES
@pytest.mark.parametrize("collective", STAR)
def test_star(collective: str, p: int) -> None:
    centre = p - 1 if collective in ("broadcast", "reduce", "gather", "scatter") else 0
    n, ranks = _measure(collective, "star", p, root=centre)
    messages, factor = STAR[collective](p)
    sent, received = ranks[centre]
    assert sent.messages + received.messages == messages
    assert sent.bytes + received.bytes == factor * n


@SIZES
@pytest.mark.parametrize("root", ["first", "last"])
def test_tree(root: str, p: int) -> None:
    where = 0 if root == "first" else p - 1
    n, ranks = _measure("broadcast", "tree", p, root=where)
    assert ranks[where][0] == Traffic(_depth(p), _depth(p) * n)
    assert max(sent.messages for sent, _ in ranks) == _depth(p)
    n, ranks = _measure("gather", "tree", p, root=where)
    assert ranks[where][1] == Traffic(_depth(p), Fraction((p - 1) * n, p))
    n, ranks = _measure("scatter", "tree", p, root=where)
    assert ranks[where][0] == Traffic(_depth(p), Fraction((p - 1) * n, p))
    n, ranks = _measure("reduce", "tree", p, root=where)
    assert ranks[0][1] == Traffic(_depth(p), _depth(p) * n)
    extra = 1 if where else 0
    assert sum(sent.messages for sent, _ in ranks) == p - 1 + extra


@SIZES
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_doubling(collective: str, p: int) -> None:
    n, ranks = _measure(collective, "doubling", p)
    for sent, received in ranks:
        if p == 2 ** _depth(p):
            whole = Fraction((p - 1) * n, p) if collective == "all_gather" else _depth(p) * n
            assert sent == received == Traffic(_depth(p), whole)
        assert sent.messages <= p - 1
        assert received.messages <= _depth(p)


@pytest.mark.parametrize(
    ("collective", "algorithm", "factor"),
    [
        ("all_reduce", "direct", 1),
        ("reduce_scatter", "direct", 1),
        ("all_reduce", "star", 1),
        ("all_gather", "doubling", 1),
        ("all_gather", "ring", 1),
        ("all_reduce", "doubling", 2),
        ("reduce_scatter", "ring", 2),
        ("all_reduce", "ring", Fraction(3, 2)),
        ("reduce", "tree", 2),
    ],
)
def test_half_precision(collective: str, algorithm: str, factor: int | Fraction) -> None:
    """Where partial sums travel, they travel as float32."""
    p = 4
    _, narrow = _measure(collective, algorithm, p, dtype=oracle.HALVES[1])
    _, integers = _measure(collective, algorithm, p, dtype=np.int16)
    for half, whole in zip(narrow, integers, strict=True):
        assert half[0] == Traffic(whole[0].messages, factor * whole[0].bytes)


@SIZES
def test_agreement_and_barrier(p: int) -> None:
    """Before the data: ceil(lg p) messages, p - 1 records of one size, on every rank."""
    ranks = run_on(CountingSim, _count_barrier, world_size=p)
    record = ranks[0][0].bytes // (p - 1)
    for sent, received in ranks:
        assert sent == received == Traffic(_depth(p), record * (p - 1))
    empty = run_on(CountingSim, _count_empty, world_size=p)
    assert empty == ranks


def _count_barrier(backend: Any) -> tuple[Traffic, Traffic]:
    fc.barrier(backend)
    return _so_far(backend)


def _count_empty(backend: Any) -> tuple[Traffic, Traffic]:
    fc.all_gather(np.zeros((0, 5)), backend, algorithm="ring")
    return _so_far(backend)


def _so_far(backend: Any) -> tuple[Traffic, Traffic]:
    sent, received = backend.sent, backend.received
    return Traffic(len(sent), sum(sent)), Traffic(len(received), sum(received))
