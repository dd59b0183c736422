"""``Agent``: starts the ranks of its host, sees their ends, and forms generations with the others.

It is one loop on one thread. What a rank's process says or how it ends goes to a ``Member``, which
knows nothing of processes and sockets; what that decides goes to the processes, and what it wants
to say, to the other agents.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fsdpcore.comm.agents import AgentLinks
from fsdpcore.elastic.channel import Message
from fsdpcore.elastic.events import Change, Event, Finished, Install, Note, Stop
from fsdpcore.elastic.generation import Generation
from fsdpcore.elastic.hearing import pass_on
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.seats import SeatProcess, Seats
from fsdpcore.launch.run.endings import ScriptExit, exit_code, interrupted
from fsdpcore.launch.supervision import GRACE_SECONDS, Signals

# How long an agent whose ranks a signal has ended still votes, so that the others can go on.
_VOTE_SECONDS = 2.0
_LOOK_SECONDS = 1.0  # the longest wait
_STRANGE = (
    "who listens there does not know the secret of this host (FSDPCORE_TOKEN, "
    "FSDPCORE_TOKEN_FILE), or is no agent of this version of fsdpcore"
)
_LEFT_OUT = "the other ranks have left it behind"


@dataclass
class _Failure:
    """What to say of a process that has failed, and with which exit code."""

    seat: int
    text: str
    code: int


def describe(generation: Generation) -> str:
    """Say in a line who belongs to a generation."""
    ranks, hosts = len(generation.seats), len(generation.hosts)
    reason = f" ({generation.reason})" if generation.reason else ""
    return (
        f"generation {generation.number}: {ranks} rank{'s' * (ranks != 1)} on "
        f"{hosts} host{'s' * (hosts != 1)}{reason}"
    )


class NotedSignals(Signals):
    """Signals that are noted rather than raised; each wakes who waits for ``fileno``."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[int] = []
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)

    def fileno(self) -> int:
        """A descriptor that is readable when there may be something to take."""
        return self._read

    def take(self) -> list[int]:
        """The signals that have come since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)
        noted, self._noted = self._noted, []
        return noted

    def __enter__(self) -> NotedSignals:
        super().__enter__()
        self._woken = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: Any) -> None:
        signal.set_wakeup_fd(self._woken)
        super().__exit__(*exception)
        os.close(self._read)
        os.close(self._write)


class Agent:
    """The agent of a host. Call ``run`` on the main thread.

    Args:
        make_member: makes a member of a new id, and tells that: one that founds the job, or joins
            it at more addresses than the host was told. Its other argument is the job, if known.
        links: to the other agents.
        seats: where its processes are.
        token: the job's secret, which the ranks need.
        listener_fd: of the socket where ranks meet if rank 0 is here.
        restarts: how many processes it starts again that died.
        say: prints a line for the user.
    """

    def __init__(
        self,
        make_member: Callable[[Sequence[str], str], tuple[str, Member]],
        links: AgentLinks,
        seats: Seats,
        *,
        token: str,
        listener_fd: int,
        restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self._make_member, self._links, self._seats = make_member, links, seats
        self._id, self._member = make_member((), "")
        self._token, self._listener_fd, self._restarts = token, listener_fd, restarts
        self._say = say
        self._generation: Generation | None = None
        self._failures: list[_Failure] = []  # since the last generation began
        self._finished = False
        self._warned = False  # of a secret that does not fit
        self._stopped: str | None = None  # why the member gave up
        self._leaving = 0  # the signal that asked for it
        self._interrupted = 0
        self._votes_until = 0.0

    def run(self, count: int) -> ScriptExit:
        """Start so many ranks, and serve them until all have ended. Returns how it came out."""
        with NotedSignals() as signals:
            try:
                for _ in range(count):
                    self._start()
                while (ending := self._ending()) is None:
                    self._wait(signals)
                    self._step(signals.take())
            finally:
                self._seats.close()
        return ending

    def _start(self) -> None:
        seat = self._seats.add()
        self._member.seat_started(seat.number, time.monotonic())

    # The loop.

    def _wait(self, signals: NotedSignals) -> None:
        now = time.monotonic()
        times = [self._member.next_tick(), now + _LOOK_SECONDS]
        times += [seat.kill_at for seat in self._seats.living if seat.kill_at is not None]
        seconds = max(0.0, min(times) - now)
        self._seats.wait([signals.fileno(), *self._links.watched()], seconds)

    def _step(self, signals: list[int]) -> None:
        for number in signals:
            self._handle_signal(number)
        for source, message in self._links.take():
            self._member.receive(source, message, time.monotonic())
        for seat in self._seats.living:
            self._hear(seat)
        for seat in self._seats.take_ended():
            self._hear(seat)
            seat.close_channel()
            self._handle_end(seat)
        now = time.monotonic()
        if now >= self._member.next_tick():
            self._member.tick(now)
        self._carry_out()
        self._let_waiting_go()
        self._warn_of_strangers()
        self._seats.kill_late(now)

    def _warn_of_strangers(self) -> None:
        """Say once why nobody answers: a user should not have to wait for the end to know it."""
        if self._generation is None and not self._warned and (refused := self._links.refused()):
            self._warned = True
            self._say(f"{', '.join(sorted(refused))}: {_STRANGE}; this host goes on asking")

    def _carry_out(self) -> None:
        """Do what the member has decided, and send what it has to say."""
        while events := self._member.take_events():
            for event in events:
                self._handle_event(event)
        self._send()

    def _let_waiting_go(self) -> None:
        """Let those go that are to leave and have nothing to hand over: no generation has them."""
        for seat in self._seats.living:
            if seat.leaves and seat.ready and seat.rank is None and not seat.ended_well:
                seat.let_go({"kind": "left"})
                self._miss(seat, again=False)
                self._carry_out()

    def _send(self) -> None:
        for address, message in self._member.take_outbox():
            self._links.send(address, message)

    # What processes say, and how they end.

    def _hear(self, seat: SeatProcess) -> None:
        for message in seat.hear():
            self._handle(seat, message, time.monotonic())

    def _handle(self, seat: SeatProcess, message: Message, now: float) -> None:
        kind = message["kind"]
        seat.ready |= kind == "ready"
        seat.paused |= kind == "paused"
        seat.leaves |= kind == "leave"
        seat.ended_well |= kind == "finished"
        pass_on(self._member, seat.number, message, now)
        if kind == "ready" and self._finished:
            seat.tell({"kind": "stop", "reason": "the job has ended its program"})
        elif kind == "failed":
            seat.why = str(message["reason"])
            seat.failed = not (seat.given_up or self._finished) and self._stopped is None
            self._miss(seat, again=seat.failed)

    def _handle_end(self, seat: SeatProcess) -> None:
        code = seat.process.poll() or 0
        # It was made to end, or had a right to.
        meant = (self._stopped is not None and not seat.failed) or bool(self._interrupted)
        meant |= seat.given_up or (self._finished and seat.rank is None)
        bad = not meant and (code != 0 or not (seat.ended_well or seat.ready))
        if bad:
            text = f"{seat.name} ended without calling a function with @fc.elastic.run"
            if code:
                text = seat.describe_end()
            if not (seat.failed and self._finished):  # else all went on without it, and well
                self._failures.append(_Failure(seat.number, text, exit_code(code) or 1))
            if self._seats.living and not self._finished and seat.why != _LEFT_OUT:
                self._say(text)
        elif not (meant or seat.ended_well or seat.rank is None):
            self._say(f"{seat.name} ended before the job's program did (exit code 0)")
        self._miss(seat, again=bad and code != 0)

    def _miss(self, seat: SeatProcess, *, again: bool) -> None:
        """Tell the member that a process is no rank any more, once; ``again``: start another one.

        That comes first, so that the member waits for the new one.
        """
        if seat.missed:
            return
        seat.missed = True
        goes = self._finished or self._leaving or self._interrupted
        if again and self._restarts > 0 and not goes:
            self._restarts -= 1
            self._say(f"a rank is started again ({self._restarts} restarts left)")
            self._start()
        self._member.seat_ended(seat.number, time.monotonic())

    # What the member decides.

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, Install):
            self._install(event)
        elif isinstance(event, Change):
            for seat in self._seats.living:
                if seat.rank is not None:
                    leaves = seat.leaves
                    seat.tell({"kind": "change", "reason": event.reason, "leaves": leaves})
        elif isinstance(event, Finished):
            self._finish()
        elif isinstance(event, Note):
            self._say(event.text)
        elif isinstance(event, Stop):
            own = [] if self._leaving or self._interrupted else self._seats.living
            if event.goes_on and own and self._restarts > 0:
                self._join_again(event.reason)
            else:
                self._stop(event.reason)

    def _install(self, event: Install) -> None:
        generation, now = event.generation, time.monotonic()
        self._say(describe(generation))
        self._generation = generation
        if event.ranks:
            self._failures.clear()
        for seat in self._seats.living:
            rank = event.ranks.get(seat.number)
            if rank is not None:
                self._seats.place(seat, rank)
                place = generation.place(rank, self._token)
                if rank == 0:
                    place["listener_fd"] = self._listener_fd
                content = generation.encode()
                seat.tell({"kind": "generation", "place": place, "generation": content})
            elif seat.number in event.dropped:
                if seat.leaves:
                    seat.let_go({"kind": "left"})
                else:
                    seat.why, seat.kill_at = _LEFT_OUT, now
                    self._say(f"{seat.name} is killed: {_LEFT_OUT}")
                self._seats.place(seat, None)

    def _finish(self) -> None:
        self._finished = True
        self._failures.clear()
        late = time.monotonic() + GRACE_SECONDS
        for seat in self._seats.living:
            if not seat.ended_well:
                seat.let_go({"kind": "finished"})
                if seat.rank is None:  # it has nothing to do any more
                    seat.kill_at = late

    def _stop(self, reason: str) -> None:
        if self._stopped is None and not self._finished:
            self._stopped = reason
            for seat in self._seats.living:
                if seat.leaves and (seat.paused or seat.rank is None):
                    seat.let_go({"kind": "left"})
            message = {"kind": "stop", "reason": reason}
            self._seats.ask_to_end(message, time.monotonic() + GRACE_SECONDS)

    def _join_again(self, reason: str) -> None:
        """Start again as another host, with other processes: the job goes on without this one."""
        self._restarts -= 1
        self._say(f"{reason}; this host joins again ({self._restarts} restarts left)")
        self._send()
        old, now = self._seats.living, time.monotonic()
        for seat in old:
            seat.given_up, seat.kill_at = True, now
        others = [] if self._generation is None else self._generation.hosts
        addresses = [card.address for card in others if card.id != self._id]
        self._id, self._member = self._make_member(addresses, self._member.job)
        self._generation = None
        for _ in old:
            self._start()

    # Signals.

    def _handle_signal(self, number: int) -> None:
        now = time.monotonic()
        if number == signal.SIGTERM and not self._leaving and self._generation is not None:
            self._leaving = number
            self._say("SIGTERM: this host leaves the job at the next commit; again: at once")
            for seat in self._seats.living:
                seat.leaves = True
            self._member.leave("its host was told to go (SIGTERM)", now)
        elif not self._interrupted:
            self._interrupted = number
            self._votes_until = now + GRACE_SECONDS + _VOTE_SECONDS
            self._seats.ask_to_end(number, now + GRACE_SECONDS)
        else:
            self._seats.ask_to_end(signal.SIGKILL, now)

    # The end.

    def _ending(self) -> ScriptExit | None:
        """How it came out; None as long as it goes on."""
        if self._seats.living:
            return None
        if self._interrupted:
            if self._votes() and self._stopped is None and time.monotonic() < self._votes_until:
                return None
            return interrupted(self._interrupted, "the ranks of this host were stopped")
        if self._finished:
            if not self._member.everyone_knows(time.monotonic()):
                return None
            return self._failed() or ScriptExit(0)
        generation = self._generation
        if self._stopped is not None:
            strange = generation is None and self._links.refused()
            return self._gone(self._stopped + (f"; {_STRANGE}" if strange else ""))
        if generation is None:
            return self._gone("no rank is left on this host")
        if generation.weight(self._id) == 0:
            return self._gone(f"the job goes on without it as generation {generation.number}")
        # The others need the vote of this host; who is alone has nobody to wait for.
        return None if self._votes() else self._gone("no rank is left")

    def _votes(self) -> bool:
        """Whether other hosts may need the vote of this one: both have ranks in the generation."""
        hosts = {card.id for card in self._generation.hosts} if self._generation else set()
        return self._id in hosts and len(hosts) > 1

    def _gone(self, why: str) -> ScriptExit:
        """How it came out where the job has not ended its program with the ranks of this host."""
        if self._leaving and self._stopped is not None:
            return interrupted(self._leaving, why)
        if self._leaving and not self._failures:
            return ScriptExit(0, f"this host has left in order; {why}")
        return self._failed(why) or ScriptExit(1, why)

    def _failed(self, then: str = "") -> ScriptExit | None:
        """The first failure since the last generation began; None if there was none."""
        if not self._failures:
            return None
        first = self._failures[0]
        return ScriptExit(first.code, first.text + (f"; {then}" if then else ""), first.seat)
