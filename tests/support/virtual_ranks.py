"""Jobs of ``zmq`` in virtual time; a seed says what befalls them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.virtual_hosts import Net, Process, SharedClock, host_address
from support.virtual_system import instead_of_the_system

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import resolve

# Seconds: until all must have met, of a heartbeat, and that no job can take.
MEETING, HEARTBEAT, TIMEOUT, TOO_LONG = 8.0, 3.0, 40.0, 200.0
_ROUNDS = 3
_IDLE_SECONDS, _LOOK_SECONDS = 4.0, 0.1  # who does nothing looks so often whether it is told
_LARGE = 3000  # bytes, more than are sent unasked

FAULTS = (
    "nothing",
    "a rank dies",
    "a rank stops",
    "a rank stops for a moment",
    "a rank stops for long",
    "a host is lost",
    "hosts are parted",
    "a connection is cut",
    "a rank raises",
    "a rank leaves early",
    "a rank does not come",
    "a rank comes late",
    "a rank comes twice",
    "a rank is of another job",
)

# How long what befalls a rank lasts, where it has an end.
LASTS = {
    "a rank stops for a moment": HEARTBEAT / 4,
    "a rank stops for long": 4 * HEARTBEAT,
    "a rank comes late": 2 * MEETING,
}


@dataclass(frozen=True)
class Fate:
    """What befalls a job; all of it follows from the seed.

    Attributes:
        hosts: of each rank.
        begins: when each rank is started.
        fault: what goes wrong.
        victim, other: for whom.
        at: when, if at some time.
        talk: what the ranks do: something with "all", with the next one in a "ring", or they are
            "idle", and leave one after the other.
    """

    seed: int
    hosts: tuple[int, ...]
    begins: tuple[float, ...]
    fault: str
    victim: int
    other: int
    at: float
    talk: str

    @classmethod
    def of(cls, seed: int) -> Fate:
        """Draw one."""
        draw = random.Random(f"fate {seed}")
        size = draw.choice([2, 3, 3, 4, 4, 5, 7, 11])
        hosts = [0, *sorted(draw.randrange(3) for _ in range(size - 1))]  # where the ranks meet
        apart = draw.choice([0.0, 1e-3, 1.0])
        begins = tuple(draw.random() * apart for _ in range(size))
        victim, other = draw.sample(range(size), 2)
        met = max(begins)
        at = draw.choice([draw.random() * (met + 0.005), met + draw.random() * 3])
        fault, talk = draw.choice(FAULTS), draw.choice(["all", "ring", "idle"])
        return cls(seed, tuple(hosts), begins, fault, victim, other, at, talk)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)


@dataclass
class Played:
    """How a job went; a second process that came as a rank has the number behind the last rank.

    Attributes:
        digest, turns: of all that happened, in its order.
        joined: of the ranks that have met, where all are, and what rank 0 has drawn.
        met: when each of them had.
        left: of the ranks whose programs came to their ends, when they did.
        ended: when each rank had closed its backend, or failed.
        errors: of the ranks that ended badly.
        hang: the ranks that have not ended, and are alive.
    """

    digest: int = 0
    turns: int = 0
    joined: dict[int, Any] = field(default_factory=dict)
    met: dict[int, float] = field(default_factory=dict)
    left: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    hang: list[int] = field(default_factory=list)


@functools.cache
def _config(host: int) -> Any:
    options: dict[str, Any] = {"heartbeat": HEARTBEAT, "host_id": f"host {host}", "shm": "off"}
    options |= {"eager_bytes": 1024, "segment_bytes": 1024}
    limits = {"timeout": TIMEOUT, "rendezvous_timeout": MEETING}
    return resolve({"transport": "zmq://10.0.0.1:29500", **limits, **options}, {})


class _Job:
    """A job that is played."""

    def __init__(self, fate: Fate, clock: SharedClock) -> None:
        self.fate, self.clock, self.played = fate, clock, Played()
        self.net = Net(clock, fate.seed)
        self.cls = type("Rank", (ZmqBackend,), {"clock": clock})
        self.ranks = [Process(self.net, host_address(host)) for host in fate.hosts]

    def direct(self) -> None:
        """Start the ranks, and what befalls them; wait until they have ended."""
        fate, played = self.fate, self.played
        for rank, begin in enumerate(fate.begins):
            comes_late = (fate.fault, rank) == ("a rank comes late", fate.victim)
            late = LASTS[fate.fault] if comes_late else 0.0
            if fate.fault != "a rank does not come" or rank != fate.victim:
                self._start(self.ranks[rank], rank, begin + late)
            else:
                self.ranks[rank].kill()
        if fate.fault == "a rank comes twice":
            twin = Process(self.net, host_address(fate.hosts[fate.other]))
            self.ranks.append(twin)
            self._start(twin, fate.victim, fate.at / 3)
        self._befall()
        self.net.until(lambda: not self._awaited(), TOO_LONG)
        played.hang = self._awaited()
        self.net.over = True

    def _awaited(self) -> list[int]:
        """The processes that have not ended, and do something, or will again."""
        again = self.fate.fault in LASTS
        return [
            number
            for number, rank in enumerate(self.ranks)
            if not (number in self.played.ended or rank.dead or (rank.frozen and not again))
        ]

    def _befall(self) -> None:
        fate, net = self.fate, self.net
        victim, other = self.ranks[fate.victim], self.ranks[fate.other]
        events: dict[str, Callable[[], None]] = {
            "a rank dies": victim.kill,
            "a rank stops": victim.stop,
            "a rank stops for a moment": victim.stop,
            "a rank stops for long": victim.stop,
            "a host is lost": lambda: net.lose(victim.host),
            "hosts are parted": lambda: net.part(victim.host, other.host),
            "a connection is cut": lambda: net.cut(victim, other),
        }
        if fate.fault in events:
            net.after(fate.at, events[fate.fault])
        if fate.fault in LASTS:
            net.after(fate.at + LASTS[fate.fault], victim.go_on)

    def _start(self, process: Process, rank: int, begin: float) -> None:
        number = self.ranks.index(process)

        def body() -> None:
            self.clock.sleep(begin)
            try:
                self._be(rank, number)
            except Exception as error:
                process.live()
                self.played.errors[number] = error
            process.live()
            self.played.ended[number] = self.clock.now()

        self.clock.start(lambda: process.run(body), f"process {number}")

    def _be(self, rank: int, number: int) -> None:
        fate, played = self.fate, self.played
        size, host = fate.size, fate.hosts[rank]
        if fate.fault == "a rank is of another job" and rank == fate.victim:
            size += 1
        near = [other for other in range(fate.size) if fate.hosts[other] == host]
        place = RankPlace(rank, size, near.index(rank), len(near), "a test", token="5" * 32)
        joined = self.cls.join(place, _config(host))
        played.met[number] = self.clock.now()
        links = joined.control.links  # type: ignore[attr-defined]
        played.joined[number] = (joined.hosts, links._addresses, links._nonce)
        with joined as backend:
            self._talk(backend)
            played.left[number] = self.clock.now()

    def _talk(self, backend: fc.Backend) -> None:
        """What the program of a rank does."""
        me, fate = backend.rank, self.fate
        draw = random.Random(f"program {fate.seed} {me}")
        for number in range(_ROUNDS):
            if fate.talk == "idle":
                self._idle(backend, draw.random() * _IDLE_SECONDS / _ROUNDS)
            else:
                backend.clock.sleep(draw.random() * draw.choice([1e-3, 0.5, 1.0]))
            if number and me == fate.victim:
                if fate.fault == "a rank raises":
                    raise ValueError("on purpose")
                if fate.fault == "a rank leaves early":
                    return
            if fate.talk == "all":
                rows = fc.all_gather(np.full(2, me + 10 * number), backend)
                expected = [r + 10 * number for r in range(backend.world_size) for _ in "12"]
                assert rows.tolist() == expected
            if fate.talk != "idle":
                _pass_on(backend, number)

    def _idle(self, backend: fc.Backend, seconds: float) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.sleep(_LOOK_SECONDS)
            backend.root.check_usable()


def _pass_on(backend: fc.Backend, tag: int) -> None:
    """Send a large message to the next rank."""
    me, size = backend.rank, backend.world_size
    large = np.zeros(_LARGE, np.uint8)
    sending = backend.isend(np.full(_LARGE, me, np.uint8), (me + 1) % size, tag=tag)
    backend.recv(large, (me - 1) % size, tag=tag)
    sending.wait()
    assert (large == (me - 1) % size).all()


def play(fate: Fate) -> Played:
    """Have what is to befall a job befall it."""
    clock = SharedClock(fate.seed + 1)
    with instead_of_the_system():
        job = _Job(fate, clock)
        clock.run([clock.start(job.direct, "director")])
    job.played.digest, job.played.turns = clock.digest, clock.turns
    return job.played
