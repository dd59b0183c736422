"""``Report``: what an agent says of itself, in all its messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdpcore.elastic.generation import HostCard

Terms = tuple[int, int, float]


@dataclass(frozen=True)
class Report:
    """The state of an agent and its seats, as it was when it sent this.

    Attributes:
        card: of the agent.
        founder: the id of the agent that has founded the job; empty if it is not known.
        generation: the number of the newest generation that it knows; 0 if none.
        member: it has seats in that generation.
        finished: the ranks of that generation have ended their program.
        starting: numbers of processes that aren't ready yet.
        ready: of seats that are there.
        ended: of seats that aren't any more.
        leaving: of seats that want to leave, with the reasons.
        paused: of seats that have handed over in that generation.
        going: of those, that have done so to leave.
        broken: of seats whose backend broke in that generation, with the ranks that they suspect.
        hears: the ids of the agents from which something came lately.
        witness: the id of its witness; empty if it has none.
        terms: least and most ranks of the job, and after how many seconds of silence an agent is
            lost.
    """

    card: HostCard
    founder: str = ""
    generation: int = 0
    member: bool = False
    finished: bool = False
    starting: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    leaving: tuple[tuple[int, str], ...] = ()
    paused: tuple[int, ...] = ()
    going: tuple[int, ...] = ()
    broken: tuple[tuple[int, tuple[int, ...]], ...] = ()
    hears: frozenset[str] = frozenset()
    witness: str = ""
    terms: Terms = (1, 1, 10.0)

    @property
    def is_of_job(self) -> bool:
        """Whether it is in the job, or founds it, and can take others along."""
        return self.member or (not self.generation and self.founder == self.card.id)

    @property
    def leavers(self) -> set[int]:
        """The numbers of the seats that want to leave."""
        return {number for number, _ in self.leaving}

    def encode(self) -> dict[str, Any]:
        """As values of JSON."""
        return {
            "card": [self.card.id, self.card.address, self.card.meeting],
            "founder": self.founder,
            "generation": self.generation,
            "member": self.member,
            "finished": self.finished,
            "starting": [*self.starting],
            "ready": [*self.ready],
            "ended": [*self.ended],
            "paused": [*self.paused],
            "going": [*self.going],
            "witness": self.witness,
            "terms": [*self.terms],
            "leaving": [[number, reason] for number, reason in self.leaving],
            "broken": [[number, [*suspects]] for number, suspects in self.broken],
            "hears": sorted(self.hears),
        }

    @classmethod
    def decode(cls, content: dict[str, Any]) -> Report:
        """Read what ``encode`` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        least, most, lost_after = content["terms"]
        return cls(
            card=HostCard(*map(str, content["card"])),
            founder=str(content["founder"]),
            generation=int(content["generation"]),
            member=bool(content["member"]),
            finished=bool(content["finished"]),
            **{
                name: tuple(map(int, content[name]))
                for name in ("starting", "ready", "ended", "paused", "going")
            },
            leaving=tuple((int(number), str(reason)) for number, reason in content["leaving"]),
            broken=tuple(
                (int(number), tuple(map(int, suspects))) for number, suspects in content["broken"]
            ),
            hears=frozenset(map(str, content["hears"])),
            witness=str(content["witness"]),
            terms=(int(least), int(most), float(lost_after)),
        )
