"""Handshakes of ranks in memory that shows old values: with each of their fences, and without."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from fsdpcore.transports.memory import peer
from greenlet import getcurrent
from support.weak_memory import WeakMemory

from fsdpcore.collectives.shared import region
from fsdpcore.core.fence import fence

_SEEDS = 150
_STEPS = 5
_DATA = 1 << 20  # beyond all flags


class _Old(Exception):
    """What was read is not what was written for it."""


def _old() -> None:
    raise _Old


_CONTEXT = SimpleNamespace(
    background=False, check=lambda: None, departed=lambda rank: False, disagree=_old
)

Fence = Callable[[], None]


def _left_out(fence: Fence, which: int) -> Fence:
    """A fence of one thread, of which every other call does nothing: which of two, or neither."""
    number = itertools.count()
    return lambda: None if next(number) % 2 == which else fence()


def _meet(seed: int, size: int, which: int) -> None:
    """Ranks write, enter a step, and read what the others have written for it."""
    memory = WeakMemory(seed)

    def rank(me: int) -> Callable[[], None]:
        here = region.SharedRegion(np.zeros(region.nbytes(size), np.uint8), me, size, None)
        here.flags, here.fence = memory, _left_out(memory.fence, which)

        def run() -> None:
            for step in range(1, _STEPS):
                place = _DATA + size * (step & 1)
                memory[place + me] = 10 * step + me
                here.enter(step, _CONTEXT)
                for other in range(size):
                    if memory[place + other] != 10 * step + other:
                        raise _Old

        return run

    memory.run([rank(me) for me in range(size)])


def _take_back(seed: int, without: str) -> None:
    """One rank revokes loans and changes them; another one reads them."""
    memory, lender = WeakMemory(seed), None

    def lend() -> None:
        nonlocal lender
        lender = getcurrent()
        for loan in (1, 2):
            peer.revoke(memory, loan)
            memory[_DATA + loan] = 1

    def read() -> None:
        for loan in (1, 2):
            if memory[_DATA + loan] and not peer.is_revoked(memory, loan):
                raise _Old

    def fence() -> None:
        if ("lender" if getcurrent() is lender else "reader") != without:
            memory.fence()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer, "fence", fence)
        memory.run([lend, read])


def test_a_fence_takes_a_lock_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = mock.MagicMock()
    monkeypatch.setattr(threading, "Lock", lambda: lock)
    fence()
    assert lock.mock_calls == 2 * [mock.call.acquire(), mock.call.release()]


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_shows_what_was_written_for_it(size: int) -> None:
    for seed in range(_SEEDS):
        _meet(seed, size, -1)


@pytest.mark.parametrize("which", range(2))
def test_a_step_needs_both_its_fences(which: int) -> None:
    with pytest.raises(_Old):
        for seed in range(_SEEDS):
            _meet(seed, 2, which)


def test_what_was_changed_was_revoked() -> None:
    for seed in range(3 * _SEEDS):
        _take_back(seed, "")


@pytest.mark.parametrize("without", ["lender", "reader"])
def test_a_loan_needs_both_fences(without: str) -> None:
    with pytest.raises(_Old):
        for seed in range(20 * _SEEDS):
            _take_back(seed, without)
