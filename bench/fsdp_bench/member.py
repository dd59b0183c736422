"""The program of a rank: as in ``fsdpcore.bench.member``, with these orders.

==========  ===============================================  ======================
order       what is done                                     answer
==========  ===============================================  ======================
prepare     make the model of a case                         nothing
check       one untimed step on known values                 number of wrong elements
losses      ``count`` untimed steps                          this rank's losses
run         ``warmup`` untimed steps, a barrier, then        seconds of the
            ``iterations`` steps back to back                ``iterations``
split       ``count`` untimed steps                          seconds, and those of computing
before      nothing                                          memory before the first
memory      two untimed steps                                memory at its highest
release     forget the model                                 nothing
==========  ===============================================  ======================

Memory is that of the process, as in ``fsdpcore.bench.memory``: its id, resident, proportional.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import fsdpcore as fc
from fsdp_bench.cases import ALONE, OURS, PEER, WITHOUT, Case, Exchange, Training, from_order
from fsdp_bench.exchange import OurExchange
from fsdp_bench.job import Job
from fsdp_bench.training import Alone, OurTraining
from fsdpcore.bench.contestants import Ours
from fsdpcore.bench.member import serve, timed
from fsdpcore.bench.memory import Memory, PssSampler, reset_peak

_STEPS_FOR_MEMORY = 2


class StepMember:
    """A rank of one contestant.

    Args:
        contestant: its name.
        make: makes its job.
        versions: of libraries.
        leave: called at the end.
    """

    def __init__(
        self,
        contestant: str,
        make: Callable[[Case], Job],
        versions: dict[str, str],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.versions = {contestant: versions}
        self._make = make
        self._leave = leave
        self._job: Job | None = None
        self._before = Memory.now()

    def obey(self, order: Mapping[str, Any]) -> list[float]:
        """Carry out one order of the table in the module docstring."""
        do = order["do"]
        if do == "prepare":
            self._release()
            self._job = self._make(from_order(order["case"]))
            return []
        if do == "release":
            self._release()
            return []
        if do == "before":
            return self._before.as_answer()
        assert self._job is not None
        if do == "check":
            return [float(self._job.check())]
        if do == "losses":
            return self._job.losses(order["count"])
        if do == "split":
            return self._job.split(order["count"])
        if do == "memory":
            return _highest(self._job).as_answer()
        return [timed(self._job.barrier, self._job.step, order["warmup"], order["iterations"])]

    def _release(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None
            gc.collect()  # hooks of PyTorch's modules refer to each other

    def close(self) -> None:
        """Leave."""
        self._release()
        self._leave()


def _highest(job: Job) -> Memory:
    """Memory in steps as they are timed; that of making the model and of checks does not count."""
    job.barrier()
    reset_peak()
    with PssSampler() as sampler:
        for _ in range(_STEPS_FOR_MEMORY):
            job.step()
        job.barrier()
    now = Memory.now()
    return Memory(now.process, now.peak_rss, max(sampler.highest, now.pss))


def _ours(backend: fc.Backend, options: Mapping[str, Any]) -> None:
    contestant = options["contestant"]

    def make(case: Case) -> Job:
        if contestant == WITHOUT:
            case = replace(case, prefetch=0)
        if isinstance(case, Exchange):
            return OurExchange(case, backend)
        return OurTraining(case, backend)

    member = StepMember(contestant, make, Ours(backend).versions)
    serve(backend.rank, backend.world_size, member, options["path"])


def _alone(options: Mapping[str, Any]) -> None:
    rank, ranks = options["rank"], options["world_size"]

    def make(case: Case) -> Job:
        assert isinstance(case, Training)
        return Alone(case, rank, ranks)

    with threadpool_limits(options["threads"], user_api="blas"):
        member = StepMember(ALONE, make, {"numpy": np.__version__})
        serve(rank, ranks, member, options["path"])


def _peer(options: Mapping[str, Any]) -> None:
    exchange = importlib.import_module("fsdp_bench.peer_exchange")
    training = importlib.import_module("fsdp_bench.peer_training")
    rank, ranks = options["rank"], options["world_size"]
    group = exchange.Group(rank, ranks, options["store"], options["threads"])

    def make(case: Case) -> Job:
        job: Job
        if isinstance(case, Exchange):
            job = exchange.PeerExchange(case, group)
        else:
            job = training.PeerTraining(case, group)
        return job

    serve(rank, ranks, StepMember(PEER, make, group.versions, group.close), options["path"])


def main() -> None:
    """Become the rank that the first argument describes, in JSON."""
    options = json.loads(sys.argv[1])
    if options["contestant"] in (OURS, WITHOUT):
        fc.launch(_ours, args=(options,))
    elif options["contestant"] == ALONE:
        _alone(options)
    else:
        _peer(options)


if __name__ == "__main__":
    main()
