"""The seats of an agent: processes that are ranks, or wait to be."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from fsdpcore.elastic.channel import Message, SocketChannel
from fsdpcore.launch.environment import ELASTIC
from fsdpcore.launch.run.starting import Starter
from fsdpcore.launch.supervision import RankProcess, describe_exit

# How often to look for ends where the kernel cannot tell of them.
_LOOK_SECONDS = 0.01


@dataclass
class SeatProcess:
    """A process with a number of its own, and the way to it.

    Attributes:
        number: of the seat.
        process, channel: of it. The channel is None once the process has closed its end.
        rank: in the generation that holds; None while it waits.
        ready: it has asked for a generation, ever.
        ended_well: it has told that its program has ended, or was told that it is to.
        paused: it has handed over, since its generation began.
        leaves: it, or its host, has asked to leave.
        given_up: its host joins the job anew, without it.
        why: it failed, as it has said itself.
        failed: it has said so while the job went on.
        kill_at: when it is killed, unless it ends before; None while it may live.
        missed: it is no rank any more.
        ended: its end was seen.
    """

    number: int
    process: RankProcess
    channel: SocketChannel | None
    rank: int | None = None
    ready: bool = False
    ended_well: bool = False
    leaves: bool = False
    paused: bool = False
    given_up: bool = False
    why: str = ""
    failed: bool = False
    kill_at: float | None = None
    missed: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        """What to call it in a message."""
        role = "a waiting rank" if self.rank is None else f"rank {self.rank}"
        return f"{role} (process {self.process.pid})"

    def tell(self, message: Message) -> None:
        """Send it a message, if it listens."""
        if self.channel is not None:
            self.channel.send(message)

    def let_go(self, message: Message) -> None:
        """Tell it in a message that its program is over, and that all is well."""
        self.ended_well = True
        self.tell(message)

    def hear(self) -> Iterator[Message]:
        """What it has said; never blocks."""
        with contextlib.suppress(EOFError):
            while self.channel is not None:
                message = self.channel.receive(0)
                if message is None:
                    return
                yield message
        self.close_channel()

    def close_channel(self) -> None:
        """Hear no more of it."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def describe_end(self) -> str:
        """How it ended, in words."""
        how = describe_exit(self.process.poll() or 0)
        return f"{self.name} failed ({how}{': ' if self.why else ''}{self.why})"


class Seats:
    """All processes of an agent, those that have ended included.

    Args:
        start: starts processes.
        listener_fd: descriptor of the socket where the ranks meet if rank 0 is here.
        names: gets the ranks of seats, for who prints what they say.
    """

    def __init__(self, start: Starter, listener_fd: int, names: dict[int, str]) -> None:
        self._start = start
        self._listener_fd = listener_fd
        self._names = names
        self.all: list[SeatProcess] = []

    def add(self) -> SeatProcess:
        """Start a process.

        Raises:
            RankFailedError: it cannot be started.
        """
        number = len(self.all)
        ours, theirs = socket.socketpair()
        with theirs:
            end = theirs.fileno()
            variables = {ELASTIC: f"{end}:{os.fstat(end).st_ino}"}
            process = self._start(number, variables, [end, self._listener_fd])
        seat = SeatProcess(number, process, SocketChannel(ours))
        self.all.append(seat)
        return seat

    def place(self, seat: SeatProcess, rank: int | None) -> None:
        """Note which rank it is from now on; None for one that waits."""
        seat.rank, seat.paused = rank, False
        self._names[seat.number] = "-" if rank is None else str(rank)

    @property
    def living(self) -> list[SeatProcess]:
        """Those whose end was not seen."""
        return [seat for seat in self.all if not seat.ended]

    def take_ended(self) -> list[SeatProcess]:
        """Those whose processes have ended since the last call; what they started is killed."""
        found = [seat for seat in self.living if seat.process.poll() is not None]
        for seat in found:
            seat.ended = True
            seat.process.signal(signal.SIGKILL)
            seat.process.close()
        return found

    def ask_to_end(self, message: Message | int, kill_at: float) -> None:
        """Tell all to end, by a message or a signal; who still lives then is killed."""
        for seat in self.living:
            if isinstance(message, int):
                seat.process.signal(message)
            elif not seat.ended_well:
                seat.tell(message)
            seat.kill_at = kill_at if seat.kill_at is None else min(seat.kill_at, kill_at)

    def kill_late(self, now: float) -> None:
        """Kill those whose time is over."""
        for seat in self.living:
            if seat.kill_at is not None and seat.kill_at <= now:
                seat.process.signal(signal.SIGKILL)
                seat.kill_at = None

    def wait(self, others: list[int], seconds: float) -> None:
        """Wait until a process ends or says something, or one of ``others`` is readable."""
        poller = select.poll()
        for descriptor in others:
            poller.register(descriptor, select.POLLIN)
        for seat in self.living:
            if seat.channel is not None:
                writes = select.POLLOUT if seat.channel.unsent else 0
                poller.register(seat.channel, select.POLLIN | writes)
            for descriptor in seat.process.watched():
                if descriptor < 0:
                    seconds = min(seconds, _LOOK_SECONDS)
                else:
                    poller.register(descriptor, select.POLLIN)
        poller.poll(max(0.0, 1000 * seconds))

    def close(self) -> None:
        """Kill what is left, with all that it has started, and let go of it."""
        for seat in self.living:
            seat.process.signal(signal.SIGKILL)
        for seat in self.living:
            seat.process.close()
        for seat in self.all:
            seat.close_channel()
