"""The comparison of calls behind the callers' backs, without GPUs, threads or messages."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import fake_cuda

from fsdpcore.collectives.fingerprint import Fingerprint
from fsdpcore.core.errors import MismatchError, ProtocolError
from fsdpcore.diagnostics.status import Group

CHANNEL = 77


class Call:
    """What ``Agreement`` looks at."""

    def __init__(self, shape: int) -> None:
        self.fingerprint = Fingerprint("all_reduce", np.dtype(np.float32), (shape,), "sum")
        self.digest = self.fingerprint.digest
        self.record = object()


class Running:
    """The entry of a call that has not ended."""

    def __init__(self, call: Call, sequence: int) -> None:
        self.call, self.sequence, self.end = call.record, sequence, 0


class Side:
    """A group as one rank sees it."""

    def __init__(self, rank: int, size: int) -> None:
        self.channel, self.rank, self.world_size = CHANNEL, rank, size
        self.ranks = tuple(10 + rank for rank in range(size))
        self.group = Group(CHANNEL, self.ranks)
        self.collectives: Any = SimpleNamespace(context=None)


class Ranks:
    """Ranks that tell each other what they call, when the test says so."""

    def __init__(self, size: int = 3) -> None:
        from fsdpcore.transports.nccl.agree import Agreement

        self.sides = [Side(rank, size) for rank in range(size)]
        self.told: list[tuple[int, int, str]] = []

        def tell_from(rank: int) -> Any:
            return lambda to, content: self.told.append((10 + rank, to - 10, json.dumps(content)))

        self.all = [Agreement(10 + rank, tell_from(rank)) for rank in range(size)]
        self.made = [0] * size

    def call(self, rank: int, *shapes: int) -> None:
        for shape in shapes:
            self.made[rank] += 1
            self.all[rank].called(self.sides[rank], Call(shape), self.made[rank])  # type: ignore[arg-type]

    def talk(self) -> None:
        for each in self.all:
            each.tell()
        told, self.told = self.told, []
        for sender, to, text in told:
            self.all[to].heard(sender, json.loads(text))
        for each in self.all:
            each.compare()


@pytest.fixture
def ranks() -> Any:
    with fake_cuda.installed(1):  # the transport's modules need one to be imported
        yield Ranks()


@pytest.mark.parametrize("seed", range(20))
def test_equal_calls_at_any_pace(ranks: Ranks, seed: int) -> None:
    chance = random.Random(seed)
    calls = [chance.randrange(5) for _ in range(600)]
    while min(ranks.made) < len(calls):
        rank = chance.randrange(3)
        done = ranks.made[rank]
        ranks.call(rank, *calls[done : done + chance.randrange(40)])
        if chance.random() < 0.3:
            ranks.talk()
    ranks.talk()
    assert not any(each.waits for each in ranks.all)


@pytest.mark.parametrize("seed", range(20))
def test_one_other_call_is_found(ranks: Ranks, seed: int) -> None:
    chance = random.Random(seed)
    odd, place = chance.randrange(3), chance.randrange(300)
    with pytest.raises(MismatchError) as caught:
        for number in range(320):
            for rank in range(3):
                ranks.call(rank, 9 if (rank, number) == (odd, place) else number % 4)
            if chance.random() < 0.25:
                ranks.talk()
        ranks.talk()
    text = str(caught.value)
    assert f"#{place + 1} " in text or "differ somewhere" in text
    assert f"rank {10 + odd}" in text or f"ranks {10 + odd}" in text or f"and {10 + odd}" in text


def test_both_calls_are_told_in_words(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.call(rank, 1, 2, 8 if rank == 1 else 3, 4)
    with pytest.raises(MismatchError) as caught:
        ranks.talk()
    assert str(caught.value) == (
        "collective #3 of GPU arrays does not fit together:\n"
        "  rank 10: all_reduce(sum, float32 of shape (3,))\n"
        "  rank 11: all_reduce(sum, float32 of shape (8,))"
    )


def test_a_call_that_waits_for_others_is_compared(ranks: Ranks) -> None:
    """A rank that waits on the host does not come to what the others have called."""
    for rank in range(3):
        ranks.call(rank, 1)
    ranks.call(0, 2)
    ranks.call(2, 2)
    ranks.talk()
    side, waits_in = ranks.sides[1], Call(5)
    side.collectives.context = SimpleNamespace(entry=Running(waits_in, 2), spec=waits_in)
    with pytest.raises(MismatchError, match=r"#2 .*\n  rank 10: .*\(2,\)\)\n  rank 11: .*\(5,\)\)"):
        ranks.all[1].compare()
    side.collectives.context.entry.end = 1  # it has ended: it will be compared when it is noted
    ranks.all[1].compare()


def test_the_last_calls_of_a_group_are_told_when_it_is_forgotten(ranks: Ranks) -> None:
    """A rank that closes its group before it has told of them does so then."""
    for rank in range(3):
        ranks.call(rank, 1, 3 if rank == 0 else 2)
    ranks.all[0].forget(CHANNEL)
    with pytest.raises(MismatchError, match=r"#2 .*\n  rank 10: .*\(3,\)\)\n  rank 11: .*\(2,\)\)"):
        ranks.talk()


def test_a_group_that_is_forgotten_is_remembered_as_ended(ranks: Ranks) -> None:
    ranks.call(0, 1, 2)
    ranks.all[0].forget(CHANNEL)
    assert ranks.all[0].sequence(CHANNEL) == 2
    assert ranks.all[0].calls() == [(CHANNEL, (10, 11, 12), 2)]


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"channel": 1, "sequence": 1, "sum": True, "last": []},
        {"channel": 1, "sequence": "1", "sum": 1, "last": []},
        {"channel": 1, "sequence": 1, "sum": 1, "last": [[1, 2]]},
        {"channel": 1, "sequence": 1, "sum": 1, "last": [[1, 2, 3]]},
        {"channel": 1, "sequence": 1, "sum": 1, "last": "no"},
    ],
)
def test_nonsense(ranks: Ranks, content: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="rank 12"):
        ranks.all[0].heard(12, content)
