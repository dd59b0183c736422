"""``MemorySharing``: what it means that ranks of one host share memory; transports implement it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.text import name_ranks


class MappedRegion(Protocol):
    """Memory in which the ranks of one group take turns."""

    def close(self) -> None:
        """Let go of the memory; a collective that is still in it raises."""


class Segment(Protocol):
    """Memory that one rank has made for all.

    Attributes:
        number: what the others open it by.
    """

    number: int

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        """An array on a part of it."""

    def close(self) -> None:
        """Let no further rank open it."""


class MemorySharing(Protocol):
    """A way to memory that several ranks see. Arrays on it keep it alive.

    Attributes:
        required: that ranks of one host cannot share memory is an error.
        available: there is such memory.
    """

    required: bool
    available: bool

    def common_region(self, channel: int, rank: int, size: int) -> MappedRegion | None:
        """Return the region of a group, where its ranks find it without a message.

        Args:
            channel: of the group.
            rank, size: as of ``region``.

        Returns:
            None, on all ranks, where they do not.
        """

    def region(self, memory: Bytes, rank: int, size: int) -> MappedRegion:
        """How ``size`` ranks take turns in ``memory``, seen from one of them."""

    def introduce(self) -> bytes:
        """Return at most 64 bytes, not all zero, by which other ranks find this one's memory.

        None at all where no rank needs to be met.

        Raises:
            OSError: there is no such memory; the reason.
        """

    def meet(self, introduction: bytes) -> None:
        """Make sure that the memory of the rank that introduced itself can be opened.

        Raises:
            OSError: it is out of reach; the reason.
        """

    def segment(self, nbytes: int) -> Segment:
        """Make ``nbytes`` zeros; raises OSError if they cannot be had."""

    def open(self, number: int) -> Bytes:
        """Map what another rank has made; raises OSError if it is out of reach."""

    def empty(self, nbytes: int) -> Bytes | None:
        """Return uninitialised memory that ``locate`` knows; None if there is none."""

    def locate(self, array: Array) -> tuple[int, int] | None:
        """Return two numbers of 64 bits by which all ranks find an array; None if they cannot."""

    def attach(self, number: int) -> Bytes:
        """Return the memory that the first of these numbers stands for; the second is an offset."""

    def close(self) -> None:
        """Let nobody map anything any more; arrays stay usable."""


def cannot_share(ranks: Iterable[int], why: str) -> ConfigError:
    """Return the error where shm=on, but some ranks cannot share memory with their host's others.

    Args:
        ranks: those that cannot; numbers in the job.
        why: the reason, if it is known.
    """
    return ConfigError(
        f"shm=on, but {name_ranks(list(ranks))} of this host cannot share memory with the others"
        f"{': ' + why if why else ''}; use shm=auto, which falls back to messages"
    )
