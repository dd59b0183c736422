"""Ranks that run one after the other, for programs whose only communication is a sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Sum = Callable[[NDArray[Any]], None]


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
        arrays = [part for part in parts if part is not None]
        assert len(arrays) == len(parts), "some ranks sum more often than others"
        assert len({(part.shape, part.dtype) for part in arrays}) == 1
        total = arrays[0].copy()
        for part in arrays[1:]:
            total += part
        known.append(total)


def _run(program: Callable[[Sum], None], known: list[NDArray[Any]]) -> NDArray[Any] | None:
    """Run until a sum is needed that is not known; return this rank's part of it."""
    done = 0

    def add(array: NDArray[Any]) -> None:
        nonlocal done, part
        if done == len(known):
            part = array.copy()
            raise _Paused
        np.copyto(array, known[done])
        done += 1

    part: NDArray[Any] | None = None
    try:
        program(add)
    except _Paused:
        return part
    assert done == len(known), "this rank sums less often than the others"
    return None
