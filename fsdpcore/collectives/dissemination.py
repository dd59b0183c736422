"""Dissemination: every rank tells all others something small, within a collective.

It takes ceil(lg p) messages of each rank, one after the other. Nobody is through before all have
begun: a barrier is just that.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Messages(Protocol):
    """What the ranks of a group tell each other things by: a ``CollectiveContext``."""

    rank: int
    size: int

    def exchange(
        self, array: np.ndarray[Any, Any], dst: int, out: np.ndarray[Any, Any], src: int
    ) -> None:
        """Send to one rank and receive from another at the same time, and wait for both."""


def exchange_numbers(context: Messages, number: int) -> list[int]:
    """Tell all ranks of the group a number below 2**64; return those of all, in their order."""
    numbers = np.empty(context.size, np.uint64)
    numbers[0] = number
    _disseminate(context, numbers)
    found: list[int] = numbers.tolist()
    first = context.size - context.rank  # where rank 0's is
    return found[first:] + found[:first]


def exchange_texts(context: Messages, text: str) -> list[str]:
    """Tell all ranks of the group a text; return those of all, in their order."""
    own = np.frombuffer(text.encode(errors="backslashreplace"), np.uint8)
    sizes = np.empty((context.size, 1), np.int64)
    sizes[0] = own.size
    _disseminate(context, sizes)
    records = np.zeros((context.size, max(sizes.max(), 1)), np.uint8)
    records[0, : own.size] = own
    _disseminate(context, records)
    texts = [row[:size].tobytes() for row, (size,) in zip(records, sizes.tolist(), strict=True)]
    first = context.size - context.rank  # where rank 0's is
    return [text.decode(errors="replace") for text in texts[first:] + texts[:first]]


def _disseminate(context: Messages, rows: np.ndarray[Any, Any]) -> None:
    """Bring the rows of all ranks together (Bruck's algorithm); the first row is this rank's.

    After the step of distance d, row i is that of rank (this rank + i), for i < 2 d.
    """
    distance = 1
    while distance < context.size:
        count = min(distance, context.size - distance)
        context.exchange(
            rows[:count].reshape(-1),
            (context.rank - distance) % context.size,
            rows[distance : distance + count].reshape(-1),
            (context.rank + distance) % context.size,
        )
        distance *= 2
