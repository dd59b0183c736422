"""The gradients of a whole model, as a function of all its parameters returns them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fsdpcore.core.array_module import address
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.units.param_tree import ParamTree
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.views import Gradients, UnknownParameterError, check_gradient

Named: TypeAlias = Mapping[str, Mapping[str, Array]]
"""Arrays by unit and name."""


class Whole(NamedTuple):
    """What the block of ``Step.whole`` gets.

    Attributes:
        params: by unit and name, read-only; plain dictionaries, which are empty after the block. Or
            nested as the tree that the engine was made of; not to be used after the block.
        grads: to be given in the block.
    """

    params: Any
    grads: WholeGradients


class WholeGradients(MutableMapping[str, Mapping[str, Array]]):
    """Gradients of all units, to be given as arrays: ``grads.update(found)``.

    ``grads[unit] = {name: array}`` keeps the arrays, which are read at the end of the block, and
    checks their shapes and dtypes at once. What a function has found for parameters that are frozen
    or ignored is left out, and so is None. What is not given counts as zeros. ``grads[unit]`` is a
    mapping as a backward pass of the unit has it: ``grads[unit][name]`` begins as zeros, and
    can be written.

    Args:
        units: that have gradients, in order.
        refusal: why none can be given; empty if they can.
        tree: that the engine was made of: ``update`` takes what is nested like it.
    """

    def __init__(
        self, units: Iterable[ShardedUnit], refusal: str = "", tree: ParamTree | None = None
    ) -> None:
        self._tree = tree
        self._units = {unit.name: _CollectedGradients(unit) for unit in units}
        self._refusal = refusal

    def update(self, found: Any, /, **named: Any) -> None:  # type: ignore[override]
        """Give the gradients that a function has found; see the class."""
        if found is None:
            raise ArgumentError(
                "the gradients are None; give them nested like the parameters, with None in the "
                "place of those that are zeros"
            )
        super().update(found if self._tree is None else self._tree.split(found), **named)

    def __getitem__(self, unit: str) -> MutableMapping[str, Array]:
        return self._of(unit)

    def __setitem__(self, unit: str, found: Mapping[str, Array]) -> None:
        self._of(unit).replace(found)

    def __delitem__(self, unit: str) -> None:
        raise ArgumentError(f"gradients cannot be removed; leave unit {unit!r} out, as zeros")

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def _of(self, unit: str) -> _CollectedGradients:
        if self._refusal:
            raise StateError(self._refusal)
        try:
            return self._units[unit]
        except KeyError:
            names = ", ".join(self._units) or "none"
            nested = "; give those of a tree by grads.update(tree)" if self._tree else ""
            raise UnknownParameterError(
                f"gradients of unit {unit!r} were given, but the engine has no such unit; it has "
                f"{names}{nested}"
            ) from None

    def copy_aliases_of(self, params: Named) -> None:
        """Copy arrays that lie in parameters of another unit, which is freed before they are read.

        The gradient of ``(a * b).sum()`` with respect to one of them is the other one itself.
        """
        spans = sorted(
            (*_span(array), unit.name)
            for unit in (each.unit for each in self._units.values())
            for name, array in params[unit.name].items()
            if array.size and name not in unit.ties
        )
        starts = [start for start, _, _ in spans]
        for unit_name, given in self._units.items():
            for name, array in given.arrays.items():
                first, stop = _span(array)
                # Spans are disjoint, so only what begins before the end can reach the array.
                last = bisect_left(starts, stop) - 1
                inside = array.size and last >= 0 and spans[last][1] > first
                if inside and spans[last][2] != unit_name:
                    given.arrays[name] = array.copy()

    def hand_over(self, unit: str, target: Gradients) -> None:
        """Copy what was given for a unit into its gradients, and forget it."""
        arrays = self._units[unit].arrays
        while arrays:
            name, array = arrays.popitem()
            target[name] = array

    def close(self) -> None:
        """Forget everything; from now on nothing is taken."""
        self._units = {}
        self._refusal = self._refusal or (
            "the gradients were taken at the end of step.whole(); give them inside of the block"
        )


class _CollectedGradients(MutableMapping[str, Array]):
    """What was given for one unit.

    Attributes:
        unit: the unit.
        arrays: by name.
    """

    def __init__(self, unit: ShardedUnit) -> None:
        self.unit = unit
        self.arrays: dict[str, Array] = {}
        own = unit.trained_parameter.places
        self._kinds = {name: (own.shape(name), unit.dtypes.grad) for name in own}
        for name, tie in unit.ties.items():
            owner = unit.owners[name]
            places = owner.trained_parameter.places
            if tie.param in places:
                self._kinds[name] = (places.shape(tie.param), owner.dtypes.grad)

    def replace(self, found: Mapping[str, Array]) -> None:
        """Take what a function has found for this unit in place of what was given before."""
        if not isinstance(found, Mapping):
            raise ArgumentError(
                f"the gradients of unit {self.unit.name!r} must be a mapping from names to arrays, "
                f"got {type(found).__name__}"
            )
        fixed = set(self.unit.names).difference(self._kinds)
        arrays = {
            name: self._checked(name, value)
            for name, value in found.items()
            if value is not None and name not in fixed
        }
        self.arrays = arrays

    def _checked(self, name: str, value: Any) -> Array:
        shape, dtype = self._kind(name)
        array = self.unit.device.given(value, f"the gradient of {self.unit.name}.{name}")
        where, computed = f"{self.unit.name}.{name}", self.unit.dtypes.param
        check_gradient(where, array, shape, dtype, computed, value)
        return array

    def _kind(self, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        try:
            return self._kinds[name]
        except KeyError:
            names = ", ".join(self._kinds) or "none"
            raise UnknownParameterError(
                f"unit {self.unit.name!r} has no gradient of {name!r}; it has those of {names}"
            ) from None

    def __getitem__(self, name: str) -> Array:
        if name not in self.arrays:
            self.arrays[name] = self.unit.device.zeros(*self._kind(name))
        return self.arrays[name]

    def __setitem__(self, name: str, value: Array) -> None:
        self.arrays[name] = self._checked(name, value)

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(
            f"a gradient cannot be removed; leave {self.unit.name}.{name} out, as zeros"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


def _span(array: Array) -> tuple[int, int]:
    """From where to where an array lies in memory, on the host or on a GPU."""
    ways = [(extent - 1) * step for extent, step in zip(array.shape, array.strides, strict=True)]
    start = address(array)
    below, above = sum(min(0, way) for way in ways), sum(max(0, way) for way in ways)
    return start + below, start + above + array.itemsize
