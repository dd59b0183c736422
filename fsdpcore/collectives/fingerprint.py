"""The fingerprint of a collective call, exchanged by all ranks before any data moves.

Ranks that call different things would hang or, worse, mix up each other's data. So every
collective begins with an all-gather of small records of fixed size, in a dissemination pattern:
ceil(lg p) messages and p - 1 records sent and received by each rank. Every rank then knows what
all others called and, if they do not fit, raises the same ``MismatchError``. The same exchange is
the barrier, and it tells the ragged collectives how many rows each rank contributes.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpcore.collectives.link import Link
from fsdpcore.errors import MismatchError

# What must agree (as a digest), the rows of this rank's array, the call in words.
_RECORD = struct.Struct("<8sQ176s")


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

    def pack(self) -> bytes:
        """Encode as a record; the words are cut off where they are too long for it."""
        shape = self.shape[1:] if self.ragged else self.shape
        name = self.dtype.name if self.dtype is not None else ""
        agreed = (self.operation, name, shape, len(self.shape), self.op, self.root)
        agreed += (self.algorithm, self.counts, self.label)  # type: ignore[assignment]
        digest = hashlib.blake2b(repr(agreed).encode(), digest_size=8).digest()
        rows = self.shape[0] if self.shape else 1
        return _RECORD.pack(digest, rows, str(self).encode(errors="backslashreplace")[:176])

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


def exchange(link: Link, mine: Fingerprint) -> list[int]:
    """Tell all ranks of the group what this one calls, and check that all called what fits.

    Returns:
        The number of rows (size of axis 0; 1 for a 0-d array) of every rank's array.

    Raises:
        MismatchError: the ranks called different things; every one of them raises it.
    """
    records = [_RECORD.unpack(bytes(record)) for record in _all_gather(link, mine.pack())]
    if any(digest != records[0][0] for digest, _, _ in records):
        calls = [(d, words.rstrip(b"\0").decode(errors="replace")) for d, _, words in records]
        # The same words on every rank: each may raise its own error or one that it was told of.
        number = f"collective #{link.sequence}"
        raise MismatchError(f"{number} does not fit together:{_by_rank(link, calls)}")
    return [rows for _, rows, _ in records]


def _all_gather(link: Link, record: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the records of all ranks, one a row, by dissemination (Bruck's algorithm).

    After the step of distance d, row i holds the record of rank (this rank + i), for i < 2 d.
    """
    rows = np.empty((link.size, _RECORD.size), np.uint8)
    rows[0] = np.frombuffer(record, np.uint8)
    distance = 1
    while distance < link.size:
        count = min(distance, link.size - distance)
        link.exchange(
            rows[:count].reshape(-1),
            (link.rank - distance) % link.size,
            rows[distance : distance + count].reshape(-1),
            (link.rank + distance) % link.size,
        )
        distance *= 2
    return np.roll(rows, link.rank, axis=0)


def _by_rank(link: Link, calls: list[tuple[bytes, str]]) -> str:
    """List the calls (digest and words), each once, with the ranks (of the job) that made it.

    The digest tells apart what the words, cut off at the end of a record, do not.
    """
    callers: dict[tuple[bytes, str], list[int]] = {}
    for rank, key in enumerate(calls):
        callers.setdefault(key, []).append(link.global_rank(rank))
    lines = []
    for (_, call), ranks in callers.items():
        who = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"  {who} {', '.join(map(str, ranks))}: {call}")
    return "\n".join(["", *lines])
