"""Memory that state and whole parameters take: complaint 4 of those about other engines."""

from __future__ import annotations

import tracemalloc

import pytest

import fsdpcore as fc

MIB = 1 << 20
RANKS, COUNT = 4, 6


def big_engine(backend, **options):
    """Units of 1 MiB of parameters in two arrays."""
    half = {"w": fc.Spec((256, 512)), "v": fc.Spec(MIB // 8)}
    units = [fc.Unit(f"u{n}", half) for n in range(COUNT)]
    return fc.FSDP(units, backend, optimizer=fc.optim.Adam(), **options)


def peak_of(backend, call):
    """Most that all ranks together have allocated during a call, and its result."""
    fc.barrier(backend)
    before = 0
    if backend.rank == 0:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
    fc.barrier(backend)
    result = call()
    fc.barrier(backend)
    peak = tracemalloc.get_traced_memory()[1] - before
    fc.barrier(backend)
    return peak, result


def measured(backend, options):
    engine = big_engine(backend, **options)
    # What groups make for their messages.
    engine.load_state_dict(engine.state_dict(full=True, to=0), src=0)
    peaks = {}
    peaks["to 0"], state = peak_of(backend, lambda: engine.state_dict(full=True, to=0))
    peaks["from 0"], _ = peak_of(backend, lambda: engine.load_state_dict(state, src=0))
    peaks["to all"], state = peak_of(backend, lambda: engine.state_dict(full=True))
    state = None
    peaks["sharded"], _ = peak_of(backend, engine.state_dict)
    return peaks


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": False},
        {"strategy": "no_shard"},
        {"strategy": fc.Strategy("hybrid_shard", shard_group_size=2)},
    ],
    ids=["window", "full_shard", "no_shard", "hybrid_shard"],
)
def test_memory_on_rank_0_is_the_result_and_one_unit(options):
    """All ranks are threads here, so that what is counted is the sum of all of them."""
    tracemalloc.start()
    try:
        peaks = fc.launch(measured, world_size=RANKS, transport="sim", args=(options,))[0]
    finally:
        tracemalloc.stop()
    whole, unit, small = 3 * COUNT * MIB, MIB, MIB // 2
    assert whole <= peaks["to 0"] <= whole + unit + small
    assert peaks["from 0"] <= RANKS * unit
    assert RANKS * whole <= peaks["to all"] <= RANKS * (whole + unit)
    assert peaks["sharded"] <= small


def test_full_params_in_a_window_takes_no_memory_and_leaves_none_elsewhere():
    def body(backend, window):
        engine = big_engine(backend, window=window)

        def look():
            with engine.full_params() as params:
                return sum(array.nbytes for array in params.values())

        for _ in range(2):
            peak, seen = peak_of(backend, look)
        assert seen == COUNT * MIB
        return engine.windowed, peak, engine.held().spare

    for window in (True, False):
        tracemalloc.start()
        try:
            windowed, peak, spare = fc.launch(
                body, world_size=RANKS, transport="sim", args=(window,)
            )[0]
        finally:
            tracemalloc.stop()
        assert windowed is window
        assert spare == 0
        whole = RANKS * COUNT * MIB
        assert peak < MIB if window else whole <= peak <= whole + MIB
