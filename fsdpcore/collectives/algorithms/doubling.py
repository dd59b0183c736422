"""Recursive doubling along the canonical tree: fewest steps, for small arrays.

At height h, two neighbouring blocks of up to 2**h ranks swap what they have; after ceil(lg p)
steps every rank has everything. Where p is no power of two the right block can be smaller; its
ranks then send to several ranks of the left one.

With p ranks and n bytes (per rank for the reductions, in total for all_gather), for p = 2**k:

==============  ========================================
all_reduce      lg p (alpha + n beta + n gamma)
reduce_scatter  the same: each rank reduces everything and keeps its part
all_gather      lg p alpha + ((p - 1) / p) n beta
scan, exscan    lg p (alpha + n beta), and up to (2 lg p - 1) n gamma
==============  ========================================

For any p, let w be the largest power of two below p, and r = p - w: the ranks on the left and on
the right at the top of the tree. Rank i sends m(i, p) messages and receives d(i, p):

    m(i, p) = m(i, w) + 1 for i < r, m(i, w) for r <= i < w
    m(w + j, p) = m(j, r) + ceil((w - j) / r) for j < r
    d(i, p) = d(i, w) + 1 for i < w
    d(w + j, p) = d(j, r) + 1 for j < r
    m(0, 1) = d(0, 1) = 0

For the reductions, all messages have n bytes, and rank i reduces d(i, p) n. For all_gather, those
of the top merge have (w / p) n bytes from the left and (r / p) n from the right, and so on further
down; every rank receives ((p - 1) / p) n. In a scan, messages are those of the reductions; a rank
combines what comes from its left once more, b(i) times for the b(i) bits that are set in i, and no
total in the last step: d(i, p) - 1 + b(i) times n, and one less in exscan for i > 0. Reductions
are canonical; for float16 and bfloat16, partial sums travel as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.core.buffers import Array
from fsdpcore.core.reductions import Reduction


class DoublingStep(NamedTuple):
    """One height of the tree, for one rank.

    ``mine`` and ``theirs`` are the blocks (first rank, end) that swap; ``source`` is the rank to
    receive from, ``targets`` those to send to.
    """

    mine: tuple[int, int]
    theirs: tuple[int, int]
    source: int
    targets: list[int]


def steps(rank: int, count: int) -> Iterator[DoublingStep]:
    """The steps of ``rank`` among ``count`` ranks, from the leaves of the tree to its top."""
    width = 1
    while width < count:
        low = rank // (2 * width) * 2 * width
        middle, high = low + width, min(low + 2 * width, count)
        if middle < high:
            right = high - middle
            if rank < middle:
                place = rank - low
                targets = [middle + place] if place < right else []
                yield DoublingStep((low, middle), (middle, high), middle + place % right, targets)
            else:
                place = rank - middle
                targets = list(range(low + place, middle, right))
                yield DoublingStep((middle, high), (low, middle), low + place, targets)
        width *= 2


def all_reduce(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of all ranks into ``out`` (may be ``source``) of all ranks."""
    if reduction.accumulator == source.dtype:
        total, received = out, context.scratch(source.size, source.dtype)
        np.copyto(total, source)
    else:
        total, received = context.scratch(2 * source.size, reduction.accumulator).reshape(2, -1)
        reduction.load(source, total)
    for step in steps(context.rank, context.size):
        context.irecv(received, step.source)
        for target in step.targets:
            context.isend(total, target)
        context.wait_all()
        left, right = (total, received) if step.mine < step.theirs else (received, total)
        reduction.combine(left, right, total)
    reduction.store(total, out, context.size)


def reduce_scatter(
    context: CollectiveContext,
    source: Array,
    own: Array,
    bounds: Sequence[int],
    reduction: Reduction,
) -> None:
    """Reduce ``source``, of which each rank gets ``[bounds[rank]:bounds[rank + 1]]`` in ``own``.

    ``own`` may be that part of ``source``.
    """
    everything = np.empty_like(source)
    all_reduce(context, source, everything, reduction)
    np.copyto(own, everything[bounds[context.rank] : bounds[context.rank + 1]])


def scan(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of the ranks up to this one into ``out`` (may be ``source``)."""
    totals = context.scratch(3 * source.size, reduction.accumulator).reshape(3, -1)
    reduction.load(source, totals[2])
    _combine_before(context, source, totals, reduction, begun=True)
    reduction.store(totals[2], out, context.rank + 1)


def exscan(context: CollectiveContext, source: Array, out: Array, reduction: Reduction) -> None:
    """Reduce ``source`` of the ranks before this one into ``out`` (may be ``source``)."""
    totals = context.scratch(3 * source.size, reduction.accumulator).reshape(3, -1)
    _combine_before(context, source, totals, reduction, begun=False)
    if context.rank:
        reduction.store(totals[2], out, context.rank)
    else:
        out.fill(reduction.identity)


def _combine_before(
    context: CollectiveContext, source: Array, totals: Array, reduction: Reduction, *, begun: bool
) -> None:
    """Put what the blocks on the left have in front of ``totals[2]``; that has a value if begun.

    Such a block is as large as the largest power of two below the number of ranks that it and what
    is behind it are, or as that number's half: so the result is the canonical tree of those ranks.
    """
    total, received, before = totals
    reduction.load(source, total)
    every = list(steps(context.rank, context.size))
    for step in every:
        context.irecv(received, step.source)
        for target in step.targets:
            context.isend(total, target)
        context.wait_all()
        from_left = step.theirs < step.mine
        if from_left and begun:
            reduction.combine(received, before, before)
        elif from_left:
            np.copyto(before, received)
            begun = True
        if step is not every[-1]:
            left, right = (received, total) if from_left else (total, received)
            reduction.combine(left, right, total)


def all_gather(context: CollectiveContext, own: Array, out: Array, bounds: Sequence[int]) -> None:
    """Bring every rank's ``own`` to ``out[bounds[rank]:bounds[rank + 1]]`` of all ranks.

    ``own`` may be that part of ``out``.
    """
    np.copyto(out[bounds[context.rank] : bounds[context.rank + 1]], own)
    for step in steps(context.rank, context.size):
        context.irecv(out[bounds[step.theirs[0]] : bounds[step.theirs[1]]], step.source)
        for target in step.targets:
            context.isend(out[bounds[step.mine[0]] : bounds[step.mine[1]]], target)
        context.wait_all()
