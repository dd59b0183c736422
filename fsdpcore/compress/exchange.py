"""Collectives of flat buffers that travel packed; each value is quantised once in each of them.

::

    all_gather      each rank packs its chunk; all chunks go to all; everyone unpacks all of them
    reduce_scatter  each rank packs the chunks of all; each chunk goes to its rank, which unpacks
                    and sums up, in float32 and in the canonical order
    all_reduce      reduce_scatter, then all_gather of the sums

Each rank unpacks its own chunk as well, so that all have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fsdpcore.collectives import all_gather, all_gather_v
from fsdpcore.collectives.operations.all_to_all import ALL_TO_ALL
from fsdpcore.collectives.operations.perform import perform
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm.backend import Backend
from fsdpcore.compress.on_gpu import GpuQuantiser
from fsdpcore.compress.packing import Chunk, Packing
from fsdpcore.compress.quantiser import Bytes, Floats, Format, Quantiser
from fsdpcore.core.reductions import Reduction

# Scratch memory for what ranks have sent of a chunk, at most.
_MOST_TILES = 16


class Exchange:
    """Moves flat buffers of float32 among the ranks of a group. For one thread at a time.

    Its methods are collectives of the group, in one order on all ranks, which also have the same
    packings and labels. They raise the errors of collectives (``MismatchError``, ...). Arrays are
    contiguous, and may be changed or freed when a method has returned.

    On the host the methods block. Arrays of a GPU are those of the group's device; there the
    methods enqueue on the current stream, which has to be the same one for all of them.

    Args:
        group: the ranks; chunk r of a packing is that of rank r.
        form: how what is quantised travels.
        algorithm: of the collectives; those that do not have it choose one.
    """

    def __init__(self, group: Backend, form: Format, algorithm: str = "auto") -> None:
        self.group = group
        self._gathering = _known(algorithm, "all_gather")
        self._exchanging = _known(algorithm, "all_to_all")
        self.form = form
        self._device = device = group.device
        self._quantiser = Quantiser(form) if device.on_host else GpuQuantiser(device.xp, form)
        self._tile = self._quantiser.tile
        self._sum = Reduction.of("sum", np.dtype(np.float32), converts=device.on_host)
        self._rooms: dict[str, Bytes] = {}
        self._scratch = device.empty((2, self._tile), np.float32)

    @property
    def nbytes(self) -> int:
        """Of the memory for what is packed, which is kept for the next collective."""
        return sum(room.size for room in self._rooms.values())

    def all_gather(
        self,
        own: Floats,
        packing: Packing,
        flat: Floats,
        label: str,
        *,
        differences: bool = False,
        received: Bytes | None = None,
    ) -> None:
        """Have the chunks of all ranks; see the module's docstring.

        Args:
            own: this rank's chunk.
            packing: of ``flat``.
            flat: gets all chunks; ``own`` may be a part of it, but for ``differences``.
            label: of the collective.
            differences: what is quantised is by how much the chunks differ from ``flat``, which all
                ranks have alike.
            received: gets the bytes of all chunks, which are ``sum(packing.counts)``, for
                ``unpack``; None for memory of its own.
        """
        mine = packing.chunks[self.group.rank]
        packed = self._room("sent", mine.nbytes)
        self._pack(own, mine, packed, base=flat[mine.start : mine.stop] if differences else None)
        self._all_gather_packed(
            packed, packing, flat, label, differences=differences, received=received
        )

    def reduce_scatter(
        self, flat: Floats, packing: Packing, own: Floats, residual: Floats | None, label: str
    ) -> None:
        """Have the sum of all ranks' values of this rank's chunk; see the module's docstring.

        Args:
            flat: of all chunks; only read.
            packing: of it.
            own: gets the sum; may be a part of ``flat``.
            residual: what quantising has left out so far, as large as ``flat``: it is added, and
                what is left out this time is there afterwards. None for no such thing.
            label: of the collective.
        """
        counts = packing.counts
        mine = packing.chunks[self.group.rank]
        sent = self._room("sent", sum(counts))
        for chunk, part in zip(packing.chunks, _cut(sent, counts), strict=True):
            here = slice(chunk.start, chunk.stop)
            kept = None if residual is None else residual[here]
            self._pack(flat[here], chunk, part, residual=kept)
        arriving = [mine.nbytes] * len(counts)
        received = self._room("received", sum(arriving))
        # All ranks know all counts: with these, nothing is exchanged beforehand.
        options: dict[str, Any] = {"algorithm": self._exchanging, "label": label}
        known = () if packing.even else tuple(counts)
        perform(ALL_TO_ALL, sent, self.group, received, None, False, **options, counts=known)
        self._add_up(_cut(received, arriving), mine, own)

    def all_reduce(
        self,
        flat: Floats,
        packing: Packing,
        out: Floats,
        residuals: tuple[Floats | None, Floats | None],
        label: str,
    ) -> None:
        """Have the sum of all ranks' values, on all of them; see the module's docstring.

        Args:
            flat, packing, label: as of ``reduce_scatter``.
            out: gets the sum; may be ``flat``.
            residuals: as of ``reduce_scatter``; the second is of this rank's chunk of the sum.
        """
        mine = packing.chunks[self.group.rank]
        own = out[mine.start : mine.stop]
        self.reduce_scatter(flat, packing, own, residuals[0], label)
        packed = self._room("sent", mine.nbytes)
        self._pack(own, mine, packed, residual=residuals[1])
        self._all_gather_packed(packed, packing, out, f"{label}, the sum")

    def _all_gather_packed(
        self,
        packed: Bytes,
        packing: Packing,
        flat: Floats,
        label: str,
        *,
        differences: bool = False,
        received: Bytes | None = None,
    ) -> None:
        if received is None:
            received = self._room("received", sum(packing.counts))
        options: dict[str, Any] = {"algorithm": self._gathering, "label": label}
        if packing.even:
            all_gather(packed, self.group, out=received, **options)
        else:
            all_gather_v(packed, self.group, counts=packing.counts, out=received, **options)
        self.unpack(received, packing, flat, differences=differences)

    def unpack(
        self, received: Bytes, packing: Packing, flat: Floats, *, differences: bool = False
    ) -> None:
        """Unpack the chunks of all ranks; moves nothing between them.

        Args:
            received: what ``all_gather`` has received.
            packing: as it was there.
            flat: gets all chunks, or what is quantised is added to it.
            differences: see ``all_gather``.
        """
        for chunk, part in zip(packing.chunks, _cut(received, packing.counts), strict=True):
            out = flat[chunk.start : chunk.stop]
            self._add_up([part], chunk, out, add=differences)

    def _room(self, name: str, nbytes: int) -> Bytes:
        """Return memory that is used again in the next collective."""
        room = self._rooms.get(name)
        if room is None or room.size < nbytes:
            self._rooms.pop(name, None)
            room = self._rooms[name] = self.group.empty((nbytes,), np.uint8)
        return room[:nbytes]

    def _pack(
        self,
        values: Floats,
        chunk: Chunk,
        packed: Bytes,
        *,
        residual: Floats | None = None,
        base: Floats | None = None,
    ) -> None:
        """Pack a chunk: with the ``residual`` of the last time, or as differences to ``base``."""
        xp, border = self._device.xp, 4 * chunk.exact_size
        exact, coded = packed[:border].view(np.float32), packed[border:]
        behind = 0
        for start, stop in chunk.exact:
            exact[behind : behind + stop - start] = values[start - chunk.start : stop - chunk.start]
            behind += stop - start
        one, other = self._scratch.reshape(-1)[: 2 * self._tile].reshape(2, -1)
        for begin in range(0, chunk.coded_size, self._tile):
            end = min(begin + self._tile, chunk.coded_size)
            places = _places(chunk, begin, end)
            given = _joined(values, places, one)
            if base is not None:
                there = _joined(base, places, other)
                given = xp.subtract(given, there, out=one[: end - begin])
            if residual is None:
                self._quantiser.encode(given, coded, begin)
                continue
            tile = one[: end - begin]
            kept = _joined(residual, places, other)
            with np.errstate(over="ignore", invalid="ignore"):
                xp.add(given, kept, out=tile)
            self._quantiser.encode(tile, coded, begin)
            back = other[: end - begin]
            self._quantiser.decode(coded, back, begin)
            with np.errstate(invalid="ignore"):
                xp.subtract(tile, back, out=tile)
            # What is inf or nan is found in this step, and does not come again in the next.
            xp.copyto(tile, 0, where=~xp.isfinite(tile))
            _put(tile, residual, places)

    def _add_up(
        self, parts: Sequence[Bytes], chunk: Chunk, out: Floats, *, add: bool = False
    ) -> None:
        """Unpack what ranks have sent of a chunk, sum it up, and write it where it belongs.

        With ``add`` what was quantised is added to what is there.
        """
        border = 4 * chunk.exact_size
        sums = self._device.empty(chunk.exact_size, np.float32)
        self._reduce([part[:border].view(np.float32) for part in parts], sums)
        _put(sums, out, [slice(a - chunk.start, b - chunk.start) for a, b in chunk.exact])
        # Of so many ranks that their tiles would be large together, less is summed up at once.
        size = self._tile * min(_MOST_TILES, len(parts)) // len(parts)
        size = max(size // chunk.form.block, 1) * chunk.form.block
        shape = (max(2, len(parts)), size)
        if self._scratch.size < math.prod(shape):
            self._scratch = self._device.empty(shape, np.float32)
        rows = self._scratch.reshape(-1)[: math.prod(shape)].reshape(shape)
        for begin in range(0, chunk.coded_size, size):
            end = min(begin + size, chunk.coded_size)
            places = _places(chunk, begin, end)
            direct = len(places) == 1 and not add
            target = out[places[0]] if direct else rows[0, : end - begin]
            if len(parts) == 1:
                self._quantiser.decode(parts[0][border:], target, begin)
            else:
                values = [row[: end - begin] for row in rows[: len(parts)]]
                for part, row in zip(parts, values, strict=True):
                    self._quantiser.decode(part[border:], row, begin)
                self._reduce(values, target)
            if add:
                self._device.xp.add(_joined(out, places, rows[1]), target, out=target)
            if not direct:
                _put(target, out, places)
        out[chunk.end - chunk.start :] = 0

    def _reduce(self, parts: Sequence[Floats], out: Floats) -> None:
        if self._device.on_host:
            self._sum.reduce(parts, out)
        else:
            self._sum.reduce_at_once(parts, out, self._device.empty)


def _known(algorithm: str, collective: str) -> str:
    return algorithm if algorithm in ALGORITHMS[collective] else "auto"


def _cut(joined: Bytes, counts: Sequence[int]) -> list[Bytes]:
    """Return the parts of what is joined."""
    ends = list(accumulate(counts))
    return [joined[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _places(chunk: Chunk, start: int, stop: int) -> list[slice]:
    """Return where in a chunk some of its quantised elements are."""
    first = chunk.start
    return [slice(a - first, b - first) for a, b in chunk.coded_at(start, stop)]


def _joined(values: Floats, places: Sequence[slice], room: Floats) -> Floats:
    """Return what is at some places as one array: a view, or copied to ``room``."""
    if len(places) == 1:
        return values[places[0]]
    behind = 0
    for place in places:
        size = place.stop - place.start
        room[behind : behind + size] = values[place]
        behind += size
    return room[:behind]


def _put(values: Floats, out: Floats, places: Sequence[slice]) -> None:
    """Write what is joined to its places."""
    behind = 0
    for place in places:
        size = place.stop - place.start
        out[place] = values[behind : behind + size]
        behind += size
