"""Memory that ranks share, on every transport: arrays, windows, and collectives on them."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from support.bodies import memory, memory_failures, soak
from support.cases import COSTLY, bodies, jobs
from support.spmd import TRANSPORTS, run


@jobs(1, 2, 4)
@bodies(
    memory.arrays_of_empty,
    memory.blocks_are_used_again,
    memory.every_dtype_and_op,
    memory.windows,
    memory.collectives_on_windows,
    memory.refused_windows,
)
def test_memory(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 4)
@bodies(memory.sizes_around_every_bound, memory.started_ones, memory.windows_of_groups)
def test_memory_of_several(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2)
@bodies(memory.different_windows, memory.windows_outlive_their_maker)
def test_windows_of_two(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 4, on=COSTLY)
@bodies(memory.as_on_a_weak_memory_model, memory.input_may_change_at_once)
def test_processes(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@pytest.mark.parametrize("transport", COSTLY)
def test_what_is_closed_is_not_mapped(transport: str) -> None:
    run(memory.nothing_stays_mapped, transport=transport, world_size=3)


@jobs(2, 3, 4, on=COSTLY)
def test_any_mix_of_places(transport: str, world_size: int) -> None:
    body = memory.every_place
    run(body, transport=transport, world_size=world_size, args=(100 * world_size, 60))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_shared_memory(transport: str) -> None:
    for body in (memory.arrays_of_empty, memory.blocks_are_used_again, memory.refused_windows):
        run(body, transport=transport, world_size=2, shm="off")


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_windows_are_per_host(hosts: int) -> None:
    found = run(memory.windows_per_host, transport="sim", world_size=4, hosts=hosts)
    assert len({tuple(window) for window in found}) == hosts


FAILURES = [
    ("os.memfd_create", OSError(errno.EMFILE, os.strerror(errno.EMFILE))),
    ("os.ftruncate", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    ("mmap.mmap", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
]


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize(("call", "error"), FAILURES)
def test_one_rank_without_shared_memory(call: str, error: OSError, culprit: int) -> None:
    arguments = (culprit, call, error)
    logged = run(memory_failures.one_rank_without, transport="zmq", world_size=3, args=arguments)
    lines = [line for each in logged for line in each if "cannot share memory" in line]
    assert len(lines) == 1  # one rank speaks for all
    assert "messages are sent among ranks [0, 1, 2]" in lines[0]


@pytest.mark.parametrize(
    ("failure", "culprit"), [(FAILURES[0], 0), (FAILURES[1], 1), (FAILURES[2], 2), (FAILURES[2], 0)]
)
def test_one_rank_runs_out_later(failure: tuple[str, OSError], culprit: int) -> None:
    arguments = (culprit, *failure)
    run(memory_failures.later_without, transport="zmq", world_size=3, args=arguments)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_memory_that_is_required(culprit: int) -> None:
    arguments = (culprit, OSError(errno.EMFILE, "out of descriptors"))
    told = run(
        memory_failures.memory_is_required, transport="zmq", world_size=3, args=arguments, shm="on"
    )
    # Who is told by another rank, before it has heard of all, has that one's error in words.
    assert any(text.startswith("ConfigError") for text in told)
    for text in told:
        assert "ConfigError" in text
        assert "of this host cannot share memory with the others" in text
        assert "use shm=auto, which falls back to messages" in text
    assert "out of descriptors" in told[culprit] or told[culprit].startswith("PeerFailedError")


def _check_kept(found: list[dict[str, list[int]]]) -> None:
    for rank, values in enumerate(found):
        for name in ("threads", "descriptors"):
            before, after = values[name]
            assert before == after, f"{name} of rank {rank}: {values}"
        for name in soak.MEMORY:
            before, after = values[name]
            assert after - before <= soak.SLACK_KIB, f"{name} of rank {rank}, in KiB: {values}"


@pytest.mark.parametrize("options", [{}, {"shm": "off"}], ids=["shared", "messages"])
def test_many_operations_leave_a_process_as_it_was(options: dict[str, Any]) -> None:
    count = 10_000 if not options else 4_000
    _check_kept(run(soak.soak, transport="zmq", world_size=2, args=(count,), **options))


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", COSTLY)
def test_a_million_operations(transport: str, world_size: int) -> None:
    found = run(
        soak.soak, transport=transport, world_size=world_size, args=(1_000_000,), timeout=3000
    )
    _check_kept(found)
