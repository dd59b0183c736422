"""First values of deferred parameters: a rank keeps its own elements only, made block by block.

A run of the whole, such as rows, is made alone, in the time of its elements. Of a box with gaps,
such as columns, a rank draws whole blocks and picks: that saves memory, but no time, since each
rank draws nearly all that there is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.buffers import Array
from fsdpcore.core.device import Device
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.fsdp.units.initializers import BLOCK_ELEMENTS
from fsdpcore.fsdp.units.spec import Spec

# Elements that do not have the buffer's dtype, or go to a GPU, are made so many at a time.
_BLOCK = 1 << 20

_SPAN = 4  # blocks of initialisers that are made at a time


def fill(device: Device, target: Array, spec: Spec, start: int, *, seed: int, name: str) -> None:
    """Write the elements of a parameter, flattened, that begin at ``start``, as many as fit.

    They are made on the host, in the parameter's own dtype; ``target`` may have another. Of a box
    they are those that the whole would have there, which takes memory for some blocks.

    Args:
        device: of ``target``.
        target: 1-D, written.
        spec: of the parameter; ``start`` counts elements of its box if it has one.
        start: the first element.
        seed: of the engine.
        name: of the parameter: ``unit.param``.
    """
    if device.on_host and spec.dtype == target.dtype:
        _make(target, spec, start, seed, name)
        return
    scratch = np.empty(min(_BLOCK, target.size), spec.dtype)
    for done in range(0, target.size, _BLOCK):
        block = target[done : done + _BLOCK]
        _make(scratch[: block.size], spec, start + done, seed, name)
        device.write(block, scratch[: block.size])


def _make(out: NDArray[Any], spec: Spec, start: int, seed: int, name: str) -> None:
    box = spec.box
    if box is None or not out.size:
        spec.init.fill(out, start, seed=seed, name=name)
    elif box.run is not None:
        spec.init.fill(out, box.run[0] + start, seed=seed, name=name)
    else:
        _pick(out, spec, box, start, seed, name)


def _pick(out: NDArray[Any], spec: Spec, box: ArrayBox, start: int, seed: int, name: str) -> None:
    """Write elements of a box with gaps: make spans of the whole, and take its rows out of them.

    A span is of a few blocks, in which initialisers draw, so that hardly any is made twice.
    """
    axis = max(k for k, extent in enumerate(box.shape) if extent != box.whole[k])
    length = math.prod(box.shape[axis:])  # of a row of the box, without gaps
    most = _SPAN * BLOCK_ELEMENTS // math.prod(box.whole[axis:]) + 1  # rows that a span can have
    number, skip = divmod(start, length)
    done = 0
    while done < out.size:
        rows = _rows(box, axis, number, min(most, -(-(skip + out.size - done) // length)))
        end = (rows[0] // BLOCK_ELEMENTS + _SPAN) * BLOCK_ELEMENTS
        rows = rows[: max(1, int(np.searchsorted(rows + length, end, side="right")))]
        count = min(rows.size * length - skip, out.size - done)
        first, target = int(rows[0]), out[done : done + count]
        if rows.size == 1:
            spec.init.fill(target, first + skip, seed=seed, name=name)
        else:
            made = np.empty(int(rows[-1]) - first + length, spec.dtype)
            spec.init.fill(made, first, seed=seed, name=name)
            taken = np.lib.stride_tricks.sliding_window_view(made, length)[rows - first]
            target[:] = taken.reshape(-1)[skip : skip + count]
        number, skip, done = number + rows.size, 0, done + count


def _rows(box: ArrayBox, axis: int, first: int, count: int) -> NDArray[np.int64]:
    """Return where rows of a box, counted over the axes before ``axis``, begin in the whole."""
    inside = np.unravel_index(np.arange(first, first + count), box.shape[:axis])
    indices = [index + low for index, low in zip(inside, box.start, strict=False)]
    places = np.ravel_multi_index(tuple(indices), box.whole[:axis])
    inner = math.prod(box.whole[axis + 1 :])
    return np.asarray((places * box.whole[axis] + box.start[axis]) * inner, np.int64)
