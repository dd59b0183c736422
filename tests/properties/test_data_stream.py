"""Streams of data: every row once in an epoch, whatever happens to ranks, sizes and positions."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsdpcore as fc
from fsdpcore.data import Stream
from fsdpcore.data.permutation import permuted

FIRST = [0, 9, 8, 1, 6, 7, 3, 4]
LARGE = [150091898420, 125672763936, 544147813463, 586022980587]


def rows_of(batch: Any) -> list[int]:
    return [int(row) for leaf in range(len(batch)) for row in batch.indices(leaf)]


@given(
    rows=st.integers(1, 80),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 7)), min_size=1, max_size=6),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
)
def test_every_row_is_used_once_though_batch_size_and_leaves_change(
    rows: int, sizes: list[tuple[int, int]], seed: int, shuffle: bool
) -> None:
    """A job that is stopped after each batch, and goes on with another size."""
    state: str | None = None
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for turn in range(10_000):
        size, leaves = sizes[turn % len(sizes)]
        stream = Stream(range(rows), size, leaves=leaves, seed=seed, shuffle=shuffle)
        if state is not None:
            stream.load_state_dict(json.loads(state))
        batch = next(stream)
        if batch.epoch > 1:
            break
        counts = [len(batch.indices(leaf)) for leaf in range(leaves)]
        assert sum(counts) == batch.size <= size
        assert max(counts) - min(counts) <= 1
        epochs[batch.epoch] += rows_of(batch)
        state = json.dumps(stream.state_dict())
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(rows))
    if not shuffle:
        assert epochs[0] == list(range(rows))


@given(rows=st.integers(1, 50), size=st.integers(1, 60), seed=st.integers(0, 3))
def test_a_stream_ends_after_its_epochs_and_drops_what_is_left(
    rows: int, size: int, seed: int
) -> None:
    if size > rows:
        with pytest.raises(fc.ArgumentError, match="smaller batch_size"):
            Stream(range(rows), size, drop_last=True)
        return
    stream = Stream(range(rows), size, seed=seed, drop_last=True, epochs=2)
    batches = list(stream)
    assert [batch.size for batch in batches] == [size] * (2 * (rows // size))
    assert stream.batches == rows // size
    assert [batch.last for batch in batches].count(True) == 2
    assert len(set(rows_of(batches[0]))) == size


def test_the_order_is_that_of_this_library_for_ever() -> None:
    """A job that goes on with a later version must not see rows twice."""
    assert permuted(np.arange(8), 10, (7, 0)).tolist() == FIRST
    assert permuted(np.arange(4), 10**12, (2**64 - 1, 5)).tolist() == LARGE


def test_orders_are_spread_evenly() -> None:
    """Each row at each place equally often, over seeds and over epochs (chi-square)."""
    for keys in ([(seed, 0) for seed in range(600)], [(0, epoch) for epoch in range(600)]):
        counts = np.zeros((6, 6))
        places = np.arange(6)
        for key in keys:
            counts[places, permuted(places, 6, key)] += 1
        expected = len(keys) / 6
        # 25 degrees of freedom: 60 is passed by chance once in 10,000 cases.
        assert ((counts - expected) ** 2 / expected).sum() < 60
    # Neighbours do not stay neighbours.
    order = permuted(np.arange(10_000), 10_000, (1, 1))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.04


def test_rows_are_read_from_whatever_has_rows(tmp_path: Path) -> None:
    values = np.arange(40.0).reshape(20, 2)
    mapped = np.memmap(tmp_path / "rows", np.float64, "w+", shape=values.shape)
    mapped[:] = values
    source = {"mapped": mapped, "pair": (values, [str(row) for row in range(20)])}
    batch = next(Stream(source, 6, leaves=4, seed=3))
    for leaf in range(4):
        chosen = batch.indices(leaf)
        found = batch[leaf]
        np.testing.assert_array_equal(found["mapped"], values[chosen])
        np.testing.assert_array_equal(found["pair"][0], values[chosen])
        assert found["pair"][1] == [str(row) for row in chosen]
    first = next(Stream(values, 6, shuffle=False))[0]
    first[:] = -1  # the caller's own
    assert values.min() == 0
    with pytest.raises(IndexError, match="leaves 0 to 3"):
        batch[4]
    with pytest.raises(IndexError):
        batch[-1]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ((np.zeros(3), np.zeros(4)), "equally many rows, got 0: 3, 1: 4"),
        ({}, "no parts"),
        (iter([1]), "len"),
        ("text", "len"),
        (np.zeros(()), "len"),
        ([], "at least 1"),
    ],
)
def test_what_has_no_rows_is_refused(source: Any, words: str) -> None:
    with pytest.raises(fc.ArgumentError, match=words):
        Stream(source, 1)


def test_a_state_of_another_dataset_is_refused_and_changes_nothing() -> None:
    stream = Stream(range(10), 3, seed=1)
    next(stream)
    before = stream.state_dict()
    for change in ({"rows": 11}, {"used": 10}, {"epoch": -1}, {"seed": 1.5}):
        with pytest.raises(fc.ArgumentError):
            stream.load_state_dict({**before, **change})
    with pytest.raises(fc.ArgumentError, match="no seed"):
        stream.load_state_dict({name: before[name] for name in before if name != "seed"})
    assert stream.state_dict() == before


def test_ranks_share_each_batch_among_them() -> None:
    def main(backend: fc.Backend) -> list[Any]:
        stream = Stream(np.arange(50), 8, leaves=backend.world_size, seed=2, epochs=1)
        return [batch[backend.rank] for batch in islice(stream, 20)]

    by_rank = fc.launch(main, world_size=3)
    together = [np.concatenate(parts) for parts in zip(*by_rank, strict=True)]
    assert sorted(np.concatenate(together)) == list(range(50))
    alone = Stream(np.arange(50), 8, seed=2, epochs=1)
    for batch, rows in zip(alone, together, strict=True):
        np.testing.assert_array_equal(batch[0], rows)
