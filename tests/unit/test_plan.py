"""A step as data: its bytes by the formulas of the field, its memory and its time by hand."""

from __future__ import annotations

import json
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import fsdpcore as fc
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.policy import Costs
from fsdpcore.fsdp.plan.make_plan import make_plan
from fsdpcore.fsdp.plan.sizes import UnitSize, even_units
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.units.precision import Precision

BF16 = Precision(ml_dtypes.bfloat16)
GATHER_ONCE = Strategy("full_shard", reshard_after_forward=False)
ONE_SECOND_EACH = Costs(1.0, 0.0, 0.0)  # among 2 ranks, all of these operations are one message


def of_units(plan):
    """The operations on units: not what the ranks agree on before the update."""
    return [operation for operation in plan.operations if operation.unit]


# What is sent.


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("strategy", "sync", "times"),
    [
        ("full_shard", "each", lambda a: 3 * a),
        ("full_shard", "last", lambda a: 2 * a + 1),
        (GATHER_ONCE, "each", lambda a: 2 * a),
        (GATHER_ONCE, "last", lambda a: a + 1),
        ("shard_grad_op", "each", lambda a: a + 1),
        ("shard_grad_op", "last", lambda a: 2),
        ("shard_optimizer", "each", lambda a: 2 * a + 1),
        ("shard_optimizer", "last", lambda a: 3),
        ("no_shard", "each", lambda a: 2 * a),
        ("no_shard", "last", lambda a: 2),
    ],
)
def test_elements_sent_are_those_of_the_formulas(strategy, sync, times, microbatches):
    size, ranks = 960, 8
    plan = make_plan(
        even_units(size, 4), ranks, strategy=strategy, sync=sync, microbatches=microbatches
    )
    sent = sum(operation.bytes_sent for operation in of_units(plan))
    assert sent == times(microbatches) * size * 4 * (ranks - 1) // ranks
    assert plan.padding_bytes == 0


@pytest.mark.parametrize("microbatches", [1, 4])
def test_elements_that_hybrid_shard_sends(microbatches):
    size, ranks, group = 960, 8, 4
    strategy = Strategy("hybrid_shard", shard_group_size=group)
    plan = make_plan(even_units(size, 4), ranks, strategy=strategy, microbatches=microbatches)
    inner = sum(o.bytes_sent for o in of_units(plan) if o.kind != "all_reduce")
    outer = sum(o.bytes_sent for o in of_units(plan) if o.kind == "all_reduce")
    assert inner == microbatches * 3 * size * 4 * (group - 1) // group
    assert outer == microbatches * 2 * (size // group) * 4 * (ranks - group) // ranks


@pytest.mark.parametrize(
    ("strategy", "times"),
    [("full_shard", 3), ("shard_grad_op", 2), ("shard_optimizer", 3), ("no_shard", 2)],
)
def test_what_is_sent_beyond_the_formulas_is_padding(strategy, times):
    sizes, ranks = [10, 3, 1, 0, 17], 4
    units = [UnitSize(f"u{n}", size) for n, size in enumerate(sizes)]
    plans = [make_plan(units, ranks, strategy=strategy, rank=rank) for rank in range(ranks)]
    agreed = plans[0].operations[-1].bytes_sent
    sent = Fraction(sum(plan.bytes_sent - agreed for plan in plans), ranks)
    formula = Fraction(times * sum(sizes) * 4 * (ranks - 1), ranks)
    assert sent - formula == Fraction(plans[0].padding_bytes)
    assert (plans[0].padding_bytes > 0) is (strategy != "no_shard")


def test_gathering_again_among_neighbours():
    plan = make_plan(even_units(960, 2), 8, strategy=Strategy("full_shard", 2))
    gathers = [o for o in of_units(plan) if o.kind == "all_gather"]
    assert [(o.phase, o.group_size) for o in gathers] == [("forward", 8)] * 2 + [
        ("backward", 2)
    ] * 2
    assert {o.bytes_sent for o in gathers if o.phase == "backward"} == {480 * 4 // 2}


def test_half_precision_sends_half_of_the_bytes():
    full, half = (make_plan(even_units(960, 4), 8, precision=p) for p in (None, BF16))
    assert 2 * sum(o.bytes_sent for o in of_units(half)) == sum(
        o.bytes_sent for o in of_units(full)
    )
    reduced = make_plan(even_units(960, 4), 8, precision=Precision(ml_dtypes.bfloat16, np.float32))
    assert {o.nbytes for o in of_units(reduced) if o.kind == "all_gather"} == {240 * 2}
    assert {o.nbytes for o in of_units(reduced) if o.kind == "reduce_scatter"} == {240 * 4}


def test_a_window_needs_no_gathering():
    plan = make_plan(even_units(960, 4), 8, windowed=True)
    assert {o.kind for o in of_units(plan)} == {"reduce_scatter"}
    assert (plan.gathers, plan.reductions) == (0, 4)
    assert plan.peak_live.parameters == 0
    assert plan.persistent.parameters == 960 * 4 // 8


def test_one_rank_sends_nothing():
    plan = make_plan(even_units(960, 4), 1)
    assert plan.operations == ()
    assert (plan.bytes_sent, plan.gathers, plan.reductions) == (0, 0, 0)
    assert plan.persistent.total == 16 * 960


def test_what_the_ranks_agree_on_is_an_operation():
    last = make_plan(even_units(960, 4), 8).operations[-1]
    assert (last.phase, last.unit, last.group_size, last.background) == ("update", "", 8, False)
    assert last.bytes_sent == last.nbytes // 8 * 7 < 1000


def test_numbers_of_operations():
    units = [UnitSize("a", 8), UnitSize("b", 8, frozen=4), UnitSize("c", 0, frozen=4)]
    strategy = Strategy("hybrid_shard", shard_group_size=2)
    plan = make_plan(units, 4, strategy=strategy, microbatches=3)
    assert plan.gathers == 3 * 2 * (1 + 2 + 1)
    assert plan.reductions == 3 * 2
    replicated = make_plan(units, 4, strategy="no_shard", microbatches=3)
    assert (replicated.gathers, replicated.reductions) == (0, 6)


# What is held.


def test_a_small_step_by_hand():
    plan = make_plan([UnitSize("a", 3), UnitSize("b", 6)], 2)  # 16 and 24 bytes when gathered
    told = [
        (o.phase, o.kind, o.unit, o.background, o.bytes_sent, o.padding, o.live_bytes)
        for o in of_units(plan)
    ]
    assert told == [
        ("forward", "all_gather", "a", False, 8, 4, 16),
        ("forward", "all_gather", "b", True, 12, 0, 40),
        ("backward", "all_gather", "b", False, 12, 0, 24),
        ("backward", "all_gather", "a", True, 8, 4, 40),
        ("backward", "reduce_scatter", "b", True, 12, 0, 16 + 24),
        ("backward", "reduce_scatter", "a", True, 8, 4, 16),
    ]
    # In the backward pass of b: both are gathered, and the gradients of b.
    assert (plan.peak_live.parameters, plan.peak_live.gradients) == (40, 24)
    assert plan.persistent.parameters == plan.persistent.gradients == (2 + 3) * 4
    assert plan.persistent.optimizer == 2 * 4 * (2 + 3)
    assert plan.peak_bytes == 40 + 24 + 20 + 20 + 40


def test_without_anything_in_the_background_one_unit_is_alive():
    plan = make_plan([UnitSize("a", 3), UnitSize("b", 6)], 2, prefetch=0, overlap=False)
    assert not any(operation.background for operation in plan.operations)
    assert plan.peak_live_bytes == 24 + 24


@pytest.mark.parametrize(("depth", "units"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 6)])
def test_live_units_are_one_more_than_are_fetched_ahead(depth, units):
    plan = make_plan(even_units(600, 6), 4, prefetch=depth)
    assert plan.peak_live.parameters == units * 400


def test_prefetching_stops_at_a_number_of_bytes():
    units = even_units(600, 6)  # 400 bytes each
    for limit, ahead in ((1, 1), (799, 1), (800, 2), (5000, 4)):
        plan = make_plan(units, 4, prefetch=4, prefetch_bytes=limit)
        assert plan.peak_live.parameters == (ahead + 1) * 400


def test_a_reduction_keeps_its_buffer_until_the_next_one():
    units = even_units(600, 6)
    assert make_plan(units, 4).peak_live.gradients == 2 * 400
    assert make_plan(units, 4, overlap=False).peak_live.gradients == 400


def test_gathered_once_all_units_are_alive_before_the_backward_pass():
    plan = make_plan(even_units(600, 6), 4, strategy=GATHER_ONCE)
    assert (plan.peak_live.parameters, plan.peak_live.gradients) == (6 * 400, 400)


def test_larger_parts_stay_between_the_passes():
    plan = make_plan(
        even_units(600, 6), 4, strategy=Strategy("full_shard", 2), prefetch=0, overlap=False
    )
    # Before the backward pass of the last unit: a half of each, that unit, and its gradients.
    assert (plan.peak_live.parameters, plan.peak_live.gradients) == (6 * 200 + 400, 400)


def test_gradients_that_are_added_up_are_alive_until_the_last_microbatch():
    plan = make_plan(even_units(600, 6), 4, microbatches=3, sync="last", prefetch=0)
    assert plan.peak_live.gradients == (6 + 1) * 400
    assert [o.microbatch for o in of_units(plan) if o.kind == "reduce_scatter"] == [2] * 6


@pytest.mark.parametrize(
    ("strategy", "precision", "parameters", "gradients"),
    [
        ("full_shard", None, 4 / 8, 4 / 8),
        ("full_shard", BF16, (4 + 2) / 8, 2 / 8),
        ("shard_grad_op", None, 4, 4 / 8),
        ("shard_grad_op", BF16, 2 + 4 / 8, 2 / 8),
        ("shard_optimizer", None, 4, 4),
        ("shard_optimizer", BF16, 2 + 4 / 8, 2),
        ("no_shard", None, 4, 4),
        ("no_shard", BF16, 2 + 4, 2),
        (Strategy("hybrid_shard", shard_group_size=2), None, 4 / 2, 4 / 2),
        (Strategy("hybrid_shard", shard_group_size=1), BF16, 2 + 4, 2),
    ],
)
def test_bytes_of_an_element_between_steps(strategy, precision, parameters, gradients):
    plan = make_plan(even_units(960, 4), 8, strategy=strategy, precision=precision)
    shards = plan.strategy.shard_group_size or (1 if plan.strategy.name == "no_shard" else 8)
    assert plan.persistent.parameters == 960 * parameters
    assert plan.persistent.gradients == 960 * gradients
    assert plan.persistent.optimizer == 960 * 8 / shards


def test_the_optimizer_has_no_padding():
    units = [UnitSize("a", 5, np.float64), UnitSize("b", 2)]
    states = [
        make_plan(units, 4, rank=rank, optimizer_states=3).persistent.optimizer for rank in range(4)
    ]
    assert states == [3 * (2 * 8 + 4), 3 * (2 * 8 + 4), 3 * 8, 0]


def test_frozen_parameters_are_gathered_and_nothing_else():
    plan = make_plan([UnitSize("a", 8, frozen=4)], 2, precision=BF16)
    told = [(o.phase, o.kind, o.nbytes) for o in of_units(plan)]
    forth = [("forward", "all_gather", 16), ("forward", "all_gather", 8)]
    back = [("backward", "all_gather", 16), ("backward", "all_gather", 8)]
    assert told == [*forth, *back, ("backward", "reduce_scatter", 16)]
    assert plan.persistent.parameters == 4 * 4 + 4 * 2 + 2 * 2
    assert plan.persistent.gradients == 4 * 2
    assert plan.persistent.optimizer == 2 * 4 * 4
    stays = make_plan([UnitSize("a", 8, frozen=4)], 2, strategy="shard_grad_op")
    assert [o.nbytes for o in of_units(stays) if o.kind == "all_gather"] == [32]


def test_a_frozen_part_of_another_dtype():
    plan = make_plan([UnitSize("a", 0, frozen=((8, np.int8), (0, np.float16)))], 2)
    assert [(o.kind, o.nbytes) for o in of_units(plan)] == [("all_gather", 8)] * 2


def test_a_tied_unit_has_its_owner_gathered_and_its_gradients_wait():
    units = [UnitSize("a", 100), UnitSize("b", 10), UnitSize("c", 10, ties=(("a", "w", 100),))]
    plan = make_plan(units, 2, prefetch=0, overlap=False)
    gathers = [o.unit for o in of_units(plan) if o.kind == "all_gather"]
    assert gathers == ["a", "b", "c", "a", "c", "a", "b", "a"]
    # In the backward pass of a: its parameters, its gradients, and those from c.
    assert (plan.peak_live.parameters, plan.peak_live.gradients) == (400, 800)


def test_units_of_an_engine_and_their_sizes_have_the_same_plan():
    w, b = np.zeros((3, 5), np.float32), np.zeros(2, np.float16)
    units = [
        fc.Unit("a", {"w": w, "b": b}, frozen="b"),
        fc.Unit("b", {"w": fc.Spec((7,))}),
        fc.Unit("c", {"same": w, "own": fc.Tied("b", "w"), "x": fc.Spec(2)}),
    ]
    sizes = [
        UnitSize("a", 15, frozen=((2, np.float16),)),
        UnitSize("b", 7),
        UnitSize("c", 2, ties=(("a", "w", 15), ("b", "w", 7))),
    ]
    expected = make_plan(sizes, 2).as_dict()
    assert make_plan(units, 2).as_dict() == expected

    def main(backend):
        engine = fc.FSDP(units, backend)
        return make_plan(engine.units, 2).as_dict()

    assert fc.launch(main, world_size=1, transport="sim") == [expected]


# How long it takes.


def test_what_computing_hides():
    units = even_units(8, 2)
    timed = make_plan(units, 2, costs=ONE_SECOND_EACH, compute_seconds=[1.0, 1.0])
    # 0 gather, 1 compute while the next is fetched, 2 compute, 3 gather, 4 compute for 2 while the
    # next is fetched, 6 compute for 2 while it is reduced, 8 reduce, 9 agree, 10 the end.
    assert (timed.seconds, timed.step_seconds, timed.exposed_seconds) == (7, 10, 4)
    plain = make_plan(
        units, 2, costs=ONE_SECOND_EACH, compute_seconds=[1.0, 1.0], prefetch=0, overlap=False
    )
    assert (plain.seconds, plain.step_seconds, plain.exposed_seconds) == (7, 13, 7)
    assert plain.compute_seconds == 6


def test_seconds_are_those_of_the_cheapest_algorithm():
    plan = make_plan(even_units(4096, 1), 4, costs=Costs(1.0, 1.0, 0.0))
    # 16 KiB in all: 2 messages by doubling, and three quarters of the bytes.
    assert of_units(plan)[0].seconds == 2 + 16384 * 3 / 4


def test_times_are_there_where_they_are_known():
    units = even_units(8, 2)
    plan = make_plan(units, 2)
    assert (plan.seconds, plan.step_seconds, plan.exposed_seconds) == (None, None, None)
    assert make_plan(units, 2, costs=ONE_SECOND_EACH).step_seconds is None
    alone = make_plan(units, 2, compute_seconds=[1.0, 2.0], microbatches=2)
    assert (alone.compute_seconds, alone.step_seconds) == (18, None)


# What it looks like.


def test_json():
    plan = make_plan(
        [UnitSize("a", 8, frozen=4), UnitSize("b", 3)],
        4,
        strategy=Strategy("full_shard", 2),
        costs=ONE_SECOND_EACH,
        compute_seconds=[1.0, 1.0],
    )
    told = json.loads(json.dumps(plan.as_dict()))
    assert told["placement"] == {"shards": 4, "replicas": 1, "regather": 2, "keep": "use"}
    assert told["bytes_sent"] == sum(o["bytes_sent"] for o in told["operations"])
    assert told["peak_bytes"] == sum(told["persistent"].values()) + sum(told["peak_live"].values())
    assert told["units"][0] == {
        "name": "a",
        "size": 8,
        "dtype": "float32",
        "frozen": [[4, "float32"]],
        "ties": [],
    }


def test_tables():
    plan = make_plan(even_units(1000, 3), 4, costs=ONE_SECOND_EACH, compute_seconds=[1.0] * 3)
    summary = str(plan)
    for words in ("full_shard", "rank 0 of 4", "3 units", "1.00k parameters", "reduce_scatter"):
        assert words in summary
    assert "padding" in summary
    assert "waiting for communication" in summary
    table = plan.table().splitlines()
    assert len(table) == 1 + len(plan.operations)
    assert "layer 2" in table[3]
    assert "background" in table[3]
    assert len(make_plan([], 4).table().splitlines()) == 2


# What is wrong.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"rank": 4}, "rank 4 is outside of a world of 4 ranks"),
        ({"rank": -1}, "rank must be at least 0"),
        ({"strategy": "zero"}, "unknown strategy 'zero'"),
        ({"strategy": Strategy("hybrid_shard", shard_group_size=3)}, "does not divide the 4"),
        ({"sync": "never"}, "sync must be 'each' or 'last', got 'never'"),
        ({"microbatches": 0}, "microbatches must be at least 1"),
        ({"prefetch": -1}, "prefetch"),
        ({"prefetch_bytes": 0}, "max_bytes"),
        ({"optimizer_states": -1}, "optimizer_states must be at least 0"),
        ({"precision": Precision(np.float64)}, "wider"),
        (
            {"compression": fc.Compression(), "virtual_ranks": 4},
            "not go together with virtual_ranks",
        ),
        (
            {"compression": fc.Compression(), "precision": Precision("bfloat16")},
            "travels as bfloat16; plan without precision",
        ),
        ({"compute_seconds": [1.0]}, "one number for each of the 2 units, got 1"),
        ({"compute_seconds": [1.0, -1.0]}, "'layer 1' must be at least 0"),
        ({"units": 3}, "must be a list of Unit or UnitSize, got 3"),
        ({"units": "ab"}, "must be Unit or UnitSize, got str"),
        ({"units": [UnitSize("a", 1), UnitSize("a", 2)]}, "two units are named 'a'"),
        ({"units": [UnitSize("a", 1, ties=(("b", "w", 1),))]}, "tied to 'b', which is no unit"),
    ],
)
def test_what_is_wrong_is_said(arguments, words):
    given = {"units": even_units(8, 2), "world_size": 4, **arguments}
    with pytest.raises(ArgumentError, match=words):
        make_plan(given.pop("units"), given.pop("world_size"), **given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: UnitSize("", 1), "non-empty string"),
        (lambda: UnitSize("a", -1), "size of unit 'a' must be at least 0"),
        (lambda: UnitSize("a", 1.5), "size of unit 'a' must be an integer"),
        (lambda: UnitSize("a", 1, "words"), "dtype"),
        (lambda: UnitSize("a", 1, frozen=-1), "frozen size of unit 'a' must be at least 0"),
        (lambda: UnitSize("a", 1, ties=(("b", "w", -1),)), "size of a tie of unit 'a'"),
        (lambda: even_units(0, 1), "number of parameters must be at least 1"),
        (lambda: even_units(1.5, 1), "must be a whole number, got 1.5"),
        (lambda: even_units(8, 0), "number of layers must be at least 1"),
    ],
)
def test_wrong_sizes_are_said(make, words):
    with pytest.raises(ArgumentError, match=words):
        make()


def test_even_units_have_all_parameters():
    units = even_units(7e9 + 5, 32)
    assert sum(unit.size for unit in units) == 7_000_000_005
    assert {unit.size for unit in units} == {218_750_000, 218_750_001}
