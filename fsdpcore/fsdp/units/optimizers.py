"""Which optimizer updates which parameter of an engine."""

from __future__ import annotations

from collections.abc import Sequence

from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.optim import Optimizer, ParamGroups
from fsdpcore.fsdp.optim.groups import Given
from fsdpcore.fsdp.units.declaration import UnitDeclaration


class Optimizers:
    """The optimizer of each parameter; ``repr`` is what ranks compare."""

    def __init__(self, given: Given | ParamGroups, units: Sequence[UnitDeclaration]) -> None:
        self._groups = ParamGroups.of(given)
        names = {
            (unit.name, name): f"{unit.name}.{name}" for unit in units for name in unit.trained
        }
        found = self._groups.resolve(list(names.values()))
        self._by_unit: dict[str, dict[str, Optimizer]] = {}
        for (unit, name), full in names.items():
            self._by_unit.setdefault(unit, {})[name] = found[full]
        for each in units:
            for name in each.trained:
                assert each.initial is not None
                box = each.boxes.get(name)
                shape = each.initial[name].shape if box is None else box.whole
                self._by_unit[each.name][name].check_parameter(f"{each.name}.{name}", shape)

    def of_unit(self, unit: str) -> dict[str, Optimizer]:
        """Return the optimizers of a unit's parameters by name."""
        return self._by_unit.get(unit, {})

    def check_takes_lr(self) -> None:
        """Raise ArgumentError if an optimizer has a learning rate that cannot be replaced."""
        for pattern, optimizer in self._groups.rules:
            if not optimizer.takes_lr:
                raise ArgumentError(
                    f"lr=... cannot replace the learning rate of the optimizer for {pattern!r}, "
                    "which is in its transformation; give that a schedule, such as "
                    "optax.adamw(optax.cosine_decay_schedule(3e-4, 1000))"
                )

    @property
    def groups(self) -> ParamGroups:
        """The patterns, and their optimizers."""
        return self._groups

    def __repr__(self) -> str:
        return repr(self._groups)
