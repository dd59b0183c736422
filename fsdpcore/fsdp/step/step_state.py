"""What a step has come through, and what it is inside of; all else is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.step.schedule import Phase
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit

NO_BACKWARD = "an evaluation has no backward pass; use engine.step()"
_OUTSIDE = "{} outside of the step; use it inside 'with engine.step()'"


class StepState:
    """The state of one step; its methods raise StateError for what makes no sense in it.

    Args:
        training: whether there is a backward pass.

    Attributes:
        active: inside of the ``with`` block.
        forwards: by name of the unit, how many forward passes wait for their backward pass.
        unit: whose context the step is inside of.
        phase: of that unit.
        whole: it is inside of ``whole()``.
        reduced: gradients were reduced, or kept.
        updated: ``update`` was called.
        shown: it is inside of ``gradients()``.
    """

    def __init__(self, training: bool) -> None:
        self.active = False
        self.forwards: Counter[str] = Counter()
        self.unit: ShardedUnit | None = None
        self.phase: Phase = "forward"
        self.whole = False
        self.reduced = False
        self.updated = False
        self.shown = False
        self._training = training
        self._entered = False

    @property
    def words(self) -> str:
        """Where the step is."""
        if not self.active:
            return "ended" if self._entered else "not entered"
        if self._context:
            return f"inside the context of {self._context}"
        return "updated" if self.updated else "open"

    def check_first(self) -> None:
        """Refuse to enter a step twice."""
        if self._entered:
            raise StateError("a step is entered once; make a new one with engine.step()")

    def begin(self) -> None:
        """Enter the ``with`` block."""
        self._entered = self.active = True

    def check_applied(self) -> None:
        """Refuse to end with gradients that nobody has used."""
        if self.reduced and not self.updated:
            raise StateError(
                "the step ended with gradients that were never applied; call step.update() "
                "before the end of the with block"
            )

    # Passes.

    def enter(self, unit: ShardedUnit, phase: Phase) -> None:
        """Enter the context of a unit."""
        self.check_entering(phase, f" of unit {unit.name!r}")
        check_written(unit)
        self.unit, self.phase = unit, phase
        unit.in_use = True

    def leave(self, unit: ShardedUnit) -> bool:
        """Leave it; False if the step has ended before, and its units with it."""
        if not self.active:
            return False
        self.unit, unit.in_use = None, False
        return True

    def check_forward(self, unit: ShardedUnit) -> None:
        """Refuse a backward pass without its forward pass."""
        if not self._training:
            raise StateError(NO_BACKWARD)
        if not self._context and self.active and not self.forwards[unit.name]:
            raise StateError(
                f"backward of unit {unit.name!r} without a forward pass in this step; go through "
                "'with step.forward(unit)' first, once for each backward"
            )

    def check_entering(self, what: str, which: str = "") -> None:
        """Refuse passes outside of the step, after its update, and inside of others."""
        if not self.active:
            raise StateError(_OUTSIDE.format(what))
        if self.updated:
            raise StateError(f"{what} after update(); begin a new step")
        if self.shown:
            raise StateError(f"{what}{which} inside of step.gradients(); leave that block first")
        if self._context:
            raise StateError(
                f"{what}{which} inside the context of {self._context}; leave that one first"
            )

    @property
    def _context(self) -> str:
        """What the step is inside of; empty if nothing."""
        if self.whole:
            return "whole()"
        return "" if self.unit is None else f"unit {self.unit.name!r}"

    def check_passes(self, before: str = "the next virtual rank") -> None:
        """Refuse to go on while backward passes are to come."""
        left = [name for name, count in self.forwards.items() if count]
        if left and self._training:
            raise StateError(
                f"units {left} had a forward pass without its backward; run it before {before}"
            )

    # The end.

    def check_gradients(self, units: Iterable[ShardedUnit], what: str = "update()") -> None:
        """Refuse what needs all gradients where there are none, not all yet, or no more of them."""
        if self.updated:
            after = "was called already in this step" if what == "update()" else "after update()"
            raise StateError(f"{what} {after}; begin a new step")
        if self.shown:
            raise StateError(f"{what} inside of step.gradients(); leave that block first")
        if self._context:
            raise StateError(f"{what} inside the context of {self._context}; leave it first")
        if not self.active:
            raise StateError(_OUTSIDE.format(what))
        if not self._training:
            raise StateError(f"an evaluation has no {what}; use engine.step()")
        if not self.reduced:
            raise StateError(
                f"{what} without gradients; run step.forward and step.backward of the units "
                "first, on every rank: one that has no rows in this step goes through the same "
                "passes, and leaves its gradients as zeros"
            )
        self.check_passes(what)
        kept = [unit.name for unit in units if unit.gradients.kept]
        if kept:
            raise StateError(
                f"gradients of units {kept} were kept by no_sync() and never reduced; run the "
                "backward pass of the last microbatch outside of no_sync()"
            )


def check_written(unit: ShardedUnit) -> None:
    """Refuse a pass of a unit whose gradients are being written."""
    if unit.gradients.writable is not None:
        raise StateError(f"unit {unit.name!r} has gradients that were not reduced")
