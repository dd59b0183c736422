"""A permutation of ``range(size)`` that is computed where it is asked for, and never stored.

A Feistel network of a keyed hash permutes the smallest even power of two that holds the range,
and an index that falls outside is permuted again until it falls inside (cycle walking: Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So the place of one row costs the same in
a dataset of a thousand rows and of a billion, and no rank holds an order of all of them. The
numbers are this file's own: no version of NumPy changes them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_ROUNDS = 6
# Small ranges are permuted within a larger one: a network of a few bits has few permutations.
_LEAST_BITS = 6
# The increment and the multipliers of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def permuted(indices: NDArray[np.int64], size: int, key: tuple[int, int]) -> NDArray[np.int64]:
    """Return where a permutation of ``range(size)`` sends some of its indices.

    Args:
        indices: in ``range(size)``.
        size: how many indices there are in all.
        key: which permutation: a seed and an epoch, each a non-negative integer below 2**64.
    """
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    half = np.uint64((bits + 1) // 2)
    keys = _keys(key)
    found = indices.astype(np.uint64)
    outside = np.arange(found.size)
    while outside.size:
        found[outside] = _network(found[outside], half, keys)
        outside = outside[found[outside] >= np.uint64(size)]
    return found.astype(np.int64)


def _network(values: Words, half: np.uint64, keys: list[np.uint64]) -> Words:
    """Permute the integers below ``4**half``."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << half) | right


def _keys(key: tuple[int, int]) -> list[np.uint64]:
    state = np.zeros(1, np.uint64)
    keys = []
    for number in (*key, *range(_ROUNDS)):
        state = _mixed(state ^ np.uint64(number))
        keys.append(state[0])
    return keys[len(key) :]


def _mixed(values: Words) -> Words:
    """Splitmix64's finaliser: every bit of a value changes about half of the result's."""
    values = values + _GOLDEN  # wraps around
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
