"""The program of a rank that trains on a GPU: a job makes the steps of a case."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from fsdp_bench.cases import PEER, WITHOUT
from fsdp_bench.job import StepJob
from fsdp_bench.training import Alone, OurTraining

import fsdpcore as fc
from fsdpcore.bench.contestants import versions_of_ours
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.member import CaseRunner, Member, Options, become_rank
from fsdpcore.bench.harness.memory import Memory
from gpu_bench.cases import OFFLOAD, PLAIN, PRECISIONS, GpuTraining


class OnGpu(CaseRunner):
    """A job whose steps have ended when the GPU has done them.

    Args:
        job: makes the steps.
        barrier: until all ranks are here, and their GPUs have done what they were given.
        peak: bytes that the library had of the GPU at most since the job was made.
    """

    def __init__(self, job: StepJob, barrier: Callable[[], None], peak: Callable[[], int]) -> None:
        self._job, self._barrier, self._peak = job, barrier, peak
        self.losses = job.losses

    def barrier(self) -> None:
        self._barrier()

    def call(self) -> Callable[[], object]:
        return self._job.step

    def finish(self) -> None:
        self._barrier()

    def memory(self) -> list[float]:
        """That of the GPU."""
        return replace(Memory.now(), peak_rss=self._peak()).as_answer()

    def close(self) -> None:
        self._job.close()


def _ours(backend: fc.Backend, options: Options) -> Member:
    """All of ours in one process, so that there is one GPU context for them."""
    xp: Any = backend.device.xp

    def barrier() -> None:
        backend.device.synchronize()
        backend.barrier()

    def peak() -> int:
        # CuPy's pool keeps what it ever had: what it has now is the peak since it was emptied.
        return int(xp.get_default_memory_pool().total_bytes())

    def make(contestant: str, order: Mapping[str, Any]) -> CaseRunner:
        backend.device.synchronize()
        xp.get_default_memory_pool().free_all_blocks()
        case = GpuTraining(**order)
        precision = PRECISIONS[case.precision]
        if contestant == PLAIN:
            alone = Alone(case, backend.rank, backend.world_size, xp, precision)
            return OnGpu(alone, barrier, peak)
        if contestant == WITHOUT:
            case = replace(case, prefetch=0)
        offload = fc.Offload() if contestant == OFFLOAD else None
        ours = OurTraining(case, backend, precision=precision, offload=offload, watched=False)
        return OnGpu(ours, barrier, peak)

    names = (OURS, WITHOUT, OFFLOAD, PLAIN)
    versions = dict.fromkeys(names, versions_of_ours(backend))
    return Member({name: partial(make, name) for name in names}, versions)


def _peer(options: Options) -> Member:
    peer = importlib.import_module("gpu_bench.peer")
    group = peer.GpuGroup.of(options)

    def make(order: Mapping[str, Any]) -> CaseRunner:
        peer.reset_peak()
        case = GpuTraining(**order)
        group.choose(case.precision)
        return OnGpu(peer.PeerTraining(case, group), group.barrier, peer.peak)

    return Member({PEER: make}, {PEER: group.versions}, group.close)


if __name__ == "__main__":
    become_rank(_ours, _peer)
