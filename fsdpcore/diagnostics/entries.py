"""What the flight recorder keeps of one operation, a collective or a message."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from fsdpcore.core.work import Work
from fsdpcore.diagnostics.status import Group, OpenOperation

Marks = Sequence[Any]
"""What a training step notes: a moment, and what the rank does from then on (unit, phase, part);
the next moment, and so on. A pair for each would keep the garbage collector busy."""


@dataclass
class CollectiveRecord:
    """What is recorded of a collective, the same for all calls of a kind.

    Attributes:
        operation: name of the collective.
        dtype, shape, nbytes: of this rank's array; None, () and 0 where it has none.
        algorithm: who carries it out, as far as that is known.
        label: what the call is for.
    """

    operation: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    nbytes: int
    algorithm: str
    label: str


class OperationRecord(Protocol):
    """What an entry describes, a collective or a message; must not lead to any array."""

    @property
    def operation(self) -> str:
        """Name of the collective."""

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """Of this rank's array; None where it has none."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this rank's array."""

    @property
    def nbytes(self) -> int:
        """Of this rank's array."""

    @property
    def algorithm(self) -> str:
        """Who carries it out, as far as that is known at the start."""

    @property
    def label(self) -> str:
        """What the call is for."""


class MessageRecord(NamedTuple):
    """What is recorded of a message, or of a probe for one, which has no dtype.

    ``peer`` is a number in the whole job; it and ``tag`` are -1 for any.
    """

    operation: str
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    nbytes: int
    peer: int
    tag: int
    algorithm: str = ""
    label: str = ""

    def words(self, peer: int) -> str:
        """Describe it to those who call its peer ``peer``."""
        of = "" if self.dtype is None else f" of {self.dtype} {self.shape}"
        return f"{self.operation}{of} {ends(self.operation, peer, self.tag)}"


def ends(operation: str, peer: int, tag: int) -> str:
    """Say between whom a message is: ``to rank 2 (tag 0)``, ``from any rank (any tag)``."""
    direction = "to" if operation == "send" else "from"
    rank = "any rank" if peer < 0 else f"rank {peer}"
    return f"{direction} {rank} ({'any tag' if tag < 0 else f'tag {tag}'})"


class OperationEntry:
    """One operation.

    Attributes:
        sequence: number of the collective in its group; 0 for a message.
        group: whose operation it is.
        call: what it is.
        algorithm: who carries it out, if somebody knows better than ``call``; see ``carrier``.
        start, end: by the job's clock; ``end`` is 0 while it runs.
        failed: ``failed``, ``timed out``, or empty.
        error: why, where it has failed.
        thread: that it began on.
    """

    __slots__ = (
        "algorithm",
        "call",
        "end",
        "error",
        "failed",
        "group",
        "sequence",
        "start",
        "thread",
    )

    # No __init__: setting the fields from ``Recorder.begin`` takes two thirds of the time.
    sequence: int
    group: Group
    call: OperationRecord
    algorithm: str
    thread: int
    start: int
    end: int
    failed: str
    error: str

    @property
    def blocks(self) -> bool:
        """Whether a thread of the rank is in it."""
        return self.end == 0

    @property
    def carrier(self) -> str:
        """The algorithm, as far as it is known."""
        return self.algorithm or self.call.algorithm

    @property
    def state(self) -> str:
        """``started``, ``done``, ``failed`` or ``timed out``."""
        if self.end == 0:
            return "started"
        return self.failed or "done"

    def words(self) -> str:
        """The operation and its group."""
        if isinstance(self.call, MessageRecord):
            return self.call.words(self.call.peer)
        label = f" ({self.call.label})" if self.call.label else ""
        return f"{self.call.operation} #{self.sequence} of {self.group}{label}"

    def wait(self, now: int) -> OpenOperation:
        """Describe an operation that runs, or that has failed."""
        over = self.end != 0
        seconds = (now - (self.end if over else self.start)) * 1e-9
        peer, tag = -1, -1
        if isinstance(self.call, MessageRecord):
            peer, tag = self.call.peer, self.call.tag
        name = self.call.operation
        return OpenOperation(
            self.words(), seconds, over, name, self.sequence, peer, tag, *self.group
        )


class MessageEntry(OperationEntry):
    """A message: posted at ``start``, but ``waiting`` only while a thread waits for it.

    ``work`` tells whether a message that nobody has waited for yet has arrived.
    """

    __slots__ = ("waiting", "work")
    waiting: bool
    work: weakref.ReferenceType[Work] | None

    @property
    def blocks(self) -> bool:
        return self.end == 0 and self.waiting


def spans(number: int, marks: Marks, now: int) -> Iterator[dict[str, Any]]:
    """What a step has gone through, for the file of a trace; up to ``now`` while it is open."""
    kept = list(marks)
    starts, doings = kept[::2], kept[1::2]
    for start, end, (unit, phase, part) in zip(starts, [*starts[1:], now], doings, strict=True):
        if phase or part != "computing":  # what is no pass is nobody's, and the end of a step
            what = {"unit": unit, "phase": phase, "part": part}
            yield {"step": number, "start_ns": start, "end_ns": end, **what}
