"""An elastic job of threads whose agent is the test: it decides at once, and by itself."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fsdpcore.transports.simulated.faults import Faults, InjectedCrash

from fsdpcore.comm.place import RankPlace
from fsdpcore.comm.transport import Transport
from fsdpcore.elastic.generation import Generation, HostCard, Seat
from fsdpcore.elastic.program import Process, sit
from fsdpcore.elastic.seat import Seat as RankSeat
from fsdpcore.elastic.threads import Gatherings, QueueChannel
from fsdpcore.launch.config import resolve

SETTLE_SECONDS = 0.01


class Killed(BaseException):
    """Ends the thread of a rank that has died."""


class _MortalChannel(QueueChannel):
    """That of a rank which says nothing any more once it has died."""

    backend: Any = None

    def check(self) -> None:
        if isinstance(getattr(self.backend, "failure", None), InjectedCrash):
            self.close()
            raise Killed

    def send(self, message: dict[str, Any]) -> None:
        self.check()
        super().send(message)


class Rank:
    """A thread that is a rank."""

    def __init__(self, job: ThreadJob, number: int, host: int) -> None:
        self.number, self.host, self.job = number, host, job
        self.channel = _MortalChannel(job.told, number)
        self.seat = RankSeat(self.channel)
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = self.killed = self.leaves = self.parts = self.paused = self.finished = False
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        sit(Process(self.seat, self._meet))
        self.seat.sit()
        try:
            self.result = self.job.program()
        except Killed:
            self.killed = True
        except BaseException as error:
            self.error = error
        self.channel.close()
        self.job.told.put((self.number, {"kind": "ended"}))

    def _meet(self, place: RankPlace) -> Transport:
        self.channel.check()
        backend = self.job.gatherings.meet(place)
        self.channel.backend = backend
        return backend

    def kill(self) -> None:
        """Have it die without a word."""
        self.killed = True
        backend = self.channel.backend
        if backend is not None:
            backend.fail(InjectedCrash("killed"))
            backend._vanish("has died without a word")
        self.channel.close()
        self.job.told.put((self.number, {"kind": "ended"}))


class ThreadJob:
    """Ranks, and who decides on them.

    Args:
        program: a function that ``elastic.run`` has decorated; called by every rank.
        hosts: of the first ranks.
        crash: of a generation, which ranks die after how many posts of messages.
        watch: called with every message of a rank.
    """

    def __init__(
        self,
        program: Callable[[], Any],
        hosts: Sequence[int],
        *,
        crash: dict[int, dict[int, int]] | None = None,
        watch: Callable[[ThreadJob, Rank, dict[str, Any]], None] | None = None,
        timeout: float = 20.0,
    ) -> None:
        self.program, self.watch = program, watch
        self.told: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self.config = resolve({"transport": "sim", "timeout": timeout}, {}, None)
        self.crash = crash or {}
        self.gatherings = _Crashing(self.config, self.crash)
        self.ranks: dict[int, Rank] = {}
        self.members: list[int] = []
        self.generations: list[Generation] = []
        self.log: list[tuple[int, dict[str, Any]]] = []
        self._due: float | None = None
        self._reasons: list[str] = []
        self.done = False
        self.first = len(hosts)
        for host in hosts:
            self.add(host)

    def add(self, host: int) -> Rank:
        """Start one more rank."""
        rank = Rank(self, len(self.ranks), host)
        self.ranks[rank.number] = rank
        rank.thread.start()
        return rank

    def run(self, seconds: float = 60.0) -> list[Any]:
        """Go on until all ranks have ended; return what they returned, killed ones left out."""
        end = time.monotonic() + seconds
        while not all(rank.ended for rank in self.ranks.values()):
            assert time.monotonic() < end, (self.log[-20:], self.members)
            wait = 0.2 if self._due is None else max(0.0, self._due - time.monotonic())
            try:
                number, message = self.told.get(timeout=wait)
            except queue.Empty:
                if self._due is not None and time.monotonic() >= self._due:
                    self._due = None
                    self._change(orderly=False)
                continue
            self._heard(self.ranks[number], message)
        return [rank.result for rank in self.ranks.values() if rank.finished]

    @property
    def number(self) -> int:
        return len(self.generations)

    def _heard(self, rank: Rank, message: dict[str, Any]) -> None:
        self.log.append((rank.number, message))
        if self.watch is not None:
            self.watch(self, rank, message)
        kind = message["kind"]
        stale = message.get("number", self.number) != self.number
        if kind == "ready":
            waiting = [r for r in self.ranks.values() if not r.ended]
            if not self.generations:
                if all((r.number, {"kind": "ready"}) in self.log for r in waiting):
                    self.members = []
                    self._change(orderly=False)
            else:
                self._ask("rank comes")
        elif kind == "ended":
            rank.ended = True
            if rank.number in self.members and not self.done:
                self._lost(f"seat {rank.number} was lost")
        elif kind == "broken" and self.done:
            rank.finished = True
            rank.channel.tell({"kind": "finished"})
        elif kind == "broken" and not stale:
            self._lost(message["reason"])
        elif kind == "leave":
            rank.leaves = True
            self._ask(message["reason"])
        elif kind == "paused" and not stale:
            rank.paused, rank.parts = True, message["leaves"]
            if all(self.ranks[each].paused for each in self.members) and self._due is None:
                self._change(orderly=True)
        elif kind == "finished" and not stale:
            self.done = rank.finished = True

    def _ask(self, reason: str) -> None:
        for each in self.members:
            leaves = self.ranks[each].leaves
            self.ranks[each].channel.tell({"kind": "change", "reason": reason, "leaves": leaves})

    def _lost(self, reason: str) -> None:
        self._reasons.append(reason)
        if self._due is None:
            self._due = time.monotonic() + SETTLE_SECONDS

    def _change(self, *, orderly: bool) -> None:
        there = [rank for rank in self.ranks.values() if not rank.ended]
        leaving = [rank for rank in there if orderly and rank.parts]
        old = [r for r in there if r.number in self.members and r not in leaving]
        new = [
            r
            for r in there
            if r.number not in self.members and (r.number, {"kind": "ready"}) in self.log
        ]
        members = [*old, *(rank for rank in new if rank not in leaving)]
        hosts = list(dict.fromkeys(rank.host for rank in members))
        members.sort(key=lambda rank: hosts.index(rank.host))
        reason = self._reasons[0] if self._reasons else ""
        self._reasons = []
        generation = Generation(
            self.number + 1,
            tuple(HostCard(f"h{host}", f"h{host}:1", f"h{host}:2") for host in hosts),
            tuple(Seat(f"h{rank.host}", rank.number) for rank in members),
            orderly,
            reason,
        )
        self.generations.append(generation)
        self.members = [rank.number for rank in members]
        for rank in leaving:
            rank.channel.tell({"kind": "left"})
        for number, rank in enumerate(members):
            rank.paused = rank.parts = False
            place = {"rank": number, "world_size": len(members), "local_rank": 0}
            place |= {"local_world_size": 1, "meeting": "nowhere:1", "token": ""}
            place["job"] = str(generation.number)
            rank.channel.tell(
                {"kind": "generation", "generation": generation.encode(), "place": place}
            )
        if any(self.ranks[each].leaves for each in self.members):
            self._ask("some still are to leave")


class _Crashing(Gatherings):
    """Has ranks of some generations die."""

    def __init__(self, config: Any, crash: dict[int, dict[int, int]]) -> None:
        super().__init__(config)
        self._plain, self._crash = config, crash

    def meet(self, place: RankPlace) -> Transport:
        faults = Faults(crash=self._crash.get(int(place.job), {}))
        options = replace(self._plain.transport_options, faults=faults)
        self._config = replace(self._plain, transport_options=options)
        return super().meet(place)
