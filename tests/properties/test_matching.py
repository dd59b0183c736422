"""Messages and receives in random orders are matched as MPI says: against a model of two lists."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.matching import Key, MatchTable
from fsdpcore.core.wildcard import ANY_NUMBER


@dataclass(eq=False)
class Item:
    """A message, a receive or a probe; ``asked`` stays what ``key`` was at first."""

    key: Key
    signature: bytes = b""
    envelope: Envelope | None = None
    finished: bool = False
    asked: Key = field(init=False)

    def __post_init__(self) -> None:
        self.asked = self.key

    def finish(self, error: BaseException | None = None) -> None:
        assert not self.finished, "finished twice"
        self.finished = True


def fits(asked: Key, key: Key) -> bool:
    return all(want in (have, ANY_NUMBER) for want, have in zip(asked, key, strict=True))


class Model:
    """What MPI says: receives and messages wait in the order in which they came."""

    def __init__(self) -> None:
        self.receives: list[Item] = []
        self.messages: list[Item] = []
        self.probes: list[Item] = []

    def post(self, receive: Item) -> Item | None:
        return self._first(
            self.messages, lambda m: fits(receive.asked, m.key), self.receives, receive
        )

    def arrive(self, message: Item) -> Item | None:
        return self._first(
            self.receives, lambda r: fits(r.asked, message.key), self.messages, message
        )

    def _first(self, there: list[Item], takes: Any, waiting: list[Item], item: Item) -> Item | None:
        found = next((each for each in there if takes(each)), None)
        if found is None:
            waiting.append(item)
        else:
            there.remove(found)
        return found

    def seen(self, probe: Item) -> Item | None:
        """The message that a probe has to show."""
        return next((each for each in self.messages if fits(probe.asked, each.key)), None)


def key(chance: random.Random, wild: float) -> Key:
    rank, tag = chance.randrange(3), chance.randrange(3)
    return (
        ANY_NUMBER if chance.random() < wild else rank,
        chance.choice([0, 2]),
        ANY_NUMBER if chance.random() < wild else tag,
    )


def carry_out(chance: random.Random, steps: int) -> None:
    table: MatchTable[Any, Any] = MatchTable()
    model, numbers = Model(), itertools.count()
    wild, more = chance.choice([0.0, 0.2, 0.6]), chance.choice([0.3, 0.5, 0.7])
    for _ in range(steps):
        action = chance.random()
        if action < 0.1:
            waiting = model.receives + model.probes
            if waiting:
                item = chance.choice(waiting)
                assert table.withdraw_receive(item)
                assert not table.withdraw_receive(item)
                (model.receives if item in model.receives else model.probes).remove(item)
        elif action < 0.15 and model.messages:
            item = chance.choice(model.messages)
            assert table.withdraw_message(item)
            assert not table.withdraw_message(item)
            model.messages.remove(item)
        elif action < 0.3:
            probe = Item(key(chance, wild))
            table.probe(probe)
            model.probes.append(probe)
        elif chance.random() < more:
            receive = Item(key(chance, wild))
            message = model.post(receive)
            assert table.post(receive) is message
            assert receive.key == (receive.asked if message is None else message.key)
        else:
            message = Item(key(chance, 0), signature=bytes([next(numbers) % 250]))
            taken = model.arrive(message)
            assert table.arrive(message) is taken
            assert taken is None or taken.key == message.key
        check(table, model)


def check(table: MatchTable[Any, Any], model: Model) -> None:
    for probe in list(model.probes):
        shown = model.seen(probe)
        assert probe.finished == (shown is not None)
        if shown is not None:
            assert probe.key == shown.key
            _, channel, tag = shown.key
            assert probe.envelope == Envelope(channel, tag, shown.signature)
            model.probes.remove(probe)
    waiting = model.receives + model.probes
    assert sorted(map(id, table.receives())) == sorted(map(id, waiting))
    assert sorted(map(id, table.messages())) == sorted(map(id, model.messages))
    asked = [item.asked for item in waiting]
    assert table.open_channels() == {channel for src, channel, _ in asked if src == ANY_NUMBER}
    for rank, channel in itertools.product(range(3), (0, 2)):
        assert table.awaits(rank) == any(src == rank for src, _, _ in asked)
        tags = {m.key[2] for m in model.messages if m.key[:2] == (rank, channel)}
        assert set(table.unexpected(rank, channel)) == tags


@pytest.mark.parametrize("seed", range(8))
def test_random_orders(seed: int) -> None:
    for number in range(25):
        carry_out(random.Random(f"{seed}/{number}"), 60)


def test_nothing_stays_behind() -> None:
    """What was matched or withdrawn leaves no memory behind, whatever it left open."""
    table: MatchTable[Any, Any] = MatchTable()
    for number in range(100):
        src, tag = (number, ANY_NUMBER) if number % 2 else (ANY_NUMBER, number)
        receive, message = Item((src, number, tag)), Item((number, number, number))
        if number % 3:
            assert table.post(receive) is None
            assert table.arrive(message) is receive
        else:
            assert table.arrive(message) is None
            assert table.post(receive) is message
    sizes = {name: len(value) for name, value in vars(table).items() if hasattr(value, "__len__")}
    assert set(sizes.values()) == {0}, sizes
