"""Memory that processes of one host share, without a name that could outlive them.

The memory is an anonymous file of the kernel (``memfd``), which another process of the same user
opens through ``/proc``. It is gone with the last process that has it mapped, however that ends;
and it does not come out of ``/dev/shm``, which is tiny in many containers. A random token tells
whether what was opened is what was meant: process numbers repeat in other containers.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct

from fsdpcore.errors import ConfigError

# process, descriptor, size, token
_OFFER = struct.Struct("<QQQ16s")


class SharedMemory:
    """The memory that one process has offered to others or has mapped."""

    def __init__(self) -> None:
        self._offered: dict[bytes, int] = {}

    def offer(self, nbytes: int) -> bytes:
        """Make memory of ``nbytes`` zeros; return what ``map`` needs in another process.

        Raises:
            OSError: the system has none, or no such thing.
        """
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        descriptor = os.memfd_create("fsdpcore")
        token = secrets.token_bytes(16)
        try:
            os.ftruncate(descriptor, nbytes + len(token))
            os.pwrite(descriptor, token, nbytes)
        except OSError:
            os.close(descriptor)
            raise
        offer = _OFFER.pack(os.getpid(), descriptor, nbytes, token)
        self._offered[offer] = descriptor
        return offer

    def map(self, offer: bytes) -> memoryview:
        """Return memory that was offered, mapped for reading and writing, without its token.

        Raises:
            OSError: it is out of reach.
        """
        process, number, nbytes, token = _OFFER.unpack_from(offer)
        own = self._offered.get(offer[: _OFFER.size])
        if own is None:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        else:
            descriptor = own
        try:
            if own is None and os.pread(descriptor, len(token) + 1, nbytes) != token:
                raise OSError("the ranks run in different containers")
            return memoryview(mmap.mmap(descriptor, nbytes + len(token)))[:nbytes]
        finally:
            if own is None:
                os.close(descriptor)

    def forget(self, offer: bytes) -> None:
        """Let go of what this process has offered; who has it mapped keeps it."""
        os.close(self._offered.pop(offer[: _OFFER.size]))


class NoMemory:
    """Takes the place of ``SharedMemory`` where it is not wanted."""

    def offer(self, nbytes: int) -> bytes:
        """Refuse."""
        raise OSError("shm=off")

    def map(self, offer: bytes) -> memoryview:
        """Refuse."""
        raise OSError("shm=off")

    def forget(self, offer: bytes) -> None:
        """Nothing to forget."""


def check_option(shm: str) -> None:
    """Raise ``ConfigError`` if a transport's option ``shm`` has no meaning."""
    if shm not in ("auto", "off"):
        raise ConfigError(f"shm must be 'auto' or 'off', got {shm!r}")


def memory_sharing(shm: str) -> SharedMemory | NoMemory:
    """What the option ``shm`` of a transport stands for."""
    return SharedMemory() if shm == "auto" else NoMemory()
