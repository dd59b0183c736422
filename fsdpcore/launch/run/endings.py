"""How the ranks of a job ended, and what their launcher says of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdpcore.launch import supervision
from fsdpcore.launch.failure_report import FailureReport
from fsdpcore.launch.supervision import RankProcess


@dataclass(frozen=True)
class ScriptExit:
    """How a job ended: the exit code for its launcher, and what to say; nothing if all is well.

    ``rank``: the one that failed, if it is known.
    """

    code: int
    message: str = ""
    rank: int | None = None


class RankEnd(NamedTuple):
    """How the process of a rank ended.

    Attributes:
        code: exit code, or minus the signal.
        stopped: its launcher made it end.
        error: why it failed, as it said itself; None if it said nothing.
        consequence: because of another rank.
    """

    rank: int
    code: int
    stopped: bool
    error: str | None = None
    consequence: bool = False

    @property
    def failed(self) -> bool:
        """Whether it did not end well."""
        return self.code != 0


class RankEnds(NamedTuple):
    """How all ranks of a host ended.

    Attributes:
        first: the one that was seen to fail first.
        signal: what ended them, if that was a signal to their launcher.
    """

    ranks: Sequence[RankEnd]
    first: int | None = None
    signal: int = 0

    @property
    def culprit(self) -> RankEnd | None:
        """The rank that failed by itself, or else the first that failed; None if all is well."""
        first = next((rank for rank in self.ranks if rank.rank == self.first), None)
        if first is None:
            return None
        said = {rank.rank: rank.consequence for rank in self.ranks if rank.error is not None}
        return supervision.culprit(self.ranks, first, said)


def ends_of(
    ranks: Sequence[RankProcess],
    first: RankProcess | None,
    number: int,
    reports: Mapping[int, FailureReport],
) -> RankEnds:
    """How processes ended, all of which have, together with what they reported."""
    ends = []
    for rank in ranks:
        report = reports.get(rank.rank)
        said = (None, False) if report is None else (report.error, report.consequence)
        ends.append(RankEnd(rank.rank, rank.poll() or 0, rank.stopped, *said))
    return RankEnds(ends, None if first is None else first.rank, number)


def describe(ends: RankEnds, world_size: int, name: Callable[[int], str]) -> ScriptExit:
    """Say how a job ended.

    Args:
        ends: of its ranks, as far as they are known.
        world_size: of the job.
        name: what to call a rank.
    """
    if ends.signal:
        return interrupted(ends.signal)
    culprit = ends.culprit
    if culprit is None:
        return ScriptExit(0)
    # One that was too slow to end by itself says nothing of its own by its exit code.
    codes = {rank.rank: rank.code for rank in ends.ranks}
    code = (codes[ends.first or 0] if culprit.stopped else culprit.code) or 1
    how = supervision.describe_exit(code)
    if culprit.error is not None:
        how += f": {culprit.error}"
    others = "; the other ranks were stopped" if world_size > 1 else ""
    message = f"{name(culprit.rank)} failed ({how}){others}"
    return ScriptExit(exit_code(code), message, culprit.rank)


def interrupted(number: int, then: str = "all ranks were stopped") -> ScriptExit:
    """What to say of a job that a signal ended."""
    how = "interrupted" if number == signal.SIGINT else "terminated"
    return ScriptExit(128 + number, f"{how} ({signal.Signals(number).name}); {then}")


def exit_code(code: int) -> int:
    """The exit code of a shell for that of a process, which is minus the signal that killed it."""
    return 128 - code if code < 0 else code
