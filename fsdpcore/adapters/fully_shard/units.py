"""Units of the arrays in layers' attributes: what each consists of, by name."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fsdpcore.adapters.fully_shard.attributes import (
    AttributePath,
    FoundArray,
    array_of,
    arrays_of,
    slots_of,
)
from fsdpcore.adapters.fully_shard.gradients import Convention, GradientOf, GradientPlace
from fsdpcore.adapters.fully_shard.guards import Placeholder
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.foreign import is_foreign
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.fsdp.units.unit import Unit


@dataclass(eq=False)
class Parameter:
    """An array that was taken out of a layer. Units with the same place have it in common.

    Attributes:
        place: where it is, while it is gathered.
        label: ``unit.param`` of its first unit.
        shape: of the array.
        dtype: of it.
        box: where it lies in a whole one, for tensor parallelism; None if it is whole.
        shown: the gathered array that is there now.
    """

    place: AttributePath
    label: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    box: ArrayBox | None = None
    shown: Array | None = None

    @property
    def missing(self) -> str:
        """What is said where it is read and not there."""
        return (
            f"{self.label} (shape {self.shape}, {self.dtype}) is sharded over the ranks: it is "
            "there inside of the layer's forward and backward pass, in 'with sharded.gathered()', "
            "and after sharded.restore()"
        )

    @property
    def fixed(self) -> str:
        """What is said where something is assigned to it."""
        return (
            f"{self.label} cannot be assigned to: it is a sharded parameter, which step.update() "
            "changes; to write it, use sharded.engine.full_params(write=True). If it is no "
            "parameter, name it in fully_shard(..., ignored=...)"
        )

    def show(self, array: Array) -> None:
        """Have the gathered array in its place."""
        self.place.put(array)
        self.shown = array

    def hide(self) -> None:
        """Have nothing there, or in a container what fails when it is used."""
        self.shown = None
        if self.place.keys:
            self.place.put(Placeholder(self.missing))
        else:
            self.place.clear()


@dataclass(eq=False)
class LayerUnit:
    """A layer that is a unit.

    Attributes:
        name: the unit's.
        layer: the object.
        parameters: by their names in the unit.
        gradients: where the backward pass leaves those; none if a function tells.
        unit: for the engine.
    """

    name: str
    layer: Any
    parameters: dict[str, Parameter]
    gradients: dict[str, GradientPlace]
    unit: Unit

    @cached_property
    def taken(self) -> set[tuple[int, str]]:
        """Attributes that parameters are in, by the object's identity and name."""
        return {parameter.place.key[:2] for parameter in self.parameters.values()}

    @cached_property
    def owners(self) -> list[tuple[Any, dict[str, Any]]]:
        """The objects that have the parameters, with their slots."""
        owners = {id(each.place.owner): each.place.owner for each in self.parameters.values()}
        return [(owner, slots_of(type(owner))) for owner in owners.values()]


@dataclass
class Patterns:
    """Patterns of the shell, of which each has to match a parameter of some layer.

    Args:
        what: the argument that has them.
        given: they fit ``unit.param``, or ``param`` alone.
    """

    what: str
    given: tuple[str, ...]
    _used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, what: str, given: str | Iterable[str]) -> Patterns:
        """Make them of what a caller passed."""
        return cls(what, (given,) if isinstance(given, str) else tuple(given))

    def fit(self, unit: str, name: str) -> bool:
        """Whether one of them matches."""
        matching = {
            pattern
            for pattern in self.given
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(f"{unit}.{name}", pattern)
        }
        self._used |= matching
        return bool(matching)

    def check(self, known: Iterable[str]) -> None:
        """Raise ArgumentError for patterns that have matched nothing so far."""
        unused = [pattern for pattern in self.given if pattern not in self._used]
        if unused:
            raise ArgumentError(
                f"{self.what}={unused[0]!r} matches nothing in these layers; they have "
                f"{', '.join(known) or 'nothing'}"
            )


def layer_units(
    layers: Sequence[Any],
    names: Sequence[str],
    grads: str | GradientOf,
    ignored: Patterns,
    frozen: Patterns,
) -> list[LayerUnit]:
    """Return those layers that have parameters; an object that is listed twice once.

    Raises:
        ArgumentError: there are none, a pattern matches nothing, or an array cannot be taken.
    """
    convention = grads if callable(grads) else Convention(grads)
    by_place: dict[tuple[Any, ...], Parameter] = {}
    units: list[LayerUnit] = []
    seen: set[int] = set()
    for name, layer in zip(names, layers, strict=True):
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        found = _found(name, layer, convention, ignored)
        if found:
            units.append(_layer_unit(name, layer, found, by_place, convention, frozen))
    known = [f"{unit.name}.{name}" for unit in units for name in unit.parameters]
    for patterns in (ignored, frozen):
        patterns.check(known)
    if not units:
        foreign = next(filter(None, map(_foreign_kind, layers)), None)
        if foreign is not None:
            raise ArgumentError(
                f"these layers have arrays of {foreign}, of which fully_shard knows nothing: it "
                "takes objects with NumPy's arrays. Make units of such parameters with fc.Unit, "
                "and pass what computes with them to fsdpcore.adapters.arrays"
            )
        raise ArgumentError(
            "these layers have no parameters: no NumPy array of float32 or float64 in their "
            "attributes, nor in those of objects, dicts and lists below"
        )
    return units


def _foreign_kind(layer: Any, depth: int = 4) -> str | None:
    """Return the library of an array in an object's attributes that is not NumPy's, if any."""
    if is_foreign(layer):
        return str(type(layer).__module__).partition(".")[0]
    if not depth:
        return None
    if isinstance(layer, (tuple, list)):
        below = list(layer)
    else:
        inside = layer if isinstance(layer, Mapping) else getattr(layer, "__dict__", {})
        below = list(inside.values())
    return next(filter(None, (_foreign_kind(item, depth - 1) for item in below)), None)


def _found(
    name: str, layer: Any, convention: Convention | GradientOf, ignored: Patterns
) -> list[FoundArray]:
    try:
        found = arrays_of(layer, lambda below: ignored.fit(name, below))
    except ArgumentError as error:
        raise ArgumentError(f"layer {name!r}: {error}") from error
    if isinstance(convention, Convention):
        found = convention.without_gradients(found)
    names = [each.name for each in found]
    for each in found:
        if names.count(each.name) > 1:
            raise ArgumentError(
                f"layer {name!r} has two parameters that would both be named {each.name!r}"
            )
    return found


def _layer_unit(
    name: str,
    layer: Any,
    found: Sequence[FoundArray],
    by_place: dict[tuple[Any, ...], Parameter],
    convention: Convention | GradientOf,
    frozen: Patterns,
) -> LayerUnit:
    parameters, gradients = {}, {}
    for each in found:
        local, label = array_of(each.value), f"{name}.{each.name}"
        box = getattr(each.value, "box", None)
        parameters[each.name] = by_place.setdefault(
            each.place.key, Parameter(each.place, label, tuple(local.shape), local.dtype, box)
        )
        if isinstance(convention, Convention):
            gradients[each.name] = GradientPlace(convention.place(each.place), label)
    _check_distinct(name, gradients)
    unit = Unit(
        name,
        {each.name: each.value for each in found},
        frozen=[glob.escape(each.name) for each in found if frozen.fit(name, each.name)],
    )
    return LayerUnit(name, layer, parameters, gradients, unit)


def _check_distinct(unit: str, gradients: dict[str, GradientPlace]) -> None:
    """Raise ArgumentError where two parameters would have their gradient in the same place."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, gradient in gradients.items():
        other = seen.setdefault(gradient.place.key, name)
        if other != name:
            raise ArgumentError(
                f"{unit}.{other} and {unit}.{name} would leave their gradients in the same place; "
                "pass grads= a function of a layer and a parameter's name"
            )
