"""The program of a rank on one of several hosts: a job is a case, done once at a time."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore.bench.cases import make_cases
from fsdpcore.bench.contestants import Contestant, Ours
from fsdpcore.bench.harness.member import CaseRunner, Member, Options, become_rank
from fsdpcore.bench.member import CollectiveJob
from fsdpcore.bench.peer_gloo import Gloo
from hosts_bench.cases import BARRIER, EXCHANGE, Case

# Given the number of a pair's other rank and two arrays, sends one there and receives the other.
Exchange = Callable[[int, Any, Any], object]


class OnceJob(CaseRunner):
    """Does a case once, when the clock that all processes of a machine have says so."""

    def __init__(self, inner: CaseRunner) -> None:
        self._inner = inner
        self._call = inner.call()

    def barrier(self) -> None:
        self._inner.barrier()

    def check(self) -> int:
        return self._inner.check()

    def once(self, at: float) -> float:
        """Begin at a time of ``time.monotonic``; how long after it this rank is done."""
        time.sleep(max(0.0, at - time.monotonic()))
        self._call()
        return time.monotonic() - at


class BarrierJob(CaseRunner):
    """A barrier."""

    def __init__(self, contestant: Contestant) -> None:
        self._contestant = contestant

    def barrier(self) -> None:
        self._contestant.barrier()

    def step(self) -> None:
        """What is timed."""
        self._contestant.barrier()


class ExchangeJob(BarrierJob):
    """Pairs of neighbouring ranks send each other a message at the same time, or nearly so."""

    def __init__(self, contestant: Contestant, case: Case, exchange: Exchange) -> None:
        super().__init__(contestant)
        rank = contestant.rank
        self._partner = rank ^ 1 if rank < 2 * case.pairs else None
        self._exchange = exchange
        self._late = 0.0 if rank % 2 else case.late
        self._mine = np.full(case.size // 4, rank, np.float32)
        self._theirs = np.empty_like(self._mine)

    def step(self) -> None:
        if self._partner is not None:
            time.sleep(self._late)
            self._exchange(self._partner, self._mine, self._theirs)

    def check(self) -> int:
        self._theirs.fill(-1)
        self.step()
        return 0 if self._partner is None else int((self._theirs != self._partner).sum())


def _make(contestant: Contestant, exchange: Exchange, ranks: int) -> Callable[..., CaseRunner]:
    def make(order: Mapping[str, Any]) -> CaseRunner:
        case = Case(**order)
        if case.operation == BARRIER:
            return OnceJob(BarrierJob(contestant))
        if case.operation == EXCHANGE:
            return OnceJob(ExchangeJob(contestant, case, exchange))
        in_place = case.operation != "all_gather"
        (made,) = make_cases(
            case.operation,
            [case.size],
            ranks,
            dtype="float32" if case.size >= 4 * ranks else "uint8",
            op="sum",
            root=0,
            in_place=in_place,
        )
        return OnceJob(CollectiveJob(contestant, vars(made)))

    return make


def _ours(backend: fc.Backend, options: Options) -> Member:
    ours, name = Ours(backend), options["contestant"]

    def exchange(partner: int, mine: Any, theirs: Any) -> None:
        works = [backend.irecv(theirs, partner), backend.isend(mine, partner)]
        for work in works:
            work.wait()

    return Member({name: _make(ours, exchange, backend.world_size)}, {name: ours.versions})


def _gloo(options: Options) -> Member:
    gloo = Gloo(options["rank"], options["world_size"], options["store"])
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")

    def exchange(partner: int, mine: Any, theirs: Any) -> None:
        works = [
            dist.irecv(torch.from_numpy(theirs), partner),
            dist.isend(torch.from_numpy(mine), partner),
        ]
        for work in works:
            work.wait()

    jobs = {options["contestant"]: _make(gloo, exchange, options["world_size"])}
    return Member(jobs, {options["contestant"]: gloo.versions}, gloo.close)


if __name__ == "__main__":
    become_rank(_ours, _gloo)
