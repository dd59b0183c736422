"""The fingerprint of a collective call, compared by all ranks before any data moves.

Ranks that call different things would hang or, worse, mix up each other's data. So every
collective begins with an all-gather of 16 bytes per rank, in a dissemination pattern: ceil(lg p)
messages and 16 (p - 1) bytes sent and received by each rank. If the digests differ, a second
exchange carries the calls in words, and every rank raises the same ``MismatchError``. The first
exchange is the barrier too (dissemination: nobody leaves it before all have entered), and it tells
the ragged collectives how many rows each rank contributes. Ranks with a shared area compare there
instead, see ``area.py``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fsdpcore.core.errors import MismatchError

# A call in words is cut off here, and so is the policy.
_WORDS = 240


@dataclass(frozen=True)
class Fingerprint:
    """What one rank called; all fields must agree, ``shape[0]`` only unless ``ragged``.

    Attributes:
        operation: name of the collective.
        dtype, shape: of the rank's input; of the root's, where only the root has one.
        op: name of the reduction, or empty.
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
        agreed = (self.operation, name, shape, len(self.shape), self.op, self.root)
        agreed += (self.algorithm, self.counts, self.label, self.policy)  # type: ignore[assignment]
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

    def exchange(
        self, array: np.ndarray[Any, Any], dst: int, out: np.ndarray[Any, Any], src: int
    ) -> None:
        """Send to one rank and receive from another at the same time, and wait for both."""

    def global_rank(self, rank: int) -> int:
        """The number that a rank of the group has in the whole job."""


def exchange(context: Messages, mine: Fingerprint) -> list[int]:
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
        raise disagreement(context, mine)
    return [rows for _, rows in found]


def disagreement(context: Messages, mine: Fingerprint) -> MismatchError:
    """Tell all ranks in words what this one calls; all of them get the same error."""
    record = mine.digest.to_bytes(8, "little") + _padded(str(mine)) + _padded(mine.policy)
    records = np.empty((context.size, len(record)), np.uint8)
    records[0] = np.frombuffer(record, np.uint8)
    _disseminate(context, records)
    everyone = [row.tobytes() for row in np.roll(records, context.rank, axis=0)]
    calls = [(record[:8], _unpadded(record[8 : 8 + _WORDS])) for record in everyone]
    policies = [_unpadded(record[8 + _WORDS :]) for record in everyone]
    if len(set(policies)) > 1:
        calls = [
            (digest, f"{call}, algorithms chosen by: {policy}")
            for (digest, call), policy in zip(calls, policies, strict=True)
        ]
    # The same words on every rank: each may raise its own error or one that it was told of.
    number = f"collective #{context.sequence}"
    return MismatchError(f"{number} does not fit together:{_by_rank(context, calls)}")


def _padded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")[:_WORDS].ljust(_WORDS, b"\0")


def _unpadded(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


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


def _by_rank(context: Messages, calls: list[tuple[bytes, str]]) -> str:
    """List the calls (digest and words), each once, with the ranks (of the job) that made it.

    The digest tells apart what the words, cut off at the end of a record, do not.
    """
    callers: dict[tuple[bytes, str], list[int]] = {}
    for rank, key in enumerate(calls):
        callers.setdefault(key, []).append(context.global_rank(rank))
    lines = []
    for (_, call), ranks in callers.items():
        who = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"  {who} {', '.join(map(str, ranks))}: {call}")
    return "\n".join(["", *lines])
