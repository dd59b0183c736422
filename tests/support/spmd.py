"""Run a function on every rank of a job, on any transport, and never hang.

A body is ``def body(backend, *args)``, a function at the top of a module that the ranks can import
(for transports whose ranks are processes). A new transport is one more entry in ``TRANSPORTS``.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from typing import Any, Protocol

from support.spmd_job import Body, Job, Outcome, meet
from support.spmd_mpi import MpiRanks
from support.spmd_pool import ProcessRanks
from support.spmd_threads import ThreadRanks

__all__ = ["TRANSPORTS", "RanksFailed", "meet", "run", "run_on", "run_with", "shut_down"]


class Ranks(Protocol):
    """How the ranks of one transport are had."""

    def run(self, job: Job) -> list[Outcome]:
        """Run a job; return in rank order, at the latest a little after its deadline."""

    def close(self) -> None:
        """End what was kept for further jobs."""


@dataclass(frozen=True)
class Transport:
    """A transport under test.

    Attributes:
        ranks: how its ranks are had.
        tight: options with which even short messages take the way of long ones.
        costly: ranks are processes, so that the suite goes easy on large numbers of them.
        large: the large number of ranks of every day, if it is costly; all are a campaign.
        turn: where it begins to take every second one of the small numbers, if it is costly.
        alike: it runs the code of another one, and takes one number of ranks for each test.
    """

    ranks: Ranks
    tight: dict[str, Any]
    costly: bool = False
    large: int = 8
    turn: int = 0
    alike: bool = False


TRANSPORTS = {
    "sim": Transport(ThreadRanks("sim"), tight={"eager_bytes": 0, "shm": "off"}),
    "virtual": Transport(
        ThreadRanks("sim://?clock=virtual&seed=1"), tight={"eager_bytes": 0}, alike=True
    ),
    "zmq": Transport(
        ProcessRanks("zmq"),
        tight={"eager_bytes": 0, "segment_bytes": 1024, "shm": "off"},
        costly=True,
    ),
    "mpi": Transport(
        MpiRanks(), tight={"eager_bytes": 0, "shm": "off"}, costly=True, large=7, turn=1
    ),
}


class RanksFailed(AssertionError):
    """A body raised, or did not end in time; the message has the traceback of every such rank."""


def run(
    body: Body,
    *,
    transport: str,
    world_size: int,
    args: tuple[Any, ...] = (),
    timeout: float = 180.0,
    **options: Any,
) -> list[Any]:
    """Call ``body(backend, *args)`` on every rank of a new job.

    Args:
        body: what each rank does; ends with the backend closed.
        transport: a key of ``TRANSPORTS``.
        world_size: number of ranks.
        args: further arguments of the body.
        timeout: seconds for everything; then the ranks that have not ended count as failed.
        **options: settings and options of the transport, as of ``fsdpcore.launch``; ``timeout``
            of the backend is ``op_timeout`` here, 20 seconds by default. For ranks that are
            processes, an option that is a tuple has a value for each rank.

    Returns:
        The results, in rank order.

    Raises:
        RanksFailed: a rank raised, or had not ended at the deadline.
    """
    return run_with(TRANSPORTS[transport].ranks, body, world_size, args, timeout, options)


def run_on(
    backend_class: type[Any],
    body: Body,
    *,
    world_size: int,
    args: tuple[Any, ...] = (),
    timeout: float = 180.0,
    **options: Any,
) -> list[Any]:
    """Do as ``run`` on a class derived from ``SimBackend``."""
    ranks = ThreadRanks("sim", backend_class)
    return run_with(ranks, body, world_size, args, timeout, options)


def run_with(
    ranks: Ranks,
    body: Body,
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    options: dict[str, Any],
) -> list[Any]:
    """Do as ``run``, on ranks that are had in a way of their own."""
    settings = dict(options)
    settings["timeout"] = settings.pop("op_timeout", 20.0)
    outcomes = ranks.run(Job(body, world_size, tuple(args), timeout, settings))
    if any(outcome.failed for outcome in outcomes):
        raise RanksFailed(_report(body, outcomes))
    return [outcome.result for outcome in outcomes]


def _report(body: Body, outcomes: list[Outcome]) -> str:
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.failed]
    lines = [f"{body.__name__} failed on ranks {failed} of {len(outcomes)}"]
    for rank in failed:
        lines += [f"----- rank {rank}: {outcomes[rank].error}", outcomes[rank].traceback.rstrip()]
    return "\n".join(lines)


def shut_down() -> None:
    """End the processes that are kept between jobs."""
    for transport in TRANSPORTS.values():
        transport.ranks.close()


atexit.register(shut_down)
