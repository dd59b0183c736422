"""Loads into arrays of a device: batch by batch through one window of the host's memory.

What is wanted of a batch lies, wherever it goes, in the same stretch of the line that the catalog
thinks of. So the ranks, whose parts of arrays differ, need the same blocks in the same batch, and
can share the reads of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fsdpcore.checkpoint.memory.fetching import aligned, fetch
from fsdpcore.checkpoint.memory.shards import Part
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import ReadPlan, WantedPart, plan_reads
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import Device
from fsdpcore.core.geometry.regions import Box, Range

STRETCH_BYTES = 16 << 20
"""Of the line, for a batch. A row that begins in it is taken as a whole: at most twice as much."""


@dataclass(frozen=True)
class LoadBatch:
    """What is read at a time, and where it goes from there.

    Attributes:
        number: the same one on all ranks for what they may share.
        plan: what to read into the host's memory.
        device: of the targets below.
        windows: flat or not, of the host and of the device, to be copied when all is read.
        kept: those of them that are not stored in full, so that they need what there was.
    """

    number: int
    plan: ReadPlan
    device: Device
    windows: list[tuple[Array, Array]] = field(default_factory=list)
    kept: list[tuple[Array, Array]] = field(default_factory=list)

    def begin(self) -> None:
        """Prepare the windows, which other batches have as well; blocks."""
        fetch(self.kept, self.device)

    def end(self) -> None:
        """Write what was read to where it belongs."""
        for window, target in self.windows:
            self.device.write(target, window)


def planned(
    catalog: Catalog, wanted: Sequence[WantedPart], device: Device
) -> tuple[list[LoadBatch], list[int]]:
    """Find what to read for ``wanted``, none of which is empty, and in which order.

    Arrays of the host are filled by the first batch, number 0, in place.

    Args:
        catalog: of what is stored.
        wanted: parts of arrays, of the host or of ``device``.
        device: see there.

    Returns:
        Batches in ascending order of their numbers; and the positions in ``wanted`` of what is not
        stored in full, ascending.
    """
    here = [position for position, each in enumerate(wanted) if on_host(each.part.array)]
    plan = plan_reads(catalog, [wanted[position] for position in here])
    batches = [LoadBatch(0, plan, device)]
    uncovered = {here[index] for index in plan.uncovered}
    slabs: dict[int, list[tuple[int, Part]]] = {}
    for position, (tensor, part) in enumerate(wanted):
        if not on_host(part.array):
            for number, slab in _slabs(catalog, tensor, part):
                slabs.setdefault(number, []).append((position, slab))
    sizes = [sum(aligned(slab.array.nbytes) for _, slab in each) for each in slabs.values()]
    memory = device.page_locked(max(sizes)) if sizes else np.empty(0, np.uint8)
    for number, each in sorted(slabs.items()):
        windows = []
        filled = []
        used = 0
        for position, (region, target) in each:
            flat = memory[used : used + target.nbytes]
            window = flat.view(target.dtype).reshape(target.shape)
            used += aligned(target.nbytes)
            windows.append((window, target))
            filled.append(WantedPart(wanted[position].tensor, Part(region, window)))
        plan = plan_reads(catalog, filled)
        kept = [windows[index] for index in plan.uncovered]
        uncovered.update(each[index][0] for index in plan.uncovered)
        batches.append(LoadBatch(1 + number, plan, device, windows, kept))
    return batches, sorted(uncovered)


def _slabs(catalog: Catalog, number: int, part: Part) -> Iterator[tuple[int, Part]]:
    """Cut a part into those that are read at a time, each with the number of its stretch."""
    tensor = catalog.tensors[number]
    base, itemsize = int(catalog.base[number]), tensor.dtype.itemsize
    region, array = part
    if isinstance(region, Box):
        yield from _slabs_of_box(region, array, tensor.shape, itemsize, base)
        return
    for stretch, start, stop in _cut(region.start, region.stop, itemsize, base):
        taken = array[start - region.start : stop - region.start]
        yield stretch, Part(Range(start, stop), taken)


def _slabs_of_box(
    box: Box, array: Array, shape: tuple[int, ...], itemsize: int, base: int, axis: int = 0
) -> Iterator[tuple[int, Part]]:
    """Cut a box, whose extent along all axes before ``axis`` is 1, along that and those behind it.

    Args:
        box, array: the part.
        shape: of the tensor.
        itemsize: of its elements.
        base: where on the line the first element behind the index before ``axis`` is.
        axis: along which to cut.
    """
    if axis == len(shape):
        yield base // STRETCH_BYTES, Part(box, array)
        return
    first, last = box.start[axis], box.stop[axis]
    pitch = itemsize * math.prod(shape[axis + 1 :])
    if pitch > STRETCH_BYTES:
        for row in range(first, last):
            inner = _narrowed(box, array, axis, row, row + 1)
            yield from _slabs_of_box(*inner, shape, itemsize, base + row * pitch, axis + 1)
        return
    for stretch, start, stop in _cut(first, last, pitch, base):
        yield stretch, Part(*_narrowed(box, array, axis, start, stop))


def _narrowed(box: Box, array: Array, axis: int, start: int, stop: int) -> tuple[Box, Array]:
    """Return what a box has between two indices along an axis."""
    begin = box.start[axis]
    index = (slice(None),) * axis + (slice(start - begin, stop - begin),)
    low = (*box.start[:axis], start, *box.start[axis + 1 :])
    high = (*box.stop[:axis], stop, *box.stop[axis + 1 :])
    return Box(low, high), array[index]


def _cut(first: int, last: int, pitch: int, base: int) -> Iterator[tuple[int, int, int]]:
    """Group items ``[first, last)`` by the stretch in which they begin: its number, and which.

    Args:
        first, last: see there.
        pitch: bytes from one item to the next.
        base: where item 0 is on the line.
    """
    while first < last:
        stretch = (base + first * pitch) // STRETCH_BYTES
        behind = -(-((stretch + 1) * STRETCH_BYTES - base) // pitch)
        stop = min(behind, last)
        yield stretch, first, stop
        first = stop
