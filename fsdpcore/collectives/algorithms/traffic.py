"""What each rank sends or receives in recursive doubling and halving, for any number of ranks.

Where p is no power of two, the canonical tree is uneven and so is the traffic. These are the
functions that the docstrings of ``doubling`` and ``halving`` define, for all ranks at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PerRank = NDArray[np.int64]


def left_half(p: int) -> int:
    """How many of p > 1 ranks are on the left at the top of the canonical tree."""
    return 1 << (p - 1).bit_length() - 1


@lru_cache(maxsize=1024)
def sends(p: int) -> PerRank:
    """Return m(i, p): how many messages rank i sends, in doubling and in halving."""
    if p == 1:
        return np.zeros(1, np.int64)
    w = left_half(p)
    return np.concatenate([sends(w), sends(p - w)]) + _targets(w, p - w)


@lru_cache(maxsize=1024)
def receives(p: int) -> PerRank:
    """Return d(i, p): how many messages rank i receives, which is how many merges it is in."""
    if p == 1:
        return np.zeros(1, np.int64)
    w = left_half(p)
    return np.concatenate([receives(w), receives(p - w)]) + 1


@lru_cache(maxsize=1024)
def chunks_spread(p: int) -> PerRank:
    """Return how many chunks rank i sends in an all_gather by doubling."""
    if p == 1:
        return np.zeros(1, np.int64)
    w, r = left_half(p), p - left_half(p)
    sizes = np.array([w] * w + [r] * r)
    chunks: PerRank = np.concatenate([chunks_spread(w), chunks_spread(r)])
    chunks += _targets(w, r) * sizes
    return chunks


@lru_cache(maxsize=1024)
def chunks_kept(p: int) -> PerRank:
    """Return how many chunks rank i receives, and reduces, in a reduce_scatter by halving."""
    return _kept(np.arange(p), p)


def _kept(place: NDArray[Any], p: int) -> PerRank:
    """Add up what arrives at p ranks, of which number ``place[c]`` keeps chunk c in the end."""
    if p == 1:
        return np.zeros(1, np.int64)
    w, r = left_half(p), p - left_half(p)
    below = [_kept(place % w, w), _kept(place % w % r, r)]
    return np.concatenate(below) + np.bincount(place, minlength=p)


def _targets(w: int, r: int) -> PerRank:
    """How many messages each of w + r ranks sends when blocks of w and r ranks merge."""
    left = np.arange(w) < r
    right = -((np.arange(r) - w) // r)
    return np.concatenate([left, right]).astype(np.int64)
