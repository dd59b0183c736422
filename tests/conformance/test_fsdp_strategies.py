"""The GPT under every strategy: the same bits as a loop that shards nothing, on every transport."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from numpy.testing import assert_array_equal
from support.fsdp_models import Setup, named, strategies, train_gpt
from support.fsdp_reference import train_unsharded
from support.spmd import run

import fsdpcore as fc

WORLD_SIZES = [2, 3, 4]
CLIP = 1.3  # of norms that fall from 5 to below it
SHORT, LONG = 3, 50
GRID = [(p, strategy) for p in WORLD_SIZES for strategy in strategies(p)]
# Groups of groups: what four ranks have no room for.
GRID += [
    (8, fc.Strategy("full_shard", 4)),
    (8, fc.Strategy("hybrid_shard", True, 4)),
    (8, fc.Strategy("hybrid_shard", 2, 4)),
    (8, fc.Strategy("hybrid_shard", False, 2)),
]
# One of each kind, over and among as many ranks as there are.
KINDS = {
    "full": lambda p: fc.Strategy("full_shard"),
    "gather once": lambda p: fc.Strategy("full_shard", False),
    "regather": lambda p: fc.Strategy("full_shard", p // 2 if p % 2 == 0 else 1),
    "grad op": lambda p: fc.Strategy("shard_grad_op"),
    "optimizer": lambda p: fc.Strategy("shard_optimizer"),
    "hybrid": lambda p: fc.Strategy("hybrid_shard", shard_group_size=p // 2 if p % 2 == 0 else 1),
    "none": lambda p: fc.Strategy("no_shard"),
}
# What the ranks do besides must not matter.
WAYS = [
    Setup(clip=CLIP, prefetch=1, window=True),
    Setup(prefetch=fc.Prefetch(3, reductions=1), window=False),
    Setup(clip=CLIP, prefetch=0, window=False, algorithm="direct"),
    Setup(prefetch=fc.Prefetch(2, max_bytes=1, reductions=0), window=False, algorithm="doubling"),
    Setup(clip=CLIP, prefetch=fc.Prefetch(1, reductions=1), window=True, algorithm="star"),
]


@functools.cache
def _expected(world_size, steps, clip, parts, deferred):
    return train_unsharded(world_size, steps, Setup(clip=clip, parts=parts, deferred=deferred))


def expected(world_size, steps, setup):
    return _expected(world_size, steps, setup.clip, setup.parts, setup.deferred)


def assert_same_bits(results, reference):
    losses, norms, params = reference
    for ours in results:
        assert [loss.hex() for loss in ours[0]] == [loss.hex() for loss in losses]
        assert ours[1] == norms
        assert set(ours[2]) == set(params)
        for unit, arrays in params.items():
            for name, array in arrays.items():
                assert_array_equal(ours[2][unit][name], array, f"{unit}.{name}", strict=True)


def sim(world_size, steps, setup):
    return fc.launch(
        train_gpt, world_size=world_size, transport="sim", args=(steps, setup), timeout=60
    )


@pytest.mark.parametrize(("world_size", "kind"), [(3, "full"), (4, "hybrid"), (2, "optimizer")])
def test_many_steps_are_those_of_an_unsharded_loop(world_size, kind):
    """All of them take fifty steps in a campaign."""
    setup = Setup(KINDS[kind](world_size), clip=CLIP, window=False)
    steps = 12
    reference = expected(world_size, steps, setup)
    losses, norms, _ = reference
    assert losses[-1] < losses[0] - 0.5  # it learns, so that the comparison means something
    assert min(norms) < CLIP < max(norms)  # clipping is on and off
    assert_same_bits(sim(world_size, steps, setup), reference)


@pytest.mark.parametrize(
    ("number", "world_size", "strategy"),
    [(n, *case) for n, case in enumerate(GRID)],
    ids=[f"{p}-{named(strategy)}" for p, strategy in GRID],
)
def test_every_strategy_gives_the_bits_of_an_unsharded_loop(number, world_size, strategy):
    setup = dataclasses.replace(WAYS[number % 5], strategy=strategy)
    assert_same_bits(sim(world_size, SHORT, setup), expected(world_size, SHORT, setup))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_microbatches_give_the_same_bits_in_every_strategy(world_size, deferred):
    """Reduced one by one, or added up first: each has its own order, and all strategies keep it."""
    for number, kind in enumerate(KINDS.values()):
        way = dataclasses.replace(WAYS[number % 5], parts=2, deferred=deferred)
        setup = dataclasses.replace(way, strategy=kind(world_size))
        assert_same_bits(sim(world_size, 2, setup), expected(world_size, 2, setup))


def train_all(backend, setups, steps):
    return [train_gpt(backend, steps, setup) for setup in setups]


@pytest.mark.parametrize(
    ("transport", "world_size", "options"),
    [
        ("sim", 3, {"hosts": 2}),
        ("zmq", 4, {}),
        ("zmq", 3, {"shm": "off"}),
        ("mpi", 3, {}),
    ],
)
def test_transports_give_the_same_bits(transport, world_size, options):
    setups = [
        Setup(kind(world_size), clip=CLIP, window=window)
        for kind, window in zip(KINDS.values(), itertools.cycle([True, False]), strict=False)
    ]
    results = run(
        train_all,
        transport=transport,
        world_size=world_size,
        args=(setups, 2),
        deterministic=True,
        **options,
    )
    for ours, setup in zip(zip(*results, strict=True), setups, strict=True):
        assert_same_bits(ours, expected(world_size, 2, setup))


@pytest.mark.parametrize("window", [True, False])
def test_with_and_without_a_window_is_what_was_compared(window):
    for kind in KINDS.values():
        found = sim(2, 1, Setup(kind(2), window=window))
        assert [ours[3] for ours in found] == [window] * 2


@pytest.mark.campaign
@pytest.mark.parametrize("transport", ["sim", "zmq", "mpi"])
@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 8])
def test_fifty_steps_everywhere(transport, world_size):
    """Every kind of strategy, for as many steps, on every transport."""
    setups = [Setup(kind(world_size), clip=CLIP) for kind in KINDS.values()]
    results = run(
        train_all,
        transport=transport,
        world_size=world_size,
        args=(setups, LONG),
        timeout=600.0,
        deterministic=True,
    )
    for ours, setup in zip(zip(*results, strict=True), setups, strict=True):
        assert_same_bits(ours, expected(world_size, LONG, setup))


QUANTISED = [
    Setup(
        KINDS[kind](2), clip=CLIP, compression=fc.Compression("int8", "int4", error_feedback=True)
    )
    for kind in ("full", "grad op", "none")
]


@pytest.mark.parametrize("transport", ["zmq", pytest.param("mpi", marks=pytest.mark.campaign)])
def test_what_is_quantised_has_the_same_bits_on_every_transport(transport):
    results = run(train_all, transport=transport, world_size=2, args=(QUANTISED, SHORT))
    for number, setup in enumerate(QUANTISED):
        reference = sim(2, SHORT, setup)[0]
        assert_same_bits([result[number] for result in results], reference[:3])
