"""The fingerprint of a collective call, compared by all ranks before any data moves.

Ranks that call different things would hang or, worse, mix up each other's data. So every
collective begins with an all-gather of 16 bytes per rank, in a dissemination pattern: ceil(lg p)
messages and 16 (p - 1) bytes sent and received by each rank. If the digests differ, a second
exchange carries the calls in words, and every rank raises the same ``MismatchError``. The first
exchange is the barrier too (dissemination: nobody leaves it before all have entered), and it tells
the ragged collectives how many rows each rank contributes. Ranks with a shared region compare
there instead, see ``shared.region``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fsdpcore.core.disagreement import check_same

# A call in words is cut off here, and so is the policy.
_WORDS = 240


@dataclass(frozen=True)
class Fingerprint:
    """What one rank called; all fields must agree, ``shape[0]`` only unless ``ragged``.

    Attributes:
        operation: name of the collective.
        dtype, shape: of the rank's input; of the root's, where only the root has one.
        op: the reduction, as ``Reduction.told``, or empty.
        root: the root rank, or -1.
        algorithm: as asked for, so that ranks cannot choose differently.
        counts: the counts of a ragged collective that are the same on all ranks.
        label: what the call is for; named in errors.
        ragged: the ranks may differ in the size of axis 0.
        policy: how ``algorithm="auto"`` is decided, in words that differ where the choices may.
    """

    operation: str
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    op: str = ""
    root: int = -1
    algorithm: str = "auto"
    counts: tuple[int, ...] = ()
    label: str = ""
    ragged: bool = False
    policy: str = ""

    @cached_property
    def digest(self) -> int:
        """64 bits that are equal where the calls fit together."""
        shape = self.shape[1:] if self.ragged else self.shape
        name = self.dtype.name if self.dtype is not None else ""
        agreed = (
            self.operation,
            name,
            shape,
            len(self.shape),
            self.op,
            self.root,
            self.algorithm,
            self.counts,
            self.label,
            self.policy,
        )
        digest = hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def rows(self) -> int:
        """The size of axis 0; 1 for a 0-d array."""
        return self.shape[0] if self.shape else 1

    def __str__(self) -> str:
        parts = [self.op] if self.op else []
        if self.dtype is not None:
            parts.append(f"{self.dtype.name} of shape {self.shape}")
        if self.root >= 0:
            parts.append(f"root {self.root}")
        if self.counts:
            parts.append(f"counts {list(self.counts)}")
        if self.algorithm != "auto":
            parts.append(f"algorithm {self.algorithm}")
        if self.label:
            parts.append(f"for {self.label}")
        return f"{self.operation}({', '.join(parts)})"


class Messages(Protocol):
    """What the ranks tell each other their calls by: a ``CollectiveContext``."""

    rank: int
    size: int
    sequence: int

    @property
    def ranks(self) -> Sequence[int]:
        """The numbers that the ranks of the group have in the whole job."""

    def exchange(
        self, array: np.ndarray[Any, Any], dst: int, out: np.ndarray[Any, Any], src: int
    ) -> None:
        """Send to one rank and receive from another at the same time, and wait for both."""


def compare_calls(context: Messages, mine: Fingerprint) -> list[int]:
    """Tell all ranks of the group what this one calls, and check that all called what fits.

    Returns:
        The rows of every rank's array.

    Raises:
        MismatchError: the ranks called different things; every one of them raises it.
    """
    records = np.empty((context.size, 2), np.uint64)
    records[0] = mine.digest, mine.rows
    _disseminate(context, records)
    first = context.size - context.rank  # where rank 0's record is
    found = records.tolist()
    found = found[first:] + found[:first]
    if any(digest != mine.digest for digest, _ in found):
        refuse_calls(context, mine)
    return [rows for _, rows in found]


def refuse_calls(context: Messages, mine: Fingerprint) -> None:
    """Tell all ranks in words what this one calls, and raise; once all know that they differ."""
    said = [str(mine.digest), str(mine)[:_WORDS], mine.policy[:_WORDS]]
    everyone = [json.loads(text) for text in exchange_texts(context, json.dumps(said))]
    same_policy = len({policy for *_, policy in everyone}) == 1
    # The digest tells apart what the words, cut off, do not.
    calls = [
        (digest, call if same_policy else f"{call}, algorithms chosen by: {policy}")
        for digest, call, policy in everyone
    ]
    # The same words on every rank: each may raise its own error or one that it was told of.
    check_same(
        [[call] for call in calls],
        context.ranks,
        lambda found: found.lines(f"collective #{context.sequence}"),
        words=lambda call: str(call[1]),
    )


def exchange_texts(context: Messages, text: str) -> list[str]:
    """Tell all ranks of the group a text, inside of a collective; return those of all."""
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
