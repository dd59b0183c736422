"""Where gradients are inf or nan: in which parameters, and from which ranks.

The reduced gradients tell the parameters. From which rank they come, only that rank can tell, and
its own gradients were freed when they had been reduced. To look at all of them before would cost
more than 1 % of a step that computes little. So nobody looks while all is well; afterwards each
rank looks at those whose memory nobody has used since. These are the ones that were reduced last,
and what is inf or nan in one unit spreads to them through the rest of the backward pass. Where that
finds nothing, ranks look at all of their own gradients in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdpcore.collectives import all_gather
from fsdpcore.core.buffers import Array
from fsdpcore.core.text import listed, name_ranks
from fsdpcore.fsdp.offload.arrays import GRADIENTS
from fsdpcore.fsdp.step.norm import all_finite
from fsdpcore.fsdp.step.schedule import Phase
from fsdpcore.fsdp.step.shards import in_turn
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.views import Places


@dataclass(frozen=True)
class NonFinite:
    """What all ranks have found.

    Attributes:
        parameters: see ``Step.nonfinite``.
        complete: each rank has looked at all of its own gradients.
    """

    parameters: dict[str, tuple[int, ...]]
    complete: bool

    @property
    def words(self) -> str:
        """The beginning of an error's message."""
        what = f"the gradients of {listed(list(self.parameters))} are inf or nan"
        ranks = sorted({rank for ranks in self.parameters.values() for rank in ranks})
        if ranks:
            return f"{what}; those of {name_ranks(ranks)} were so before the sum over the ranks"
        if self.complete:
            return (
                f"{what}; each rank's own gradients were finite, so the sum over the ranks is too "
                "large for its dtype (reduce_dtype of Precision)"
            )
        return (
            f"{what}; from which rank is not known any more: if you go on, the next step looks at "
            "each rank's own gradients"
        )


class NonFiniteSearch:
    """Finds out where the gradients of an engine's steps are inf or nan.

    Args:
        model: whose.
        pool: that full gradients go back to.
    """

    def __init__(self, model: ShardedModel, pool: BufferPool) -> None:
        self._model = model
        self._pool = pool
        self._watching = False
        self._complete = False  # they were watched from the beginning of the step
        self._own: set[tuple[str, str]] = set()  # units and parameters, of this rank's gradients

    def begin(self) -> None:
        """Begin a step."""
        self._complete = self._watching
        self._own.clear()
        self._pool.forget()

    def end(self) -> None:
        """Take note that all gradients were finite."""
        if self._watching:
            self._watch(False)

    def _watch(self, on: bool) -> None:
        self._watching = on
        for unit in self._model.units:
            unit.gradients.watch = self._look if on else None

    def _look(self, places: Places, flat: Array) -> None:
        for name in places:
            values = places.view(flat, name).reshape(-1)
            if values.size and not all_finite([values]):
                self._own.add((places.unit, name))

    def find(self, events: Sequence[tuple[Phase, int]]) -> NonFinite:
        """Find out where they are in this step, before its gradients are dropped; a collective.

        Args:
            events: the passes of the step: phase, and number of the unit.
        """
        groups = self._model.groups
        for unit in self._model.units:
            left = self._pool.left_of(unit.name)
            if left is not None:
                self._look(unit.trained_parameter.places, left)
        names = self._names(events)
        reduced = self._reduced()
        rows = [[each in found for each in names] for found in (reduced, self._own)]
        row = np.array([self._complete, *rows[0], *rows[1]])
        told = all_gather(row, groups.everyone, label="update, inf or nan").reshape(-1, row.size)
        complete = bool(told[:, 0].all())
        in_sum, in_own = told[:, 1 : len(names) + 1].any(axis=0), told[:, len(names) + 1 :]
        ranks = groups.everyone.ranks
        parameters = {
            f"{unit}.{name}": tuple(ranks[rank] for rank in np.flatnonzero(in_own[:, number]))
            for number, (unit, name) in enumerate(names)
            if in_sum[number]
        }
        self._watch(not complete and not any(parameters.values()))
        return NonFinite(parameters, complete)

    def _names(self, events: Sequence[tuple[Phase, int]]) -> list[tuple[str, str]]:
        """All units and parameters, in the order of the backward pass."""
        units = self._model.units
        order = dict.fromkeys(number for phase, number in events if phase == "backward")
        order.update(dict.fromkeys(reversed(range(len(units)))))
        return [
            (units[number].name, name)
            for number in order
            for name in units[number].trained_parameter.places
        ]

    def _reduced(self) -> set[tuple[str, str]]:
        """Units and parameters, of this rank's shards of the sums."""
        found = set()
        units = [unit for unit in self._model.units if unit.gradients.shard is not None]
        for unit in in_turn(units, GRADIENTS):
            shard = unit.gradients.shard
            assert shard is not None
            unit.store.begin(GRADIENTS)
            try:
                for piece in unit.layout.pieces(unit.shard_rank):
                    if not all_finite([shard[piece.shard_start : piece.shard_stop]]):
                        found.add((unit.name, piece.name))
            finally:
                unit.store.end(GRADIENTS)
        return found
