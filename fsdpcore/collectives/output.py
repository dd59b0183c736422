"""Where a collective writes its result, and what to copy first if that overlaps its input."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdpcore.buffers import Array, check_out


class Output:
    """The result of a collective: the caller's array, or a new one.

    Attributes:
        flat: flat contiguous memory to communicate into; the result's own where that is contiguous.
    """

    def __init__(self, out: Array | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._result = np.empty(shape, dtype) if out is None else check_out(out, shape, dtype)
        self._direct = bool(self._result.flags.c_contiguous)
        self.flat = self._result.reshape(-1) if self._direct else np.empty(self._result.size, dtype)

    def deliver(self) -> Array:
        """Return the result array, filled."""
        if not self._direct:
            np.copyto(self._result, self.flat.reshape(self._result.shape))
        return self._result


def separate(source: Array, source_part: Array, target: Array, target_part: Array) -> Array:
    """Return ``source``, or a copy of it if ``target`` overlaps it.

    An algorithm may write to ``target`` before it has read all of ``source``. The one overlap that
    all of them allow is ``source_part`` being exactly ``target_part``: a rank's own chunk in place.
    """
    if not np.may_share_memory(source, target):
        return source
    in_place = (
        source_part.ctypes.data == target_part.ctypes.data
        and source_part.nbytes == target_part.nbytes
    )
    return source if in_place else source.copy()
