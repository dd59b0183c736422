"""What the transport counts in a step is what the plan says, to the byte."""

from __future__ import annotations

import sys

import ml_dtypes
import pytest
from support.counting import CountingSim
from support.plan_steps import train
from support.spmd import run_on

import fsdpcore as fc
from fsdpcore.fsdp.plan.make_plan import make_plan

STRATEGIES = [
    fc.Strategy(),
    fc.Strategy("full_shard", False),
    fc.Strategy("full_shard", 2),
    fc.Strategy("shard_grad_op"),
    fc.Strategy("shard_optimizer"),
    fc.Strategy("no_shard"),
    fc.Strategy("hybrid_shard", shard_group_size=2),
]
EVEN, UNEVEN = (64, 128, 96), (13, 1, 50)


def step_bytes(engine, microbatches, sync):
    """Bytes that this rank sends in a step, the checks of collectives included."""
    before = sum(engine.backend.sent)
    train(engine, microbatches, sync)
    return sum(engine.backend.sent) - before


def count(backend, sizes, options, microbatches, sync):
    """What a step sends, less what it does with empty units; and what the plan says."""
    counted = []
    for elements in (sizes, [0] * len(sizes)):
        units = [fc.Unit(f"u{n}", {"w": fc.Spec(size)}) for n, size in enumerate(elements)]
        # All of its algorithms send as little as possible.
        engine = fc.FSDP(
            units,
            backend,
            optimizer=fc.optim.SGD(lr=1.0),
            algorithm="direct",
            window=False,
            **options,
        )
        step_bytes(engine, microbatches, sync)
        counted.append(step_bytes(engine, microbatches, sync))
        if elements is sizes:
            plan = make_plan(
                engine.units, backend.world_size, microbatches=microbatches, sync=sync, **options
            )
    return counted[0] - counted[1], plan.bytes_sent - plan.operations[-1].bytes_sent


@pytest.mark.parametrize(("microbatches", "sync"), [(1, "each"), (4, "each"), (4, "last")])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_bytes_sent(strategy, microbatches, sync, monkeypatch):
    # Now and then ranks meet first. Which calls do depends on how many went before.
    monkeypatch.setattr("fsdpcore.collectives.context.FREE_CALLS", sys.maxsize)
    options = {"strategy": strategy, "precision": fc.Precision(ml_dtypes.bfloat16)}
    args = (EVEN, options, microbatches, sync)
    for counted, planned in run_on(CountingSim, count, world_size=4, args=args, shm="off"):
        assert counted == planned > 0


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer"])
def test_bytes_sent_with_padding(strategy):
    args = (UNEVEN, {"strategy": strategy}, 1, "each")
    for counted, planned in run_on(CountingSim, count, world_size=3, args=args, shm="off"):
        assert counted == planned > 0
