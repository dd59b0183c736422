"""``Decree``: how the agents of a generation decide on the next, seen from one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Any

from fsdpcore.elastic.generation import Generation
from fsdpcore.elastic.paxos import (
    NO_BALLOT,
    Acceptor,
    Answer,
    Ballot,
    Proposer,
    Value,
    Witness,
    read_ballot,
)

Message = dict[str, Any]
_GRACE = 0.2  # seconds for which a proposer waits for those who don't answer
_RETRY = 0.5  # seconds after which it begins anew


def read_ballot_message(content: Message) -> Message:
    """A message for ``Decree.receive`` that was values of JSON meanwhile.

    Raises:
        LookupError, TypeError, ValueError, OverflowError: it is something else.
    """
    kind = str(content["kind"])
    found: Message = {"kind": kind, "number": int(content["number"])}
    found["ballot"] = read_ballot(content["ballot"])
    if kind == "accept":
        found["value"] = Generation.decode(content["value"]).encode()
    elif kind in ("promised", "accepted"):
        accepted = content["accepted"]
        found["granted"] = bool(content["granted"])
        found["promised"] = read_ballot(content["promised"])
        found["accepted"] = accepted and (
            read_ballot(accepted[0]),
            Generation.decode(accepted[1]).encode(),
        )
    elif kind != "prepare":
        raise ValueError(f"no message on a ballot: {kind}")
    return found


class Decree:
    """One agent's part in the decision on one generation: it votes, and may propose.

    What it returns are pairs of an agent's id and a message for it.

    Args:
        before: the generation whose agents decide on the next.
        name: of the job, for the witness.
        me: the agent's id.
        witness: what tips the scales.
        chance: decides how long it holds back when others propose.
        lost_after: seconds after which an agent is lost.

    Attributes:
        number: of the generation that is decided.
        decided: the value, once this agent knows it.
    """

    def __init__(
        self,
        before: Generation,
        name: str,
        me: str,
        witness: Witness | None,
        chance: random.Random,
        lost_after: float,
    ) -> None:
        self.number = before.number + 1
        self.decided: Value | None = None
        self._name, self._me = name, me
        self._weights = {card.id: before.weight(card.id) for card in before.hosts}
        self._witness, self._chance = witness, chance
        self._grace = min(_GRACE, lost_after / 8)
        self._retry = min(_RETRY, lost_after / 4)
        self._acceptor = Acceptor()
        self._proposer: Proposer | None = None
        self._highest: Ballot = NO_BALLOT
        self._tries = 0
        self._phase_at = 0.0
        self._look_at = 0.0
        self._again_at = 0.0

    @property
    def proposes(self) -> bool:
        """Whether this agent has put something forward that isn't decided yet."""
        return self._proposer is not None

    def may_propose(self, now: float) -> bool:
        """Whether this agent doesn't hold back."""
        return self._proposer is None and now >= self._again_at

    def next_step(self) -> float:
        """When ``step`` or ``propose`` can do something more."""
        return min(self._look_at, self._again_at) if self._proposer else self._again_at

    def propose(self, now: float) -> list[tuple[str, Message]]:
        """Begin to propose: ask all for their promise."""
        ballot = (max(self._highest[0], self._acceptor.promised[0]) + 1, self._me)
        self._highest = ballot
        self._proposer = Proposer(ballot, self._weights)
        self._phase_at = self._look_at = now
        self._tries += 1
        self._again_at = now + self._retry * (2 ** min(self._tries - 1, 3) + self._chance.random())
        return self._ask({"kind": "prepare"})

    def receive(self, source: str, message: Message) -> list[tuple[str, Message]]:
        """Take in a message of an agent of the generation before: see ``read_ballot_message``."""
        kind, ballot = message["kind"], message["ballot"]
        if source not in self._weights:
            return []
        if kind in ("prepare", "accept"):
            return [(source, self._answer(kind, ballot, message))]
        self._highest = max(self._highest, message["promised"])
        if self._proposer and ballot == self._proposer.ballot:
            self._note(source, kind, Answer(message["granted"], self._highest, message["accepted"]))
        return []

    def step(
        self,
        now: float,
        expected: Collection[str],
        choose: Callable[[frozenset[str]], Value | None],
    ) -> list[tuple[str, Message]]:
        """Go on with what this agent proposes, as far as the answers go.

        Args:
            now: the time.
            expected: who should answer; the others are not waited for.
            choose: returns what to put to the voters, given who has not answered of all; None if
                there is nothing to decide any more.
        """
        proposer = self._proposer
        if proposer is None:
            return []
        missing = frozenset(expected) - proposer.voters
        waits = now < self._phase_at + self._grace and missing
        self._look_at = self._phase_at + self._grace if waits else now + self._grace
        if not waits and proposer.tied:
            self._ask_witness(proposer)
        if not self._proposer:
            return []
        if proposer.agreed and proposer.value is not None:
            self.decided = proposer.value
            self._proposer = None
        elif proposer.agreed and not waits:
            silent = frozenset(self._weights) - proposer.voters
            return self._put(proposer, proposer.bound or choose(silent), now)
        elif now >= self._again_at:
            return self.propose(now)
        return []

    def _put(
        self, proposer: Proposer, value: Value | None, now: float
    ) -> list[tuple[str, Message]]:
        if value is None:
            self._proposer = None
            return []
        proposer.put(value)
        self._phase_at = self._look_at = now
        self._again_at = now + self._retry * (2 ** min(self._tries, 3) + self._chance.random())
        return self._ask({"kind": "accept", "value": value})

    def _ask(self, message: Message) -> list[tuple[str, Message]]:
        """Ask all the others, and this agent's own acceptor."""
        assert self._proposer is not None
        message |= {"number": self.number, "ballot": self._proposer.ballot}
        own = self._answer(message["kind"], self._proposer.ballot, message)
        self.receive(self._me, own)
        return [(voter, message) for voter in self._weights if voter != self._me]

    def _answer(self, kind: str, ballot: Ballot, message: Message) -> Message:
        """Vote."""
        if kind == "prepare":
            answer = self._acceptor.prepare(ballot)
        else:
            answer = self._acceptor.accept(ballot, dict(message["value"]))
        return {
            "kind": "promised" if kind == "prepare" else "accepted",
            "number": self.number,
            "ballot": ballot,
            "granted": answer.granted,
            "promised": answer.promised,
            "accepted": answer.accepted,
        }

    def _ask_witness(self, proposer: Proposer) -> None:
        if self._witness is None:
            return
        if proposer.value is None:
            kind, answer = (
                "promised",
                self._witness.prepare(self._name, self.number, proposer.ballot),
            )
        else:
            kind, answer = (
                "accepted",
                self._witness.accept(self._name, self.number, proposer.ballot, proposer.value),
            )
        if answer is not None:
            self._highest = max(self._highest, answer.promised)
            self._note(None, kind, answer)

    def _note(self, voter: str | None, kind: str, answer: Answer) -> None:
        """Count an answer; one that says no ends the try."""
        assert self._proposer is not None
        if not answer.granted:
            self._proposer = None
        elif kind == "promised":
            self._proposer.promised(voter, answer.accepted)
        else:
            self._proposer.accepted(voter)
