"""Where a collective writes its result, and what to copy first if that overlaps its input."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

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

    def load(self, array: ArrayLike, source: Array) -> None:
        """Begin with the input ``array``, which is ``source`` as an array that travels."""
        if array is not self._given or self._staged:
            np.copyto(self.flat, source.reshape(-1))

    def separate(self, source: Array, low: int, high: int, place: Array) -> Array:
        """Return ``source``, or a copy of it if it overlaps the result; see ``apart``."""
        if self._given is None:
            return source
        return apart(source, self.flat, place, source[low:high], self._device)

    def beside(self, source: Array) -> Array:
        """Return flat ``source``, or a copy of it if it overlaps the result at all."""
        return source.copy() if self._device.overlap(source, self.flat) else source

    def deliver(self) -> Array:
        """Return the result array, filled."""
        if self._staged:
            np.copyto(self._result, self.flat.reshape(self._result.shape))
        return self._result


def apart(
    source: Array,
    out: Array,
    place: Array,
    part: Array | None = None,
    device: Device = HOST,
) -> Array:
    """Return flat ``source``, or a copy of it if it overlaps flat ``out``.

    An algorithm may write to ``out`` before it has read all of ``source``. The one overlap that
    all of them allow is ``part``, all of ``source`` or a piece of it, being exactly ``place``, a
    piece of ``out``: a rank's own chunk in place.
    """
    if source is place or not device.overlap(source, out):
        return source
    part = source if part is None else part
    in_place = device.address(part) == device.address(place) and part.nbytes == place.nbytes
    return source if in_place else source.copy()
