"""Ranks of the ``nccl`` transport on the stand-in for CuPy and NCCL: threads of the test's process.

Each has a backend of its own. Import what binds to CuPy inside the ``with`` block of ``machine``.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from support import fake_cuda, spmd
from support.fake_cuda import Machine
from support.on_device import moved_bodies
from support.spmd_job import Body as AnyBody
from support.spmd_job import Job
from support.spmd_threads import ThreadRanks, _State
from support.zmq_ranks import PATIENCE, Outcome, listener, place, run_joined

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import Config, resolve

Body = Callable[[Any], Any]
# In seconds: what comes at all has come by then, also on a machine that is busy.
SOON = 15.0


def config(**options: Any) -> Config:
    """Settings for one rank; by default with deadlines longer than any test's patience."""
    given = {"timeout": 2 * PATIENCE, "rendezvous_timeout": 2 * PATIENCE, **options}
    return resolve({"transport": "nccl", **given}, {})


def run_ranks(body: Body, world_size: int, **options: Any) -> list[Outcome]:
    """Call ``body(backend)`` on every rank, each a thread of this process; close the backends.

    Within ``fake_cuda.installed``. An option that is a list has a value for each rank.
    """

    def join(here: RankPlace) -> Any:
        from fsdpcore.transports.nccl.backend import NcclBackend

        given = {name: v[here.rank] if isinstance(v, list) else v for name, v in options.items()}
        return NcclBackend.join(here, config(**given))

    return run_joined(join, body, world_size)


def results_of(body: Body, world_size: int, **options: Any) -> list[Any]:
    """The results of ``run_ranks``, none of whose ranks may fail."""
    outcomes = run_ranks(body, world_size, **options)
    failed = {rank: o for rank, o in enumerate(outcomes) if o.error}
    assert not failed, "\n".join(f"rank {r}: {o.error}: {o.text}" for r, o in failed.items())
    return [outcome.result for outcome in outcomes]


def results(body: Body, world_size: int, **options: Any) -> list[Any]:
    """The same on a machine of their own."""
    with fake_cuda.installed(world_size):
        return results_of(body, world_size, **options)


# What bodies do.


def ones(backend: Any, size: int = 100) -> Any:
    """An array of a rank's GPU."""
    return backend.device.zeros(size, np.float32) + np.float32(1)


def settled(backend: Any) -> Any:
    """An array, after a first call, on which the host waits for the others, and a second one."""
    x = ones(backend)
    for _ in range(2):
        fc.all_reduce(x, backend, op="mean", out=x)
    backend.device.synchronize()
    return x


def until_broken(backend: Any) -> None:
    """Wait for a failure that comes from behind, and raise it."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        backend.root.check_usable()
        time.sleep(0.005)
    raise AssertionError("nothing has failed")


def expect(outcomes: list[Outcome], *errors: str, words: tuple[str, ...] = ()) -> None:
    """Check the error of each rank, and that all of them say some words."""
    assert [outcome.error for outcome in outcomes] == list(errors), outcomes
    for outcome in outcomes:
        for word in words:
            assert word in outcome.text, outcome


def wait_for_end(machine: Machine) -> None:
    """Until threads that were left to themselves have aborted what they made."""
    end = time.monotonic() + SOON
    while machine.open_communicators() and time.monotonic() < end:
        time.sleep(0.01)


# Jobs of the conformance suite.


class StandInRanks(ThreadRanks):
    """Runs jobs of ``support.spmd`` on ranks with a GPU each of a stand-in of their own."""

    def __init__(self) -> None:
        super().__init__("nccl")

    def _launch(self, job: Job, state: _State) -> None:
        try:
            with fake_cuda.installed(job.world_size), listener() as meeting:
                self._join(job, state, meeting)
        except BaseException as error:  # raised again on the test's thread
            state.launch_error = error

    def _join(self, job: Job, state: _State, meeting: Any) -> None:
        from fsdpcore.transports.nccl.backend import NcclBackend

        settings, token = config(**job.options), secrets.token_hex(8)
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            passed = meeting if rank == 0 else None
            here = place(rank, job.world_size, meeting.getsockname()[1], token, passed)
            try:
                state.rank_main(NcclBackend.join(here, settings))
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(job.world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


_STAND_IN = StandInRanks()


def run(body: AnyBody, world_size: int, *args: Any, moved: bool = True, **options: Any) -> Any:
    """Return the results of ``body(backend, *args)``, a body of the conformance suite.

    Args:
        body, world_size, args, options: see ``spmd.run``.
        moved: its arrays are moved to the GPU for every collective.
    """
    timeout = options.pop("timeout", PATIENCE)
    if not moved:
        return spmd.run_with(_STAND_IN, body, world_size, args, timeout, options)
    with moved_bodies():
        return spmd.run_with(_STAND_IN, body, world_size, args, timeout, options)
