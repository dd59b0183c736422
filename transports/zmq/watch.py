"""``Watch``: which rank is lost, when links break.

Every rank has links to a few others, its neighbours, from the beginning: the next and the previous
one, and those about the square root of the number of ranks away. ZeroMQ's threads ask along each
link whether the other end is there, without the interpreter, and a link where nothing comes for the
time of ``heartbeat`` breaks. So somebody notices the loss of any rank, whether or not anybody
needs it, and what is noticed spreads from neighbour to neighbour.

A broken link says little by itself. Who sees one tries to connect anew: if the other
host refuses, the process has ended; if ZeroMQ answers, only the connection was cut; if the kernel
alone does, the process is stopped; if nothing comes back, the host is lost, or the network. It
tells all ranks what it found. A rank that hears itself called lost says that it is alive. A moment
later all ranks know who is right: the same rank, or the same pair, is to blame everywhere.

A rank that leaves says so to all in the same way. The others then watch each other across the gap.
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fsdpcore.core.errors import PeerFailedError, ProtocolError

# A connection breaks a moment before the last frames on it have been read; wait for them.
_LAST_WORDS_SECONDS = 0.02
# How long who is called lost has to say that it is alive, and what a new connection may take.
_ANSWER_SECONDS = 0.2
_LOOK_SECONDS = 0.01
# Ranks mostly leave together, and then nobody watches anybody any more.
_CLOSE_UP_SECONDS = 1.0

ENDED, STOPPED, SILENT, CUT = "ended", "stopped", "silent", "cut"
# What a rank says of itself.
ALIVE, LEFT = "alive", "left"
_FINDINGS = (ENDED, STOPPED, SILENT, CUT, ALIVE, LEFT)
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


class _Probe:
    """A new connection to a rank whose link has broken."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._end = time.monotonic() + _ANSWER_SECONDS
        self._found = ""
        self._ended_once = False
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET)
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        try:
            self._socket.connect(self._address)
        except BlockingIOError:
            pass
        except OSError as error:
            self._refused(error)

    def look(self) -> str:
        """What it has found; empty as long as it has not."""
        if not self._found and self._poll.poll(0):
            try:
                # Who lives says at once that it speaks ZeroMQ's protocol.
                if self._socket.recv(1):
                    self._found = CUT
                else:
                    self._ended()
            except BlockingIOError:
                pass
            except OSError as error:
                self._refused(error)
        if not self._found and time.monotonic() >= self._end:
            self._found = STOPPED if self._connected() else SILENT
        if self._found:
            self._socket.close()
        return self._found

    def _refused(self, error: OSError) -> None:
        if isinstance(error, ConnectionResetError):
            self._ended()
        else:
            self._found = ENDED if isinstance(error, ConnectionRefusedError) else SILENT

    def _ended(self) -> None:
        """Try again: a process that just ends does so once, something between the two each time."""
        self._socket.close()
        if self._ended_once:
            self._found = CUT
        else:
            self._ended_once = True
            self._connect()

    def _connected(self) -> bool:
        try:
            self._socket.getpeername()
        except OSError:
            return False
        return True


class Watch:
    """What a rank knows of lost ranks; called with the lock of the connections held.

    Args:
        rank: of this process.
        hosts: the number of each rank's host.
        addresses: where the ranks listen.
        heartbeat: seconds after which a link that is silent breaks.
        spread: tells all neighbours but one.
        open_link: makes sure that there is a link to a rank.
        gone: whether a rank has left or failed, as it said itself.
        note_left: called with a rank that has left, as it told all ranks.
        fail: called with the error to raise.

    Attributes:
        neighbours: of this rank.
        left: the ranks that have told all others that they leave.
    """

    def __init__(
        self,
        rank: int,
        hosts: tuple[int, ...],
        addresses: list[tuple[str, int]],
        heartbeat: float,
        spread: Callable[[Mapping[str, Any], int | None], None],
        open_link: Callable[[int], None],
        gone: Callable[[int], bool],
        note_left: Callable[[int], None],
        fail: Callable[[PeerFailedError], None],
    ) -> None:
        self.neighbours = neighbours(rank, range(len(addresses)))
        self.left: set[int] = set()
        self._rank, self._hosts, self._addresses = rank, hosts, addresses
        self._heartbeat = heartbeat
        self._spread, self._gone, self._fail = spread, gone, fail
        self._open, self._note_left = open_link, note_left
        self._close_up_at: float | None = None
        self._reports: set[Report] = set()
        self._lost: set[int] = set()
        self._broken: dict[int, float] = {}
        self._probes: dict[int, _Probe] = {}
        self._settled: float | None = None
        self._done = False

    def lost(self, rank: int) -> None:
        """Note that a link from or to a rank has broken."""
        if rank in self._lost or self._done:
            return
        self._lost.add(rank)
        self._broken[rank] = time.monotonic() + _LAST_WORDS_SECONDS

    def heard(self, source: int, content: Mapping[str, Any]) -> None:
        """Take what a neighbour tells.

        Raises:
            ProtocolError: it makes no sense.
        """
        rank: Any = content.get("rank")
        by: Any = content.get("by")
        found: Any = content.get("found")
        if not (self._is_rank(rank) and self._is_rank(by) and found in _FINDINGS):
            raise ProtocolError("a LOST frame makes no sense")
        self._note(Report(rank, by, found), source)

    def _is_rank(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < len(self._addresses)

    def _note(self, report: Report, source: int | None = None) -> None:
        if report in self._reports or self._done:
            return
        self._reports.add(report)
        self._spread(report._asdict(), source)
        if report.found == LEFT:
            self.left.add(report.rank)
            self._close_up_at = time.monotonic() + _CLOSE_UP_SECONDS
            self._note_left(report.rank)
        elif report.found != ALIVE:
            if self._settled is None:
                # A neighbour that finds the process ended knows that it had not left before.
                known = report.by in neighbours(report.rank, range(len(self._addresses)))
                sure = report.found == ENDED and known
                self._settled = time.monotonic() + (0.0 if sure else _ANSWER_SECONDS)
            if report.rank == self._rank:
                self._note(Report(self._rank, self._rank, ALIVE))

    def leave(self) -> None:
        """Tell all ranks that this one leaves."""
        self._note(Report(self._rank, self._rank, LEFT))

    def tick(self) -> float | None:
        """Do what is due; return after how many seconds to be called again, if ever."""
        if self._done:
            return None
        now = time.monotonic()
        for rank, due in list(self._broken.items()):
            if now >= due:
                del self._broken[rank]
                if not self._gone(rank):
                    self._probes[rank] = _Probe(self._addresses[rank])
        for rank, probe in list(self._probes.items()):
            found = probe.look()
            if found:
                del self._probes[rank]
                self._note(Report(rank, self._rank, found))
        if self._settled is not None and now >= self._settled and not self._probes:
            self._decide()
        if self._broken or self._probes or (self._settled is not None and not self._done):
            return _LOOK_SECONDS
        if self._close_up_at is None or self._done:
            return None
        if now >= self._close_up_at:
            self._close_up()
            return None
        return self._close_up_at - now

    def _close_up(self) -> None:
        """Watch, and be watched by, those who are near now that others have left."""
        self._close_up_at = None
        if self._rank not in self.left:
            there = [rank for rank in range(len(self._addresses)) if rank not in self.left]
            self.neighbours = neighbours(self._rank, there)
            for rank in self.neighbours:
                self._open(rank)

    def _decide(self) -> None:
        reports = {r for r in self._reports if r.found in _VERDICTS and not self._gone(r.rank)}
        if not reports:  # those who were missed have left
            self._settled = None
            return
        self._done = True
        alive = {report.by for report in self._reports if report.found != LEFT}
        alive |= {r.rank for r in self._reports if r.found in (CUT, ALIVE)}
        for found in (ENDED, SILENT, STOPPED):
            ranks = sorted({r.rank for r in reports if r.found == found} - alive)
            if found == SILENT:  # of a host that others hear of, it is the network
                ranks = [rank for rank in ranks if not self._hears_of_host(rank, alive)]
            if ranks:
                self._fail(PeerFailedError(self._text(ranks[0], found, ranks[1:]), ranks[0]))
                return
        low, high = min(sorted((r.rank, r.by)) for r in reports)
        text = (
            f"the connection between rank {low} and rank {high} is lost, though both are alive: "
            "it was cut, or the network drops what one of them sends to the other"
        )
        self._fail(PeerFailedError(text, low, pair=(low, high)))

    def _hears_of_host(self, rank: int, alive: set[int]) -> bool:
        host = self._hosts[rank]
        return host != self._hosts[self._rank] and any(self._hosts[r] == host for r in alive)

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
