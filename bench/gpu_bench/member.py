"""The program of a rank that trains: as in ``fsdpcore.bench.member``, with these orders.

==========  ===============================================  ======================
order       what is done                                     answer
==========  ===============================================  ======================
prepare     make the model of a case                         nothing
losses      ``count`` untimed steps                          this rank's losses
run         ``warmup`` untimed steps, a barrier, then        seconds of the
            ``iterations`` steps until the GPU is done       ``iterations``
memory      look                                             bytes that the library had of the
                                                             GPU at most since ``prepare``
release     forget the model                                 nothing
==========  ===============================================  ======================
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from fsdp_bench.cases import OURS, PEER, WITHOUT
from fsdp_bench.job import Job

import fsdpcore as fc
from fsdpcore.bench.contestants import Ours
from fsdpcore.bench.member import serve
from gpu_bench.cases import OFFLOAD, PLAIN, Step, from_order
from gpu_bench.jobs import OurStep, PlainStep

Make = Callable[[str, Step], Job]


class StepMember:
    """A rank of contestants that share its process.

    Args:
        versions: of libraries.
        make: makes the job of a contestant.
        reset, peak: of the memory that its library has of the GPU; only where one is prepared.
        leave: called at the end.
    """

    def __init__(
        self,
        versions: Mapping[str, dict[str, str]],
        make: Make,
        reset: Callable[[], None],
        peak: Callable[[], int],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.versions = dict(versions)
        self._make, self._reset, self._peak, self._leave = make, reset, peak, leave
        self._jobs: dict[str, Job] = {}

    def obey(self, order: Mapping[str, Any]) -> list[float]:
        """Carry out one order of the table in the module docstring."""
        do, name = order["do"], order["contestant"]
        if do == "prepare":
            self._release(name)
            self._reset()
            self._jobs[name] = self._make(name, from_order(order["case"]))
            return []
        if do == "release":
            self._release(name)
            return []
        if do == "losses":
            return self._jobs[name].losses(order["count"])
        if do == "memory":
            return [float(self._peak())]
        return [_timed(self._jobs[name], order["warmup"], order["iterations"])]

    def _release(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            job.close()
        gc.collect()  # hooks of PyTorch's modules refer to each other

    def close(self) -> None:
        """Leave."""
        for name in list(self._jobs):
            self._release(name)
        self._leave()


def _timed(job: Job, warmup: int, iterations: int) -> float:
    for _ in range(warmup):
        job.step()
    enabled = gc.isenabled()
    gc.disable()
    try:
        job.barrier()
        started = time.perf_counter()
        for _ in range(iterations):
            job.step()
        job.barrier()
        return time.perf_counter() - started
    finally:
        if enabled:
            gc.enable()


def _ours(backend: fc.Backend, options: Mapping[str, Any]) -> None:
    """All of ours in one process, so that there is one GPU context for them."""
    xp = backend.device.xp

    def make(contestant: str, case: Step) -> Job:
        if contestant == PLAIN:
            return PlainStep(case, backend)
        prefetch = 0 if contestant == WITHOUT else case.prefetch
        return OurStep(case, backend, prefetch=prefetch, offload=contestant == OFFLOAD)

    def reset() -> None:
        backend.device.synchronize()
        xp.get_default_memory_pool().free_all_blocks()

    def peak() -> int:
        # CuPy's pool keeps what it ever had: what it has now is the peak since it was emptied.
        return int(xp.get_default_memory_pool().total_bytes())

    versions = Ours(backend).versions
    names = (OURS, WITHOUT, OFFLOAD, PLAIN)
    member = StepMember(dict.fromkeys(names, versions), make, reset, peak)
    serve(backend.rank, backend.world_size, member, options["path"])


def _peer(options: Mapping[str, Any]) -> None:
    peer = importlib.import_module("gpu_bench.peer")
    rank, ranks = options["rank"], options["world_size"]
    group = peer.GpuGroup(rank, ranks, options["store"], share_gpu=options["share_gpu"])

    def make(contestant: str, case: Step) -> Job:
        group.choose(case.precision)
        job: Job = peer.PeerStep(case, group)
        return job

    versions = {PEER: group.versions}
    member = StepMember(versions, make, peer.reset_peak, peer.peak, group.close)
    serve(rank, ranks, member, options["path"])


def main() -> None:
    """Become the rank that the first argument describes, in JSON."""
    options = json.loads(sys.argv[1])
    if options["contestant"] == OURS:
        fc.launch(_ours, args=(options,))
    else:
        _peer(options)


if __name__ == "__main__":
    main()
