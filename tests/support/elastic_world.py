"""A world of agents of elastic jobs in virtual time, where a seed says what befalls them.

The members are the real ones. The network, the ranks, the processes and the witness are played.
"""

from __future__ import annotations

import heapq
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from support.elastic_oracle import Oracle, Wrong

from fsdpcore.elastic.events import Change, Finished, Install, Stop
from fsdpcore.elastic.generation import Generation, HostCard
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.paxos import Acceptor, Answer

LOST_AFTER, PATIENCE, FAULTS_LAST = 1.0, 5.0, 6.0
# Seconds after the faults in which a job must have settled: silence is noticed, a decision tried a
# few times, what was lost is noticed again, and who cannot go on has lost patience.
SETTLES = 2 * PATIENCE + 8 * LOST_AFTER
_MEETING, _OPERATION = 0.6, 0.5  # after which a rank gives up a meeting, and a silent peer


class Over(Exception):
    """A job has ended altogether, and another has begun."""


@dataclass
class Process:
    """A seat: where it is in the job."""

    host: Host
    number: int
    alive: bool = True
    ready: bool = False
    frozen: float = 0.0
    at: int = 0  # the generation that it is in
    met: bool = False
    paused: bool = False


@dataclass
class Host:
    """An agent with its processes."""

    member: Member
    address: str
    alive: bool = True
    frozen: float = 0.0
    tick_at: float = -1.0
    next_number: int = 0
    restarts: int = 0
    seats: dict[int, Process] = field(default_factory=dict)
    waiting: list[Callable[[float], None]] = field(default_factory=list)
    end: str = ""

    @property
    def id(self) -> str:
        return self.member._card.id


class PlayedWitness:
    """A witness in memory that now and then cannot be asked."""

    def __init__(self, world: World) -> None:
        self.id, self.trouble = "witness", ""
        self._world = world
        self._number, self._acceptor = 0, world.acceptor()

    def _ask(self, number: int, ask: Callable[[Acceptor], Answer]) -> Answer | None:
        if self._world.chance.random() < 0.2 or number < self._number:
            return None
        if number > self._number:
            self._number, self._acceptor = number, self._world.acceptor()
        return ask(self._acceptor)

    def prepare(self, decree: str, number: int, ballot: Any) -> Answer | None:
        return self._ask(number, lambda acceptor: acceptor.prepare(ballot))

    def accept(self, decree: str, number: int, ballot: Any, value: Any) -> Answer | None:
        answer = self._ask(number, lambda acceptor: acceptor.accept(ballot, value))
        if answer and answer.granted:
            self._world.oracle.voted("witness", number, ballot, value)
        return answer


class World:
    """A job, its hosts and what befalls them, all drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chance = seed, random.Random(seed)
        chance = self.chance
        self.now, self.turns, self.digest = 0.0, 0, 0
        self.count = chance.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7])
        self.per_host = [chance.choice([1, 1, 2, 2, 3]) for _ in range(self.count)]
        total = sum(self.per_host)
        self.minimum = chance.randint(1, max(1, total // 2))
        self.maximum = max(self.minimum, chance.choice([total, total, total + 2, total - 1]))
        self.oracle = Oracle(self.minimum, self.maximum)
        self.acceptor: Callable[[], Acceptor] = Acceptor
        self.witness = PlayedWitness(self) if chance.random() < 0.5 else None
        self.restarts = chance.choice([0, 0, 1, 3])
        self.loss = chance.choice([0.0, 0.0, 0.02, 0.15])
        self.doubled = chance.choice([0.0, 0.05, 0.2])
        self.delay = chance.choice([0.002, 0.01, 0.08])
        self.blocked: set[tuple[str, str]] = set()
        self.text = chance.random() < 0.1  # messages travel as JSON text
        self.calm = False
        self.blind = chance.random() < 0.2  # ranks suspect nobody
        self.hosts: list[Host] = []
        self.visits: Counter[tuple[str, str, str]] = Counter()
        self.faults: list[str] = []
        self.changes: set[int] = set()
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    # Time.

    def at(self, delay: float, do: Callable[[], object]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, do))

    def soon(self, do: Callable[[], object], most: float = 0.02) -> None:
        self.at(self.chance.random() * most, do)

    def log(self, *words: Any) -> None:
        self.turns += 1
        self.digest = zlib.crc32(repr((round(self.now, 6), *words)).encode(), self.digest)

    def run_until(self, end: float) -> Iterator[None]:
        while self._queue and self._queue[0][0] <= end:
            self.now, _, do = heapq.heappop(self._queue)
            do()
            yield
        self.now = end

    # Agents.

    def add_host(self, seats: int, founder: bool = False, address: str = "") -> Host:
        number = len(self.hosts)
        address = address or f"10.0.0.{number + 1}:1"
        card = HostCard(f"h{number}", address, address + "1")
        # Who has been in a job, and joins it again, knows its id.
        jobs = [each.member.job for each in self.hosts if self.chance.random() < 0.3]
        member = Member(
            card,
            minimum=self.minimum,
            maximum=self.maximum,
            lost_after=LOST_AFTER,
            patience=PATIENCE,
            job=f"job {number}" if founder else "".join(jobs[-1:]),
            witness=self.witness,
            seed=self.seed,
        )
        host = Host(member, address, restarts=self.restarts)
        known = [each.address for each in self.hosts if each.alive]
        known = known or [each.address for each in self.hosts[:1]]
        self.hosts.append(host)
        self.log("host", card.id)
        if founder:
            self.call(host, "found", self.count)
        else:
            many = self.chance.randint(1, max(1, len(known)))
            self.call(host, "join", self.chance.sample(known, min(many, len(known))))
        for _ in range(seats):
            self.add_seat(host)
        return host

    def add_seat(self, host: Host) -> None:
        seat = Process(host, host.next_number)
        host.next_number += 1
        host.seats[seat.number] = seat
        self.call(host, "seat_started", seat.number)

        def ready() -> None:
            if seat.alive and host.alive:
                seat.ready = True
                self.call(host, "seat_ready", seat.number)

        self.soon(ready, 0.5)

    def call(self, host: Host, name: str, *args: Any) -> None:
        """Call an agent's member, now or when it goes on."""
        if not host.alive:
            return
        if self.now < host.frozen:
            host.waiting.append(lambda now: self._call(host, name, *args))
        else:
            self._call(host, name, *args)

    def _call(self, host: Host, name: str, *args: Any) -> None:
        if not host.alive:
            return
        before = state(host.member)
        late = args[3:] if name == "seat_paused" else ()
        args = (*(args[:2] if late else args), self.now, *late)
        getattr(host.member, name)(*args)
        self.log(host.id, name, *args[:1])
        kind = args[1]["kind"] if name == "receive" else name
        for event in host.member.take_events():
            self._handle(host, event)
        self._let_waiting_go(host)
        after = state(host.member)
        self.visits[before, kind, after] += 1
        for address, message in host.member.take_outbox():
            self._send(host, address, message)
        self._schedule(host)

    def _let_waiting_go(self, host: Host) -> None:
        """As its driver does: those that are to leave, and that no generation has."""
        generation = host.member.generation
        ranks = generation.ranks(host.id) if generation else {}
        for number in {*host.member._here.leaving} - {*ranks}:
            if host.seats[number].alive:
                self._drop(host.seats[number])

    def _schedule(self, host: Host) -> None:
        when = max(host.member.next_tick(), self.now + 0.001)
        if host.tick_at < self.now or when < host.tick_at - 1e-9:
            host.tick_at = when

            def tick() -> None:
                if host.tick_at == when:
                    host.tick_at = -1.0
                    if host.alive and self.now < host.frozen:
                        return
                    self.call(host, "tick")

            self.at(when - self.now, tick)

    def freeze(self, host: Host, lasts: float) -> None:
        host.frozen = self.now + lasts

        def thaw() -> None:
            if host.alive and self.now >= host.frozen:
                host.tick_at = -1.0
                waiting, host.waiting = host.waiting, []
                if self.chance.random() < 0.5:
                    self.call(host, "tick")
                for do in waiting:
                    do(self.now)
                self.call(host, "tick")

        self.at(lasts + 1e-6, thaw)

    def kill(self, host: Host, end: str) -> None:
        self.log("gone", host.id, end)
        host.alive, host.end = False, end
        for seat in host.seats.values():
            self._dies(seat)

    # The network.

    def _send(self, host: Host, address: str, message: dict[str, Any]) -> None:
        if self.text:
            message = json.loads(json.dumps(message))
        copies = 1
        if not self.calm:
            copies = (self.chance.random() >= self.loss) + (self.chance.random() < self.doubled)
        if (host.address, address) in self.blocked:
            return
        for _ in range(copies):
            delay = self.delay * self.chance.random()
            if not self.calm and self.chance.random() < 0.02:
                delay += self.chance.random() * 2 * LOST_AFTER

            def arrive() -> None:
                there = [each for each in self.hosts if each.alive and each.address == address]
                if there and (host.address, address) not in self.blocked:
                    self.call(there[-1], "receive", host.address, message)

            self.at(delay, arrive)

    # What agents tell their driver.

    def _handle(self, host: Host, event: Any) -> None:
        self.log(host.id, type(event).__name__)
        if isinstance(event, Install):
            if event.generation.number == 1 and host.id not in self._first():
                old = [each for each in self.hosts if each.alive and each.member._known.number]
                # Who does not hear of the job that goes on begins another one.
                words = ("cut", "part", "freeze")
                parted = any(word in fault for fault in self.faults for word in words)
                if parted or old == [host] or self.oracle.finished:
                    raise Over
            self.oracle.installed(host.id, event.generation.encode(), event.ranks)
            for number in event.ranks:
                if number not in host.seats or not host.seats[number].ready:
                    raise Wrong(f"seat {number} of {host.id} is no process that was ready")
                self._install(host.seats[number], event.generation)
            for number in event.dropped:
                self._drop(host.seats[number])
        elif isinstance(event, Change):
            number = host.member.generation.number if host.member.generation else 0
            self._change(number)
        elif isinstance(event, Stop):
            self.soon(lambda: host.alive and self.kill(host, f"stop: {event.reason}"), 0.1)
        elif isinstance(event, Finished):
            self.at(LOST_AFTER, lambda: self._leave_finished(host))

    def _first(self) -> set[str]:
        """The agents of the first generation; this one's where it begins."""
        first = self.oracle.contents.get(1)
        return {card[0] for card in first["hosts"]} if first else {host.id for host in self.hosts}

    def _leave_finished(self, host: Host) -> None:
        if host.alive:
            host.end = "finished"
            if host.member.everyone_knows(self.now):
                self.kill(host, "finished")
            else:
                self.at(LOST_AFTER, lambda: self._leave_finished(host))

    # Processes and ranks.

    def seats_of(self, number: int) -> list[Process]:
        hosts = {host.id: host for host in self.hosts}
        return [hosts[h].seats[n] for h, n in self.oracle.contents[number]["seats"]]

    def _install(self, seat: Process, generation: Generation) -> None:
        number = generation.number
        seat.met = seat.paused = False
        left, seat.at = seat.at, 0
        self._breaks(left)

        def comes() -> None:
            if seat.alive and seat.host.alive and self._newest(seat) == number:
                seat.at = number
                self._meet(number)
                self.at(_MEETING, lambda: self._misses(seat, number))

        self.soon(comes, 0.05)

    def _newest(self, seat: Process) -> int:
        generation = seat.host.member.generation
        return generation.number if generation else 0

    def _meet(self, number: int) -> None:
        seats = self.seats_of(number)
        if not all(s.alive and s.at == number and self.now >= s.frozen for s in seats):
            return
        if any(s.met for s in seats) or self._cut(seats):
            return
        self.log("met", number)
        self.oracle.whole(number)
        for seat in seats:
            seat.met = True
            self.soon(lambda s=seat: self.call(s.host, "seat_joined", s.number, number))
        self._check_use()
        if number in self.changes:
            self._agree(number)

    def _cut(self, seats: list[Process]) -> set[tuple[str, str]]:
        hosts = {seat.host.address for seat in seats}
        return {(a, b) for a, b in self.blocked if a in hosts and b in hosts}

    def _check_use(self) -> None:
        self.oracle.in_use({n for n in self.oracle.contents if self.goes_on(n)})

    def goes_on(self, number: int) -> bool:
        return all(s.alive and s.at == number and s.met for s in self.seats_of(number))

    def works(self, number: int) -> bool:
        """Whether the ranks of a generation go on with their program: none has handed over."""
        return self.goes_on(number) and not any(s.paused for s in self.seats_of(number))

    def _misses(self, seat: Process, number: int) -> None:
        """A rank has not met the others in time."""
        if seat.alive and seat.at == number and not seat.met:
            seats = self.seats_of(number)
            missing = [
                rank
                for rank, other in enumerate(seats)
                if other is not seat
                and (not other.alive or other.at != number or self.now < other.frozen)
            ]
            self._breaks_one(seat, missing if self.chance.random() < 0.7 else [])

    def _breaks_one(self, seat: Process, suspects: list[int]) -> None:
        number, seat.at, seat.met = seat.at, 0, False
        suspects = [] if self.blind else suspects
        if seat.alive and number:
            self.call(seat.host, "seat_broken", seat.number, number, suspects, "broken")

    def _breaks(self, number: int, culprit: Process | None = None, wait: float = 0.0) -> None:
        """The ranks of a generation that has met hear that one is gone."""
        if not number:
            return
        for seat in self.seats_of(number):
            if seat.at == number and seat.met and seat.alive and not seat.paused:
                suspects = [self.seats_of(number).index(culprit)] if culprit else []
                self.at(
                    wait + self.chance.random() * 0.05,
                    lambda s=seat, x=suspects: s.at == number and s.met and self._breaks_one(s, x),
                )

    def end_seat(self, seat: Process) -> None:
        if seat.alive:
            self._dies(seat)
            self.soon(lambda: self.call(seat.host, "seat_ended", seat.number))
            if seat.host.restarts and not seat.host.member.finished:
                seat.host.restarts -= 1
                self.soon(lambda: seat.host.alive and self.add_seat(seat.host), 0.3)

    def _dies(self, seat: Process) -> None:
        at, met = seat.at, seat.met
        seat.alive, seat.at, seat.met = False, 0, False
        if at and met:
            self._breaks(at, seat)

    def _drop(self, seat: Process) -> None:
        if seat.alive:
            self._dies(seat)
            self.soon(lambda: self.call(seat.host, "seat_ended", seat.number), 0.3)

    def freeze_seat(self, seat: Process, lasts: float) -> None:
        seat.frozen = self.now + lasts
        if seat.met and lasts > _OPERATION:
            self._breaks(seat.at, seat, _OPERATION)

    def cut(self, pairs: set[tuple[str, str]], lasts: float) -> None:
        self.blocked |= pairs
        self.at(lasts, lambda: self.blocked.difference_update(pairs))
        for number in [n for n in self.oracle.contents if self.goes_on(n)]:
            seats = self.seats_of(number)
            for a, b in sorted(self._cut(seats)):
                for one in seats:
                    if one.host.address == b:
                        named = [r for r, other in enumerate(seats) if other.host.address == a]
                        self.at(
                            _OPERATION + self.chance.random() * 0.1,
                            lambda s=one, x=named, number=number: (
                                s.at == number and s.met and self._breaks_one(s, x)
                            ),
                        )

    def _change(self, number: int) -> None:
        """A rank was told to hand over; all agree at their next commit."""
        self.changes.add(number)
        if number and self.goes_on(number):
            self._agree(number)

    def _agree(self, number: int) -> None:
        def commit() -> None:
            if self.works(number) and self.oracle.finished != number:
                self.log("paused", number)
                for seat in self.seats_of(number):
                    seat.paused = True
                    leaves = seat.number in seat.host.member._here.leaving
                    leaves = leaves and self.chance.random() < 0.8  # or it came too late
                    self.soon(lambda s=seat, x=leaves: self._pauses(s, number, x))

        self.soon(commit, 0.3)

    def _pauses(self, seat: Process, number: int, leaves: bool) -> None:
        now = self.now
        self.call(seat.host, "seat_paused", seat.number, number, now, leaves)

    def finish(self, number: int) -> None:
        """The program of a generation that goes on ends on all its ranks."""
        self.log("finish", number)
        self.oracle.finished = number
        for seat in self.seats_of(number):

            def ends(seat: Process = seat) -> None:
                self.call(seat.host, "seat_finished", seat.number, number)
                self.at(0.03, lambda: self.end_seat(seat))

            self.soon(ends, 0.03)


def state(member: Member) -> str:
    """What a member is about, in a word or two."""
    if member.stopped:
        return "stopped"
    if member.finished:
        return "finished"
    if member.generation is None:
        if member._known.number:
            return "spare"
        return "founds" if member._tie.hosts else "joins"
    term = member._term
    assert term is not None
    decree, proposer = term.decree, term.decree._proposer
    words = "member"
    if member._here.broken:
        words += " broken"
    if member._here.paused:
        words += " paused"
    elif term.wished:
        words += " to change"
    if term.due_since is not None:
        words += " waits"
    if proposer:
        words += " proposes" if proposer.value is None else " puts"
    if decree._acceptor.accepted:
        words += ", accepted"
    elif decree._acceptor.promised[0]:
        words += ", promised"
    return words
