"""Many schedules of elastic jobs: one generation after the other, whatever befalls the agents.

A schedule that goes wrong is repeated by its seed: ``play(seed)`` goes the same way to the same
event. The oracle (``elastic_oracle.py``) sees what agents install and accept, and which ranks meet.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
from support.elastic_fates import Played, play
from support.schedules import elsewhere, seeds

from fsdpcore.elastic import succession
from fsdpcore.elastic.membership import Member
from fsdpcore.elastic.paxos import Acceptor, Answer, Proposer
from fsdpcore.elastic.peers import Peers


def _search(seeds: Iterable[int], seen: Counter[Any] | None = None) -> Played | None:
    """Play a job for each seed; return the first that goes wrong."""
    for seed in seeds:
        played = play(seed)
        if seen is not None:
            seen.update(played.visits)
            seen.update({"generations": played.generations, "events": played.turns})
            seen.update(f"agent {end}" for end in played.ends.elements())
        if played.wrong:
            print(f"seed {seed}, turn {played.turns}, digest {played.digest:08x}:", played)
            return played
    return None


def test_schedules() -> None:
    seen: Counter[Any] = Counter()
    assert _search(range(70), seen) is None
    transitions = [visit for visit in seen if isinstance(visit, tuple)]
    assert len({before for before, _, _ in transitions}) >= 35
    assert len(transitions) >= 300


@pytest.mark.campaign
def test_many_schedules() -> None:
    chosen = seeds(20_000)
    seen: Counter[Any] = Counter()
    assert _search(chosen, seen) is None
    transitions = [visit for visit in seen if isinstance(visit, tuple)]
    states = {state for before, _, after in transitions for state in (before, after)}
    print(chosen, {word: count for word, count in seen.items() if isinstance(word, str)})
    print(f"{len(states)} states, {len(transitions)} transitions: {sorted(states)}")


def _ways(count: int) -> list[tuple[int, int]]:
    return [(played.digest, played.turns) for played in map(play, range(count))]


def test_a_seed_is_a_schedule() -> None:
    """The same in another process with other hashes."""
    assert elsewhere("properties.test_elastic_schedules", "_ways(3)") == str(_ways(3))


def _half_is_enough(self: Proposer) -> bool:
    weight = sum(self.weights[voter] for voter in self.voters & self.weights.keys())
    return 2 * weight >= sum(self.weights.values())


def _forgets(self: Acceptor, ballot: Any, value: Any) -> Answer:
    self.accepted = ballot, value
    return Answer(True, ballot)


def _one_way(self: Peers, now: float) -> frozenset[str]:
    return self.hears(now) | {self._me}


def _one_hears(view: succession.View, a: str, b: str) -> bool:
    if view.me in (a, b):
        return (b if a == view.me else a) in view.linked
    one, other = view.report(a), view.report(b)
    return not (one and other and b not in one.hears and a not in other.hears)


_describe = Member._describe


def _keeps_the_end(self: Member, now: float) -> Any:
    return dataclasses.replace(_describe(self, now), finished=False)


BROKEN = {
    "half is a quorum": [mock.patch.object(Proposer, "agreed", property(_half_is_enough))],
    "promises are forgotten": [mock.patch.object(Acceptor, "accept", _forgets)],
    "what was accepted is ignored": [mock.patch.object(Proposer, "bound", None)],
    "one way is enough": [
        mock.patch.object(Peers, "linked", _one_way),
        mock.patch.object(succession, "_hear", _one_hears),
    ],
    "the end is not told": [mock.patch.object(Member, "_describe", _keeps_the_end)],
}


def _broken(name: str, chosen: Iterable[int]) -> tuple[Played | None, Played | None]:
    """The first schedule in which a broken variant goes wrong, played twice."""
    for patch in BROKEN[name]:
        patch.start()
    try:
        found = _search(chosen)
        return found, play(found.seed) if found else None
    finally:
        for patch in BROKEN[name]:
            patch.stop()


@pytest.mark.campaign
@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_found(name: str) -> None:
    found, again = _broken(name, range(1000))
    assert found == again
    assert found is not None
