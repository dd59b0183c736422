"""``MemoryPeer``: what a process reads of the memory of another one, see ``shared.py``.

The first segment of a process says which of its loans are revoked: how many, and their numbers. If
there are more than fit, all are.
"""

from __future__ import annotations

import errno
import mmap
import threading
from typing import Protocol

from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import ProtocolError

from .segment import MappedSegment, process_of

HOME_BYTES = mmap.PAGESIZE - 16  # of the first segment, a page with the mark at its end
_WORDS = HOME_BYTES // 8
# What a lack of something or of a right looks like, unlike a segment that is not there.
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


def revoke(home: mmap.mmap, loan: int) -> None:
    """Note a loan as revoked; for one thread at a time."""
    words = memoryview(home).cast("Q")
    count = words[0]
    if count + 1 < _WORDS:
        words[count + 1] = loan
        _fence()
    words[0] = min(count + 1, _WORDS)
    _fence()


class SegmentTable(Protocol):
    """The segments of other processes that this one has mapped; ``SharedMemory`` is one."""

    def attached(self, number: int) -> MappedSegment:
        """Map, once, the segment of that number; raises OSError if it is out of reach."""

    def visit(self, number: int, drawn: int) -> MappedSegment:
        """Map the first segment of a process; raises OSError if it is out of reach."""


class MemoryPeer:
    """Memory of another process, which was met.

    Args:
        memory: of this process.
        home: the first segment of the other one.
        drawn: what it has drawn at random.
    """

    def __init__(self, memory: SegmentTable, home: MappedSegment, drawn: int) -> None:
        self._memory, self._home, self._drawn = memory, home, drawn
        self._words = memoryview(home.memory)[:HOME_BYTES].cast("Q")
        self._seen: dict[int, Bytes] = {}

    def bytes(self, number: int, offset: int, nbytes: int) -> Bytes:
        """Return a part of a segment of that process.

        Raises:
            ProcessLookupError: the process is gone.
            OSError: the segment is out of reach.
            ProtocolError: there is no such segment, or it is smaller.
        """
        seen = self._seen.get(number)
        if seen is None:
            seen = self._seen[number] = self._attach(number)
        if offset + nbytes > seen.size:
            raise ProtocolError(f"a segment of {seen.size} bytes ends before {offset} + {nbytes}")
        return seen[offset : offset + nbytes]

    def _attach(self, number: int) -> Bytes:
        home = self._home.number
        if process_of(number) != process_of(home):
            raise ProtocolError("memory of another process is named")
        try:
            segment = self._memory.attached(number)
        except OSError as error:
            if error.errno in _LACKS:
                raise
            try:
                self._memory.visit(home, self._drawn)
            except OSError:
                raise ProcessLookupError("the process is gone") from error
            raise ProtocolError("memory is named that does not exist") from error
        if not segment.marked(number, self._drawn):
            raise ProtocolError("memory of another process is named")
        return segment.bytes(0, segment.nbytes)

    def revoked(self, loan: int) -> bool:
        """Whether what was lent under that number may have changed before this call.

        To be asked after reading it, and before using what was read.
        """
        _fence()
        count = self._words[0]
        _fence()  # the list was written before the count
        return count > 0 and (count >= _WORDS or loan in self._words[1 : count + 1].tolist())


def _fence() -> None:
    """Let no store or load of this thread pass a call; see ``collectives/shared`` for why."""
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()
