"""One decision that is taken once, by voters of different weight: single-decree Paxos.

A value is decided when voters of more than half of the weight have accepted it under one ballot.
At exactly half a witness tips the scales, which is one more acceptor. Any two such quorums have a
voter in common, or the witness: so no second value is ever decided, whatever messages are lost,
doubled, late or out of order, and however many propose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Value = dict[str, Any]
Ballot = tuple[int, str]  # a round, and the id of who proposes in it
NO_BALLOT: Ballot = (0, "")


def read_ballot(content: Any) -> Ballot:
    """A ballot that was a value of JSON meanwhile."""
    return int(content[0]), str(content[1])


@dataclass(frozen=True)
class Answer:
    """What an acceptor says to a proposal.

    Attributes:
        granted: it has promised, or accepted.
        promised: the highest ballot that it has seen.
        accepted: what it has accepted last, and under which ballot.
    """

    granted: bool
    promised: Ballot
    accepted: tuple[Ballot, Value] | None = None


@dataclass
class Acceptor:
    """A voter: it accepts what is proposed, unless it has promised a higher ballot."""

    promised: Ballot = NO_BALLOT
    accepted: tuple[Ballot, Value] | None = None

    def prepare(self, ballot: Ballot) -> Answer:
        """Promise to accept nothing below a ballot; tell what was accepted before."""
        granted = ballot >= self.promised
        self.promised = max(ballot, self.promised)
        return Answer(granted, self.promised, self.accepted)

    def accept(self, ballot: Ballot, value: Value) -> Answer:
        """Accept a value, unless a higher ballot was promised."""
        granted = ballot >= self.promised
        if granted:
            self.promised, self.accepted = ballot, (ballot, value)
        return Answer(granted, self.promised)


class Witness(Protocol):
    """An acceptor that all agents reach in another way than over the network.

    Attributes:
        id: the same for all that ask the same witness.
        trouble: why it could not be asked the last time; empty if it could.
    """

    id: str
    trouble: str

    def prepare(self, decree: str, number: int, ballot: Ballot) -> Answer | None:
        """As ``Acceptor.prepare`` for one decree of many; None if it cannot be asked now."""

    def accept(self, decree: str, number: int, ballot: Ballot, value: Value) -> Answer | None:
        """As ``Acceptor.accept``; None if it cannot be asked now."""


def has_quorum(weights: Mapping[str, int], voters: Collection[str], witness: bool = False) -> bool:
    """Whether voters are more than half of the weight, or half of it and the witness."""
    weight = 2 * sum(weights[voter] for voter in {*voters} & weights.keys())
    total = sum(weights.values())
    return weight > total or (witness and weight == total)


@dataclass
class Proposer:
    """One try to have a value decided, under one ballot.

    First the voters promise; then, with a quorum of promises, a value is put to them. It must be
    the one that was accepted under the highest ballot so far, if there is one.

    Attributes:
        ballot: never used before.
        weights: of the voters.
        promises: who has promised.
        accepts: who has accepted the value.
        witness: the witness has promised, or accepted, in the phase that is on.
        value: what was put to the voters; None before.
    """

    ballot: Ballot
    weights: Mapping[str, int]
    promises: set[str] = field(default_factory=set)
    accepts: set[str] = field(default_factory=set)
    witness: bool = False
    value: Value | None = None
    _bound: tuple[Ballot, Value] | None = None

    @property
    def bound(self) -> Value | None:
        """The value that must be put to the voters; None if any may be."""
        return self._bound[1] if self._bound else None

    @property
    def voters(self) -> set[str]:
        """Who has said yes in the phase that is on."""
        return self.promises if self.value is None else self.accepts

    @property
    def agreed(self) -> bool:
        """Whether a quorum has said yes in the phase that is on."""
        return has_quorum(self.weights, self.voters, self.witness)

    @property
    def tied(self) -> bool:
        """Whether the witness would tip the scales."""
        return not self.agreed and has_quorum(self.weights, self.voters, True)

    def promised(self, voter: str | None, accepted: tuple[Ballot, Value] | None) -> None:
        """Note a promise, of the witness if there is no voter, and what was accepted before."""
        if self.value is not None:
            return
        if accepted and (self._bound is None or accepted[0] > self._bound[0]):
            self._bound = accepted
        if voter is None:
            self.witness = True
        else:
            self.promises.add(voter)

    def put(self, value: Value) -> None:
        """Begin the second phase with a value."""
        self.value, self.witness = value, False

    def accepted(self, voter: str | None) -> None:
        """Note who has accepted the value, the witness if there is no voter."""
        if self.value is None:
            return
        if voter is None:
            self.witness = True
        else:
            self.accepts.add(voter)
