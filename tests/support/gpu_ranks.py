"""Ranks of the transport ``nccl``: one in this process, or several that are processes.

Bodies are as in ``support.spmd``: functions at the top of a module that the ranks can import.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Sequence
from typing import Any

import pytest
from support import spmd
from support.on_device import body_on_device
from support.spmd_job import Body, Job, Outcome, perform
from support.spmd_pool import ProcessRanks

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.launch.config import resolve

TRANSPORT = "nccl"

# Making NCCL's communicators takes seconds, more if it has to give up.
_PROBE_SECONDS = 60.0
_RENDEZVOUS_SECONDS = 30.0


class OneRank:
    """Runs jobs of one rank in this process."""

    def run(self, job: Job) -> list[Outcome]:
        assert job.world_size == 1
        config = resolve({"transport": TRANSPORT, **job.options}, {})
        place = RankPlace(0, 1, 0, 1, "the test suite")
        return [perform(job, config.transport_class.join(place, config), lambda: None)]

    def close(self) -> None:
        """Nothing is kept."""


_ALONE = OneRank()
# A broken job costs no more than its own backend.
_PROCESSES = ProcessRanks(TRANSPORT)


def alone(body: Body, *args: Any, **options: Any) -> Any:
    """Return ``body(backend, *args)`` of the only rank; see ``spmd.run`` for the options."""
    timeout = options.pop("timeout", 120.0)
    (result,) = spmd.run_with(_ALONE, body, 1, args, timeout, options)
    return result


def moved_alone(body: Body, *args: Any, **options: Any) -> Any:
    """Do as ``alone``, with the body's arrays moved to the GPU."""
    return alone(body_on_device, body, *args, **options)


def through_nccl(backend: fc.Backend, body: Body, *args: Any) -> Any:
    """A body that calls another one while even a single rank calls NCCL, where it could copy."""
    calls: Any = importlib.import_module("fsdpcore.transports.nccl.calls")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.Collectives, "copies_alone", False)
        return body(backend, *args)


class Together:
    """Ranks that are processes.

    Attributes:
        share_gpu: they have a GPU in common, rather than one each.
    """

    def __init__(self, *, share_gpu: bool) -> None:
        self.share_gpu = share_gpu

    def run(self, body: Body, world_size: int, *args: Any, **options: Any) -> list[Any]:
        """Return the results of ``body(backend, *args)``; see ``spmd.run``."""
        timeout = options.pop("timeout", 90.0)
        options.setdefault("rendezvous_timeout", _RENDEZVOUS_SECONDS)
        if self.share_gpu:
            options["share_gpu"] = True
        return spmd.run_with(_PROCESSES, body, world_size, args, timeout, options)

    def run_moved(self, body: Body, world_size: int, *args: Any, **options: Any) -> list[Any]:
        """Do as ``run``, with the body's arrays moved to the GPU."""
        return self.run(body_on_device, world_size, body, *args, **options)

    def run_each(
        self, bodies: Sequence[Body], world_size: int, *, moved: bool = False, **options: Any
    ) -> dict[Body, str]:
        """Run bodies in turn, in as few jobs as that takes: making communicators takes long.

        Args:
            bodies: each is ``body(backend)``.
            world_size: of the jobs.
            moved: their arrays are moved to the GPU.
            **options: as of ``run``.

        Returns:
            What went wrong with each body on the ranks; empty where nothing did.
        """
        found: dict[Body, str] = {}
        left = list(bodies)
        while left:
            run = self.run_moved if moved else self.run
            try:
                ranks = run(_in_turn, world_size, left, **options)
            except spmd.RanksFailed as error:  # one of them hangs
                return {**found, **dict.fromkeys(left, str(error))}
            count = min(len(errors) for errors in ranks)
            for number, body in enumerate(left[:count]):
                errors = [f"rank {rank}: {each[number]}" for rank, each in enumerate(ranks)]
                bad = any(each[number] for each in ranks)
                found[body] = "\n".join(errors) if bad else ""
            left = left[count:]
        return found

    def refusal(self) -> str:
        """Try two ranks; return why they cannot be had, or nothing if they can."""
        try:
            self.run(_one_sum, 2, timeout=_PROBE_SECONDS)
        except spmd.RanksFailed as error:
            lines = str(error).splitlines()
            return next((line for line in lines if line.startswith("-----")), lines[0])
        return ""


def _in_turn(backend: fc.Backend, bodies: Sequence[Body]) -> list[str]:
    """What went wrong with each body, up to the first with which something did, on any rank."""
    found = []
    for body in bodies:
        try:
            body(backend)
            backend.barrier()
        except Exception:
            found.append(traceback.format_exc())
            backend.abort(f"{body.__name__} failed")
            break
        found.append("")
    return found


def _one_sum(backend: fc.Backend) -> None:
    device = backend.device
    ones = device.from_host(device.to_host(device.zeros(3, "float32")) + 1)
    assert device.to_host(fc.all_reduce(ones, backend)).tolist() == [backend.world_size] * 3


def shut_down() -> None:
    """End the processes that are kept between jobs."""
    _PROCESSES.close()
