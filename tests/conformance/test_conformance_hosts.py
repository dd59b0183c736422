"""With and without shared memory, and with ranks that count as being on different hosts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from support.bodies import asynchronous, bounded, groups, layouts, movement, reductions, splitting
from support.cases import bodies
from support.spmd import run

import fsdpcore as fc

pytestmark = pytest.mark.side_by_side("transport")

# The transport, the number of ranks, and options; one that is a tuple has a value for each rank.
# Hosts in turn make reductions send partial results of several subtrees of the canonical tree.
WHERE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sim, off": ("sim", 4, {"shm": "off"}),
    "sim, hosts": ("sim", 4, {"hosts": 2}),
    "zmq, on": ("zmq", 3, {"shm": "on"}),
    "zmq, off": ("zmq", 3, {"shm": "off"}),
    "zmq, hosts": ("zmq", 4, {"shm": "on", "host_id": ("a", "a", "b", "b")}),
    "zmq, hosts in turn": ("zmq", 3, {"shm": "on", "host_id": ("a", "b", "a")}),
    "zmq, one host without": (
        "zmq",
        4,
        {"host_id": ("a", "b", "b", "a"), "shm": ("auto", "off", "off", "auto")},
    ),
    "mpi, hosts": ("mpi", 3, {"shm": "on", "host_id": ("a", "a", "b")}),
}


# Threads and processes; by messages alone, and through memory and messages.
THOROUGH = ["sim, off", "zmq, hosts"]
# What the other modules run everywhere, too, as memory is shared there without being asked for.
AS_EVERYWHERE = ["zmq, on"]
EVERY_DAY = [where for where in WHERE if where not in AS_EVERYWHERE]
# Where messages take the long way, the other modules have all that travels by messages alone.
BOTH_WAYS = [where for where in EVERY_DAY if "off" not in where]
# One of each transport.
OF_ALL_KINDS = ["sim, off", "zmq, hosts", "mpi, hosts"]

SHAPES = [reductions.every_shape, movement.every_shape]
EVERYWHERE = [groups.any_members_in_any_order, asynchronous.every_collective]
# The same code wherever ranks are: that of the reductions, of moves by root, and of groups.
WHERE_IT_DIFFERS = [
    movement.barriers,
    movement.ragged_gather,
    movement.ragged_reduction,
    movement.ragged_exchange,
    layouts.every_layout,
    layouts.own_chunk_in_place,
    groups.messages_and_collectives_do_not_mix,
    groups.closing_a_group,
    splitting.meshes,
    bounded.messages_between_collectives,
    movement.ragged_rooted,
    groups.several_at_once,
    groups.between_calls_of_the_parent,
    groups.equal_members_do_not_mix,
    splitting.overlapping_groups,
    splitting.blocking_beside_started,
    asynchronous.many_outstanding,
]
# By messages alone; where memory is shared, the other modules have them.
OF_VALUES = [
    reductions.special_values,
    reductions.means_of_integers,
    reductions.all_reduce_in_two_steps,
    movement.every_dtype,
]


def _among(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise by ``where``, and for what runs side by side by its ``transport``."""
    return pytest.mark.parametrize(
        ("transport", "where"), [pytest.param(WHERE[name][0], name, id=name) for name in names]
    )


def _run(body: Any, where: str, *args: Any) -> None:
    transport, world_size, options = WHERE[where]
    run(body, transport=transport, world_size=world_size, args=args, **options)


@_among(where for where in BOTH_WAYS if "mpi" not in where)
@bodies(*SHAPES)
def test_shapes(body: Any, transport: str, where: str) -> None:
    _run(body, where)


@_among(EVERY_DAY)
@bodies(*EVERYWHERE)
def test_hosts(body: Any, transport: str, where: str) -> None:
    _run(body, where)


@pytest.mark.campaign
@_among(WHERE)
@bodies(*SHAPES, *EVERYWHERE)
def test_shapes_on_all_hosts(body: Any, transport: str, where: str) -> None:
    _run(body, where)


@_among(THOROUGH)
@bodies(*WHERE_IT_DIFFERS)
def test_kinds_of_hosts(body: Any, transport: str, where: str) -> None:
    _run(body, where)


@_among(["sim, off"])
@bodies(*OF_VALUES)
def test_values(body: Any, transport: str, where: str) -> None:
    _run(body, where)


@pytest.mark.campaign
@_among(where for where in WHERE if where not in THOROUGH)
@bodies(*WHERE_IT_DIFFERS, *OF_VALUES)
def test_all_hosts(body: Any, transport: str, where: str) -> None:
    _run(body, where)


@_among(OF_ALL_KINDS)
def test_some_dtypes_and_ops(transport: str, where: str) -> None:
    every = 3 if where in THOROUGH else 6
    _run(reductions.every_dtype_and_op, where, every, list(WHERE).index(where) % every)


@pytest.mark.campaign
@_among(WHERE)
def test_every_dtype_and_op(transport: str, where: str) -> None:
    _run(reductions.every_dtype_and_op, where)


@_among(where for where in WHERE if "host_id" in WHERE[where][2])
def test_who_is_where(transport: str, where: str) -> None:
    _, world_size, options = WHERE[where]
    ids = options["host_id"]
    expected = tuple(sorted(set(ids)).index(name) for name in ids)
    found = run(_hosts, transport=transport, world_size=world_size, **options)
    assert found == [(expected, ids.count(name)) for name in ids]


def _hosts(backend: fc.Backend) -> tuple[tuple[int, ...], int]:
    return backend.hosts, backend.host_group().world_size


@_among(where for where in WHERE if where in (*OF_ALL_KINDS, "sim, hosts"))
@bodies(reductions.large_arrays, movement.large_arrays)
def test_large_arrays(body: Any, transport: str, where: str) -> None:
    _run(body, where, 140_000)
