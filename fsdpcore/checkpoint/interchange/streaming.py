"""Elements from a source to whatever takes bytes, in few and large strokes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fsdpcore.checkpoint.interchange.array_sources import ArrayRegion, ArraySource, ProgressCallback
from fsdpcore.checkpoint.interchange.selection import SelectedArray
from fsdpcore.checkpoint.memory.rounding import rounded
from fsdpcore.core.buffers import byte_view
from fsdpcore.core.geometry.regions import Region

_SMALL = 64 << 10
_GATHERED = 1 << 20


class WriteBuffer:
    """Passes bytes on, small ones together.

    Args:
        write: takes them, in order; they are the caller's again when it returns.
    """

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write
        self._waiting = bytearray()

    def write(self, data: memoryview) -> None:
        """Take bytes, which are the caller's again when this returns."""
        if data.nbytes < _SMALL:
            self._waiting += data
            if len(self._waiting) >= _GATHERED:
                self.flush()
            return
        self.flush()
        self._write(data)

    def flush(self) -> None:
        """Pass on what is left."""
        if self._waiting:
            self._write(memoryview(self._waiting))
            self._waiting = bytearray()


class ProgressCounter:
    """Tells how far a transfer has come.

    Args:
        total: bytes in all.
        progress: who wants to know.
    """

    def __init__(self, total: int, progress: ProgressCallback | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress
        self.add(0)

    def add(self, nbytes: int) -> None:
        """Say that so many more bytes are done."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def streamed(
    source: ArraySource, taken: Sequence[tuple[SelectedArray, Region]], counting: ProgressCounter
) -> Iterator[memoryview]:
    """Give the bytes of a region of each array, in C order, with the dtype that it takes.

    They are little-endian and overwritten when the next ones are asked for. Of each array all but
    the last bytes given are whole blocks of checksums.
    """
    wants = [ArrayRegion(each.source, region) for each, region in taken]
    for index, array in source.stream(wants):
        data = byte_view(rounded(array, taken[index][0].array.dtype)).data
        yield data
        counting.add(data.nbytes)
