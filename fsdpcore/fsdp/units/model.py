"""What all that works on an engine needs of it: units, groups of ranks, and how far it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.sharding.placement import Keep, Placement
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.sharding.virtual_ranks import Leaves
from fsdpcore.fsdp.units.optimizers import Optimizers
from fsdpcore.fsdp.units.options import EngineOptions
from fsdpcore.fsdp.units.persistent import persistent_of
from fsdpcore.fsdp.units.precision import Scaler
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.unit import Unit
from fsdpcore.fsdp.units.wire import Wire

_ALONE = Placement(shards=1, replicas=1, regather=1, keep=Keep.UPDATE)


@dataclass
class EngineStatus:
    """How far an engine has come, and what it is in the middle of.

    Attributes:
        steps: number of updates so far.
        partially_updated: an update was left half done, for instance by an interrupt.
        full_params_open: inside of ``full_params``.
        in_step: inside of a step.
        averaged: averages are in the place of the weights.
        ended: what became of the engine, and what to do; empty while it can be used.
    """

    steps: int = 0
    partially_updated: bool = False
    full_params_open: bool = False
    in_step: bool = False
    ended: str = ""
    averaged: bool = False

    def check_whole(self) -> None:
        """Raise StateError if an update was left half done, and nothing was loaded since."""
        self.check_held("a step")
        if self.partially_updated:
            raise StateError(
                "an update was left half done, so that some parameters are newer than others; load "
                "a whole state (load_state_dict) before you go on"
            )

    def check_held(self, what: str) -> None:
        """Raise StateError, which refuses ``what``, if the engine has ended."""
        if self.ended:
            raise StateError(f"{what} of an engine that {self.ended}")

    def check_own(self, what: str) -> None:
        """Raise StateError where averages are in the place of the weights that ``what`` needs."""
        if self.averaged:
            raise StateError(
                f"{what} inside of averaged(), where the parameters are averages of the weights; "
                "leave that first"
            )

    def check_idle(self, what: str) -> None:
        """Raise StateError in a step or in ``full_params``, and once the engine has ended."""
        self.check_held(what)
        if self.in_step or self.full_params_open:
            where = "full_params()" if self.full_params_open else "a step"
            raise StateError(f"{what} inside of {where}; leave that first")


@dataclass(frozen=True)
class ShardedModel:
    """The units of an engine, and what they have in common.

    Attributes:
        units: in order.
        groups: of ranks, that this rank communicates in.
        options: as given.
        optimizers: which optimizer updates which parameter; None without one.
        scaler: the scale of the loss and its history.
        status: how far it has come.
        leaves: whose gradients this rank computes.
        wire: what travels quantised; None for nothing.
    """

    units: tuple[ShardedUnit, ...]
    groups: ProcessGroups
    options: EngineOptions
    optimizers: Optimizers | None
    scaler: Scaler
    status: EngineStatus
    leaves: Leaves
    wire: Wire | None = None

    @cached_property
    def _by_name(self) -> dict[str, ShardedUnit]:
        return {unit.name: unit for unit in self.units}

    @cached_property
    def unsharded(self) -> int:
        """Bytes that one rank alone would hold all the time."""
        return sum(
            each.nbytes
            for unit in self.units
            for each in persistent_of(unit, _ALONE, 0, self.optimizers)
        )

    @cached_property
    def tied(self) -> set[ShardedUnit]:
        """Units with parameters that others are tied to."""
        return {owner for unit in self.units for owner in unit.owners.values()}

    def __getitem__(self, unit: Unit | str) -> ShardedUnit:
        """Return a unit by name, or what became of one that was declared."""
        self.status.check_held("a unit")
        name = unit.name if isinstance(unit, Unit) else unit
        found = self._by_name.get(name)
        if found is None or (isinstance(unit, Unit) and found.declaration is not unit):
            raise ArgumentError(
                f"this engine has no unit {name!r}; it has {', '.join(self._by_name)}"
            )
        return found

    def num_parameters(self, *, trainable: bool) -> int:
        """Return the number of elements of all parameters of the whole model, or the trained ones.

        A box counts as the whole parameter that it is cut from.
        """
        return sum(
            param.size if param.name not in unit.boxes else math.prod(unit.boxes[param.name].whole)
            for unit in self.units
            for part in unit.flat_parameters
            if part is unit.trained_parameter or not trainable
            for param in part.layout.params
        )

    @property
    def device(self) -> Device:
        """Where the arrays are."""
        return self.groups.device

    @property
    def host_algorithm(self) -> str:
        """The algorithm of collectives that move arrays of the host."""
        return self.options.algorithm if self.device.on_host else "auto"
