"""Where the arrays of an engine's units are: in memory, or in files that all ranks could make.

On a GPU they are in its memory, or in that of the host.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives import all_gather
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Allocate
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.text import size
from fsdpcore.fsdp.offload.arrays import PersistentArray
from fsdpcore.fsdp.offload.mapped_file import PAGE, MappedFile, check_system, in_memory, pages
from fsdpcore.fsdp.offload.offload import Offload
from fsdpcore.fsdp.offload.offload_store import (
    FileOffloadStore,
    HostOffloadStore,
    OffloadFile,
    OffloadStore,
)
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups

_IN_MEMORY = -1  # not the number of any error of the system


@dataclass(frozen=True)
class OffloadStores:
    """The stores of all units, in their order.

    Attributes:
        file: where they are; None in memory.
    """

    each: Sequence[OffloadStore]
    file: OffloadFile | None = None


def open_stores(
    policy: Offload | None,
    persistent: Sequence[Sequence[PersistentArray]],
    groups: ProcessGroups,
) -> OffloadStores:
    """Make a store for each of several units; a collective if there is a policy.

    Args:
        policy: of the engine.
        persistent: what a rank holds of each unit.
        groups: of ranks.

    Raises:
        ConfigError: a rank cannot have its file, or there are none on a GPU; on all ranks, and no
            file is left.
        UnsupportedError: this is not Linux.
    """
    empty, device = groups.shards.empty, groups.device
    private: Allocate = device.lined_up_zeros if device.on_host else empty
    if policy is None:
        return OffloadStores([OffloadStore(empty, private, each) for each in persistent])
    if not device.on_host:
        if policy.directory is not None:
            raise ConfigError(
                f"this engine computes on a GPU ({device}), where Offload keeps arrays in the "
                "memory of the host, and has no files: leave out the directory, Offload()"
            )
        return OffloadStores(
            [HostOffloadStore(policy, empty, private, device.pinned, each) for each in persistent]
        )
    starts, total = [], 0
    for each in persistent:
        starts.append(total)
        total += sum(pages(array.nbytes) for array in each if array.kind in policy.kinds)
    file = OffloadFile(policy, _open(policy, groups.everyone, max(total, PAGE)))
    made = [
        FileOffloadStore(file, policy, empty, private, start, each)
        for start, each in zip(starts, persistent, strict=True)
    ]
    return OffloadStores(made, file)


def _open(policy: Offload, backend: Backend, nbytes: int) -> MappedFile:
    """Make this rank's file; all ranks have theirs, or raise."""
    if policy.directory is None:
        raise ConfigError(
            "this engine computes on the host, where Offload needs a directory on a disk for its "
            "files: Offload('/scratch')"
        )
    check_system()
    directory = os.fspath(policy.directory)
    _refuse(backend, directory, _shared(backend, _look(directory, nbytes)))
    file, failed = None, 0
    try:
        file = MappedFile(directory, nbytes)
    except OSError as error:
        failed = error.errno or errno.EIO
    _refuse(backend, directory, _shared(backend, [failed, nbytes, nbytes, 0]))
    assert file is not None
    return file


def _look(directory: str, nbytes: int) -> list[int]:
    """What could be wrong, bytes that are needed and free, and the disk."""
    try:
        if not os.path.isdir(directory):
            os.listdir(directory)  # for its error
        kind = in_memory(directory)
        found = os.statvfs(directory)
        device = os.stat(directory).st_dev
    except OSError as error:
        return [error.errno or errno.EIO, nbytes, 0, 0]
    # Some file systems do not say how large they are; to make the file is the test there.
    free = found.f_bavail * found.f_frsize if found.f_blocks else np.iinfo(np.int64).max
    return [_IN_MEMORY if kind else 0, nbytes, free, device]


def _shared(backend: Backend, row: Iterable[int]) -> NDArray[np.int64]:
    rows: Any = all_gather(np.array(list(row), np.int64), backend, label="offload")
    return np.asarray(rows).reshape(backend.world_size, -1)


def _refuse(backend: Backend, directory: str, table: NDArray[np.int64]) -> None:
    """Raise for the first rank that cannot have its file, in the same words on all ranks."""
    for number, (failed, nbytes, free, device) in enumerate(table.tolist()):
        beside = [
            other
            for other in range(backend.world_size)
            if backend.hosts[other] == backend.hosts[number] and table[other, 3] == device
        ]
        together = sum(table[beside, 1].tolist()) if device else nbytes
        why = ""
        if failed == _IN_MEMORY:
            why = "is on a file system in memory, so nothing would be gained; name one on a disk"
        elif failed:
            why = f"cannot be used: {os.strerror(failed)}"
        elif together > free:
            others = "" if len(beside) == 1 else f", with the others on this disk {size(together)}"
            why = f"has {size(free)} free, which is too little{others}"
        if why:
            raise ConfigError(
                f"offload: rank {backend.ranks[number]} needs a file of {size(nbytes)} "
                f"({nbytes} bytes) in {directory!r}, which {why}"
            )
