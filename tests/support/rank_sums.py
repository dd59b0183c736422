"""Ranks that run one after the other, for programs that only communicate by sums and maxima."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sum = Callable[..., None]
"""Takes an array, and ``np.maximum`` where it is not to be summed."""


class _Paused(Exception):
    """A rank needs a sum that is not known yet."""


def run_ranks(programs: Sequence[Callable[[Sum], None]]) -> int:
    """Run a program per rank, each with a function that sums an array in place over all of them.

    A program is started anew each time one more sum is known, so it must begin from the same values
    each time. Asserts that all of them sum equally often, with equal sizes. Returns how often.
    """
    known: list[NDArray[Any]] = []
    while True:
        parts = [_run(program, known) for program in programs]
        if all(part is None for part in parts):
            return len(known)
        given = [part for part in parts if part is not None]
        assert len(given) == len(parts), "some ranks sum more often than others"
        assert len({(part.shape, part.dtype, join) for part, join in given}) == 1
        arrays, join = [part for part, _ in given], given[0][1]
        known.append(functools.reduce(join, arrays))


def _run(
    program: Callable[[Sum], None], known: list[NDArray[Any]]
) -> tuple[NDArray[Any], np.ufunc] | None:
    """Run until a sum is needed that is not known; return this rank's part of it, and how."""
    done = 0

    def add(array: NDArray[Any], join: np.ufunc = np.add) -> None:
        nonlocal done, part
        if done == len(known):
            part = array.copy(), join
            raise _Paused
        np.copyto(array, known[done])
        done += 1

    part: tuple[NDArray[Any], np.ufunc] | None = None
    try:
        program(add)
    except _Paused:
        return part
    assert done == len(known), "this rank sums less often than the others"
    return None
