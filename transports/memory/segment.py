"""``MappedSegment``: an anonymous file of the kernel that this process has mapped.

A segment is named by a number of 64 bits: its process, its descriptor there, and how many
segments that process had made before. The last 16 bytes of every segment repeat that number and
what the process has drawn at random: process numbers repeat in other containers.
"""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np

from fsdpcore.core.buffers import Array, Bytes

MARK = struct.Struct("<QQ")  # at the end of every segment: its number, and the drawn one
_DESCRIPTOR_BITS, _SERIAL_BITS = 20, 22


def number_of(process: int, descriptor: int, serial: int) -> int:
    """The number of a segment that a process has made.

    Raises:
        OSError: descriptors have grown too large for it.
    """
    if descriptor >> _DESCRIPTOR_BITS:
        raise OSError("too many open files")
    serial %= 1 << _SERIAL_BITS
    return (process << _DESCRIPTOR_BITS | descriptor) << _SERIAL_BITS | serial


def process_of(number: int) -> int:
    """The process that has made the segment of that number."""
    return number >> (_DESCRIPTOR_BITS + _SERIAL_BITS)


def descriptor_of(number: int) -> int:
    """The segment's descriptor in that process."""
    return number >> _SERIAL_BITS & ((1 << _DESCRIPTOR_BITS) - 1)


def address_of(array: Array) -> int:
    """Where an array begins."""
    address: int = array.__array_interface__["data"][0]
    return address


class MappedSegment:
    """Mapped memory.

    Attributes:
        number: what other processes open it by.
        nbytes: its size without the mark at the end.
        address: where it is mapped.
        memory: what arrays are made on.
        descriptor: of the file; -1 in processes that did not make it.
    """

    def __init__(self, descriptor: int, number: int, nbytes: int, *, owned: bool) -> None:
        self.number, self.nbytes = number, nbytes
        self.memory = mmap.mmap(descriptor, nbytes + MARK.size)
        self.address = address_of(np.frombuffer(self.memory, np.uint8))
        self.descriptor = descriptor if owned else -1

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        """An array on a part of the memory, which lives as long as the array."""
        return np.ndarray((nbytes,), np.uint8, self.memory, offset)

    def marked(self, number: int, drawn: int) -> bool:
        """Whether the segment was made under that number, by the process that has drawn that."""
        return bool(MARK.unpack_from(self.memory, self.nbytes) == (number, drawn))

    def close(self) -> None:
        """Let no further process open the segment; the memory goes with the last array on it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
