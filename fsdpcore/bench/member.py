"""The program of a rank that measures collectives: a job is an operation on its arrays."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fsdpcore.bench.buffers import Buffers
from fsdpcore.bench.cases import Case
from fsdpcore.bench.contestants import Contestant, Ours
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.member import CaseRunner, Member, Options, become_rank, serve
from fsdpcore.bench.peer_gloo import Gloo
from fsdpcore.bench.peer_mpi import Mpi
from fsdpcore.comm.backend import Backend


class CollectiveJob(CaseRunner):
    """A collective of one contestant."""

    def __init__(self, contestant: Contestant, case: Mapping[str, Any]) -> None:
        self._contestant = contestant
        self._buffers = Buffers.allocate(Case(**case), contestant)
        buffers = self._buffers
        self._call = contestant.step(buffers.case, buffers.source, buffers.output)

    def barrier(self) -> None:
        self._contestant.barrier()

    def call(self) -> Callable[[], object]:
        return self._call

    def check(self) -> int:
        self._buffers.pose()
        self.barrier()
        self._call()
        self.barrier()
        wrong = self._buffers.wrong()
        self._buffers.settle()
        return wrong


def _member(contestants: Mapping[str, Contestant]) -> Member:
    def leave() -> None:
        for one in contestants.values():
            one.close()

    return Member(
        {name: partial(CollectiveJob, one) for name, one in contestants.items()},
        {name: one.versions for name, one in contestants.items()},
        leave,
    )


def make_member(backend: Backend, options: Options) -> Member:
    """A member for our contestant and, where the job runs on MPI, a bare loop beside it."""
    contestants: dict[str, Contestant] = {
        OURS: Ours(backend, options["algorithm"], plain=options["plain"])
    }
    if "mpi" in options["contestants"]:
        contestants["mpi"] = Mpi()
    return _member(contestants)


def _gloo(options: Options) -> Member:
    return _member({"gloo": Gloo(options["rank"], options["world_size"], options["store"])})


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given["contestants"] == ["mpi"]:
        mpi = Mpi()
        serve(mpi.rank, mpi.world_size, _member({"mpi": mpi}), given["path"])
    else:
        become_rank(make_member, _gloo)
