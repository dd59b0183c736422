"""An engine does what its plan says: operations, bytes, and memory at the peak, exactly."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from support.plan_steps import train

import fsdpcore as fc
from fsdpcore.fsdp.plan.make_plan import make_plan
from fsdpcore.fsdp.units.buffer_pool import BufferPool

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
BF16 = fc.Precision(ml_dtypes.bfloat16)
WIDER = fc.Precision(ml_dtypes.bfloat16, np.float32)
NOTHING_AHEAD = fc.Prefetch(0, reductions=0)
SEVERAL = {"microbatches": 3}
ADDED_UP = {"microbatches": 2, "sync": "last"}

CASES = [
    (4, fc.Strategy(), {}),
    (4, fc.Strategy(), {"prefetch": NOTHING_AHEAD}),
    (3, fc.Strategy(), {"prefetch": fc.Prefetch(2), "precision": BF16}),
    (2, fc.Strategy(), {"prefetch": fc.Prefetch(3, max_bytes=700), **SEVERAL}),
    (2, fc.Strategy(), {"window": True, "precision": BF16, **SEVERAL}),
    (4, fc.Strategy("full_shard", False), {"precision": BF16, **SEVERAL}),
    (4, fc.Strategy("full_shard", 2), {"prefetch": fc.Prefetch(2), **SEVERAL}),
    (3, fc.Strategy("shard_grad_op"), {"precision": BF16, **SEVERAL}),
    (2, fc.Strategy("shard_grad_op"), ADDED_UP),
    (3, fc.Strategy("shard_optimizer"), {"precision": BF16, **SEVERAL}),
    (2, fc.Strategy("shard_optimizer"), ADDED_UP),
    (3, fc.Strategy("no_shard"), SEVERAL),
    (4, fc.Strategy("hybrid_shard", shard_group_size=2), {"precision": BF16}),
    (4, fc.Strategy("hybrid_shard", False, 2), {"prefetch": NOTHING_AHEAD, **ADDED_UP}),
    (4, fc.Strategy("hybrid_shard", shard_group_size=1), ADDED_UP),
    (1, fc.Strategy(), SEVERAL),
    (1, fc.Strategy(), {"virtual_ranks": 3}),
    (2, fc.Strategy(), {"virtual_ranks": 4, "window": True, **ADDED_UP}),
    (3, fc.Strategy(), {"virtual_ranks": 8, **ADDED_UP}),
    (5, fc.Strategy("no_shard"), {"virtual_ranks": 8, "prefetch": NOTHING_AHEAD}),
    (3, fc.Strategy("shard_optimizer"), {"virtual_ranks": 5, "precision": WIDER}),
    (4, fc.Strategy("hybrid_shard", shard_group_size=2), {"virtual_ranks": 7}),
    (4, fc.Strategy("hybrid_shard", False, 2), {"virtual_ranks": 11, "prefetch": fc.Prefetch(2)}),
]


def made():
    """Uneven units: one with frozen parameters, one tied to the first, and a small one."""
    return [
        fc.Unit("a", {"w": fc.Spec((11, 7))}),
        fc.Unit("b", {"w": fc.Spec(40), "f": fc.Spec(13)}, frozen="f"),
        fc.Unit("c", {"w": fc.Spec(1), "b": fc.Spec(1)}),
        fc.Unit("d", {"w": fc.Spec(50), "t": fc.Tied("a", "w")}),
    ]


def tied_to_a_later_unit():
    """The owner's gradients are reduced before those of the other use are there, and again."""
    return [
        fc.Unit("a", {"w": fc.Spec((5, 3)), "t": fc.Tied("c", "w")}),
        fc.Unit("b", {"w": fc.Spec(40)}),
        fc.Unit("c", {"w": fc.Spec(9)}),
    ]


def moved(backend, start):
    """Collectives since then that moved something, with the bytes of all ranks together."""
    found = Counter()
    for entry in backend.recorder.entries()[start:]:
        ranks, name = len(entry.group.ranks), entry.call.operation
        if name in COLLECTIVES and ranks > 1 and entry.call.nbytes:
            found[name, ranks, entry.call.nbytes * (ranks if name == "all_gather" else 1)] += 1
    return found


def compare(backend, strategy, options, made=made):
    options = dict(options)
    passes = options.pop("microbatches", 1), options.pop("sync", "each")
    ahead = options.pop("prefetch", fc.Prefetch())
    options.setdefault("window", False)
    engine = fc.FSDP(
        made(), backend, strategy=strategy, optimizer=fc.optim.AdamW(), prefetch=ahead, **options
    )
    assert engine.windowed is (options["window"] and backend.world_size > 1)
    train(engine, *passes)
    start = len(backend.recorder.entries())
    train(engine, *passes)
    wanted = {
        "strategy": strategy,
        "precision": options.get("precision"),
        "prefetch": ahead.units or 0,
        "prefetch_bytes": ahead.max_bytes,
        "overlap": bool(ahead.reductions),
        "microbatches": passes[0],
        "sync": passes[1],
        "windowed": engine.windowed,
        "rank": backend.rank,
        "virtual_ranks": options.get("virtual_ranks"),
    }
    plan = make_plan(engine.units, backend.world_size, **wanted)
    planned = Counter(
        # Padding of an all_reduce is in the formulas only.
        (o.kind, o.group_size, o.nbytes)
        for o in plan.operations
        if o.kind in COLLECTIVES and o.kind != "all_reduce"
    )
    reduced = Counter((o.kind, o.group_size) for o in plan.operations if o.kind == "all_reduce")
    done = moved(backend, start)
    assert Counter({key: n for key, n in done.items() if key[0] != "all_reduce"}) == planned
    by_group = Counter()
    for (name, ranks, _), number in done.items():
        if name == "all_reduce":
            by_group[name, ranks] += number
    assert by_group == reduced
    assert engine.gathered_peak == plan.peak_live_bytes
    held = engine.held()
    assert held.parameters == plan.persistent.parameters
    assert held.gradients == plan.persistent.gradients
    assert held.optimizer == plan.persistent.optimizer
    assert fc.memory_estimate(made(), backend.world_size, **wanted).total == plan.peak_bytes
    for row in engine.report().rows:
        if row.name in ("peak_bytes", "bytes_sent", "gathers", "reductions"):
            assert row.measured == row.predicted or backend.world_size == 1, row


@pytest.mark.parametrize(("world_size", "strategy", "options"), CASES)
def test_an_engine_does_what_its_plan_says(world_size, strategy, options):
    # A buffer that is used again may be larger than what it is used for, and counts as it is.
    with mock.patch.object(BufferPool, "_reuse", return_value=None):
        fc.launch(compare, world_size=world_size, transport="sim", args=(strategy, options))


@pytest.mark.parametrize(("world_size", "strategy", "options"), CASES)
def test_so_it_does_where_an_owner_comes_after_a_use(world_size, strategy, options):
    args = (strategy, options, tied_to_a_later_unit)
    with mock.patch.object(BufferPool, "_reuse", return_value=None):
        fc.launch(compare, world_size=world_size, transport="sim", args=args)
