"""Ranks of the ``nccl`` transport on the stand-in for CuPy and NCCL: threads of the test's process.

Each has a backend of its own. Import what binds to CuPy inside the ``with`` block of ``machine``.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

from support import fake_cuda, spmd
from support.on_device import moved_bodies
from support.spmd_job import Body as AnyBody
from support.spmd_job import Job
from support.spmd_threads import ThreadRanks, _State
from support.zmq_ranks import PATIENCE, Outcome, listener, place, run_joined

from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import Config, resolve

Body = Callable[[Any], Any]


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
