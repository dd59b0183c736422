"""The program of a rank: as in ``fsdpcore.bench.member``, with these orders.

==========  ================================================  ==========================
order       what is done                                      answer
==========  ================================================  ==========================
prepare     make the state of a case                          nothing
save        a barrier, then save ``step`` in ``folder``       seconds
load        a barrier, then load it                           seconds
stall       a barrier, begin to save in the background;       seconds of that, and until
            change all values; wait; put them back            it was durable
copy        a barrier, then copy the rank's share             seconds
memory      do what ``of`` says, untimed                      bytes that it added to the
                                                              resident set at its peak
spoil       change all values                                 nothing
wrong       compare all values                                number of wrong elements
==========  ================================================  ==========================
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsdpcore as fc
from checkpoint_bench.cases import COPY, LIMIT, LOAD, OURS, PEER, SAVE, STALL, Case
from checkpoint_bench.job import Job
from checkpoint_bench.ours import Limit, OurJob
from fsdpcore.bench.contestants import Ours
from fsdpcore.bench.member import serve, timed
from fsdpcore.bench.memory import peak_rss, reset_peak


class CheckpointMember:
    """A rank of the contestants that share a process and a state.

    Args:
        make: makes the jobs of a case, by contestant.
        versions: of libraries, by contestant.
        leave: called at the end.
    """

    def __init__(
        self,
        make: Callable[[Case], dict[str, Job]],
        versions: dict[str, dict[str, str]],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.versions = versions
        self._make = make
        self._leave = leave
        self._jobs: dict[str, Job] = {}

    def obey(self, order: Mapping[str, Any]) -> list[float]:
        """Carry out one order of the table in the module docstring."""
        do = order["do"]
        if do == "prepare":
            self._jobs = self._make(Case(**order["case"]))
            gc.collect()
            return []
        job = self._jobs[order["contestant"]]
        if do == "memory":
            return [_added(lambda: _carried_out(job, order["of"], order))]
        return _carried_out(job, do, order)

    def close(self) -> None:
        """Leave."""
        for job in reversed(self._jobs.values()):
            job.close()
        self._jobs = {}
        self._leave()


def _carried_out(job: Job, do: str, order: Mapping[str, Any]) -> list[float]:
    if do == "spoil":
        job.spoil()
        return []
    if do == "wrong":
        return [float(job.wrong())]
    if do == "copy":
        assert isinstance(job, Limit)
        return [timed(job.barrier, job.copy, 0, 1)]
    folder, step = Path(order["folder"]), order["step"]
    if do == STALL:
        return _stall(job, folder, step)
    if do == SAVE:
        job.threads = order["threads"]
        return [timed(job.barrier, lambda: job.save(folder, step), 0, 1)]
    assert do == LOAD
    return [timed(job.barrier, lambda: job.load(folder, step), 0, 1)]


def _stall(job: Job, folder: Path, step: int) -> list[float]:
    job.barrier()
    began = time.perf_counter()
    wait = job.save_async(folder, step)
    stall = time.perf_counter() - began
    job.spoil()  # as a training would; what is stored is not to notice
    wait()
    durable = time.perf_counter() - began
    job.fill()
    return [stall, durable]


def _added(do: Callable[[], object]) -> float:
    reset_peak()
    before = peak_rss()
    do()
    return float(peak_rss() - before)


def _ours(backend: fc.Backend, options: Mapping[str, Any]) -> None:
    def make(case: Case) -> dict[str, Job]:
        ours = OurJob(case, backend)
        limit = Limit(ours, backend.rank, backend.world_size)
        return {OURS: ours, LIMIT: limit, COPY: limit}

    versions = Ours(backend).versions
    member = CheckpointMember(make, dict.fromkeys((OURS, LIMIT, COPY), versions))
    serve(backend.rank, backend.world_size, member, options["path"])


def _peer(options: Mapping[str, Any]) -> None:
    peer = importlib.import_module("checkpoint_bench.peer")
    rank, ranks = options["rank"], options["world_size"]
    group = peer.Group(rank, ranks, options["store"], options["threads"])

    def make(case: Case) -> dict[str, Job]:
        return {PEER: peer.PeerJob(case, group)}

    member = CheckpointMember(make, {PEER: group.versions}, group.close)
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
