"""``StepJob``: one contestant's way to make steps on one rank."""

from __future__ import annotations

from fsdpcore.bench.harness.member import CaseRunner
from fsdpcore.bench.harness.memory import Memory, PssSampler, reset_peak

_STEPS_FOR_MEMORY = 2


class StepJob(CaseRunner):
    """Makes its model when it is made."""

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
        """Make ``count`` steps; this rank's loss in each, in nats."""
        raise NotImplementedError(f"{type(self).__name__} trains nothing")

    def split(self, count: int) -> list[float]:
        """Make ``count`` steps; their seconds, and how many of these went into computing."""
        raise NotImplementedError(f"{type(self).__name__} does not tell computing apart")
