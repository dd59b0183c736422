"""Movements as data: one that no collective has goes through the same interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.sharing import SharingSim
from support.spmd import run_on

import fsdpcore as fc
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.movements import Move, inputs, outputs
from fsdpcore.collectives.run import run
from fsdpcore.collectives.shared import region
from fsdpcore.collectives.shared.interpreter import move
from fsdpcore.collectives.spec import Layout
from fsdpcore.collectives.state import state_of
from fsdpcore.core.reductions import Reduction


@pytest.fixture(autouse=True)
def _threads_let_each_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "_LOOKS", 1)
    monkeypatch.setattr(region, "_YIELDS", 0)


def _scan(ranks: range, root: int) -> list[Move]:
    """To each rank the reduction of all up to it; the last one first, as it may be in place."""
    return [
        Move(outputs([rank]), inputs(range(rank + 1)), divided=True) for rank in reversed(ranks)
    ]


def _exscan(ranks: range, root: int) -> list[Move]:
    """To each rank but the first the reduction of all before it."""
    return [Move(outputs([rank]), inputs(range(rank)), divided=True) for rank in ranks[:0:-1]]


def _prefixes(backend: fc.Backend, count: int, published: bool, in_place: bool) -> None:
    me, dtype = backend.rank, np.dtype(np.int64)
    make = backend.empty if published else np.empty
    fc.all_reduce(np.zeros(count, dtype), backend, algorithm="shared")
    (spec,) = [spec for spec in state_of(backend).calls.values() if spec.collective]
    layout = Layout(-1, Reduction.of("sum", dtype))
    for movement, before in ((_scan, me + 1), (_exscan, me)):
        for _ in range(3):
            source = make((count,), dtype)
            source[:] = np.arange(count) + me
            out = source if in_place else make((count,), dtype)
            if not in_place:
                out[:] = -1

            def body(
                context: CollectiveContext,
                movement: Any = movement,
                source: Any = source,
                out: Any = out,
            ) -> None:
                move(context, movement, layout, source, out)

            untouched = out.copy()
            run(backend, spec, body, timeout=None, async_op=False)
            expected = np.arange(count) * before + before * (before - 1) // 2
            np.testing.assert_array_equal(out, expected if before else untouched)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("count", [0, 5, 1000, 70_001])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_scans(world_size: int, count: int, published: bool, in_place: bool) -> None:
    args = (count, published, in_place)
    run_on(SharingSim, _prefixes, world_size=world_size, args=args)
