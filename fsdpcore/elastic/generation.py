"""``Generation``: who belongs to an elastic job, from one change to the next."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HostCard:
    """A host that takes part, by its agent.

    Attributes:
        id: of the agent, drawn when it starts: an agent that is started again is another one.
        address: where the other agents reach it, ``HOST:PORT``.
        meeting: where the ranks meet if rank 0 is on this host, ``HOST:PORT``.
    """

    id: str
    address: str
    meeting: str


@dataclass(frozen=True, order=True)
class Seat:
    """A process that is a rank, or waits to become one.

    Attributes:
        host: the id of its agent.
        number: of the process on that host, never used again.
    """

    host: str
    number: int


@dataclass(frozen=True)
class Generation:
    """The ranks of a job between two changes.

    Attributes:
        number: from 1.
        hosts: those that have seats, the longest in the job first.
        seats: in the order of their ranks; those of a host follow each other.
        orderly: all ranks of the generation before had handed over at the same commit.
        reason: of the change, in words: "rank 2 on 10.0.0.3 was lost".
    """

    number: int
    hosts: tuple[HostCard, ...]
    seats: tuple[Seat, ...]
    orderly: bool = False
    reason: str = ""

    def weight(self, host: str) -> int:
        """How many ranks a host has: its weight in the vote on the next generation."""
        return sum(seat.host == host for seat in self.seats)

    def rank(self, seat: Seat) -> int | None:
        """Its rank; None if it has none."""
        return self.seats.index(seat) if seat in self.seats else None

    def ranks(self, host: str) -> dict[int, int]:
        """The numbers of a host's seats, with the rank of each."""
        return {seat.number: r for r, seat in enumerate(self.seats) if seat.host == host}

    def host_numbers(self) -> tuple[int, ...]:
        """For every rank, the index of its host in ``hosts``."""
        numbers = {card.id: number for number, card in enumerate(self.hosts)}
        return tuple(numbers[seat.host] for seat in self.seats)

    def place(self, rank: int, token: str = "") -> dict[str, Any]:
        """What a rank is told of its place, as values of JSON; see ``channel.py``."""
        numbers = self.host_numbers()
        own = numbers[rank]
        content = json.dumps(self.encode(), sort_keys=True)
        return {
            "rank": rank,
            "world_size": len(numbers),
            "local_rank": rank - numbers.index(own),
            "local_world_size": numbers.count(own),
            "meeting": self.hosts[numbers[0]].meeting,
            "token": token,
            "job": hashlib.sha256(content.encode()).hexdigest()[:32],
        }

    def encode(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            "number": self.number,
            "hosts": [[card.id, card.address, card.meeting] for card in self.hosts],
            "seats": [[seat.host, seat.number] for seat in self.seats],
            "orderly": self.orderly,
            "reason": self.reason,
        }

    @classmethod
    def decode(cls, content: dict[str, Any]) -> Generation:
        """Read what ``encode`` wrote."""
        return cls(
            int(content["number"]),
            tuple(HostCard(*map(str, card)) for card in content["hosts"]),
            tuple(Seat(str(host), int(number)) for host, number in content["seats"]),
            bool(content["orderly"]),
            str(content["reason"]),
        )
