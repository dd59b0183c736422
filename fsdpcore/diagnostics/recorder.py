"""The flight recorder: the last operations of a rank, for error messages and for ``trace``.

Every collective and message passes through ``begin`` and ``end``, so these only store references
and times: no formatting, no lock (appending to a ``deque`` is atomic), and nothing that would keep
an array alive. Whoever reads does the work.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.clock import Clock
from fsdpcore.core.errors import CommTimeoutError, CommunicationError, in_words
from fsdpcore.diagnostics.entries import (
    Marks,
    MessageEntry,
    MessageRecord,
    OperationEntry,
    OperationRecord,
    spans,
)
from fsdpcore.diagnostics.stack import where
from fsdpcore.diagnostics.status import MAX_WAITS, CallAnswer, Group, Status
from fsdpcore.diagnostics.trace_file import FORMAT, VERSION, file_name, write_json

DEFAULT_SIZE = 1000
_get_ident = threading.get_ident
# A program that polls with short timeouts must not spend its time on writing.
_SECONDS_BETWEEN_TIMEOUTS = 1.0
_CLOSED = 64  # groups
_STEPS = 4


class RecordedGroup(Protocol):
    """What is recorded of a group: who it is, and how far its collectives are on this rank.

    Attributes:
        issued, begun: how many collectives this rank has called, and how many of them have begun.
    """

    issued: int
    begun: int

    @property
    def group(self) -> Group:
        """The group's name."""

    def called(self, sequence: int) -> CallAnswer | None:
        """What this rank has called under a number; None for what it does not know."""


class RecordedRank(Protocol):
    """What is recorded of a rank; ``comm.job.Job`` is one."""

    rank: int
    world_size: int
    clock: Clock

    @property
    def capabilities(self) -> Capabilities:
        """Which transport it uses."""

    @property
    def failure(self) -> CommunicationError | None:
        """What its job is broken by."""


class Recorder:
    """The last operations of one rank.

    Several threads may record at the same time.

    Args:
        rank: whose operations these are.
        size: how many are kept.

    Attributes:
        program: what to call the function that the rank runs.
        returned: that function has returned, and nothing had failed by then.
        closed: the rank begins no operation any more.
    """

    program = "main"
    returned = False
    closed = False

    def __init__(self, rank: RecordedRank, size: int = DEFAULT_SIZE) -> None:
        self._rank = weakref.ref(rank)
        self._entries: deque[OperationEntry] = deque(maxlen=size)
        # The groups that are in use, so that this does not grow with those that were.
        self._groups: weakref.WeakValueDictionary[int, RecordedGroup] = (
            weakref.WeakValueDictionary()
        )
        self._closed: deque[RecordedGroup] = deque(maxlen=_CLOSED)
        # Of the last steps, of training or not, in the order of all: what the rank did when.
        self._steps: deque[tuple[int, Marks]] = deque(maxlen=_STEPS)
        self._numbers = itertools.count()
        self._directory: Path | None = None
        self._file_lock = threading.Lock()
        self._written = -_SECONDS_BETWEEN_TIMEOUTS
        self._started = time.time()
        self._now = rank.clock.nanoseconds
        self._thread = threading.get_ident()  # of the rank's program
        self._waited = 0  # nanoseconds of that thread, in what ``waited`` was told

    def configure(self, directory: str, size: int = DEFAULT_SIZE) -> None:
        """Choose where ``save`` writes (nowhere, if empty) and how many operations are kept."""
        self._directory = Path(directory).absolute() if directory else None
        if size != self._entries.maxlen:
            self._entries = deque(self._entries, maxlen=size)

    # The rank's program.

    def begin_program(self, name: str) -> None:
        """Note that the rank's program runs from now on, on this thread."""
        self.program, self._thread = name, threading.get_ident()

    def end_program(self) -> None:
        """Note that it has returned."""
        rank = self._rank()
        self.returned = rank is not None and rank.failure is None

    def _stack(self) -> str:
        """Where the rank's program is, for other threads that ask."""
        # In virtual time all ranks are on the thread that asks.
        here = self._thread == threading.get_ident()
        stack = "" if here or self.returned else where(self._thread)
        return f" ({stack})" if stack else ""

    # Recording.

    def add_group(self, order: RecordedGroup) -> None:
        """Note that this rank is a member of a group, for as long as the group is in use."""
        self._groups[order.group.channel] = order

    def close_group(self, order: RecordedGroup) -> None:
        """Keep what is known of a group for a while: others may still wait in its last call."""
        self._closed.append(order)

    def begin(self, order: RecordedGroup, sequence: int, call: OperationRecord) -> OperationEntry:
        """Note that collective number ``sequence`` of a group starts on this rank."""
        entry = OperationEntry()
        entry.sequence = sequence
        entry.group = order.group
        entry.call = call
        entry.end = 0
        entry.failed = ""
        entry.algorithm = ""
        entry.thread = _get_ident()
        order.begun = sequence
        entry.start = self._now()
        self._entries.append(entry)
        return entry

    def end(self, entry: OperationEntry) -> None:
        """Note that an operation has ended well."""
        entry.end = self._now()

    def fail(self, entry: OperationEntry, error: BaseException) -> None:
        """Note that an operation has failed. Only the first end of an operation counts."""
        if entry.end == 0:
            # Not the error itself: the frames of its traceback hold arrays.
            entry.error = in_words(error)
            entry.failed = "timed out" if isinstance(error, CommTimeoutError) else "failed"
            entry.end = self._now()

    def message(self, group: Group, message: MessageRecord) -> MessageEntry:
        """Note that this rank posts a send or a receive; ended as other operations are."""
        entry = MessageEntry()
        entry.waiting = False
        entry.work = None
        entry.sequence = 0
        entry.group = group
        entry.call = message
        entry.algorithm = ""
        entry.thread = 0  # who starts it does not wait
        entry.end = 0
        entry.failed = ""
        entry.start = self._now()
        self._entries.append(entry)
        return entry

    def waited(self, start: int) -> None:
        """Note that a thread has waited since ``start`` for an operation that it had started."""
        if _get_ident() == self._thread:
            self._waited += self._now() - start

    def add_spans(self, marks: Marks) -> None:
        """Keep what a step notes of units and passes, while it goes on and for a few steps more."""
        self._steps.append((next(self._numbers), marks))

    # Reading.

    def waited_since(self, time: int, noted: int) -> tuple[float, int]:
        """For how many seconds the rank's program has waited in operations.

        Args:
            time: since then, by the job's clock in nanoseconds; as far as the operations are kept.
            noted: what the last call has returned beside; 0 for the first.

        Returns:
            The seconds, and what the next call needs.
        """
        inside = sum(
            entry.end - entry.start
            for entry in self._kept()
            if entry.thread == self._thread and entry.start >= time and entry.end
        )
        total = self._waited
        return (inside + total - noted) * 1e-9, total

    def entries(self) -> list[OperationEntry]:
        """The last operations, in the order of their start."""
        found = self._kept()
        for entry in found:
            if isinstance(entry, MessageEntry) and entry.end == 0 and entry.work is not None:
                work = entry.work()
                if work is not None:
                    work.done()  # which notes the end
        return found

    def _kept(self) -> list[OperationEntry]:
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # another thread has added one meanwhile
                continue

    def group(self, channel: int) -> Group | None:
        """The group of a channel, if this rank has it."""
        order = self._groups.get(channel)
        return None if order is None else order.group

    def entered(self, channel: int) -> int:
        """The last collective begun on a channel; 0 for none."""
        order = self._groups.get(channel)
        if order is not None:
            return order.begun
        last = (e.sequence for e in reversed(self.entries()) if e.group.channel == channel)
        return next((sequence for sequence in last if sequence), 0)

    def status(self, channel: int, sequence: int = 0) -> Status:
        """Say what this rank is doing, how far it is on a channel, and what it called there.

        Outside of operations, the words have its stack; not if a call is asked for, which happens
        often.
        """
        entries, now = self.entries(), self._now()
        running = [entry.wait(now) for entry in entries if entry.blocks][:MAX_WAITS]
        last = _last(entries)
        if running:
            text = " and ".join(map(str, running))
        else:
            text = f"{self._past(last, now)}{'' if sequence else self._stack()}"
            running = [last.wait(now)] if last is not None and last.failed else []
        known = any(entry.group.channel == channel for entry in entries)
        entered = self.entered(channel)
        order = self._groups.get(channel)
        call = order.called(sequence) if order is not None and sequence else None
        return Status(text, entered, known or order is not None, tuple(running), call)

    def waits(self) -> str:
        """The operations that this rank is in, in words; empty for none. Takes no lock."""
        words = [entry.words() for entry in self._kept() if entry.blocks]
        return " and ".join(words[:MAX_WAITS])

    def _past(self, last: OperationEntry | None, now: int) -> str:
        """Say what a rank has done that is in no operation."""
        if last is None:
            done = "no collective so far"
        elif last.failed:
            return str(last.wait(now))
        else:
            done = f"finished {last.words()} {(now - last.end) * 1e-9:.1f} s ago"
        if self.returned:
            return f"{done}, has returned from {self.program}"
        return f"{done}, busy elsewhere{'' if last is None else ' since'}"

    # Writing.

    def dump(self, path: str | Path) -> None:
        """Write the last operations to a file that ``fsdpcore trace`` reads; replaces it at once.

        Raises:
            OSError: it cannot be written.
        """
        with self._file_lock:  # a thread that fails and one that closes may come together
            write_json(Path(path), self._content())
            self._written = time.monotonic()

    def save(self, *, seldom: bool = False) -> None:
        """Write to the directory of the setting ``trace``, if there is one; never raises.

        Args:
            seldom: not if that was done a moment ago.
        """
        if self._directory is None:
            return
        if seldom and time.monotonic() < self._written + _SECONDS_BETWEEN_TIMEOUTS:
            return
        owner = self._rank()
        rank = -1 if owner is None else owner.rank
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self.dump(self._directory / file_name(rank))
        except Exception as error:  # what the rank fails of is more important
            sys.stderr.write(f"fsdpcore: rank {rank} cannot write its trace: {error}\n")

    def _content(self) -> dict[str, Any]:
        rank = self._rank()
        assert rank is not None, "it owns the recorder"
        entries = self.entries()
        groups = {entry.group for entry in entries}
        alive = list(self._groups.values())
        groups.update(order.group for order in alive)
        issued = {order.group.channel: order.issued for order in alive}
        failure = rank.failure
        return {
            "format": FORMAT,
            "version": VERSION,
            "rank": rank.rank,
            "world_size": rank.world_size,
            "transport": rank.capabilities.transport,
            "started": self._started,
            "written": time.time(),
            "clock": {"wall_ns": time.time_ns(), "monotonic_ns": self._now()},
            "complete": len(entries) < (self._entries.maxlen or 0),
            "returned": self.program if self.returned else None,
            "closed": self.closed,
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
            "groups": [
                {
                    "channel": f"{group.channel:016x}",
                    "ranks": list(group.ranks),
                    "position": group.position,
                    "name": group.name,
                    "entered": self.entered(group.channel),
                    "issued": issued.get(group.channel),
                }
                for group in sorted(groups)
            ],
            "operations": [_operation(entry) for entry in entries],
            "spans": [each for step in list(self._steps) for each in spans(*step, self._now())],
        }


def _operation(entry: OperationEntry) -> dict[str, Any]:
    call = entry.call
    content = {
        "op": call.operation,
        "sequence": entry.sequence,
        "channel": f"{entry.group.channel:016x}",
        "dtype": None if call.dtype is None else str(call.dtype),
        "shape": list(call.shape),
        "bytes": call.nbytes,
        "algorithm": entry.carrier,
        "label": call.label,
        "start_ns": entry.start,
        "end_ns": entry.end or None,
        "state": entry.state,
        "error": entry.error if entry.failed else None,
    }
    if isinstance(call, MessageRecord):
        content |= {"peer": call.peer, "tag": call.tag}
    return content


def _last(entries: list[OperationEntry]) -> OperationEntry | None:
    """The operation that ended last."""
    return max((entry for entry in entries if entry.end), key=lambda e: e.end, default=None)
