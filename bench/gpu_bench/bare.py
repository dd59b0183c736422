"""NCCL through CuPy alone: what our collectives are compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore.bench.cases import Case

Step = Callable[[], None]


class Bare:
    """A communicator of its own among the ranks of a backend.

    Args:
        backend: tells the id to all ranks, over the host.
    """

    def __init__(self, backend: fc.Backend) -> None:
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        self._cupy: Any = backend.device.xp
        told = np.zeros(128, np.uint8)
        if backend.rank == 0:
            told[:] = np.frombuffer(self._nccl.get_unique_id(), np.uint8)
        identity = fc.broadcast(told, backend).tobytes()
        self.rank, self.size = backend.rank, backend.world_size
        self._communicator = self._nccl.NcclCommunicator(self.size, identity, self.rank)

    def step(self, case: Case, source: Any, output: Any) -> Step:
        """Prepare a collective of float32 sums on the null stream; a call of it enqueues it.

        Args:
            case: what to do.
            source, output: flat arrays of the GPU; the same one for in place.
        """
        nccl, call = self._nccl, self._communicator
        kind, total = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
        stream = self._cupy.cuda.get_current_stream().ptr
        at = source.data.ptr if source is not None else 0
        to = output.data.ptr if output is not None else 0
        count, root = case.count, case.root
        steps: dict[str, Step] = {
            "all_reduce": lambda: call.allReduce(at, to, count, kind, total, stream),
            "all_gather": lambda: call.allGather(at, to, count, kind, stream),
            "reduce_scatter": lambda: call.reduceScatter(at, to, count, kind, total, stream),
            "broadcast": lambda: call.broadcast(at, to, count, kind, root, stream),
            "reduce": lambda: call.reduce(at, to or at, count, kind, total, root, stream),
            "all_to_all": lambda: self._exchange(at, to, case, everyone, everyone),
            "gather": lambda: self._exchange(at, to, case, [root], everyone if root == me else []),
            "scatter": lambda: self._exchange(at, to, case, everyone if root == me else [], [root]),
        }
        me, everyone = self.rank, list(range(self.size))
        return steps[case.operation]

    def _exchange(
        self, at: int, to: int, case: Case, receivers: list[int], senders: list[int]
    ) -> None:
        """Send a chunk to each receiver and receive one from each sender, in one group."""
        nccl, call = self._nccl, self._communicator
        kind, stream = nccl.NCCL_FLOAT32, self._cupy.cuda.get_current_stream().ptr
        count, chunk = case.count, case.count * case.numpy_dtype.itemsize
        sends_all, receives_all = case.operation != "gather", case.operation != "scatter"
        nccl.groupStart()
        for rank in receivers:
            call.send(at + rank * chunk * sends_all, count, kind, rank, stream)
        for rank in senders:
            call.recv(to + rank * chunk * receives_all, count, kind, rank, stream)
        nccl.groupEnd()

    def close(self) -> None:
        """Destroy the communicator; all ranks do so."""
        self._communicator.destroy()
