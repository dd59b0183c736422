"""What holds for every plan, whatever the units, the strategy and the schedule."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpcore.core.policy import Costs
from fsdpcore.fsdp.plan.estimate import memory_estimate
from fsdpcore.fsdp.plan.make_plan import make_plan
from fsdpcore.fsdp.plan.sizes import UnitSize
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.units.precision import Precision

# Machines may be busy: how long an example takes says nothing.
patient = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=50
)

PRECISIONS = (
    None,
    Precision(ml_dtypes.bfloat16),
    Precision(ml_dtypes.bfloat16, np.float32),
    Precision(None, np.float16),
)


@st.composite
def units(draw):
    sizes = st.one_of(st.integers(0, 5), st.integers(0, 500))
    dtypes = st.sampled_from([np.float32, np.float64])
    frozen = st.one_of(st.just(0), sizes)
    return [
        UnitSize(f"u{n}", draw(sizes), draw(dtypes), draw(frozen))
        for n in range(draw(st.integers(0, 6)))
    ]


@st.composite
def placements(draw):
    """A number of ranks, and a strategy for it."""
    inner, outer = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    world_size = inner * outer
    keeping = ["shard_grad_op", "shard_optimizer", "no_shard"]
    name = draw(st.sampled_from(["full_shard", "hybrid_shard", *keeping]))
    if name in keeping:
        return world_size, Strategy(name)
    shards = inner if name == "hybrid_shard" else world_size
    divisors = [n for n in range(1, shards + 1) if shards % n == 0]
    reshard = draw(st.sampled_from([True, False, *divisors]))
    return world_size, Strategy(name, reshard, inner if name == "hybrid_shard" else None)


options = st.fixed_dictionaries(
    {
        "precision": st.sampled_from(PRECISIONS),
        "optimizer_states": st.integers(0, 3),
        "prefetch": st.integers(0, 4),
        "prefetch_bytes": st.one_of(st.none(), st.integers(1, 5000)),
        "overlap": st.booleans(),
        "microbatches": st.integers(1, 3),
        "sync": st.sampled_from(["each", "last"]),
        "windowed": st.booleans(),
    }
)


@patient
@given(units(), placements(), options)
def test_memory(units, placement, options):
    world_size, strategy = placement
    plan = make_plan(units, world_size, strategy=strategy, **options)
    assert plan.peak_bytes >= plan.persistent.total >= 0
    assert plan.peak_bytes == plan.persistent.total + plan.peak_live_bytes
    for operation in plan.operations:
        assert 0 <= operation.live_bytes <= plan.peak_live_bytes
    if plan.operations:
        assert plan.operations[-1].live_bytes == 0
    precision = options["precision"] or Precision()
    for unit in units:  # all of its gradients are there at some time
        item = precision.dtypes(np.dtype(unit.dtype)).grad.itemsize
        assert plan.peak_live_bytes >= unit.size * item


@patient
@given(units(), placements(), options)
def test_every_element_has_its_state_once_for_each_replica(units, placement, options):
    world_size, strategy = placement
    replicas = world_size
    if strategy.name == "hybrid_shard":
        replicas = world_size // strategy.shard_group_size
    elif strategy.name != "no_shard":
        replicas = 1
    plans = [
        make_plan(units, world_size, strategy=strategy, rank=rank, **options)
        for rank in range(world_size)
    ]
    elements = sum(unit.size * np.dtype(unit.dtype).itemsize for unit in units)
    held = sum(plan.persistent.optimizer for plan in plans)
    assert held == replicas * options["optimizer_states"] * elements


@patient
@given(units(), placements(), options)
def test_what_is_sent_without_padding(units, placement, options):
    """All ranks together; each kind of operation follows from the sizes of units alone."""
    world_size, strategy = placement
    plans = [
        make_plan(units, world_size, strategy=strategy, rank=rank, **options)
        for rank in range(world_size)
    ]
    precision = options["precision"] or Precision()
    items = {unit.name: precision.dtypes(np.dtype(unit.dtype)) for unit in units}
    sizes = {unit.name: unit.size for unit in units}
    sent: dict[tuple[str, str], Fraction] = {}
    expected: dict[tuple[str, str], Fraction] = {}
    for plan in plans:
        shards = 1 if strategy.name == "shard_optimizer" else plan.placement.shards
        for o in plan.operations:
            assert o.nbytes > 0
            assert o.group_size > 1
            assert 0 <= o.padding < o.nbytes or o.kind == "all_reduce"
            if o.kind == "all_gather":
                continue
            key = (o.unit, o.kind)
            sent[key] = sent.get(key, Fraction(0)) + o.bytes_sent - o.padding_sent
            if plan.rank == 0:
                nbytes = sizes[o.unit] * items[o.unit].grad.itemsize
                part = Fraction(nbytes * (o.group_size - 1), o.group_size)
                each = part if o.kind == "reduce_scatter" else 2 * part / shards
                expected[key] = expected.get(key, Fraction(0)) + world_size * each
    assert sent == expected


@patient
@given(units(), placements(), options)
def test_fetching_more_ahead_never_sends_more(units, placement, options):
    world_size, strategy = placement
    deeper = {**options, "prefetch": options["prefetch"] + 1}
    plan, other = (make_plan(units, world_size, strategy=strategy, **o) for o in (options, deeper))
    assert other.bytes_sent == plan.bytes_sent
    assert other.persistent == plan.persistent
    if options["prefetch_bytes"] is None:
        assert other.peak_live_bytes >= plan.peak_live_bytes

    def moved(plan):
        return sorted((o.kind, o.unit, o.nbytes, o.group_size) for o in plan.operations)

    assert moved(other) == moved(plan)


@patient
@given(units(), placements(), options, st.data())
def test_times(units, placement, options, data):
    world_size, strategy = placement
    number = st.floats(0, 10)
    given = {
        "strategy": strategy,
        "costs": Costs(*(data.draw(number) for _ in range(3))),
        "compute_seconds": [data.draw(number) for _ in units],
    }
    plan = make_plan(units, world_size, **given, **options)
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + plan.exposed_seconds)
    assert 0 <= plan.exposed_seconds <= plan.seconds * (1 + 1e-9) + 1e-9
    alone = make_plan(units, world_size, **given, **{**options, "prefetch": 0, "overlap": False})
    assert alone.exposed_seconds == pytest.approx(alone.seconds)


@patient
@given(placements(), options)
def test_empty_units_cost_nothing(placement, options):
    world_size, strategy = placement
    full = [UnitSize("a", 7), UnitSize("b", 3, frozen=2)]
    empty = [UnitSize(f"empty {n}", 0) for n in range(3)]
    mixed = [empty[0], full[0], empty[1], full[1], empty[2]]
    options = {**options, "prefetch": 0, "overlap": False}
    plan, other = (make_plan(u, world_size, strategy=strategy, **options) for u in (full, mixed))
    assert plan.operations == other.operations
    assert plan.peak_bytes == other.peak_bytes


@patient
@given(units(), placements(), options)
def test_estimates_are_parts_of_the_peak(units, placement, options):
    world_size, strategy = placement
    plan = make_plan(units, world_size, strategy=strategy, **options)
    estimate = memory_estimate(units, world_size, strategy=strategy, **options)
    assert estimate.total == plan.peak_bytes
    assert min(estimate.gradients, estimate.communication, estimate.live_units) >= 0
    if not options["windowed"]:
        for what in ("parameters", "all"):
            moved = memory_estimate(units, world_size, strategy=strategy, offload=what, **options)
            assert moved.live_units >= estimate.live_units
            kept = moved.total - moved.live_units
            assert kept + moved.host.total == estimate.total - estimate.live_units
