"""Memory into which a rank's share is copied, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpcore.buffers import Array, Bytes

_ALIGNMENT = 64


class Staging:
    """One block of memory, used again by every save, and as large as the largest."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._memory.nbytes

    def copy(self, sources: Sequence[Array]) -> tuple[Array, ...]:
        """Return copies in C order, which are overwritten by the next call."""
        offsets, size = [], 0
        for source in sources:
            offsets.append(size)
            size += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.nbytes:
            self._memory = np.empty(0, np.uint8)  # first free what there was
            self._memory = np.empty(size, np.uint8)
        copies = []
        for source, offset in zip(sources, offsets, strict=True):
            flat = self._memory[offset : offset + source.nbytes]
            copy = flat.view(source.dtype).reshape(source.shape)
            np.copyto(copy, source)
            copies.append(copy)
        return tuple(copies)
