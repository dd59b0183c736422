"""Batches and lists on every transport; and the messages that they cost, counted on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.simulated.backend import SimBackend
from support.bodies import coalescing
from support.cases import NOT_MPI, bodies, jobs
from support.spmd import run, run_on

import fsdpcore as fc
from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.work import Pending

pytestmark = pytest.mark.side_by_side("transport")


@jobs(on=NOT_MPI)
@bodies(coalescing.as_single_calls, coalescing.every_dtype_and_op)
def test_values(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs()
@bodies(
    coalescing.into_out,
    coalescing.started,
    coalescing.nothing_and_misuse,
    coalescing.left_by_an_exception,
    coalescing.lists,
    coalescing.lists_refused,
)
def test_coalescing(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 3)
@pytest.mark.parametrize("how", ["label", "shape", "order", "length"])
def test_batches_that_differ(how: str, transport: str, world_size: int) -> None:
    body = coalescing.batches_that_differ
    run(body, transport=transport, world_size=world_size, args=(how,))


@jobs(2, 3)
@bodies(coalescing.batch_and_other, coalescing.lists_that_differ)
def test_differences(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


class _Counting(SimBackend):
    """Counts the messages that this rank sends."""

    sent = 0

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        self.sent += 1
        return super().post_send(data, dst, envelope)


def _count(backend: Any) -> None:
    def messages(count: int, kind: str, **options: Any) -> int:
        before = backend.sent
        with fc.coalesce(backend) as batch:
            for number in range(count):
                getattr(batch, kind)(np.full((8, 2), number, np.float32), **options)
        return int(backend.sent - before)

    kinds = ["all_reduce", "reduce_scatter", "reduce", "broadcast", "all_gather", "gather"]
    for kind in [*kinds, "all_to_all"]:
        messages(1, kind)
        assert messages(20, kind) == messages(1, kind), kind
    before = backend.sent
    fc.all_reduce(np.ones(16, np.float32), backend)
    single = backend.sent - before
    assert messages(1, "all_reduce") == single
    before = backend.sent
    fc.all_reduce_many([np.ones(4, np.float32)] * 20, backend, bucket_bytes=160)
    assert backend.sent - before == 2 * single
    before = backend.sent
    with fc.coalesce(backend) as batch:  # what only moves shares messages across dtypes
        for dtype in (np.int8, np.float64, np.complex64):
            batch.broadcast(np.ones(3, dtype))
    mixed, before = backend.sent - before, backend.sent
    with fc.coalesce(backend) as batch:
        batch.broadcast(np.ones(51, np.uint8))
    assert mixed == backend.sent - before


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_batch_costs_as_many_messages_as_one_call(world_size: int) -> None:
    run_on(_Counting, _count, world_size=world_size)
