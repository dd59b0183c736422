"""Memory that processes of one host share, without a name that could outlive them.

The memory is an anonymous file of the kernel (``memfd``), a *segment*, which another process of
the same user opens through ``/proc``. It is gone with the last process that has it mapped, however
that ends; and it does not come out of ``/dev/shm``, which is tiny in many containers.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import logging
import mmap
import operator
import os
import secrets
import struct
import threading
import weakref
from typing import Any

from fsdpcore.collectives.shared.region import SharedRegion
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.errors import ProtocolError

from .peer import HOME_BYTES, MemoryPeer, home_words, revoke
from .pool import Pool
from .segment import MARK, MappedSegment, address_of, descriptor_of, number_of, process_of

_LOG = logging.getLogger("fsdpcore")

_INTRODUCTION = struct.Struct("<QQ")
_SMALLEST, _LARGEST = 4 << 20, 1 << 30  # bytes of a segment of the pool, unless one array is larger
_PAGE = mmap.PAGESIZE
_PHYSICAL = os.sysconf("SC_PHYS_PAGES") * _PAGE


class SharedMemory:
    """The memory that one process has offered to others, or has mapped.

    All methods may be called by any thread.
    """

    available = hasattr(os, "memfd_create")

    def __init__(self, *, required: bool = False) -> None:
        self.required = required
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._drawn = int.from_bytes(secrets.token_bytes(8), "little")
        self._serials = itertools.count(1)
        self._home: MappedSegment | None = None
        self._met: set[bytes] = set()
        self._segments: dict[int, MappedSegment] = {}
        # For ``locate``: where those segments begin, in order, and which they are.
        self._places: tuple[list[int], list[MappedSegment]] = ([], [])
        self._pool = Pool(self._grow)
        self._exhausted = False

    def common_region(self, channel: int, rank: int, size: int) -> None:
        """None: ranks make it together."""

    def region(self, memory: Bytes, rank: int, size: int) -> SharedRegion:
        """How ranks take turns in memory that all of them have mapped."""
        return SharedRegion(memory, rank, size, self)

    # Meeting other processes.

    def introduce(self) -> bytes:
        """Return at most 64 bytes by which other processes find this one.

        Raises:
            OSError: the system has no such memory.
        """
        with self._lock:
            if self._home is None:
                self._home = self._make(HOME_BYTES)
            return _INTRODUCTION.pack(self._home.number, self._drawn)

    def meet(self, introduction: bytes) -> None:
        """Make sure that memory of the process that introduced itself can be opened.

        Raises:
            OSError: it is out of reach.
        """
        introduction = introduction[: _INTRODUCTION.size]
        if introduction in self._met:
            return
        number, drawn = _INTRODUCTION.unpack(introduction)
        if drawn != self._drawn:
            self.visit(number, drawn)
        self._met.add(introduction)

    def memory_peer(self, introduction: bytes) -> MemoryPeer:
        """Return the memory of the process that introduced itself.

        Raises:
            OSError: it is out of reach.
            ProtocolError: this is not how another process introduces itself.
        """
        if not self.available:
            raise OSError("shm=off")
        if len(introduction) != _INTRODUCTION.size:
            raise ProtocolError("memory is introduced by too few or too many bytes")
        number, drawn = _INTRODUCTION.unpack(introduction)
        home = self.visit(number, drawn)
        if drawn == self._drawn or home.nbytes < HOME_BYTES:
            raise ProtocolError("memory that is no other rank's is introduced")
        return MemoryPeer(self, home, drawn)

    def visit(self, number: int, drawn: int) -> MappedSegment:
        """Map the first segment of a process, by what it has introduced itself with.

        Raises:
            OSError: it is out of reach.
        """
        home = self._open(number)
        if not home.marked(number, drawn):
            raise OSError("the ranks run in different containers")
        return home

    def revoke(self, loan: int) -> None:
        """Tell all neighbours that what was lent under a number, not 0, is not to be read.

        On return nobody takes any more for whole what they read of it: see ``MemoryPeer.revoked``.
        """
        with self._lock:
            if self._home is not None:  # else nothing was lent
                revoke(home_words(self._home.memory), loan)

    # Segments.

    def attached(self, number: int) -> MappedSegment:
        """Map, once, a segment that ``locate`` has named.

        Raises:
            OSError: it is out of reach.
        """
        segment = self._segments.get(number)
        if segment is None:
            with self._lock:
                segment = self._segments.get(number) or self._add(self._open(number))
        return segment

    def segment(self, nbytes: int) -> MappedSegment:
        """Make a segment of zeros for the caller, which ``open`` maps in other processes.

        Raises:
            OSError: the system has no memory of that kind, or not enough.
        """
        with self._lock:
            return self._make(nbytes)

    def open(self, number: int) -> Bytes:
        """Return the bytes of a segment of a process that has been met.

        Raises:
            OSError: it is out of reach.
        """
        segment = self._open(number)
        return segment.bytes(0, segment.nbytes)

    def attach(self, number: int) -> Bytes:
        """Return the bytes of a segment that ``locate`` has named, in this process or another.

        Raises:
            OSError: it is out of reach.
        """
        segment = self.attached(number)
        return segment.bytes(0, segment.nbytes)

    def locate(self, array: Array) -> tuple[int, int] | None:
        """Return in which segment a contiguous array lies, and where.

        None if it is not memory from ``empty``, so that other processes cannot ``attach`` it.
        """
        addresses, ordered = self._places
        if not addresses:
            return None
        address = address_of(array)
        at = bisect.bisect_right(addresses, address) - 1
        if at < 0:
            return None
        segment = ordered[at]
        offset = address - segment.address
        return (segment.number, offset) if offset < segment.nbytes else None

    def own(self, array: Array) -> tuple[int, int] | None:
        """Do as ``locate``, for what this process has made, not only mapped."""
        place = self.locate(array)
        if place is None:
            return None
        segment = self._segments.get(place[0])
        return place if segment is not None and segment.descriptor >= 0 else None

    # Arrays.

    def empty(self, nbytes: int) -> Bytes | None:
        """Return uninitialised memory that other processes can map, aligned to a cache line.

        It is taken from segments that grow with what is in use, and goes back to them with the
        last array on it. None if there is no more, which is logged once, and in a process forked
        from this one: it would take what this one takes, too.
        """
        nbytes = operator.index(nbytes)
        if os.getpid() != self._process:
            return None
        try:
            with self._lock:
                pool = self._pool
                segment, offset, size = pool.take(nbytes)
        except OSError as error:
            if not self._exhausted:
                _LOG.warning("no shared memory for %d bytes, private is used: %s", nbytes, error)
            self._exhausted = True
            return None
        array = segment.bytes(offset, nbytes)
        # An array made on a buffer is the base of all views of it, however derived.
        weakref.finalize(array, pool.give, segment, offset, size).atexit = False
        return array

    def close(self) -> None:
        """Let no further process open anything; arrays stay usable."""
        with self._lock:
            self._pool = Pool(_refuse)
            for segment in [*self._segments.values(), *([self._home] if self._home else [])]:
                segment.close()
            self._home = None
            self._segments.clear()
            self._places = ([], [])

    def _grow(self, nbytes: int) -> MappedSegment:
        size = max(_SMALLEST, min(self._pool.nbytes, _LARGEST), nbytes)
        size = -(-size // _PAGE) * _PAGE
        return self._add(self._make(size))

    def _make(self, nbytes: int) -> MappedSegment:
        if nbytes > _PHYSICAL:  # the system would promise it, and kill who writes to it
            raise OSError(errno.ENOMEM, f"{nbytes} bytes are more than the memory of this host")
        if not self.available:
            raise OSError("this system has no memfd_create")
        descriptor = os.memfd_create("fsdpcore")
        try:
            number = number_of(os.getpid(), descriptor, next(self._serials))
            os.ftruncate(descriptor, nbytes + MARK.size)
            os.pwrite(descriptor, MARK.pack(number, self._drawn), nbytes)
            return MappedSegment(descriptor, number, nbytes, owned=True)
        except (OSError, OverflowError) as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise
            raise OSError(f"{nbytes} bytes are more than there can be") from error

    def _open(self, number: int) -> MappedSegment:
        path = f"/proc/{process_of(number)}/fd/{descriptor_of(number)}"
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            nbytes = os.fstat(opened).st_size - MARK.size
            mark = os.pread(opened, MARK.size, max(nbytes, 0))
            if len(mark) != MARK.size or MARK.unpack(mark)[0] != number:
                raise OSError("the ranks run in different containers")
            return MappedSegment(opened, number, nbytes, owned=False)
        finally:
            os.close(opened)

    def _add(self, segment: MappedSegment) -> MappedSegment:
        """Register a segment; under the lock. ``locate`` reads without it: what it has stays."""
        addresses, ordered = self._places
        at = bisect.bisect(addresses, segment.address)
        self._places = (
            [*addresses[:at], segment.address, *addresses[at:]],
            [*ordered[:at], segment, *ordered[at:]],
        )
        self._segments[segment.number] = segment
        return segment


def _refuse(nbytes: int) -> Any:
    raise OSError("the backend is closed")


class NoMemory(SharedMemory):
    """Takes the place of ``SharedMemory`` where it is not wanted."""

    available = False

    def empty(self, nbytes: int) -> None:
        """There is none."""

    def _make(self, nbytes: int) -> MappedSegment:
        raise OSError("shm=off")


def memory_sharing(shm: str) -> SharedMemory:
    """What the option ``shm`` of a transport stands for."""
    return NoMemory() if shm == "off" else SharedMemory(required=shm == "on")
