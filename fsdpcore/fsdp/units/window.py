"""One window for the parameters of all units, where the ranks can share memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdpcore.collectives import barrier
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import CACHE_LINE, Array
from fsdpcore.core.errors import UnsupportedError
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.work import Work

_LOG = logging.getLogger("fsdpcore")


@dataclass(frozen=True)
class ParameterWindow:
    """The flat buffers of all units in memory that all ranks see.

    Attributes:
        flats: one per unit, of shape ``(layout.padded_size,)``; zeros.
        nbytes: of all memory, which exists once for all ranks.
    """

    flats: tuple[Array, ...]
    nbytes: int


class WindowMeetings:
    """Collectives without data: who leaves one sees what all had written when they entered.

    Attributes:
        begun: how many; the same on all ranks.
        pending: the latest, if it was begun in the background, to be waited for.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.pending: Work | None = None

    def begin(self, ranks: Backend, label: str, *, async_op: bool) -> None:
        """Begin another one; blocks until all have entered, unless ``async_op``."""
        if ranks.world_size > 1:
            self.pending = barrier(ranks, async_op=async_op, label=label)
        self.begun += 1


def open_window(layouts: Sequence[FlatLayout], backend: Backend) -> ParameterWindow | None:
    """Return a window for units with these ``layouts``, or None if there can be none.

    There can be if all ranks are on one host and the transport has windows; not on GPUs, each of
    which has memory of its own. A collective; all ranks get the same answer. A rank that is alone
    needs no transport for it.
    """
    if len(set(backend.hosts)) > 1 or not backend.device.on_host:
        return None
    sizes = [layout.padded_size * layout.dtype.itemsize for layout in layouts]
    bounds = [0, *itertools.accumulate(-(-size // CACHE_LINE) * CACHE_LINE for size in sizes)]
    if not bounds[-1]:
        return None
    if backend.world_size == 1:
        memory = backend.device.lined_up((bounds[-1],), np.uint8)
        memory.fill(0)
    else:
        try:
            memory = backend.shared_window((bounds[-1],), np.uint8)
        except UnsupportedError as error:  # raised on all ranks, or on none
            if backend.rank == 0:
                _LOG.info("parameters are gathered, not kept in shared memory: %s", error)
            return None
    flats = tuple(
        memory[start : start + size].view(layout.dtype)
        for start, size, layout in zip(bounds[:-1], sizes, layouts, strict=True)
    )
    return ParameterWindow(flats, bounds[-1])
