"""What must hold in an elastic job, seen from outside: it shares no code with its members."""

from __future__ import annotations

import json
from typing import Any


class Wrong(AssertionError):
    """An elastic job did what it must never do."""


class Oracle:
    """Watches all agents and seats of a job.

    Attributes:
        contents: of each generation that was installed, by its number.
        met: the numbers of generations whose ranks have all met, in that order.
        finished: the number of the generation whose ranks have ended; 0 before.
    """

    def __init__(self, minimum: int, maximum: int) -> None:
        self.contents: dict[int, dict[str, Any]] = {}
        self.met: list[int] = []
        self.finished = 0
        self._limits = minimum, maximum
        self._votes: dict[tuple[int, tuple[Any, ...], str], set[str]] = {}
        self._newest: dict[str, int] = {}  # installed, by host

    def voted(self, host: str, number: int, ballot: Any, value: Any) -> None:
        """An agent, or the witness, has accepted a value."""
        key = number, tuple(ballot), json.dumps(value, sort_keys=True)
        self._votes.setdefault(key, set()).add(host)

    def installed(self, host: str, content: dict[str, Any], ranks: dict[int, int]) -> None:
        """An agent begins a generation."""
        number, seats = content["number"], content["seats"]
        before = self.contents.setdefault(number, content)
        self._check(before == content, f"two generations {number}: {before} and {content}")
        self._check(number > self._newest.get(host, 0), f"{host} goes back to {number}")
        self._newest[host] = number
        own = {seat: rank for rank, (where, seat) in enumerate(seats) if where == host}
        self._check(ranks == own, f"{host} has {own} in generation {number}, and was told {ranks}")
        minimum, maximum = self._limits
        self._check(minimum <= len(seats) <= maximum, f"{len(seats)} ranks in {number}")
        self._check(len({tuple(seat) for seat in seats}) == len(seats), f"twice in {number}")
        hosts = [where for where, _ in seats]
        runs = [where for rank, where in enumerate(hosts) if rank == 0 or hosts[rank - 1] != where]
        self._check(runs == [card[0] for card in content["hosts"]], f"order in {number}: {content}")
        if number > 1:
            self._check_votes(number, content)

    def _check_votes(self, number: int, content: dict[str, Any]) -> None:
        """More than half of the generation before must have accepted it under one ballot."""
        before = self.contents.get(number - 1)
        assert before is not None, f"nobody was in generation {number - 1}"
        wanted, total = json.dumps(content, sort_keys=True), len(before["seats"])
        for (voted, _, value), voters in self._votes.items():
            if voted == number and value == wanted:
                weight = sum(where in voters for where, _ in before["seats"])
                if 2 * weight > total or (2 * weight == total and "witness" in voters):
                    return
        raise Wrong(f"generation {number} was installed, and no majority has voted for it")

    def whole(self, number: int) -> None:
        """All ranks of a generation have met: none other may be able to go on."""
        content = self.contents[number]
        weight = sum(self._newest.get(where, 0) > number for where, _ in content["seats"])
        late = f"generation {number} meets after {weight} of its ranks were told of another"
        self._check(2 * weight <= len(content["seats"]), late)
        self._check(not self.met or number > self.met[-1], f"{number} meets after {self.met}")
        self.met.append(number)

    def in_use(self, numbers: set[int]) -> None:
        """The generations whose ranks can all go on at this moment."""
        self._check(len(numbers) <= 1, f"generations {sorted(numbers)} go on at once")

    @staticmethod
    def _check(holds: bool, message: str) -> None:
        if not holds:
            raise Wrong(message)
