"""The figures of a step: for callbacks of the user, and for ``fsdpcore top``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from fsdpcore.diagnostics.live import Answers
from fsdpcore.fsdp.plan.memory import measure
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.step_times import StepTimes
from fsdpcore.fsdp.units.buffer_pool import BufferPool

Figures = dict[str, float]
Callback = Callable[[Figures], object]

_LOOK_NS = 500_000_000
_PAGE = os.sysconf("SC_PAGE_SIZE")


class StepFigures:
    """Tells of an engine's steps whoever wants to know.

    Args:
        executor: of the steps.
        pool: of its buffers.
        window: bytes of the host's window.
    """

    def __init__(self, executor: StepExecutor, pool: BufferPool, window: int) -> None:
        self.callbacks: list[Callback] = []
        self._executor = executor
        self._pool = pool
        self._window = window
        root = executor.model.groups.whole.root
        self._root = root
        self._answers = Answers(root.job_id, root.rank)
        self._next = 0
        self._last: tuple[Figures, StepTimes] | None = None
        self._ended = 0  # when that was, by the clock of the steps
        self._between: float | None = None  # seconds from the step before that one to it

    def ended(self, found: Mapping[str, float | None]) -> None:
        """Take note that a training step has ended.

        Args:
            found: what the step knows itself; None for what it does not.
        """
        times = self._executor.times
        begin, end = times.marks[0], times.marks[-2]
        self._between = (begin - self._ended) * 1e-9 if self._last is not None else None
        self._ended = end
        self._last = {name: value for name, value in found.items() if value is not None}, times
        if self.callbacks:
            figures = self._figures()
            for callback in tuple(self.callbacks):
                callback(dict(figures))
        self.look()

    def _figures(self) -> Figures:
        if self._last is None:
            return {}
        found, times = self._last
        trained = self._executor.trained
        figures: Figures = {"step": self._executor.model.status.steps, "seconds": times.seconds}
        figures.update((str(part), taken) for part, taken in times.by_part().items())
        held = measure(self._executor.model, self._pool, self._window)
        figures["memory_bytes"] = held.parameters + held.gradients + held.optimizer
        if trained is not None:
            figures["memory_bytes"] += trained[0].peak_buffers
            figures["sent_bytes"] = trained[0].bytes_sent
        figures["loss_scale"] = self._executor.model.scaler.scale
        figures.update(found)
        if self._between is not None:
            figures["between_steps"] = self._between
        if "tokens" in found and times.seconds:
            figures["tokens_per_second"] = found["tokens"] / (times.seconds + (self._between or 0))
        return figures

    def look(self) -> None:
        """Answer ``fsdpcore top``, if it asks; looks twice a second at most."""
        now, doing = self._executor.times.marks[-2:] or (0, None)
        if now < self._next:
            return
        self._next = now + _LOOK_NS
        if not self._answers.wanted:
            return
        root, here = self._root, self._root.hosts[self._root.rank]
        self._answers.give(
            {
                "rank": root.rank,
                "world_size": root.world_size,
                "here": root.hosts.count(here),
                "resident": _resident(),
                "unit": "" if doing is None else doing.unit,
                "phase": "" if doing is None else doing.phase,
                "figures": self._figures(),
            }
        )


def _resident() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
