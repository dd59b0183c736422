"""Checks of an engine's units on one rank: ties, boxes, and which optimizers they can have."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.sharding.tensor_group import described
from fsdpcore.fsdp.units.declaration import UnitDeclaration, alias
from fsdpcore.fsdp.units.optimizers import Optimizers
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.fsdp.units.special import Tied, elements_of
from fsdpcore.fsdp.units.unit import Unit


def check_units(units: Sequence[Unit], device: Device, *, has_tensor: bool) -> None:
    """Tie arrays that occur twice, and raise ArgumentError for units that do not fit together.

    Args:
        units: of one engine; changed.
        device: of it. Their arrays may be NumPy's, or those of the device.
        has_tensor: they may be boxes of arrays of which other ranks have the rest.
    """
    if not units:
        raise ArgumentError("an engine needs at least one unit")
    names = set()
    for unit in units:
        if not isinstance(unit, Unit):
            raise ArgumentError(
                f"units must be Unit objects, got {type(unit).__name__}; make a list of them: "
                "[fc.Unit(name, params), ...]"
            )
        if unit.name in names:
            raise ArgumentError(f"two units are named {unit.name!r}; names must be unique")
        names.add(unit.name)
        if unit.initial is None:
            raise StateError(f"unit {unit.name!r} belongs to an engine already; make a new one")
        for name, value in (*unit.initial.items(), *unit.ignored.items()):
            if not isinstance(value, Spec):
                device.given(value, f"{unit.name}.{name}")
    if not has_tensor:
        _drop_whole_boxes(units)
    _tie_same_arrays(units)
    _check_ties(units)


def _drop_whole_boxes(units: Sequence[UnitDeclaration]) -> None:
    """Have boxes that are all there is be none, where no group has others; changes the units.

    Raises:
        ArgumentError: there are others.
    """
    for unit in units:
        for name, box in list(unit.boxes.items()):
            if not box.is_whole:
                raise ArgumentError(
                    f"{unit.name}.{name} is {described(box)}, and no rank of this engine has the "
                    "rest; pass the group of ranks that do: FSDP(..., tensor=mesh['tensor'])"
                )
            del unit.boxes[name]


def _tie_same_arrays(units: Sequence[UnitDeclaration]) -> None:
    seen: dict[Hashable, tuple[UnitDeclaration, str]] = {}
    for unit in units:
        for name, value in list((unit.initial or {}).items()):
            # The same elements, also by way of a view or a transpose.
            place = elements_of(value)
            owner, first = (unit, name) if place is None else seen.setdefault(place, (unit, name))
            if (owner, first) == (unit, name):
                continue
            other = (owner.initial or {})[first]
            assert not isinstance(other, Spec)
            assert not isinstance(value, Spec)
            if (other.shape, other.strides, other.dtype) != (
                value.shape,
                value.strides,
                value.dtype,
            ):
                raise ArgumentError(
                    f"{owner.name}.{first} and {unit.name}.{name} are views of the same memory, "
                    "but not the same array; a tied parameter has one shape: pass "
                    f"fc.Tied({owner.name!r}, {first!r}) and transpose it where it is used"
                )
            _check_same_box(owner, first, unit, name)
            if (first in owner.frozen) is not (name in unit.frozen):
                stays, learns = (f"{owner.name}.{first}", f"{unit.name}.{name}")
                if name in unit.frozen:
                    stays, learns = learns, stays
                raise ArgumentError(
                    f"{stays} is frozen, but {learns}, which is the same array, is trained; freeze "
                    "both, or neither"
                )
            alias(unit, name, Tied(owner.name, first))


def _check_same_box(owner: UnitDeclaration, first: str, unit: UnitDeclaration, name: str) -> None:
    here = (owner.boxes.get(first), unit.boxes.get(name))
    one, other = (None if box is None or box.is_whole else box for box in here)
    if one != other:
        told = ["whole" if box is None else described(box) for box in (one, other)]
        raise ArgumentError(
            f"{owner.name}.{first} and {unit.name}.{name} are the same array, but the first is "
            f"{told[0]}, the second {told[1]}; a tied parameter has one place"
        )


def _check_ties(units: Sequence[UnitDeclaration]) -> None:
    by_name = {unit.name: unit for unit in units}
    for unit in units:
        for name, tie in unit.ties.items():
            owner = by_name.get(tie.unit)
            if owner is None or tie.param not in (owner.initial or {}):
                raise ArgumentError(
                    f"{unit.name}.{name} is tied to {tie}, which no unit of this engine owns; name "
                    "a parameter that is itself an array or a Spec"
                )


def check_optimizers(units: Sequence[UnitDeclaration], optimizers: Optimizers | None) -> None:
    """Raise ArgumentError for a box with an optimizer that has to know the whole parameter."""
    for unit in units:
        found = {} if optimizers is None else optimizers.of_unit(unit.name)
        for name in unit.boxes:
            policy = found.get(name)
            if policy is not None and not (policy.elementwise or policy.takes_boxes):
                raise ArgumentError(
                    f"{unit.name}.{name} is cut over the ranks of tensor, but "
                    f"{type(policy).__name__} updates whole parameters; give it another optimizer"
                )


def check_order(units: Sequence[UnitDeclaration], optimizers: Optimizers | None) -> None:
    """Raise ArgumentError for an optimizer whose sums depend on which rank has which part."""
    for unit in units:
        found = {} if optimizers is None else optimizers.of_unit(unit.name)
        for name, policy in found.items():
            if not (policy.elementwise or policy.has_owners or policy.any_order):
                raise ArgumentError(
                    f"virtual_ranks with {type(policy).__name__} for {unit.name}.{name}: its sums "
                    "over a parameter are made in another order on other numbers of ranks; give it "
                    "another optimizer"
                )
