"""Memory into which a rank's share is copied, so that training can go on while it is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpcore.checkpoint.memory.fetching import aligned, fetch
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.device import HOST, Device


class Staging:
    """One block of the host's memory, used again by every save, and as large as the largest.

    Args:
        device: where arrays may be, beside the host.
    """

    def __init__(self, device: Device = HOST) -> None:
        self._device = device
        self._memory: Bytes = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._memory.nbytes

    def copy(self, sources: Sequence[Array]) -> tuple[Array, ...]:
        """Return copies in C order, in NumPy, which are overwritten by the next call; blocks.

        What is on the device is copied after all that this thread has enqueued there.
        """
        offsets, size = [], 0
        for source in sources:
            offsets.append(size)
            size += aligned(source.nbytes)
        if size > self._memory.nbytes:
            self._memory = np.empty(0, np.uint8)  # first free what there was
            self._memory = self._device.page_locked(size)
        copies = []
        pairs = []
        for source, offset in zip(sources, offsets, strict=True):
            flat = self._memory[offset : offset + source.nbytes]
            copy = flat.view(source.dtype).reshape(source.shape)
            if on_host(source):
                np.copyto(copy, source)
            else:
                pairs.append((copy, source))
            copies.append(copy)
        fetch(pairs, self._device)
        return tuple(copies)
