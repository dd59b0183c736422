"""``CollectiveMethods``: the methods of a ``Backend`` that are collectives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.collectives.device_transport import DeviceTransport
from fsdpcore.collectives.operations.all_gather import all_gather
from fsdpcore.collectives.operations.barrier import barrier
from fsdpcore.collectives.operations.table import OPERATIONS
from fsdpcore.collectives.operations.window import shared_window
from fsdpcore.collectives.state import CollectiveState
from fsdpcore.comm.backend import SubBackend
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int64
from fsdpcore.core.errors import UnsupportedError


class CollectiveMethods(CollectiveState):
    """The collectives of one group as ``Backend`` calls them; see its methods."""

    operations = OPERATIONS

    def barrier(self, timeout: float | None) -> None:
        """Block until every rank of the group has called it."""
        barrier(self.backend, timeout=timeout)

    def split(self, color: int | None, key: int, timeout: float | None) -> SubBackend | None:
        """Make a group of the ranks that give the same color."""
        backend, mine = self.backend, np.zeros(3, np.int64)
        if transport_of(backend).alike is not None:
            raise UnsupportedError(
                "split(): played=one: nobody gives the colors of the other ranks; make the group "
                "with sub(), or play all (played=all)"
            )
        if color is not None:
            mine[:] = 1, as_int64(color, "split(): color (None for no group)"), 0
        mine[2] = as_int64(key, "split(): key")
        every = all_gather(mine, backend, timeout=timeout, label="split").reshape(-1, 3)
        made = None
        if color is not None:
            alike = np.flatnonzero((every[:, :2] == mine[:2]).all(axis=1))
            in_order = np.argsort(every[alike, 2], kind="stable")
            made = backend.sub(alike[in_order].tolist())
        if isinstance(backend.root, DeviceTransport):
            backend.root.was_split(backend, made)
        return made

    def shared_window(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        """Make one array that all ranks of a host see."""
        return shared_window(self.backend, shape, dtype)

    def close(self) -> None:
        """Give back the memory that this rank shares because of the group."""
        backend = self.backend
        if self.device_twin is not None:
            self.device_twin.close()
        # Another thread may be in a collective; if it does not end, the memory goes with the group.
        lock, root = backend.order.lock, backend.root
        if self.context is not None and lock.acquire(timeout=backend.timeout):
            try:
                for region in self.context.regions:
                    if region in root.regions:
                        root.regions.discard(region)
                        region.close()
            finally:
                lock.release()
