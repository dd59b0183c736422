"""First values of deferred parameters: a rank keeps its own elements only, made block by block.

A run of the whole, such as rows, is made alone, in the time of its elements. Of a box with gaps,
such as columns, a rank draws whole blocks and picks: that saves memory, but hardly any time, since
each rank draws nearly all that there is (half of the columns take 0.8 of the time of the whole).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.buffers import Array
from fsdpcore.device import Device
from fsdpcore.fsdp.boxes import ArrayBox
from fsdpcore.fsdp.initializers import BLOCK_ELEMENTS
from fsdpcore.fsdp.spec import Spec

# Elements that do not have the buffer's dtype, or go to a GPU, are made so many at a time.
_BLOCK = 1 << 20


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
        for done in range(0, out.size, BLOCK_ELEMENTS):
            chunk = out[done : done + BLOCK_ELEMENTS]
            _pick(chunk, spec, _places(box, start + done, chunk.size), seed, name)


def _pick(out: NDArray[Any], spec: Spec, places: NDArray[np.int64], seed: int, name: str) -> None:
    """Write the elements at these places of the whole, which ascend, to ``out``.

    As initialisers draw block by block, each block that has some of them is made once, from the
    first of these to the last.
    """
    blocks = places // BLOCK_ELEMENTS
    firsts = np.flatnonzero(np.diff(blocks, prepend=-1))
    for first, stop in zip(firsts, [*firsts[1:], places.size], strict=True):
        here = places[first:stop]
        made = np.empty(int(here[-1] - here[0]) + 1, spec.dtype)
        spec.init.fill(made, int(here[0]), seed=seed, name=name)
        out[first:stop] = made[here - here[0]]


def _places(box: ArrayBox, start: int, size: int) -> NDArray[np.int64]:
    """Return where elements of a box, both flattened in C order, lie in the whole."""
    inside = np.unravel_index(np.arange(start, start + size), box.shape)
    indices = tuple(index + first for index, first in zip(inside, box.start, strict=True))
    return np.asarray(np.ravel_multi_index(indices, box.whole), np.int64)
