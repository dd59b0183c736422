"""``shared_window``: one array that the ranks of a host have in common."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.collectives.arguments import remembered, spec_for
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.operations.all_gather import all_gather
from fsdpcore.collectives.run import run
from fsdpcore.collectives.shared.region import region_of
from fsdpcore.collectives.spec import CallSpec
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.sharing import MemorySharing
from fsdpcore.core.buffers import Array, Bytes
from fsdpcore.core.checks import as_allocatable
from fsdpcore.core.errors import UnsupportedError
from fsdpcore.core.text import name_ranks, rank_list

_LOG = logging.getLogger("fsdpcore")


def shared_window(backend: Backend, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
    """Make the array; see ``Backend.shared_window``."""
    kind = np.dtype(dtype)
    sizes = as_allocatable(shape, kind, "the array of shared_window()")
    call = remembered(backend, _shared_window, kind, sizes)
    if backend.world_size == 1:
        return np.zeros(sizes, kind)
    sharing = backend.root.memory
    if sharing is None:
        raise _unsupported(backend, "it has none, or shm=off")
    if len(set(backend.hosts)) > 1:
        return _on_every_host(backend, sizes, kind)

    def body(context: CollectiveContext) -> Array | None:
        found = _map(context, sharing, math.prod(sizes) * kind.itemsize)
        return None if found is None else found.view(kind).reshape(sizes)

    found: Array | None = run(backend, call, body, timeout=None, async_op=False)
    if found is None:
        off = sharing is not None and not sharing.available
        raise _unsupported(backend, "shm=off" if off else "the log says why, at level INFO")
    return found


def _on_every_host(backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Make one array on each host; if one of them cannot, there is none on any."""
    made, why = None, UnsupportedError("")
    try:
        made = shared_window(backend.host_group(), shape, dtype)
    except UnsupportedError as error:
        why = error
    able = all_gather(np.array([made is not None]), backend)
    if made is None:
        raise why
    if not able.all():
        without = [backend.ranks[rank] for rank in np.flatnonzero(~able)]
        raise _unsupported(backend, f"{name_ranks(without)} share none with others on their host")
    return made


def _shared_window(backend: Backend, dtype: np.dtype[Any], shape: tuple[int, ...]) -> CallSpec:
    return spec_for(backend, "shared_window", None, dtype, shape)


def _map(context: CollectiveContext, sharing: MemorySharing, nbytes: int) -> Bytes | None:
    """Let the first rank make memory and all map it; the same outcome on all ranks."""
    region = region_of(context)
    if region is None:
        return None
    window, memory, why = None, None, ""
    try:
        window = sharing.segment(max(nbytes, 1)) if context.rank == 0 else None
    except (OSError, MemoryError) as error:
        why = str(error)
    try:
        number = region.exchange(context, window.number if window else 0)[0]
        try:
            if number:
                memory = window.bytes(0, nbytes) if window else sharing.open(number)[:nbytes]
        except (OSError, MemoryError) as error:
            why = str(error)
        complete = all(region.exchange(context, memory is not None))
    finally:
        if window is not None:
            window.close()
    if why:
        rank = context.global_rank(context.rank)
        _LOG.info("rank %d has no memory for a window of %d bytes: %s", rank, nbytes, why)
    return memory if complete else None


def _unsupported(backend: Backend, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the ranks {rank_list(backend.ranks)} of transport {backend.capabilities.transport!r} "
        f"share no memory for a window ({why}); use empty() and a collective"
    )
