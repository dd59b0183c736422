"""What a plan has to know of the units of an engine, or of those that it will be made of."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from fsdpcore.compress.compression import Compression
from fsdpcore.compress.packing import Span
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.layout import ParamRange
from fsdpcore.fsdp.plan.sizes import UnitSize
from fsdpcore.fsdp.units.special import elements_of
from fsdpcore.fsdp.units.unit import Unit, sharded_of

_Places = dict[Hashable, tuple[Unit, str]]


def sizes_of(
    units: Iterable[UnitSize | Unit], compression: Compression | None = None
) -> tuple[UnitSize, ...]:
    """Return the sizes of units, whether they belong to an engine already or not.

    With ``compression`` they say what of them travels as it is.

    Raises:
        ArgumentError: something else among them, two of the same name, or a tie to none of them.
    """
    try:
        given = tuple(units)
    except TypeError as error:
        raise ArgumentError(f"units must be a list of Unit or UnitSize, got {units!r}") from error
    names: set[str] = set()
    for unit in given:
        if not isinstance(unit, (Unit, UnitSize)):
            raise ArgumentError(f"units must be Unit or UnitSize, got {type(unit).__name__}")
        if unit.name in names:
            raise ArgumentError(f"two units are named {unit.name!r}; names must differ")
        names.add(unit.name)
    known = {unit.name: unit for unit in given if isinstance(unit, Unit)}
    seen: _Places = {}
    sizes = [
        unit if isinstance(unit, UnitSize) else _size(unit, known, seen, compression)
        for unit in given
    ]
    for size in sizes:
        for owner, *_ in size.ties:
            if owner not in names:
                raise ArgumentError(f"unit {size.name!r} is tied to {owner!r}, which is no unit")
    return tuple(sizes)


def _size(
    unit: Unit, known: Mapping[str, Unit], seen: _Places, compression: Compression | None
) -> UnitSize:
    """Return a unit's sizes; ``seen`` says where the arrays of units before it lie."""
    ties = {(tie.unit, tie.param) for tie in unit.ties.values()}
    size = 0
    frozen: dict[np.dtype[Any], int] = {}
    exact: list[Span] = []
    for name, shape, dtype in _parameters(unit):
        elements = math.prod(shape)
        twin = _twin(unit, name, seen)
        if twin is not None:
            ties.add(twin)
        elif dtype is None:
            if compression is not None:
                exact += compression.exact_spans(unit.name, [ParamRange(name, shape, size)])
            size += elements
        else:
            frozen[dtype] = frozen.get(dtype, 0) + elements
    return UnitSize(
        unit.name,
        size,
        unit.dtype,
        tuple((elements, dtype) for dtype, elements in frozen.items()),
        tuple((owner, param, _trained(known.get(owner), param)) for owner, param in sorted(ties)),
        tuple(exact),
    )


def _parameters(unit: Unit) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any] | None]]:
    """Give name, shape, and of frozen ones the dtype, of each parameter of the unit's own."""
    sharded = sharded_of(unit)
    if sharded is not None:
        for number, part in enumerate(sharded.flat_parameters):
            for param in part.layout.params:
                yield param.name, param.shape, part.layout.dtype if number else None
        return
    for name, value in (unit.initial or {}).items():
        yield name, value.shape, value.dtype if name in unit.frozen else None


def _twin(unit: Unit, name: str, seen: _Places) -> tuple[str, str] | None:
    """Find the parameter that an array is already, as an engine would."""
    place = elements_of((unit.initial or {}).get(name))
    if place is None:
        return None
    owner, first = seen.setdefault(place, (unit, name))
    return None if (owner, first) == (unit, name) else (owner.name, first)


def _trained(owner: Unit | None, param: str) -> int:
    """Elements of the gradient of a parameter; 0 where it has none."""
    found = _parameters(owner) if owner is not None else iter(())
    return sum(math.prod(s) for name, s, frozen in found if name == param and frozen is None)
