"""The passes of an engine's steps: from the beginning of a step to its end."""

from __future__ import annotations

from collections import Counter

from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.offload.arrays import GATHERED
from fsdpcore.fsdp.step.nonfinite import NonFiniteSearch
from fsdpcore.fsdp.step.passes import UnitPasses
from fsdpcore.fsdp.step.schedule import Phase
from fsdpcore.fsdp.step.stats import StepStats
from fsdpcore.fsdp.step.step_times import AROUND, OUTSIDE
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.make_model import ModelMemory
from fsdpcore.fsdp.units.model import ShardedModel


class StepExecutor(UnitPasses):
    """The passes of an engine, which its steps are made of.

    Args:
        model: has the units.
        pool: of their buffers.
        memory: where their arrays are.

    Attributes:
        model: as given.
        keeps_params: see ``Step.keeps_params``.
        trained: ``stats`` and ``events`` of the last step that reduced gradients.
        nonfinite: finds out where gradients are inf or nan.
    """

    def __init__(self, model: ShardedModel, pool: BufferPool, memory: ModelMemory) -> None:
        backend = model.groups.whole
        ahead = model.options.prefetch.among(backend.hosts, on_host=model.device.on_host)
        super().__init__(model.units, model.groups.placement, ahead, clock=backend.root.clock)
        self.model = model
        self.keeps_params = memory.all_windowed or _keeps_params(model)
        self.nonfinite = NonFiniteSearch(model, pool)
        self._pool = pool
        self._recorder = backend.root.recorder
        self._file = memory.file
        self.trained: tuple[StepStats, list[tuple[Phase, int]]] | None = None

    def begin(self, awaiting: Counter[str]) -> None:
        """Begin a step.

        Args:
            awaiting: how many of its forward passes of a unit wait for their backward pass.
        """
        status = self.model.status
        if status.in_step:
            raise StateError("a step is open already; leave it before you begin another one")
        status.check_whole()
        status.check_idle("a step")
        self.begin_passes(awaiting)
        self.times.mark(AROUND)
        self._recorder.add_spans(self.times.marks)
        if self._file is not None:
            self._file.restart()
            self.model.units[0].store.ahead(GATHERED)
        self._pool.reset_peak()
        self.nonfinite.begin()
        status.in_step = True
        self.times.mark(OUTSIDE)

    def end(self) -> None:
        """End a step: reshard all units and drop the gradients."""
        self.model.status.in_step = False
        self.times.mark(AROUND)
        self.end_passes()
        for unit in self.model.units:
            unit.in_use = False
            unit.reshard()
            unit.drop_gradients()
        if self._file is not None:
            self._file.settle()
            for unit in self.model.units:
                unit.store.forget()
        self.stats.peak_buffers = self._pool.peak_bytes
        self.times.mark(OUTSIDE)
        self.stats.seconds = self.times.seconds
        if self.stats.reductions:
            self.trained = self.stats, self.events


def _keeps_params(model: ShardedModel) -> bool:
    """Whether parameters that are in no window stay where they are between the two passes."""
    placement = model.groups.placement
    pinned = model.options.offload is not None and not model.device.on_host
    return placement.keeps_for_backward or (placement.whole_parameters and not pinned)
