"""``Watch``: which rank is lost, when links break.

Every rank has links to a few others, its neighbours, from the beginning: the next and the previous
one, and those about the square root of the number of ranks away. ZeroMQ's threads ask along each
link whether the other end is there, without the interpreter, and a link where nothing comes for the
time of ``heartbeat`` breaks. So somebody notices the loss of any rank, whether or not anybody
needs it, and what is noticed spreads from neighbour to neighbour.

A broken link says little by itself. Who sees one tries to connect anew (``Probe``): if the other
host refuses, the process has ended; if ZeroMQ answers, only the connection was cut; if the kernel
alone does, the process is stopped; if nothing comes back, the host is lost, or the network. It
tells all ranks what it found. A rank that hears itself called lost says that it is alive. A moment
later all ranks know who is right: the same rank, or the same pair, is to blame everywhere.

A rank that leaves says so to all in the same way. The others then watch each other across the gap.

A rank that was stopped for so long that its links broke blames nobody when it goes on: it knows
that it was (``_Standstill``).
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fsdpcore.core.clock import WALL, Clock
from fsdpcore.core.errors import CommunicationError, PeerFailedError, ProtocolError

from .probe import CUT, ENDED, SILENT, STOPPED, UNKNOWN, Probe

# A connection breaks a moment before the last frames on it have been read; wait for them.
_LAST_WORDS_SECONDS = 0.02
# How long who is called lost has to say that it is alive, and what a new connection may take: that,
# or so many round trips. ZeroMQ's greeting takes two, and so does a word by way of a third rank.
_ANSWER_SECONDS, _ANSWER_ROUND_TRIPS = 0.2, 4
_LOOK_SECONDS = 0.01
# In parts of a heartbeat: how often a rank looks whether it was stopped, and for how long that is
# before others may miss it.
_STANDSTILL_LOOK, _STANDSTILL = 0.25, 0.8
# Ranks mostly leave together, and then nobody watches anybody any more.
_CLOSE_UP_SECONDS = 1.0

# What a rank says of itself.
ALIVE, LEFT, RETURNED = "alive", "left", "returned"
_LEAVES = (LEFT, RETURNED)
_FINDINGS = (ENDED, STOPPED, SILENT, CUT, ALIVE, *_LEAVES)
_VERDICTS = (ENDED, STOPPED, SILENT, CUT)


def neighbours(rank: int, ranks: Sequence[int]) -> list[int]:
    """Those of ``ranks``, of which it is one, that watch ``rank`` and that it watches.

    They are four at most. From any rank to any other it takes about as many steps as the square
    root of their number.
    """
    at, count = ranks.index(rank), len(ranks)
    stride = max(math.isqrt(count), 1)
    around = {ranks[(at + step) % count] for step in (1, -1, stride, -stride)}
    return sorted(around - {rank})


class Report(NamedTuple):
    """What rank ``by`` has found about ``rank``, or says of itself."""

    rank: int
    by: int
    found: str


class WatchOwner(Protocol):
    """What ``Watch`` uses of the rank whose links it watches."""

    def spread(self, content: Mapping[str, Any], source: int | None) -> None:
        """Tell all neighbours but ``source``."""

    def open(self, rank: int) -> None:
        """Make sure that there is a link to a rank."""

    def has_left(self, rank: int) -> bool:
        """Whether a rank has left or failed, as it said itself."""

    def miss_if_incomplete(self, rank: int) -> None:
        """Break the backend if a rank has left of which part of a message is missing."""

    def note_left(self, rank: int) -> None:
        """Note that a rank has told all others that it leaves."""

    def fail(self, error: CommunicationError) -> None:
        """Break the backend, and tell the others."""


class _Standstill:
    """Whether this process was stopped, as one of its threads sees that looks now and then.

    That thread is late if the process was stopped, but also if another thread did not let it have
    the interpreter. Then it wakes up every few milliseconds, to ask for it, and the system counts
    how often a thread does. Who is stopped does not wake.

    Args:
        heartbeat: seconds after which others miss this rank.
    """

    def __init__(self, heartbeat: float) -> None:
        self.look_seconds = _STANDSTILL_LOOK * heartbeat
        self._heartbeat = heartbeat
        self._looked, self._woken = math.inf, 0
        self._seconds, self._ended = 0.0, -math.inf

    def look(self, now: float) -> None:
        """Note for how long this thread was away; always called by the same one."""
        of_thread = getattr(resource, "RUSAGE_THREAD", None)  # Linux, and few others
        woken = 0 if of_thread is None else resource.getrusage(of_thread).ru_nvcsw
        away, wakes = now - self._looked, woken - self._woken
        # It may wake later than it wants to. A system that counts nothing tells nothing.
        if away >= _STANDSTILL * self._heartbeat and 0 < 2 * wakes * sys.getswitchinterval() < away:
            self._seconds, self._ended = away, now
        self._looked, self._woken = now, woken

    def seconds(self, now: float) -> float:
        """For how long it was stopped, not more than a heartbeat ago; 0 if it was not."""
        return self._seconds if now - self._ended < self._heartbeat else 0.0


class Watch:
    """What a rank knows of lost ranks; called with the lock of the links held.

    Args:
        rank: of this process.
        hosts: the number of each rank's host.
        addresses: where the ranks listen.
        heartbeat: seconds after which a link that is silent breaks.
        owner: of the links.
        clock: of the job.

    Attributes:
        neighbours: of this rank.
        leavers: the ranks that have told all others that they leave.
        returned: those of them whose program has returned.
    """

    def __init__(
        self,
        rank: int,
        hosts: tuple[int, ...],
        addresses: list[tuple[str, int]],
        heartbeat: float,
        owner: WatchOwner,
        clock: Clock = WALL,
    ) -> None:
        self.neighbours = neighbours(rank, range(len(addresses)))
        self.leavers: set[int] = set()
        self.returned: set[int] = set()
        self._rank, self._hosts, self._addresses = rank, hosts, addresses
        self._heartbeat = heartbeat
        self._owner, self._clock = owner, clock
        self._standstill = _Standstill(heartbeat)
        self._close_up_at: float | None = None
        self._in_gap: list[Report] = []  # what was told to those who may all have left
        self._reports: set[Report] = set()
        self._lost: set[int] = set()
        self._broken: dict[int, float] = {}
        self._probes: dict[int, Probe] = {}
        self._settled: float | None = None
        self._answer_seconds = _ANSWER_SECONDS
        self._done = False

    def expect(self, round_trip: float) -> None:
        """Take into account how many seconds the longest way takes, there and back."""
        self._answer_seconds = max(_ANSWER_SECONDS, _ANSWER_ROUND_TRIPS * round_trip)

    def lost(self, rank: int) -> None:
        """Note that a link from or to a rank has broken."""
        if rank in self._lost or self._done:
            return
        self._lost.add(rank)
        self._broken[rank] = self._clock.now() + _LAST_WORDS_SECONDS

    def heard(self, source: int, content: Mapping[str, Any]) -> None:
        """Take what a neighbour tells.

        Raises:
            ProtocolError: it makes no sense.
        """
        rank: Any = content.get("rank")
        by: Any = content.get("by")
        found: Any = content.get("found")
        if not (self._is_rank(rank) and self._is_rank(by) and found in _FINDINGS):
            raise ProtocolError("a REPORT frame makes no sense")
        self._note(Report(rank, by, found), source)

    def _is_rank(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < len(self._addresses)

    def _note(self, report: Report, source: int | None = None) -> None:
        if report in self._reports or self._done:
            return
        self._reports.add(report)
        self._owner.spread(report._asdict(), source)
        if report.found in _LEAVES:
            self.leavers.add(report.rank)
            if report.found == RETURNED:
                self.returned.add(report.rank)
            if self._close_up_at is None:
                self._close_up_at = self._clock.now() + _CLOSE_UP_SECONDS
            self._owner.note_left(report.rank)
        elif report.found != ALIVE:
            if self._settled is None:
                # A neighbour that finds the process ended knows that it had not left before.
                known = report.by in neighbours(report.rank, range(len(self._addresses)))
                sure = report.found == ENDED and known
                self._settled = self._clock.now() + (0.0 if sure else self._answer_seconds)
            if report.rank == self._rank:
                self._note(Report(self._rank, self._rank, ALIVE))
        if self._close_up_at is not None:
            self._in_gap.append(report)

    def close_gaps(self) -> None:
        """See to it that what is said now spreads: all neighbours may be among those that left."""
        if self._close_up_at is not None:
            self._close_up()

    def leave(self, returned: bool = False) -> None:
        """Tell all ranks that this one leaves, and whether since its program has returned."""
        self.close_gaps()
        self._note(Report(self._rank, self._rank, RETURNED if returned else LEFT))

    def tick(self) -> float | None:
        """Do what is due; return after how many seconds to be called again, if ever."""
        if self._done:
            return None
        now = self._clock.now()
        self._standstill.look(now)
        for rank, due in list(self._broken.items()):
            if now >= due:
                del self._broken[rank]
                if self._has_left(rank):
                    continue
                if stopped := self._standstill.seconds(now):
                    self._fail_stopped(rank, stopped)
                    return None
                self._probes[rank] = Probe(self._addresses[rank], self._answer_seconds, self._clock)
        for rank, probe in list(self._probes.items()):
            found = probe.look()
            if found:
                del self._probes[rank]
                if found == UNKNOWN:
                    self._owner.fail(self._unknown(rank))
                else:
                    self._note(Report(rank, self._rank, found))
        if self._settled is not None and now >= self._settled and not self._probes:
            self._decide()
        return self._next_look(now)

    def _next_look(self, now: float) -> float | None:
        if self._done:
            return None
        if self._broken or self._probes or self._settled is not None:
            return _LOOK_SECONDS
        if self._close_up_at is not None and now >= self._close_up_at:
            self._close_up()
        close_up = math.inf if self._close_up_at is None else self._close_up_at - now
        return min(close_up, self._standstill.look_seconds)

    def _close_up(self) -> None:
        """Watch, and be watched by, those who are near now that others have left."""
        self._close_up_at = None
        if self._rank not in self.leavers:
            there = [rank for rank in range(len(self._addresses)) if rank not in self.leavers]
            self.neighbours = neighbours(self._rank, there)
            for rank in self.neighbours:
                self._owner.open(rank)
            for report in self._in_gap:
                self._owner.spread(report._asdict(), None)
        self._in_gap.clear()

    def _has_left(self, rank: int) -> bool:
        self._owner.miss_if_incomplete(rank)  # all that it sent has been read
        return self._owner.has_left(rank)

    def _fail_stopped(self, rank: int, seconds: float) -> None:
        self._done = True
        text = (
            f"rank {self._rank} is lost: its process was stopped for {seconds:.1f} s, and the "
            f"connection to rank {rank} broke meanwhile"
        )
        self._owner.fail(PeerFailedError(text, self._rank))

    def _decide(self) -> None:
        reports = {r for r in self._reports if r.found in _VERDICTS and not self._has_left(r.rank)}
        if not reports:  # those who were missed have left
            self._settled = None
            return
        self._done = True
        # Who said something of a rank that has left since may be lost itself by now.
        alive = {report.by for report in reports}
        alive |= {r.rank for r in self._reports if r.found == ALIVE}
        alive |= {r.rank for r in reports if r.found == CUT}
        for found in (ENDED, SILENT, STOPPED):
            ranks = sorted({r.rank for r in reports if r.found == found} - alive)
            if found == SILENT:  # of a host that others hear of, it is the network
                ranks = [rank for rank in ranks if not self._cut_off(rank, reports, alive)]
            if ranks:
                self._owner.fail(PeerFailedError(self._text(ranks[0], found, ranks[1:]), ranks[0]))
                return
        low, high = min(sorted((r.rank, r.by)) for r in reports)
        text = (
            f"the connection between rank {low} and rank {high} is lost, though both are alive: "
            "it was cut, or the network drops what one of them sends to the other"
        )
        self._owner.fail(PeerFailedError(text, low, pair=(low, high)))

    def _cut_off(self, rank: int, reports: set[Report], alive: set[int]) -> bool:
        """Whether only other hosts miss a rank, whose host is alive."""
        host = self._hosts[rank]
        by = [self._hosts[r.by] for r in reports if (r.rank, r.found) == (rank, SILENT)]
        return host not in by and any(self._hosts[r] == host for r in alive)

    def _unknown(self, rank: int) -> CommunicationError:
        return CommunicationError(
            f"the connection between rank {self._rank} and rank {rank} is lost, and rank "
            f"{self._rank} cannot find out why: it has no file descriptors left"
        )

    def close(self) -> None:
        """Find out nothing any more."""
        self._done = True
        for probe in self._probes.values():
            probe.close()

    def _text(self, rank: int, found: str, others: list[int]) -> str:
        why = {
            ENDED: "its process ended without a word",
            STOPPED: (
                f"its host answers, but its process has not for {self._heartbeat:g} s: it was "
                "stopped, or has ended"
            ),
            SILENT: (
                f"nothing has come from it for {self._heartbeat:g} s; its host, or the network "
                "between, is down"
            ),
        }[found]
        near = [other for other in others if self._hosts[other] == self._hosts[rank]]
        also = f" (and with it rank {', '.join(map(str, near))} of its host)" if near else ""
        return f"rank {rank} is lost{also}: {why}"
