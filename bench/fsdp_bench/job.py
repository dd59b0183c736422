"""``StepJob``: one contestant's way to make steps on one rank; ``EngineJob``: ours."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import fsdpcore as fc
from fsdpcore.bench.harness.member import CaseRunner
from fsdpcore.bench.harness.memory import Memory, PssSampler, reset_peak

_STEPS_FOR_MEMORY = 2


class StepJob(CaseRunner):
    """Makes its model when it is made."""

    @abstractmethod
    def step(self) -> Any:
        """What is timed; the loss, where something is trained."""

    def memory(self) -> list[float]:
        """Memory in steps as they are timed; that of making the model does not count."""
        self.barrier()
        reset_peak()
        with PssSampler() as sampler:
            for _ in range(_STEPS_FOR_MEMORY):
                self.step()
            self.barrier()
        now = Memory.now()
        return Memory(now.process, now.peak_rss, max(sampler.highest, now.pss)).as_answer()

    def losses(self, count: int) -> list[float]:
        """Make ``count`` steps, which return their losses; this rank's, in nats."""
        return [float(self.step()) for _ in range(count)]

    def split(self) -> list[float]:
        """Make a step; its seconds, those of computing, and of waiting in each pass of a unit."""
        raise NotImplementedError(f"{type(self).__name__} does not tell computing apart")


class Moved(NamedTuple):
    """What one rank's step moves between memory and its file, in bytes and seconds.

    Attributes:
        held: in the file.
        ready: part of what was needed that was in memory by then.
        read, written: of the file.
        disk_read, disk_written: likewise, as the system counts them for the process.
        waited: for what was needed.
        flushed: for what had been changed.
    """

    held: float
    ready: float
    read: float
    disk_read: float
    written: float
    disk_written: float
    waited: float
    flushed: float


class EngineJob(StepJob):
    """Steps of one of our engines."""

    def __init__(self, backend: fc.Backend, engine: fc.FSDP) -> None:
        self._backend, self._engine = backend, engine

    def barrier(self) -> None:
        self._backend.device.synchronize()
        self._backend.barrier()

    def costs(self) -> list[float]:
        """What messages between hosts cost, of ``Costs``, by which this rank chooses."""
        link = self._backend.root.policy.link
        assert link is not None, "a job on several hosts has measured it"
        return list(astuple(link))

    def moved(self) -> list[float]:
        """Make a step; what it ``Moved``."""
        before = _disk()
        self.step()
        read, written = (now - then for then, now in zip(before, _disk(), strict=True))
        found = self._engine.offload_stats
        ready = found.ready / max(1, found.used)
        times = (found.waited, found.flushed)
        return [*Moved(found.held, ready, found.read, read, found.written, written, *times)]


def _disk() -> tuple[int, int]:
    """How many bytes this process has read from disks, and written to them."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    found = dict(line.split(": ") for line in lines)
    return int(found["read_bytes"]), int(found["write_bytes"])
