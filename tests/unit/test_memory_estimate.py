"""``memory_estimate``: the ZeRO paper's numbers, the table of formulas, and what is offloaded."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.plan.estimate import memory_estimate
from fsdpcore.fsdp.plan.make_plan import make_plan
from fsdpcore.fsdp.plan.sizes import UnitSize, even_units
from fsdpcore.fsdp.sharding.strategy import Strategy
from fsdpcore.fsdp.units.precision import Precision

BF16 = Precision(ml_dtypes.bfloat16)
GATHER_ONCE = Strategy("full_shard", reshard_after_forward=False)
HYBRID = Strategy("hybrid_shard", shard_group_size=8)
ADDED_UP = {"sync": "last", "microbatches": 4}  # gradients are replicated, as in ZeRO-1


@pytest.mark.parametrize(
    ("strategy", "options", "gigabytes"),
    [
        ("no_shard", {}, 120),
        ("shard_optimizer", {}, 31.4),
        ("shard_grad_op", ADDED_UP, 31.4),
        ("shard_grad_op", {}, 16.6),
        ("full_shard", {}, 1.9),
    ],
)
def test_the_numbers_of_the_zero_paper(strategy, options, gigabytes):
    estimate = memory_estimate(7.5e9, 64, strategy=strategy, precision=BF16, **options)
    assert round(estimate.states / 1e9, 1) == gigabytes


@pytest.mark.parametrize(
    ("strategy", "options", "mixed", "full"),
    [
        ("no_shard", {}, (16, 0), (16, 0)),
        ("shard_optimizer", {}, (4, 12), (8, 8)),
        ("shard_optimizer", ADDED_UP, (4, 12), (8, 8)),
        ("shard_grad_op", ADDED_UP, (4, 12), (8, 8)),
        ("shard_grad_op", {}, (2, 14), (4, 12)),
        (GATHER_ONCE, {}, (0, 16), (0, 16)),
        ("full_shard", {}, (0, 16), (0, 16)),
        (Strategy("full_shard", 8), {}, (0, 16), (0, 16)),
    ],
)
def test_all_rows_of_the_table_of_formulas(strategy, options, mixed, full):
    size, ranks = 64 * 1000, 64
    for precision, (whole, shared) in ((BF16, mixed), (None, full)):
        estimate = memory_estimate(
            size, ranks, layers=10, strategy=strategy, precision=precision, **options
        )
        assert estimate.states == whole * size + shared * size // ranks


@pytest.mark.parametrize("precision", [BF16, None])
def test_hybrid_shard_divides_by_the_group(precision):
    assert memory_estimate(64000, 64, strategy=HYBRID, precision=precision).states == 16 * 8000


def test_live_units_and_communication_buffers():
    estimate = memory_estimate(64000, 64, layers=10, prefetch=2)
    assert estimate.live_units == 3 * 6400 * 4
    assert estimate.communication == 2 * 6400 * 4
    assert estimate.total == 16 * 1000 + 5 * 6400 * 4


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("options", [{}, ADDED_UP, {"overlap": False, "prefetch": 0}])
@pytest.mark.parametrize(
    "strategy", ["full_shard", GATHER_ONCE, "shard_grad_op", "shard_optimizer", "no_shard"]
)
def test_the_total_is_the_peak_of_the_plan(strategy, options, windowed):
    units = [UnitSize("a", 100, frozen=7), UnitSize("b", 31), UnitSize("c", 2)]
    given = {"strategy": strategy, "precision": BF16, "windowed": windowed, "rank": 2, **options}
    estimate, plan = memory_estimate(units, 4, **given), make_plan(units, 4, **given)
    assert estimate.total == plan.peak_bytes
    assert estimate.parameters == plan.persistent.parameters
    assert estimate.communication >= 0


def test_saving_is_against_no_shard():
    estimate = memory_estimate(64000, 64, layers=10)
    plain = memory_estimate(64000, 64, layers=10, strategy="no_shard")
    assert plain.saving == 0
    assert plain.total == estimate.unsharded == 16 * 64000 + 2 * 6400 * 4
    assert estimate.saving == plain.total - estimate.total > 0


@pytest.mark.parametrize("precision", [BF16, None])
@pytest.mark.parametrize("strategy", ["full_shard", GATHER_ONCE, HYBRID])
def test_offloading_moves_shards_and_leaves_what_is_in_use(strategy, precision):
    here, some, all_of_it = (
        memory_estimate(64000, 64, layers=10, strategy=strategy, precision=precision, offload=what)
        for what in ("none", "parameters", "all")
    )
    assert here.host.total == 0
    assert (some.parameters, some.host.parameters) == (0, here.parameters)
    assert (some.gradients, some.optimizer) == (here.gradients, here.optimizer)
    assert (some.host.gradients, some.host.optimizer) == (0, 0)
    assert all_of_it.states == 0
    assert all_of_it.host.total == here.states
    for moved in (some, all_of_it):
        assert (moved.live_units, moved.communication) == (here.live_units, here.communication)


@pytest.mark.parametrize(("precision", "item"), [(BF16, 2), (None, 4)])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "shard_optimizer", "no_shard"])
def test_parameters_that_all_ranks_keep_are_offloaded_too(strategy, precision, item):
    here, moved = (
        memory_estimate(64000, 64, layers=10, strategy=strategy, precision=precision, **options)
        for options in ({}, {"offload": "all", "prefetch": 2})
    )
    assert here.live_units == moved.states == 0
    assert moved.host.total == here.states
    assert moved.live_units == 3 * 6400 * item
    assert moved.communication == here.communication


def test_one_rank_that_offloads_has_copies_of_the_units_in_use():
    assert memory_estimate(1000, 1, layers=10).live_units == 0
    estimate = memory_estimate(1000, 1, layers=10, offload="all")
    assert estimate.live_units == 2 * 100 * 4
    assert estimate.host.total == 16 * 1000


def test_a_number_of_parameters_is_as_many_units():
    assert memory_estimate(params=7e9, layers=32, world_size=64) == memory_estimate(
        even_units(7e9, 32), 64
    )
    assert memory_estimate(100, 4) == memory_estimate([UnitSize("layer 0", 100)], 4)


def test_float64():
    units = [UnitSize("a", 640, np.float64)]
    assert memory_estimate(units, 64).states == 32 * 10


def test_what_it_looks_like():
    estimate = memory_estimate(6.4e9, 64, layers=32, offload="all")
    text = str(estimate)
    for words in ("full_shard, 64 ranks", "offloaded", "800 MB", "saving against no_shard"):
        assert words in text
    assert "offloaded" not in str(memory_estimate(7e9, 64, layers=32))
    told = json.loads(json.dumps(estimate.as_dict()))
    assert told["host"] == {
        "parameters": 400000000,
        "gradients": 400000000,
        "optimizer": 800000000,
    }
    assert told["total"] == estimate.total


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"params": 0}, "number of parameters must be at least 1"),
        ({"params": 2.5}, "whole number"),
        ({"params": None}, "number of parameters must be a real number, got None"),
        ({"params": [UnitSize("a", 1)], "layers": 2}, "layers belongs to a number of parameters"),
        ({"offload": "disk"}, "offload must be one of 'none', 'parameters', 'all', got 'disk'"),
        ({"offload": "all", "windowed": True}, "leave out either windowed or offload"),
        ({"strategy": "hybrid_shard"}, "needs shard_group_size"),
        ({"world_size": 0}, "world_size must be at least 1"),
    ],
)
def test_what_is_wrong_is_said(arguments, words):
    given = {"params": 100, "world_size": 4, **arguments}
    with pytest.raises(ArgumentError, match=words):
        memory_estimate(**given)
