"""Agents of an elastic job as real processes, whose ranks are ``elastic_seat``s."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from support import elastic_seat
from support.jobs import Job, fsdpcore, started

SEAT = Path(elastic_seat.__file__)
TOKEN = "the secret of this elastic job"


class Ranks(dict[int, int]):
    """The process ids of an agent's ranks in a generation, by rank.

    Attributes:
        world_size: of all agents together.
        meetings: where they were told that the ranks meet.
        hosts: where the agents of all hosts listen, the one of rank 0 first.
    """

    def __init__(self, lines: Sequence[list[str]]) -> None:
        super().__init__({int(rank): int(pid) for _, _, rank, _, pid, *_ in lines})
        (self.world_size,) = {int(line[3]) for line in lines}
        self.meetings = {line[5] for line in lines}
        (hosts,) = {line[6] for line in lines}
        self.hosts = hosts.split(",")


class Host:
    """An agent, and what its ranks say."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def ranks(self, number: int, count: int) -> Ranks:
        """Wait until so many ranks of this host are in a generation."""
        start = f"in {number} "
        there = [line for line in self.job.seen.splitlines() if line.startswith(start)]
        self.job.wait_for(start, count - len(there))
        lines = [line.split() for line in self.job.seen.splitlines() if line.startswith(start)]
        return Ranks(lines)

    def signal(self, number: int) -> None:
        """Send a signal to the agent alone."""
        os.kill(self.job.process.pid, number)

    def vanish(self) -> None:
        """Kill the agent, as if its host were gone."""
        self.signal(signal.SIGKILL)
        self.job.process.wait()


@contextlib.contextmanager
def host(
    *options: object, script: Path = SEAT, token: str = TOKEN, within: Sequence[str] = ()
) -> Iterator[Host]:
    """Start an agent with options of ``fsdpcore run --elastic``; at the end nothing is left of it.

    Args:
        options: before the script.
        script: what its ranks run.
        token: the job's secret; empty for none.
        within: words before the command, which start it elsewhere.
    """
    command = [*within, *fsdpcore("run", "--elastic", *options, script)]
    with started(command, {"FSDPCORE_TOKEN": token} if token else {}) as job:
        yield Host(job)


def finish(rank: int) -> None:
    """Have a rank, by its process id, end its program, as if all did."""
    os.kill(rank, signal.SIGUSR1)


def kill(rank: int) -> None:
    """Kill a rank, by its process id."""
    os.kill(rank, signal.SIGKILL)


def blame_the_last(rank: int) -> None:
    """Have a rank, by its process id, say that its backend broke because of the last rank."""
    os.kill(rank, signal.SIGUSR2)
