"""Quantised blocks and their exchange: what comes back, how much travels, what is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from numpy.typing import NDArray
from support.quantised import KINDS, half_steps, round_trip, travelled, tree_sum, values_of
from support.spmd import run

import fsdpcore as fc
from fsdpcore.compress import quantiser
from fsdpcore.compress.exchange import Exchange
from fsdpcore.compress.packing import Packing
from fsdpcore.compress.quantiser import Format, Quantiser
from fsdpcore.core import compiling

BLOCK = 8


def there_and_back(values: NDArray[np.float32], form: Format, **options: Any) -> Any:
    quantiser = Quantiser(form, **options)
    packed = np.full(form.nbytes(values.size), 0xAB, np.uint8)
    back = np.empty_like(values)
    quantiser.encode(values, packed)
    quantiser.decode(packed, back)
    return packed, back


@settings(max_examples=60)
@given(
    st.sampled_from([8, 4]),
    st.sampled_from([8, 64]),
    st.integers(0, 700),
    st.sampled_from(KINDS),
    st.integers(0, 99),
)
@example(8, 64, 64 * 1100 + 5, "normal", 0)  # more than a tile
def test_values_come_back_within_half_a_step(
    bits: int, block: int, size: int, kind: str, seed: int
) -> None:
    values = values_of(kind, size, seed)
    packed, back = there_and_back(values, Format(bits, block, False), compiled=False)
    assert packed.nbytes == -(-size // block) * (4 + block * bits // 8)
    assert_array_equal(back, round_trip(values, bits, block))
    error = np.abs(back.astype(np.float64) - values)
    assert np.all(error <= half_steps(values, bits, block) * (1 + 1e-4))


@given(st.sampled_from([8, 4]), st.integers(1, 700), st.sampled_from(KINDS[:3]), st.integers(0, 99))
def test_a_rotated_block_comes_back_within_half_a_step_of_its_rotation(
    bits: int, size: int, kind: str, seed: int
) -> None:
    values = values_of(kind, size, seed)
    form = Format(bits, 64, True)
    packed, back = there_and_back(values, form, compiled=False)
    assert packed.nbytes == form.nbytes(size)
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = np.zeros((form.blocks(size), 64))
    blocks.reshape(-1)[:size] = values
    rotated = blocks * form.signs @ matrix
    steps = half_steps(rotated.astype(np.float32).reshape(-1), bits, 64).reshape(-1, 64)
    # No coefficient is off by more than half a step, and lengths stay: so no block is either.
    limit = np.sqrt((steps**2).sum(1) / 64) * (1 + 1e-4) + 64 * np.finfo(np.float32).tiny
    error = np.zeros_like(blocks)
    error.reshape(-1)[:size] = back - values
    assert np.all(np.sqrt((error**2).sum(1)) <= limit)


def test_rotation_makes_an_outlier_cost_less() -> None:
    values = values_of("normal", 64 * 200, 3)
    values[::64] *= 50
    errors = [
        np.linalg.norm(there_and_back(values, Format(4, 64, rotation), compiled=False)[1] - values)
        for rotation in (False, True)
    ]
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("form", [Format(b, 64, r) for b in (8, 4) for r in (False, True)], ids=str)
def test_inf_and_nan_are_found_in_their_block_and_nowhere_else(form: Format) -> None:
    values = values_of("normal", 300, 1)
    values[70], values[299] = -np.inf, np.nan
    with np.errstate(all="raise"):
        _, back = there_and_back(values, form, compiled=False)
    lost = ~np.isfinite(back)
    assert_array_equal(np.flatnonzero(lost), [*range(64, 128), *range(256, 300)])


@pytest.mark.skipif(not compiling.available(), reason="numba is not installed")
@pytest.mark.parametrize(
    "form", [Format(b, n, r) for n in (8, 64) for b in (8, 4) for r in (False, True)], ids=str
)
def test_numba_makes_the_same_bits(form: Format) -> None:
    parts = [values_of(kind, 999, 5) for kind in KINDS]
    values = np.concatenate([*parts, np.float32([np.nan, np.inf, -np.inf])])
    for size in (values.size, 64, 1, 0):
        found = [there_and_back(values[:size], form, compiled=on) for on in (False, True)]
        for ours, theirs in zip(*found, strict=True):
            assert ours.tobytes() == theirs.tobytes()


# The exchange.


def _program(backend: fc.Backend, size: int, exact: list[tuple[int, int]], bits: int) -> None:
    ranks, rank = backend.world_size, backend.rank
    form = Format(bits, BLOCK, False)
    shard = -(-size // ranks)
    bounds = [shard * r for r in range(ranks + 1)]
    packing = Packing.of(bounds, size, exact, form)
    exchange = Exchange(backend, form)
    flats = [values_of("normal", bounds[-1], 10 + r) for r in range(ranks)]
    for flat in flats:
        flat[size:] = 0
    coded = np.arange(bounds[-1]) < size
    for start, stop in exact:
        coded[start:stop] = False
    came = [travelled(each, bounds, coded, bits, BLOCK) for each in flats]
    total = tree_sum(came)

    flat = np.full(bounds[-1], np.nan, np.float32)
    whole = flats[0]
    exchange.all_gather(whole[bounds[rank] : bounds[rank + 1]].copy(), packing, flat, "gather")
    assert_array_equal(flat, came[0])

    mine = flats[rank].copy()
    here = slice(bounds[rank], bounds[rank + 1])
    error = np.zeros_like(mine)
    exchange.reduce_scatter(mine, packing, mine[here], error, "scatter")
    assert_array_equal(mine[here], total[here])
    assert_array_equal(error, flats[rank] - came[rank])

    out = flats[rank].copy()
    left_out = np.zeros_like(out), np.zeros_like(out[here])
    exchange.all_reduce(out, packing, out, left_out, "reduce")
    assert_array_equal(out, travelled(total, bounds, coded, bits, BLOCK))
    assert_array_equal(left_out[0], flats[rank] - came[rank])
    assert_array_equal(left_out[1], (total - out)[here])

    base = values_of("normal", bounds[-1], 9)
    base[size:] = 0
    flat = base.copy()
    exchange.all_gather(whole[here].copy(), packing, flat, "differences", differences=True)
    changed = base + travelled(whole - base, bounds, coded, bits, BLOCK)
    assert_array_equal(flat, np.where(coded, changed, whole))


@settings(max_examples=15)
@given(
    st.integers(1, 5),
    st.integers(0, 90),
    st.lists(st.integers(0, 90), max_size=6),
    st.sampled_from([8, 4]),
    st.sampled_from([16, quantiser.TILE]),
)
def test_an_exchange_quantises_once_in_each_hop(
    ranks: int, size: int, borders: list[int], bits: int, tile: int
) -> None:
    cuts = sorted(min(border, size) for border in borders)
    exact = list(zip(cuts[::2], cuts[1::2], strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantiser, "TILE", tile)
        run(_program, transport="sim", world_size=ranks, args=(size, exact, bits))
