"""Messages through memory that ranks of one host share, and where they do not."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from support.bodies import memory_messages, point_to_point, soak
from support.cases import bodies
from support.spmd import run


@pytest.mark.parametrize("world_size", [3])
@bodies(
    point_to_point.every_kind_of_array,
    point_to_point.tags_in_any_order,
    point_to_point.one_tag_keeps_order,
    point_to_point.many_outstanding,
    point_to_point.several_threads,
)
def test_messages_in_small_pieces(body: Any, world_size: int) -> None:
    tight = memory_messages.in_small_pieces
    run(tight, transport="zmq", world_size=world_size, args=(body,), eager_bytes=0, shm="on")


def test_both_ways_at_once_in_small_pieces() -> None:
    """Dozens of pieces a message, many times what may be ahead."""
    body, size = memory_messages.both_ways_at_once, 40_001
    tight = memory_messages.in_small_pieces
    run(tight, transport="zmq", world_size=3, args=(body, size), eager_bytes=0, shm="on")


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_ways_at_once(world_size: int) -> None:
    run(memory_messages.both_ways_at_once, transport="zmq", world_size=world_size, shm="on")


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_place_in_small_pieces(world_size: int) -> None:
    body = memory_messages.any_place
    run(_small, transport="zmq", world_size=world_size, args=(body, 40, 20_000), eager_bytes=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_place(world_size: int) -> None:
    body = memory_messages.any_place
    run(_large, transport="zmq", world_size=world_size, args=(body, 8, 6_000_000))


def _small(backend: Any, body: Any, count: int, largest: int) -> None:
    body(backend, 1, count, largest, small=True)


def _large(backend: Any, body: Any, count: int, largest: int) -> None:
    body(backend, 2, count, largest, small=False)


MIXES: list[dict[str, Any]] = [
    {"host_id": ("a", "b", "a"), "shm": "on"},
    {"shm": ("auto", "off", "auto")},
    {"shm": "off"},
]


@pytest.mark.parametrize("options", MIXES, ids=["hosts", "one without", "off"])
def test_any_place_where_not_all_share(options: dict[str, Any]) -> None:
    body = memory_messages.any_place
    run(_small, transport="zmq", world_size=3, args=(body, 30, 20_000), eager_bytes=0, **options)


@pytest.mark.parametrize("shm", ["on", "off"])
def test_bytes_on_the_socket(shm: str) -> None:
    body = memory_messages.bytes_on_the_socket
    run(body, transport="zmq", world_size=2, args=(shm == "on",), shm=shm)


def test_from_far_inside_a_segment() -> None:
    run(memory_messages.far_inside, transport="zmq", world_size=2, shm="on")


FAILURES = [
    ("os.memfd_create", OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
    ("mmap.mmap", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(("call", "error"), FAILURES, ids=["make", "map"])
def test_a_rank_without_memory(call: str, error: OSError, culprit: int) -> None:
    body = memory_messages.without
    told = run(body, transport="zmq", world_size=2, args=(culprit, call, error))
    assert told == [[], []]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(("call", "error"), FAILURES, ids=["make", "map"])
def test_memory_that_is_required(call: str, error: OSError, culprit: int) -> None:
    body = memory_messages.without
    told = run(body, transport="zmq", world_size=2, args=(culprit, call, error), shm="on")
    for (text,) in told:
        assert f"shm=on, but rank {culprit} of this host cannot share memory" in text
        assert "use shm=auto, which falls back to messages" in text
    assert told[culprit][0].startswith("ConfigError")
    assert os.strerror(error.errno or 0) in told[culprit][0]


def test_many_messages_leave_nothing() -> None:
    body = memory_messages.leave_nothing
    found = run(body, transport="zmq", world_size=2, args=(2_500,), eager_bytes=0, shm="on")
    for rank, values in enumerate(found):
        for name in ("threads", "descriptors"):
            before, after = values[name]
            assert before == after, f"{name} of rank {rank}: {values}"
        for name in soak.MEMORY:
            before, after = values[name]
            assert after - before <= soak.SLACK_KIB // 2, f"{name} of rank {rank}, in KiB: {values}"
