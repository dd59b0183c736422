"""``establish``: the ranks of a group find out whether they have memory in common, and make it."""

from __future__ import annotations

import logging
import os

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives.algorithms import doubling
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.shared.region import SharedRegion, nbytes
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.sharing import MemorySharing, Segment, cannot_share
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.text import rank_list

_LOG = logging.getLogger("fsdpcore")

_INTRODUCTION = 64
_CORES = 1024  # those with higher numbers count as others


def establish(context: CollectiveContext, backend: Backend) -> SharedRegion | None:
    """Make the region of a group, or find out that there can be none; the same on all ranks.

    Called by all ranks of the group. They introduce themselves to each other, the first one makes
    memory, and they tell each other whether they could reach all of that.

    Raises:
        ConfigError: there can be none, and the transport was told that there has to be.
    """
    sharing = backend.root.memory
    if sharing is None or context.size == 1 or len(set(backend.hosts)) > 1:
        return None
    found = sharing.common_region(backend.channel, context.rank, context.size)
    if found is not None:
        assert isinstance(found, SharedRegion), "what all transports give"
        return found
    window, introduction, why = None, b"", ""
    try:
        introduction = sharing.introduce()
        if context.rank == 0:
            window = sharing.segment(nbytes(context.size))
    except (OSError, MemoryError) as error:
        why = str(error) or repr(error)
    try:
        memory, votes, why, cores = _map(context, sharing, window, introduction, why)
    finally:
        if window is not None:
            window.close()
    if memory is not None:
        region = sharing.region(memory, context.rank, context.size)
        assert isinstance(region, SharedRegion), "what all transports give"
        here = backend.hosts[backend.rank]
        if backend.root.hosts.count(here) > cores:
            # Ranks share cores. Who looks for long takes the core from whom it waits for. And what
            # the other one has written is in the same cache, which turns would only fill.
            region.looks, region.turns = 0, 1
        return region
    if votes.argmin() == context.rank:  # one rank speaks for all
        _report(backend, sharing, why)
    if sharing.required:
        without = [context.global_rank(rank) for rank in range(context.size) if not votes[rank]]
        raise cannot_share(without, why)
    return None


def _map(
    context: CollectiveContext,
    sharing: MemorySharing,
    window: Segment | None,
    introduction: bytes,
    why: str,
) -> tuple[Bytes | None, NDArray[np.bool_], str, int]:
    """Map the first rank's memory; None, on all ranks, if one of them cannot reach all others'.

    Returns:
        Also which ranks could, why this one could not, and on how many cores all of them may run.
    """
    own = np.zeros(_INTRODUCTION + 8 + _CORES // 8, np.uint8)
    own[: len(introduction)] = np.frombuffer(introduction, np.uint8)
    made = np.array([window.number if window else 0], np.uint64)
    own[_INTRODUCTION : _INTRODUCTION + 8] = made.view(np.uint8)
    own[_INTRODUCTION + 8 :] = _cores()
    told = np.zeros(own.size * context.size, np.uint8)
    doubling.all_gather(context, own, told, range(0, told.size + 1, own.size))
    memory = None
    try:
        number = int(told[_INTRODUCTION : _INTRODUCTION + 8].view(np.uint64)[0])
        if number and not why:
            for rank in range(context.size):
                words = told[rank * own.size :][:_INTRODUCTION]
                if words.any():  # who has none says so itself
                    sharing.meet(words.tobytes())
            memory = window.bytes(0, nbytes(context.size)) if window else sharing.open(number)
    except (OSError, MemoryError) as error:
        why = str(error) or repr(error)
    votes = np.zeros(context.size, np.bool_)
    doubling.all_gather(context, np.array([not why]), votes, range(context.size + 1))
    masks = told.reshape(context.size, own.size)[:, _INTRODUCTION + 8 :]
    cores = int(np.unpackbits(np.bitwise_or.reduce(masks)).sum())
    return (memory if votes.all() else None), votes, why, cores


def _cores() -> Bytes:
    """On which cores this process may run, a bit for each."""
    bits = np.zeros(_CORES, np.uint8)
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    for core in allowed:
        bits[core % _CORES] = 1
    return np.packbits(bits)


def _report(backend: Backend, sharing: MemorySharing, why: str) -> None:
    """Log that there is no region, as a warning where that may be news: once for all groups."""
    root = backend.root
    level = logging.WARNING if sharing.available and not root.warned else logging.INFO
    root.warned = root.warned or level == logging.WARNING
    _LOG.log(
        level,
        "rank %d cannot share memory with the others on its host, messages are sent among ranks "
        "%s: %s",
        root.rank,
        rank_list(backend.ranks),
        why,
    )
