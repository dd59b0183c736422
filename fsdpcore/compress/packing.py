"""Chunks of a flat buffer as bytes: most of it quantised, some parameters as they are.

Pure arithmetic and copying: no communication. A chunk's bytes are first the elements that travel
as they are, as float32, in order; then the others, in order, as ``quantiser.py`` says. Padding
behind the last parameter does not travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from fsdpcore.compress.quantiser import Format

Span = tuple[int, int]
"""First element, and the one behind the last."""

Rooms = tuple[int, int]
"""Bytes of the memory for what is sent, and for what arrives."""


@dataclass(frozen=True)
class Chunk:
    """A part of a flat buffer that one rank sends, or gets; all numbers are elements of the buffer.

    Attributes:
        start, stop: where it lies.
        end: what lies behind it is padding.
        exact: what of it travels as it is.
        coded: what of it is quantised; in order, as ``exact``.
        form: how.
    """

    start: int
    stop: int
    end: int
    exact: tuple[Span, ...]
    coded: tuple[Span, ...]
    form: Format

    @cached_property
    def exact_size(self) -> int:
        """Elements that travel as they are."""
        return sum(stop - start for start, stop in self.exact)

    @cached_property
    def coded_size(self) -> int:
        """Elements that are quantised."""
        return sum(stop - start for start, stop in self.coded)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes: 4 for each exact element, and what the blocks of the rest take."""
        return 4 * self.exact_size + self.form.nbytes(self.coded_size)

    def coded_at(self, start: int, stop: int) -> Iterator[Span]:
        """Give the places in the buffer of quantised elements ``[start, stop)``, counted alone."""
        behind = 0
        for first, last in self.coded:
            begin, end = max(start, behind), min(stop, behind + last - first)
            if begin < end:
                yield first + begin - behind, first + end - behind
            behind += last - first


@dataclass(frozen=True)
class Packing:
    """A flat buffer cut into chunks, one for each rank of a group."""

    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, bounds: Sequence[int], size: int, exact: Sequence[Span], form: Format) -> Packing:
        """Cut a buffer.

        Args:
            bounds: where each chunk begins, and the end of the last one.
            size: elements of the buffer that are no padding.
            exact: what travels as it is; in order, nothing overlaps.
            form: how the rest travels.
        """
        return cls(tuple(_chunk(*each, size, exact, form) for each in pairwise(bounds)))

    @cached_property
    def even(self) -> bool:
        """Whether all chunks take as many bytes, so that no rank has to tell how many."""
        return len(set(self.counts)) <= 1

    @property
    def counts(self) -> list[int]:
        """Bytes of each chunk."""
        return [chunk.nbytes for chunk in self.chunks]

    def gather_sends(self, rank: int) -> int:
        """Bytes that a rank sends so that all have all chunks: its own, to each other rank."""
        return self.chunks[rank].nbytes * (len(self.chunks) - 1)

    def scatter_sends(self, rank: int) -> int:
        """Bytes that a rank sends so that each can sum up its chunk: those of the others."""
        return sum(self.counts) - self.chunks[rank].nbytes

    def gather_rooms(self, rank: int) -> Rooms:
        """Memory that a rank needs so that all have all chunks."""
        return self.chunks[rank].nbytes, sum(self.counts)

    def scatter_rooms(self, rank: int) -> Rooms:
        """Memory that a rank needs so that each can sum up its chunk."""
        return sum(self.counts), self.chunks[rank].nbytes * len(self.chunks)

    def reduce_rooms(self, rank: int) -> Rooms:
        """Memory that a rank needs so that all have the sum: one does for both of these."""
        return largest([self.gather_rooms(rank), self.scatter_rooms(rank)])

    def reduce_sends(self, rank: int) -> int:
        """Bytes that a rank sends so that all have the sum: both of these."""
        return self.scatter_sends(rank) + self.gather_sends(rank)


def largest(rooms: Iterable[Rooms]) -> Rooms:
    """Return the memory that is large enough for each of these."""
    found = list(rooms)
    return max((sent for sent, _ in found), default=0), max((came for _, came in found), default=0)


def _chunk(start: int, stop: int, size: int, exact: Sequence[Span], form: Format) -> Chunk:
    end = max(start, min(stop, size))
    cut = [(max(first, start), min(last, end)) for first, last in exact]
    kept = tuple(_merged([each for each in cut if each[0] < each[1]]))
    borders = [start, *(border for span in kept for border in span), end]
    between = zip(borders[::2], borders[1::2], strict=True)
    return Chunk(start, stop, end, kept, tuple(each for each in between if each[0] < each[1]), form)


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Give spans, neighbours as one."""
    last: Span | None = None
    for span in spans:
        if last is not None and last[1] == span[0]:
            last = (last[0], span[1])
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
