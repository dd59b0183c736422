"""Where a collective writes its result, and what to copy first if that overlaps its input."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import HOST, Device


class Output:
    """The result of a collective: the caller's array, or a new one.

    Attributes:
        flat: flat contiguous memory to communicate into; the result's own where that is contiguous.
    """

    __slots__ = ("_device", "_given", "_result", "_staged", "flat")

    def __init__(
        self,
        out: Array | None,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: Device = HOST,
    ) -> None:
        self._given = out
        self._device = device
        self._result = result = (
            device.empty(shape, dtype) if out is None else device.check_out(out, shape, dtype)
        )
        self._staged = not result.flags.c_contiguous
        if self._staged:
            self.flat = device.empty(result.size, dtype)
        else:
            self.flat = result if result.ndim == 1 else result.reshape(-1)

    @property
    def held(self) -> int:
        """Bytes that were allocated here, and that a queued operation therefore holds."""
        fresh = self._result.nbytes if self._given is None else 0
        return fresh + (self.flat.nbytes if self._staged else 0)

    def separate(self, source: Array, operation: Operation, layout: Layout, rank: int) -> Array:
        """Return flat ``source``, or a copy of it if it overlaps the result; see ``separated``."""
        if self._given is None:
            return source
        return separated(source, self.flat, operation, layout, rank, self._device)

    def deliver(self) -> Array:
        """Return the result array, filled."""
        if self._staged:
            np.copyto(self._result, self.flat.reshape(self._result.shape))
        return self._result


def separated(
    source: Array,
    out: Array,
    operation: Operation,
    layout: Layout,
    rank: int,
    device: Device = HOST,
) -> Array:
    """Return flat ``source`` as an algorithm may read it while it writes to flat ``out``.

    It may write to ``out`` before it has read all of ``source``. The one overlap that all
    algorithms allow is a rank's own part in place. Where the two are the same memory, the result
    is ``out`` itself; where they overlap in any other way, it is a copy.
    """
    if source is not out and not device.overlap(source, out):
        return source
    parts = operation.own_parts(layout, rank)
    if parts is None:
        return source.copy()
    if source is out:
        return out
    part, place = source[parts[0]], out[parts[1]]
    if device.address(part) == device.address(place) and part.nbytes == place.nbytes:
        return out if source.nbytes == out.nbytes else source
    return source.copy()
