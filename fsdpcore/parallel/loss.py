"""Cross entropy of logits whose vocabulary is cut over the ranks (Shoeybi et al., 2019)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_indices, as_int, as_real_array
from fsdpcore.core.errors import ArgumentError, MismatchError
from fsdpcore.parallel import exchange
from fsdpcore.parallel.arrays import row_sum, wide
from fsdpcore.parallel.splits import localised, outside, own_size


def cross_entropy(
    logits: Array, targets: Array, group: Backend, *, vocab: int
) -> tuple[Any, Array]:
    """Return the mean of -log softmax(logits)[target] over all targets, and its gradient.

    Two small all_reduces instead of one of the logits: the largest logit of every row, so that no
    exponential overflows, together with its target, which must be the same on all ranks (3 N
    floats), then the sum of exponentials together with the target's logit (2 N floats). Statistics
    are in float32 at least.

    Args:
        logits: (..., own part of the vocabulary), as a ``ColumnParallelLinear`` makes them; of any
            floating-point type, not changed.
        targets: (...) integers in [0, vocab), the same on all ranks: the ranks of a tensor group
            compute one batch together, so rows are split by the data-parallel group's rank.
        group: ranks that the vocabulary is cut over.
        vocab: the whole number of classes, cut as by ``split``.

    Returns:
        The loss in nats, a float64 scalar of the arrays' module, the same bits on all ranks, and
        the gradient of this rank's logits: a new array of their type, but float32 for 16 bits,
        where it is too small before it is multiplied by a scale of the loss.

    Raises:
        ArgumentError: logits that are no floating-point array, shapes that do not fit, or targets
            that are none of the classes. A rank looks at its own before anything is sent, so all
            ranks raise it where all make the same mistake; where one alone does, the others wait
            for it until it leaves.
        MismatchError: targets differ between ranks; on all of them alike.

    On a GPU, where a look at the targets would wait for it, the loss is NaN instead where they are
    none of the classes or differ.
    """
    what = "cross_entropy"
    exchange.as_group(group, what)
    logits = as_real_array(logits, f"{what}: logits", floating=True)
    vocab = as_int(vocab, f"{what}: vocab", minimum=1)
    own = own_size(vocab, group)
    targets = as_indices(targets, vocab, f"{what}: targets")
    if logits.shape != (*targets.shape, own) or not targets.size:
        raise ArgumentError(
            f"{what}: rank {group.rank} of {group.world_size} has logits (..., {own}) of a "
            f"vocabulary of {vocab}, and at least one target (...); got {logits.shape} and "
            f"{targets.shape}"
        )
    rows = wide(logits.reshape(targets.size, own))
    loss, gradient = _of_rows(rows, targets.reshape(-1), group, vocab)
    return loss, gradient.reshape(logits.shape)


def _of_rows(rows: Array, targets: Array, group: Backend, vocab: int) -> tuple[Any, Array]:
    """Do so for logits (N, own) and targets (N,)."""
    xp = array_module(rows)
    count, own = rows.shape
    largest, differ = _agreed(xp, rows, targets, group)
    probability = rows - largest[:, None]
    local, mine = localised(targets, vocab, group)
    place = (xp.arange(count), xp.where(mine, local, 0))

    sums: Array = xp.zeros((2, count), rows.dtype)
    total, wanted = sums
    if own:
        wanted[...] = xp.where(mine, probability[place], rows.dtype.type(0))
    lost = outside(targets, vocab)
    if lost is not None:
        wanted[lost | differ] = math.nan
    xp.exp(probability, out=probability)
    total[...] = row_sum(probability)[:, 0]
    total, wanted = exchange.all_reduce(sums, group, label="parallel loss, sums")

    loss = xp.mean(xp.log(total) - wanted, dtype=np.float64)
    probability /= total[:, None] * count
    if own:  # every row once, so that no index occurs twice
        probability[place] -= xp.where(mine, 1.0 / count, 0.0).astype(rows.dtype)
    return loss, probability


def _agreed(xp: Any, rows: Array, targets: Array, group: Backend) -> tuple[Array, Array]:
    """Return (N,): the largest logit of each row on any rank, and where the targets differ.

    The largest target and the largest negative one are those of all ranks exactly where these have
    the same; all ranks see that alike. Large ones are rounded, equal ones to equal values.
    """
    top: Array = xp.empty((3, len(rows)), rows.dtype)
    top[0] = rows.max(axis=-1) if rows.shape[1] else -math.inf
    top[1], top[2] = targets, -targets
    top = exchange.all_reduce(top, group, op="max", label="parallel loss, maximum")
    differ: Array = top[1] != -top[2]
    if on_host(differ) and differ.any():
        raise MismatchError(
            f"cross_entropy: the ranks of a tensor group compute one batch together, but "
            f"{np.count_nonzero(differ)} of {len(differ)} targets are not the same on all "
            f"{group.world_size} ranks of the group, first that of row {np.argmax(differ)}; split "
            "rows by the data-parallel group's rank, not by that of all ranks"
        )
    return top[0], differ
