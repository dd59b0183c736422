"""Objects and metrics between ranks, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
from fsdpcore.transports.simulated import SimBackend
from support.bodies import objects
from support.bodies.point_to_point import expect
from support.cases import bodies, jobs
from support.spmd import run, run_on

import fsdpcore as fc
from fsdpcore.comm.transport import Transport

pytestmark = pytest.mark.side_by_side("transport")


@jobs(1, 2, 3)
@bodies(objects.collectives, objects.messages, objects.refusals, objects.metrics)
def test_objects(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2)
@pytest.mark.parametrize("kind", objects.DIFFERENCES)
def test_difference(kind: str, transport: str, world_size: int) -> None:
    run(objects.difference, transport=transport, world_size=world_size, args=(kind,))


@jobs(2, on=["sim", "zmq"])
@pytest.mark.parametrize("kind", objects.FORGERIES)
def test_forgery(kind: str, transport: str, world_size: int) -> None:
    run(objects.forgery, transport=transport, world_size=world_size, args=(kind,))


def _pickling(backend: fc.Backend) -> None:
    expect(fc.UnsupportedError, fc.broadcast_object, {1}, backend, pickle=True)
    assert fc.all_gather_object(backend.rank, backend) == [0, 1]


def test_nothing_is_unpickled_that_comes_over_a_network_of_mpi() -> None:
    run(_pickling, transport="mpi", world_size=2, host_id=("a", "b"))


class _Silent(SimBackend):
    """A transport that does not say who can send to its ranks."""

    unauthenticated = Transport.unauthenticated


def test_nothing_is_unpickled_where_a_transport_does_not_vouch_for_it() -> None:
    run_on(_Silent, _pickling, world_size=2)
