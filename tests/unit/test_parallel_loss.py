"""Cross entropy of logits that are cut by classes is that of all logits."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.spmd import run

import fsdpcore as fc
from fsdpcore import parallel
from fsdpcore.parallel import cross_entropy, split

RANKS = [1, 2, 3, 4]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def whole(logits, targets):
    """Loss and gradient in float64, row by row from the definition."""
    rows = logits.astype(np.float64).reshape(-1, logits.shape[-1])
    gradient, losses = np.empty_like(rows), []
    for i, target in enumerate(targets.reshape(-1)):
        largest = rows[i].max()
        logsum = largest + math.log(math.fsum(math.exp(v - largest) for v in rows[i]))
        losses.append(logsum - rows[i, target])
        gradient[i] = np.exp(rows[i] - logsum)
        gradient[i, target] -= 1.0
    return math.fsum(losses) / len(losses), (gradient / len(losses)).reshape(logits.shape)


def sample(shape, vocab, dtype, scale=1.0):
    rng = np.random.default_rng(4)
    logits = (scale * rng.standard_normal((*shape, vocab))).astype(dtype)
    return logits, rng.integers(vocab, size=shape)


def _loss(backend, logits, targets):
    vocab = logits.shape[-1]
    start, stop = split(vocab, backend.world_size, backend.rank)
    mine = logits[..., start:stop].copy()
    kept = mine.copy()
    before = backend.order.issued
    loss, gradient = cross_entropy(mine, targets, backend, vocab=vocab)
    assert backend.order.issued - before == (2 if backend.world_size > 1 else 0)
    np.testing.assert_array_equal(mine, kept)
    assert loss.dtype == np.float64
    assert loss.shape == ()
    return loss, gradient


def on(ranks, logits, targets, transport="sim"):
    found = run(_loss, transport=transport, world_size=ranks, args=(logits, targets))
    assert len({loss.tobytes() for loss, _ in found}) == 1, "the loss differs between ranks"
    return found[0][0], np.concatenate([gradient for _, gradient in found], axis=-1)


def check(ranks, logits, targets, tolerance):
    loss, gradient = on(ranks, logits, targets)
    wanted_loss, wanted = whole(logits, targets)
    assert loss == pytest.approx(wanted_loss, rel=tolerance, abs=tolerance)
    assert gradient.dtype == (logits.dtype if logits.dtype.itemsize >= 4 else np.float32)
    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=tolerance / targets.size)


@pytest.mark.parametrize(
    ("shape", "vocab"), [((3, 5), 11), ((4,), 12), ((), 7), ((2, 2, 2), 3), ((6,), 2), ((3,), 1)]
)
@pytest.mark.parametrize("ranks", RANKS)
def test_it_is_that_of_all_logits(ranks, shape, vocab):
    check(ranks, *sample(shape, vocab, np.float64), 1e-14)
    check(ranks, *sample(shape, vocab, np.float32), 3e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(2, 5), st.floats(0.1, 300.0))
def test_it_is_that_of_all_logits_for_any_sizes(rows, vocab, ranks, scale):
    logits, targets = sample((rows,), vocab, np.float64, scale)
    check(ranks, logits, targets, 1e-13 * max(1.0, scale))


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16], ids=str)
def test_logits_of_sixteen_bits_are_computed_with_in_32(dtype):
    check(3, *sample((5, 4), 30, dtype), 3e-6)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_logits_do_not_overflow(offset):
    logits, targets = sample((4, 3), 10, np.float64, scale=50.0)
    check(3, logits + offset, targets, 1e-9)
    sure = np.where(np.arange(10) == targets[..., None], 1e4, -1e4).astype(np.float32)
    loss, gradient = on(3, sure, targets)
    assert loss == 0.0
    assert not gradient.any()


def test_one_logit_of_minus_infinity_is_a_class_that_does_not_happen():
    logits, targets = sample((4,), 6, np.float64)
    logits[:, 5] = -np.inf
    targets[:] = 1
    loss, gradient = on(3, logits, targets)
    without, wanted = whole(logits[:, :5], targets)
    assert loss == pytest.approx(without, rel=1e-14)
    np.testing.assert_allclose(gradient[:, :5], wanted, atol=1e-15)
    assert not gradient[:, 5].any()


def test_the_gradient_is_the_slope_of_the_loss():
    logits, targets = sample((3, 2), 5, np.float64)
    _, gradient = on(2, logits, targets)
    h = 1e-6
    for place in [(0, 0, 0), (1, 1, 3), (2, 0, 4), (*np.array([2, 1]), targets[2, 1])]:
        ends = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[place] += sign * h
            ends.append(on(2, moved, targets)[0])
        assert gradient[place] == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=1e-9)


def test_a_loss_that_is_no_number_is_none_on_any_rank():
    logits, targets = sample((4,), 6, np.float32)
    logits[1, 5] = np.nan
    assert np.isnan(on(3, logits, targets)[0])


def _wrong(backend):
    logits = np.zeros((3, 2 - backend.rank), np.float32)
    good = np.array([0, 1, 2])
    for given_logits, targets, vocab, message in (
        (logits, np.array([0, 3, 1]), 3, r"targets are in \[0, 3\), got 3"),
        (logits, np.array([0, -1, 1]), 3, r"targets are in \[0, 3\), got -1"),
        (logits, good.astype(float), 3, "array of integers, got float64"),
        (logits, good[:2], 3, "and at least one target"),
        (logits, good, 9, r"has logits \(\.\.\., \d\) of a vocabulary of 9"),
        (logits[:0], good[:0], 3, "at least one target"),
        (logits, good, 0, "vocab must be at least 1"),
    ):
        with pytest.raises(fc.ArgumentError, match=message):
            cross_entropy(given_logits, targets, backend, vocab=vocab)
    with pytest.raises(fc.ArgumentError, match="the group must be a Backend, such as"):
        cross_entropy(logits, good, None, vocab=3)


def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_is_sent():
    run(_wrong, transport="sim", world_size=2)


def _batches(backend, batches):
    """Each rank's own targets, with logits of zeros: what a rank is told."""
    targets = np.array(batches[backend.rank])
    own = parallel.splits.own_size(20, backend)
    with pytest.raises(fc.MismatchError) as caught:
        cross_entropy(np.zeros((*targets.shape, own), np.float32), targets, backend, vocab=20)
    backend.barrier()  # the ranks are together still
    return str(caught.value)


@pytest.mark.parametrize(
    ("batches", "count", "first"),
    [
        ([[0, 1, 19], [0, 2, 19]], 1, 1),  # claimed by one rank, though they differ
        ([[3], [12]], 1, 0),  # by both
        ([[12], [3]], 1, 0),  # by none
        ([[[1, 2], [3, 4]], [[1, 2], [4, 3]]], 2, 2),
        ([[5, 6], [5, 6], [5, 7], [5, 6]], 1, 1),
        ([[0, 19], [1, 18], [2, 17]], 2, 0),
    ],
)
def test_ranks_that_have_different_batches_are_told_so(batches, count, first):
    """One array_split of rows by the rank of all, instead of that of the data-parallel group."""
    ranks = len(batches)
    found = run(_batches, transport="sim", world_size=ranks, args=(batches,))
    assert len(set(found)) == 1
    size = np.size(batches[0])
    assert f"{count} of {size} targets are not the same on all {ranks} ranks" in found[0]
    assert f"that of row {first}; split rows by the data-parallel group's rank" in found[0]


def test_different_batches_are_noticed_between_processes():
    run(_batches, transport="zmq", world_size=2, args=([[3, 1], [12, 1]],))
