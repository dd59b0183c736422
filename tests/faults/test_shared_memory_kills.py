"""Ranks that die while others use their memory: the rest is told, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsdpcore.transports.memory.shared import SharedMemory
from support.jobs import SOON
from support.mappings import segments
from support.zmq_ranks import Line, processes, ready

import fsdpcore as fc
from fsdpcore.collectives.shared import region
from fsdpcore.collectives.state import state_of

pytestmark = pytest.mark.skipif(
    not SharedMemory.available, reason="this system has no memfd_create"
)

VICTIM = 1
ROWS = 1_000_000


def lending(backend: fc.Backend, line: Line) -> None:
    """Use each other's arrays, new ones every time, and a window until something happens."""
    window = backend.shared_window((backend.world_size, ROWS // 8))
    out = backend.empty(ROWS)
    line.tell("ready")
    while True:
        source = backend.empty(ROWS)
        source[...] = backend.rank
        fc.all_reduce(source, backend, out=out)
        fc.all_gather(source[: ROWS // 4], backend)
        fc.broadcast(source, backend, root=VICTIM)
        fc.all_gather(window[backend.rank], backend, out=window.reshape(-1))


def shared(names: list[str]) -> list[str]:
    """What a file system for shared memory has of this package."""
    live = f"fsdpcore-{os.getuid()}"  # the folder of ``fsdpcore top``, while somebody asks
    return [name for name in names if "fsdpcore" in name and name != live]


def mapped(pid: int) -> bool:
    """Whether a process, if there is one, has such memory."""
    with contextlib.suppress(OSError):
        return "memfd:fsdpcore" in Path(f"/proc/{pid}/maps").read_text()
    return False


def descriptors(pid: int) -> list[str]:
    """What a process has open; nothing once it has ended, also before anybody waited for it."""
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/fd")
    return []


def test_a_rank_killed_while_others_use_its_memory() -> None:
    with processes(lending, 3) as ranks:
        ready(ranks)
        assert all(mapped(rank.pid) for rank in ranks)
        ranks[VICTIM].send_signal(signal.SIGKILL)
        for number, rank in enumerate(ranks):
            if number != VICTIM:
                outcome = rank.outcome()
                assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome
                assert f"rank {VICTIM} is lost" in outcome.text
    assert shared(os.listdir("/dev/shm")) == []


def dies_once_it_has_lent(backend: fc.Backend, line: Line) -> None:
    """The victim is gone before the others look for the memory that it lends for the first time."""
    backend.barrier()
    line.tell("ready")
    source = backend.empty(ROWS)
    source[...] = 1
    pids = fc.all_gather(np.int64(os.getpid()), backend).tolist()
    memory = state_of(backend).context.region
    enter = memory.enter

    def last(digest: int, *args: Any) -> None:
        if backend.rank == VICTIM:
            mine = memory.own[(memory.step + 1) & 1]
            memory.flags[mine + region.DIGEST] = digest
            memory.flags[mine] = memory.step + 1
            os.kill(os.getpid(), signal.SIGKILL)
        enter(digest, *args)
        end = time.monotonic() + SOON
        while descriptors(pids[VICTIM]) and time.monotonic() < end:
            time.sleep(0.01)

    memory.enter = last
    fc.all_reduce(source, backend, out=source)


def test_a_rank_that_dies_before_its_memory_was_mapped() -> None:
    with processes(dies_once_it_has_lent, 2) as ranks:
        ready(ranks)
        outcome = ranks[0].outcome()
        assert (outcome.error, outcome.culprit) == ("PeerFailedError", VICTIM), outcome


def test_nothing_is_left_when_all_are_killed() -> None:
    with processes(lending, 2) as ranks:
        ready(ranks)
        pids = [rank.pid for rank in ranks]
        memory = {path for pid in pids for path in segments(pid)}
        assert memory
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    # Anonymous files have no name, so nothing but a process that has them can keep them.
    end = time.monotonic() + SOON
    while left(memory) and time.monotonic() < end:
        time.sleep(0.02)
    assert left(memory) == set()
    assert not any(mapped(pid) for pid in pids)
    assert shared(os.listdir("/dev/shm")) == []


def left(memory: set[str]) -> set[str]:
    """Which of those files any process still has."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return memory & {number for pid in pids for number in segments(pid)}
