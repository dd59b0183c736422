"""Count what one collective sends, receives and reduces, on the simulated transport."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from fsdpcore.transports.simulated.backend import SimBackend
from support.spmd import run_on

import fsdpcore as fc
from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.reductions import Reduction
from fsdpcore.core.work import Pending

ROOTED = ("broadcast", "reduce", "gather", "scatter")


class Traffic(NamedTuple):
    """What one rank sends, receives and reduces: messages, and multiples of n."""

    sent: int
    out: Fraction
    received: int
    into: Fraction
    reduced: Fraction = Fraction(0)

    @classmethod
    def total(cls, parts: Iterable[Traffic]) -> Traffic:
        """Add up."""
        return cls(*map(sum, zip(*parts, strict=True)))


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


class _Reduced(threading.local):
    """Bytes that this thread, which is a rank, has reduced."""

    bytes = 0


_reduced = _Reduced()
_combine = Reduction.combine


def _counting_combine(self: Reduction, left: Any, right: Any, out: Any) -> None:
    _reduced.bytes += out.nbytes
    _combine(self, left, right, out)


def _call(backend: Any, collective: str, algorithm: str, rows: int, dtype: Any, root: int) -> None:
    options: dict[str, Any] = {"algorithm": algorithm}
    if collective in ROOTED:
        options["root"] = root
    if collective in ("all_gather", "gather"):
        rows //= backend.world_size
    getattr(fc, collective)(np.zeros(rows, dtype), backend, **options)


def counters(backend: Any) -> list[int]:
    """Messages and bytes sent, messages and bytes received, and bytes reduced, so far."""
    sent, received = backend.sent, backend.received
    return [len(sent), sum(sent), len(received), sum(received), _reduced.bytes]


def _count(backend: Any, collective: str, algorithm: str, *args: Any) -> list[int]:
    """Count for one call, less what it takes for an empty array."""
    before = counters(backend)
    _call(backend, collective, algorithm, 0, *args[1:])
    between = counters(backend)
    _call(backend, collective, algorithm, *args)
    after = counters(backend)
    return [c - b - (b - a) for a, b, c in zip(before, between, after, strict=True)]


@cache
def measure(
    collective: str,
    algorithm: str,
    p: int,
    *,
    dtype: Any = np.float32,
    root: int = 0,
    hosts: int = 1,
    rows: int = 0,
) -> list[Traffic]:
    """Return the traffic of every rank, less what an empty array takes."""
    rows = rows or 24 * p * (p - 1)
    args = (collective, algorithm, rows, dtype, root)
    with mock.patch.object(Reduction, "combine", _counting_combine):
        ranks = run_on(CountingSim, _count, world_size=p, args=args, hosts=hosts, shm="off")
    n = rows * np.dtype(dtype).itemsize
    return [
        Traffic(sent, Fraction(out, n), received, Fraction(into, n), Fraction(reduced, n))
        for sent, out, received, into, reduced in ranks
    ]
