"""The program of a rank: a job is a block."""

from __future__ import annotations

import importlib

import fsdpcore as fc
from fsdpcore.bench.contestants import versions_of_ours
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.member import Member, Options, become_rank
from tensor_bench.cases import PEER, Case
from tensor_bench.ours import OurBlock


def _ours(backend: fc.Backend, options: Options) -> Member:
    return Member(
        {OURS: lambda case: OurBlock(Case(**case), backend)}, {OURS: versions_of_ours(backend)}
    )


def _peer(options: Options) -> Member:
    peer = importlib.import_module("tensor_bench.peer")
    group = importlib.import_module("torch_group").Group.of(options)
    jobs = {PEER: lambda case: peer.PeerBlock(Case(**case), group)}
    return Member(jobs, {PEER: group.versions}, group.close)


if __name__ == "__main__":
    become_rank(_ours, _peer)
