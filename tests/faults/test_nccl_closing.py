"""How ranks on GPUs of the stand-in end: in any order, with work under way, or not at all."""

from __future__ import annotations

import random
import threading
import time
import weakref
from typing import Any

import pytest
from support import fake_cuda
from support.fake_cuda import Machine
from support.nccl_ranks import (
    SOON,
    expect,
    run_ranks,
    settled,
    until_broken,
    wait_for_end,
)

import fsdpcore as fc


@pytest.mark.parametrize("seed", range(4))
def test_ranks_leave_at_any_time(seed: int) -> None:
    """In any order, with work under way, while others still wait for theirs."""
    with fake_cuda.installed(3, seed=seed) as machine:

        def body(backend: Any) -> float:
            chance = random.Random(f"{seed} {backend.rank}")
            x = settled(backend)
            group = backend.split(0 if backend.rank < 2 else 1)
            machine.slow(0, chance.random() * 0.01)
            y = fc.broadcast(x, backend, root=0)
            if backend.rank < 2:
                y = fc.all_reduce(y, group)
            time.sleep(chance.choice([0.0, 0.05, 0.3]))
            return float(y[0]) if chance.random() < 0.5 else 0.0

        outcomes = run_ranks(body, 3)
        assert not any(outcome.error for outcome in outcomes), outcomes


def test_a_rank_that_leaves_has_its_broadcast_received(machine: Machine) -> None:
    """The sender's part may end long before that of others begins."""

    def body(backend: Any) -> float | None:
        x = settled(backend)
        if backend.rank == 0:
            fc.broadcast(x, backend, root=0)
            return None
        machine.freeze(0)
        y = fc.broadcast(x, backend, root=0)
        time.sleep(0.2)
        machine.thaw(0)
        return float(y[0])

    outcomes = run_ranks(body, 3)
    assert [outcome.result for outcome in outcomes] == [None, 1.0, 1.0], outcomes


def test_a_call_that_a_rank_has_left_without(machine: Machine) -> None:
    def body(backend: Any) -> None:
        x = settled(backend)
        if backend.rank:
            fc.all_reduce(x, backend, op="mean")
            until_broken(backend)

    outcomes = run_ranks(body, 3)
    assert [outcome.error for outcome in outcomes] == ["", "PeerFailedError", "PeerFailedError"]
    assert all("rank 0 has left" in outcome.text for outcome in outcomes[1:]), outcomes


def test_closing_with_work_that_never_ends_raises(machine: Machine) -> None:
    gone = threading.Event()

    def body(backend: Any) -> None:
        x = settled(backend)
        if backend.rank == 0:
            fc.all_reduce(x, backend, op="mean")
            try:
                backend.close()
            finally:
                gone.set()
        else:
            assert gone.wait(SOON)
            until_broken(backend)

    expect(
        run_ranks(body, 2, timeout=0.5),
        "CommTimeoutError",
        "PeerFailedError",
        words=("all_reduce #3", "rank 1 is missing"),
    )


def test_an_abort_that_hangs_is_not_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdpcore.transports.nccl import backend as nccl
    from fsdpcore.transports.nccl import supervisor

    for module in (nccl, supervisor):
        monkeypatch.setattr(module, "BOUND", 0.2)
    machine.faults.hang_abort(rank=0)

    def body(backend: Any) -> None:
        settled(backend)
        if backend.rank == 1:
            backend.abort("enough")
        until_broken(backend)

    start = time.monotonic()
    outcomes = run_ranks(body, 2)
    assert time.monotonic() - start < SOON
    expect(outcomes, "PeerFailedError", "CommunicationError", words=("enough",))
    machine.faults.release()
    wait_for_end(machine)


def test_nccl_is_not_asked_once_a_communicator_is_over(machine: Machine) -> None:
    """Another thread may be freeing what the handle stands for."""
    from fsdpcore.transports.nccl.communicators import Communicator

    failures: list[fc.CommunicationError | None] = [None]
    communicator = Communicator(None, threading.RLock(), lambda: failures[0])
    communicator.over = True
    with pytest.raises(fc.ClosedError, match="has been ended"):
        communicator.call("broadcast")
    failures[0] = fc.PeerFailedError("rank 1 is gone")
    with pytest.raises(fc.PeerFailedError, match="rank 1 is gone"):
        communicator.call("broadcast")


def test_a_program_that_ends_without_closing_aborts(machine: Machine) -> None:
    """CuPy would destroy communicators when they are collected, and wait for the other ranks."""

    def body(backend: Any) -> None:
        from fsdpcore.transports.nccl.backend import _abort_at_exit

        settled(backend)
        _abort_at_exit(weakref.ref(backend))

    outcomes = run_ranks(body, 2)
    assert not any(outcome.error for outcome in outcomes), outcomes
    assert len(machine.calls("nccl.abort")) == 2
    assert not machine.calls("nccl.destroy")
