"""``MemoryPeer``: what a process reads of the memory of another one, see ``shared.py``.

The first segment of a process says which of its loans are revoked: how many, and their numbers. If
there are more than fit, all are.
"""

from __future__ import annotations

import errno
import mmap
from typing import Any, Protocol

from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import ProtocolError
from fsdpcore.core.fence import fence

from .segment import MappedSegment, process_of

HOME_BYTES = mmap.PAGESIZE - 16  # of the first segment, a page with the mark at its end
_WORDS = HOME_BYTES // 8
# What a lack of something or of a right looks like, unlike a segment that is not there.
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)


class Words(Protocol):
    """Words of 8 bytes, as of a ``memoryview``."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...


def home_words(memory: Any) -> Words:
    """Return the words of the first segment of a process."""
    return memoryview(memory)[:HOME_BYTES].cast("Q")


def revoke(home: Words, loan: int) -> None:
    """Note a loan as revoked, before it changes; for one thread at a time.

    The lender notes the loan, passes a fence, and then changes the data. Who has read changed data
    and then passes a fence sees the note, by the rule of ``core.fence``.
    """
    count = home[0]
    if count + 1 < _WORDS:
        home[count + 1] = loan
    home[0] = min(count + 1, _WORDS)
    fence()


def is_revoked(home: Words, loan: int) -> bool:
    """Whether a loan may have changed before this call; to be asked after reading it."""
    fence()
    count = home[0]
    return count >= _WORDS or any(home[at] == loan for at in range(1, count + 1))


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
        self._words = home_words(home.memory)
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
        return is_revoked(self._words, loan)
