"""Collectives of threads that publish arrays as processes do, in any mix of places."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle, published
from support.sharing import SharingSim
from support.spmd import run_on
from support.waits import waiting_asleep

import fsdpcore as fc
from fsdpcore.collectives.shared import region
from fsdpcore.collectives.state import state_of


@pytest.fixture(autouse=True)
def _threads_let_each_other_run() -> Iterator[None]:
    with waiting_asleep():
        yield


@pytest.fixture
def _slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks pause at times before they use what another one has published."""
    chance, peer_view = random.Random(1), region.SharedRegion.peer_view

    def late(self: region.SharedRegion, *args: Any) -> Any:
        found = peer_view(self, *args)
        if chance.random() < 0.1:
            time.sleep(0.001 * chance.random())
        return found

    monkeypatch.setattr(region.SharedRegion, "peer_view", late)


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[published.Case]]:
    """Up to five calls of two to four ranks, of sizes around what goes through in one step."""
    p = draw(st.integers(2, 4))
    rows = st.sampled_from([0, 1, p - 1, p, 7, 683, 4097, 70_001])
    cases = []
    for _ in range(draw(st.integers(1, 5))):
        dtype, op = draw(st.sampled_from(oracle.COMBINATIONS))
        cases.append(
            published.Case(
                draw(st.sampled_from(published.KINDS)),
                tuple(draw(st.lists(rows, min_size=p, max_size=p))),
                draw(st.sampled_from([1, 3])),
                dtype.name,
                op,
                draw(st.integers(0, p - 1)),
                tuple(draw(st.sampled_from(["published", *published.SOURCES])) for _ in range(p)),
                tuple(
                    draw(
                        st.sampled_from(
                            ["published", *published.OUTS, published.NEW, published.IN_PLACE]
                        )
                    )
                    for _ in range(p)
                ),
            )
        )
    return p, cases


def _carry_out(backend: fc.Backend, cases: list[published.Case]) -> None:
    for number, case in enumerate(cases):
        published.run_case(backend, case, str(number))


@pytest.mark.usefixtures("_slow_readers")
@settings(max_examples=40, deadline=None)
@given(programs())
def test_any_mix_of_places(program: tuple[int, list[published.Case]]) -> None:
    p, cases = program
    run_on(SharingSim, _carry_out, world_size=p, args=(cases,))


@pytest.mark.parametrize("kind", [kind for kind in published.KINDS if not kind.endswith("_v")])
def test_who_is_done_first_waits_for_the_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank changes its input at once, and reads its result, while others are slow."""
    peer_view = region.SharedRegion.peer_view

    def late(self: region.SharedRegion, *args: Any) -> Any:
        if self.rank_of(self.own[0]) != 0:
            time.sleep(0.005)
        return peer_view(self, *args)

    monkeypatch.setattr(region.SharedRegion, "peer_view", late)
    for p in (2, 3):
        places = ("published",) * p
        cases = [
            published.Case(kind, (20_000,), 1, "float32", "sum", root, places, places)
            for root in (0, 0, p - 1)
        ]
        run_on(SharingSim, _carry_out, world_size=p, args=(cases,))


def test_pieces_of_more_than_a_room() -> None:
    """Private arrays go through the rooms in several steps, whatever the collective."""
    places = ("private",) * 3
    cases = [
        published.Case(kind, (250_007, 3, 0), 1, "float32", "sum", 1, places, places)
        for kind in published.KINDS
    ]
    run_on(SharingSim, _carry_out, world_size=3, args=(cases,))


def _with_fences(backend: fc.Backend, cases: list[published.Case]) -> None:
    _carry_out(backend, cases)
    assert state_of(backend).context is not None
    assert state_of(backend).context.region is not None
    assert state_of(backend).context.region.fence is not None


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_processors_that_order_stores_less(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take fences, on the fast path as well, and have the same results."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    chance = random.Random(machine)
    for p in (2, 3):
        cases = []
        for _ in range(30):
            dtype, op = chance.choice(oracle.COMBINATIONS)
            rows = tuple(chance.choice([0, 1, 100, 5000]) for _ in range(p))
            sources = tuple(chance.choice(list(published.SOURCES)) for _ in range(p))
            outs = tuple(chance.choice([*published.OUTS, published.NEW]) for _ in range(p))
            kind, root = chance.choice(published.KINDS), chance.randrange(p)
            cases.append(published.Case(kind, rows, 3, dtype.name, op, root, sources, outs))
        run_on(SharingSim, _with_fences, world_size=p, args=(cases,))
