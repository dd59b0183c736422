"""The program of a rank: a job has the state of a case, and saves and loads it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import fsdpcore as fc
from checkpoint_bench.cases import LIMIT, MEMCPY, PEER, Case
from checkpoint_bench.ours import Limit, OurJob
from fsdpcore.bench.contestants import versions_of_ours
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.member import Make, Member, Options, become_rank


def _ours(backend: fc.Backend, options: Options) -> Member:
    made: dict[str, OurJob] = {}  # whose state the limits share

    def ours(case: Mapping[str, Any]) -> OurJob:
        made[OURS] = OurJob(Case(**case), backend)
        return made[OURS]

    def limit(case: Mapping[str, Any]) -> Limit:
        return Limit(made[OURS], backend.rank, backend.world_size)

    jobs: dict[str, Make] = {OURS: ours, LIMIT: limit, MEMCPY: limit}
    return Member(jobs, dict.fromkeys(jobs, versions_of_ours(backend)), made.clear)


def _peer(options: Options) -> Member:
    peer = importlib.import_module("checkpoint_bench.peer")
    group = peer.Group.of(options)
    jobs = {PEER: lambda case: peer.PeerJob(Case(**case), group)}
    return Member(jobs, {PEER: group.versions}, group.close)


if __name__ == "__main__":
    become_rank(_ours, _peer)
