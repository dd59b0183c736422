"""The program of a rank on one of several hosts: a job is a case, done once at a time."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore.bench.cases import make_cases
from fsdpcore.bench.contestants import Contestant, Ours
from fsdpcore.bench.harness.member import CaseRunner, Member, Options, become_rank
from fsdpcore.bench.member import CollectiveJob
from fsdpcore.bench.peer_gloo import Gloo
from fsdpcore.core.clock import WALL, Clock
from fsdpcore.core.policy import Costs
from hosts_bench.cases import BARRIER, EXCHANGE, Case

# Given the number of a pair's other rank and arrays to send and to receive, does so with all.
Exchange = Callable[[int, list[Any], list[Any]], object]


class OnceJob(CaseRunner):
    """Does a case once, or so many times, when the clock that all ranks have says so.

    Attributes:
        link: what a job of ours has found out about its links when it began.
    """

    link: Costs | None = None

    def __init__(self, inner: CaseRunner, clock: Clock, times: int = 1) -> None:
        self._inner = inner
        self._call = inner.call()
        self._clock, self._times = clock, times

    def barrier(self) -> None:
        self._inner.barrier()

    def check(self) -> int:
        return self._inner.check()

    def once(self, at: float) -> float:
        """Begin at a time of the clock; how long after it this rank is done, by what is done."""
        self._clock.sleep(max(0.0, at - self._clock.now()))
        for _ in range(self._times):
            self._call()
        return (self._clock.now() - at) / self._times

    def costs(self) -> list[float]:
        """What messages between hosts cost, of ``Costs``, by which a rank of ours chooses."""
        assert self.link is not None, "a job on several hosts has measured it"
        return list(astuple(self.link))


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

    def __init__(
        self, contestant: Contestant, case: Case, exchange: Exchange, clock: Clock
    ) -> None:
        super().__init__(contestant)
        rank = contestant.rank
        self._partner = rank ^ 1 if rank < 2 * case.pairs else None
        self._exchange, self._clock = exchange, clock
        self._late = 0.0 if rank % 2 else case.late
        self._mine = np.full(case.size // 4, rank, np.float32)
        self._theirs = np.empty_like(self._mine)
        self._parts = [np.array_split(each, case.parts) for each in (self._mine, self._theirs)]

    def step(self) -> None:
        if self._partner is not None:
            self._clock.sleep(self._late)
            self._exchange(self._partner, *self._parts)

    def check(self) -> int:
        self._theirs.fill(-1)
        self.step()
        return 0 if self._partner is None else int((self._theirs != self._partner).sum())


def _make(
    contestant: Contestant, exchange: Exchange, ranks: int, clock: Clock = WALL
) -> Callable[..., OnceJob]:
    def make(order: Mapping[str, Any]) -> OnceJob:
        case = Case(**order)
        if case.operation == BARRIER:
            return OnceJob(BarrierJob(contestant), clock)
        if case.operation == EXCHANGE:
            return OnceJob(ExchangeJob(contestant, case, exchange, clock), clock, case.times)
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
        return OnceJob(CollectiveJob(contestant, vars(made)), clock, case.times)

    return make


def cases_of(backend: fc.Backend) -> Callable[..., OnceJob]:
    """What makes the job of a case, for a rank of ours."""

    def exchange(partner: int, mine: list[Any], theirs: list[Any]) -> None:
        works = [backend.irecv(each, partner) for each in theirs]
        works += [backend.isend(each, partner) for each in mine]
        for work in works:
            work.wait()

    make = _make(Ours(backend), exchange, backend.world_size, backend.clock)

    def linked(order: Mapping[str, Any]) -> OnceJob:
        job = make(order)
        job.link = backend.root.policy.link
        return job

    return linked


def _ours(backend: fc.Backend, options: Options) -> Member:
    name = options["contestant"]
    return Member({name: cases_of(backend)}, {name: Ours(backend).versions})


def _gloo(options: Options) -> Member:
    gloo = Gloo(options["rank"], options["world_size"], options["store"])
    torch: Any = importlib.import_module("torch")
    dist: Any = importlib.import_module("torch.distributed")

    def exchange(partner: int, mine: list[Any], theirs: list[Any]) -> None:
        works = [dist.irecv(torch.from_numpy(each), partner) for each in theirs]
        works += [dist.isend(torch.from_numpy(each), partner) for each in mine]
        for work in works:
            work.wait()

    jobs = {options["contestant"]: _make(gloo, exchange, options["world_size"])}
    return Member(jobs, {options["contestant"]: gloo.versions}, gloo.close)


if __name__ == "__main__":
    become_rank(_ours, _gloo)
