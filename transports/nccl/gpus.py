"""Which GPU a rank computes on, and that no two ranks take the same one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cupy.cuda import nccl, runtime

from fsdpcore.collectives import all_gather
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.text import name_ranks

from .missing import no_gpu

_UUID_BYTES, _BUS_BYTES = 16, 16
# CuPy cuts UUIDs off at their first zero byte. So much of one is enough.
_ENOUGH = 8
# Since this one, NCCL can be told to let ranks share a GPU.
_SHARES_GPUS = 23000


class Gpu(NamedTuple):
    """A GPU, as all ranks see it."""

    uuid: bytes
    bus: str

    def pack(self) -> bytes:
        """Encode it."""
        bus = self.bus.encode(errors="replace")[:_BUS_BYTES].ljust(_BUS_BYTES, b"\0")
        return self.uuid.ljust(_UUID_BYTES, b"\0")[:_UUID_BYTES] + bus

    @classmethod
    def unpack(cls, data: bytes) -> Gpu:
        """Decode it."""
        return cls(data[:_UUID_BYTES], data[_UUID_BYTES:].rstrip(b"\0").decode(errors="replace"))

    def place(self, host: int) -> tuple[Any, ...]:
        """Return what is equal for two ranks that have the same one: ``host`` is the rank's."""
        known = self.uuid.rstrip(b"\0")
        return (known,) if len(known) >= _ENOUGH else (host, self.bus)

    def __str__(self) -> str:
        shown = self.uuid.hex()
        parts = [shown[:8], shown[8:12], shown[12:16], shown[16:20], shown[20:]]
        return f"GPU-{'-'.join(parts)} (PCI {self.bus})"


def count_gpus() -> int:
    """How many GPUs this process can use.

    Raises:
        MissingDependencyError: none; says why.
    """
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise no_gpu(error.status, str(error), runtime.runtimeGetVersion()) from None
    if not count:
        raise no_gpu(0, "CUDA finds no device", runtime.runtimeGetVersion())
    return count


def choose(place: RankPlace, hosts: Sequence[int], wanted: int) -> int:
    """Return the ordinal of the GPU for a rank.

    Args:
        place: who it is. Its number on its host counts if the launcher says it.
        hosts: the number of each rank's host, by which it is found otherwise.
        wanted: the ordinal that was asked for; -1 for one to each rank of the host.

    Raises:
        MissingDependencyError: there is no GPU at all.
        ConfigError: not enough of them.
    """
    count = count_gpus()
    if wanted >= 0:
        if wanted < count:
            return wanted
        raise ConfigError(
            f"device={wanted}: rank {place.rank} sees {count} GPUs, which are numbered from 0"
        )
    rank = place.rank
    local_rank = place.local_rank if place.local_known else hosts[:rank].count(hosts[rank])
    if local_rank < count:
        return local_rank
    if count == 1:  # the launcher shows every rank its own
        return 0
    raise ConfigError(
        f"rank {rank} is number {local_rank} on its host, which has {count} GPUs, and "
        "every rank needs one: start fewer ranks per host, or name GPUs with the option 'device' "
        "(share_gpu=true lets ranks share one)"
    )


def name_of(ordinal: int) -> str:
    """What a GPU is called."""
    return bytes(runtime.getDeviceProperties(ordinal)["name"]).rstrip(b"\0").decode()


def identify(ordinal: int) -> Gpu:
    """Find out by what a GPU can be told from any other."""
    properties = runtime.getDeviceProperties(ordinal)
    return Gpu(bytes(properties["uuid"]), str(runtime.deviceGetPCIBusId(ordinal)))


def check_distinct(group: Backend, mine: Gpu, share: bool, seconds: float) -> None:
    """Tell each other who has which GPU; NCCL would hang where two ranks have the same.

    Args:
        group: all ranks, in their order.
        mine: what this rank has.
        share: let it be.
        seconds: how long that may take.

    Raises:
        RendezvousError: two do.
        PeerFailedError: another rank has found that out first.
    """
    record = np.frombuffer(mine.pack(), np.uint8)
    rows = all_gather(record[np.newaxis], group, timeout=seconds)
    gpus = [Gpu.unpack(row.tobytes()) for row in rows]
    owners: dict[tuple[Any, ...], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        owners.setdefault(gpu.place(group.hosts[rank]), []).append(rank)
    shared = [ranks for ranks in owners.values() if len(ranks) > 1]
    if shared and not share:
        said = "; ".join(f"{name_ranks(ranks)} have {gpus[ranks[0]]}" for ranks in shared)
        raise RendezvousError(
            f"every rank needs a GPU of its own, but {said}: start fewer ranks per host, show "
            "every rank another GPU (CUDA_VISIBLE_DEVICES, or the option 'device'), or let them "
            "share it with share_gpu=true, which is for tests"
        )


def let_share(rank: int) -> None:
    """Have NCCL accept ranks that share a GPU. Before its first communicator."""
    if nccl.get_version() >= _SHARES_GPUS:
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    else:  # it looks whether two ranks of one host have the same
        os.environ.setdefault("NCCL_HOSTID", f"fsdpcore-{os.getpid()}-{rank}")
