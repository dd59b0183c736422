"""The program of a rank: a job makes the steps of a case."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gpt_model import keep_freed_memory
from threadpoolctl import threadpool_limits

import fsdpcore as fc
from fsdp_bench.cases import (
    ALONE,
    OFFLOADS,
    PEER,
    VIRTUAL,
    VIRTUAL_RANKS,
    WITHOUT,
    Exchange,
    Training,
    from_order,
)
from fsdp_bench.exchange import OurExchange
from fsdp_bench.job import StepJob
from fsdp_bench.training import Alone, OurTraining
from fsdpcore.bench.contestants import versions_of_ours
from fsdpcore.bench.harness.member import Member, Options, become_rank


def _ours(backend: fc.Backend, options: Options) -> Member:
    contestant = options["contestant"]
    offload = None
    if contestant in OFFLOADS:
        offload = fc.Offload(options["directory"], **OFFLOADS[contestant])

    def make(order: Mapping[str, Any]) -> StepJob:
        case = from_order(order)
        if contestant == WITHOUT:
            case = replace(case, prefetch=0)
        if contestant == VIRTUAL and isinstance(case, Training):
            case = replace(case, virtual_ranks=VIRTUAL_RANKS)
        if isinstance(case, Exchange):
            return OurExchange(case, backend)
        keep_freed_memory()  # as the example does
        return OurTraining(case, backend, offload=offload)

    return Member({contestant: make}, {contestant: versions_of_ours(backend)})


def _others(options: Options) -> Member:
    return _alone(options) if options["contestant"] == ALONE else _peer(options)


def _alone(options: Options) -> Member:
    threadpool_limits(options["threads"], user_api="blas")

    def make(order: Mapping[str, Any]) -> StepJob:
        case = from_order(order)
        assert isinstance(case, Training)
        keep_freed_memory()
        return Alone(case, options["rank"], options["world_size"])

    return Member({ALONE: make}, {ALONE: {"numpy": np.__version__}})


def _peer(options: Options) -> Member:
    exchange = importlib.import_module("fsdp_bench.peer_exchange")
    training = importlib.import_module("fsdp_bench.peer_training")
    group = importlib.import_module("torch_group").Group.of(options)

    def make(order: Mapping[str, Any]) -> StepJob:
        case = from_order(order)
        kind = exchange.PeerExchange if isinstance(case, Exchange) else training.PeerTraining
        job: StepJob = kind(case, group)
        return job

    return Member({PEER: make}, {PEER: group.versions}, group.close)


if __name__ == "__main__":
    become_rank(_ours, _others)
