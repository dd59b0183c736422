"""How arrays are cut into files: as an engine shares them, along axes, or by size. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.interchange.array_sources import ArraySpec
from fsdpcore.checkpoint.interchange.patterns import refuse_idle
from fsdpcore.checkpoint.plan.save_plan import Rows, WrittenPiece
from fsdpcore.checkpoint.plan.shard_specs import flat_cuts
from fsdpcore.checkpoint.plan.targets import checked_patterns
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.geometry.regions import Box, Range, as_range
from fsdpcore.fsdp.state.state import OPTIMIZER_PREFIX

_NONE = Rows(0, 0, 0)


def by_rank(arrays: Mapping[str, ArraySpec], ranks: int) -> list[list[WrittenPiece]]:
    """Return what each rank of an engine has, some maybe nothing.

    A unit is what its arrays' names have in front of the last dot. The arrays of a unit lie one
    behind the other, and each rank has an equal run of their elements; so do those of the same
    dtype that an optimizer keeps for it.
    """
    units: dict[tuple[str, str], dict[str, ArraySpec]] = {}
    for name, array in arrays.items():
        units.setdefault((_unit(name), array.dtype.name), {})[name] = array
    files: list[list[WrittenPiece]] = [[] for _ in range(ranks)]
    for (_, dtype), unit in units.items():
        layout = FlatLayout.build({name: unit[name].shape for name in unit}, dtype, ranks)
        for rank, name, region in flat_cuts(layout):
            files[rank].append(WrittenPiece(name, dtype, unit[name].shape, region, _NONE))
    return files


Axes = int | Mapping[str, int | None]
"""An axis for all arrays that have it; or axes by patterns of names, the first that fits counts."""


def by_axis(arrays: Mapping[str, ArraySpec], ranks: int, axes: Axes) -> list[list[WrittenPiece]]:
    """Return what each rank has where arrays are cut along axes, some ranks maybe nothing.

    Each has as many rows, columns or blocks of an array as the others, ``ceil(extent / ranks)``;
    only the last ranks have fewer. Arrays without an axis are shared as ``by_rank`` does it.

    Raises:
        ArgumentError: an array does not have the axis of its pattern, no array has the one that is
            for all, or a pattern fits no name.
    """
    if isinstance(axes, Mapping):
        cut = _by_patterns(arrays, axes)
    else:
        along = as_int(axes, "axis")
        cut = {name: _axis_of(array, along) for name, array in arrays.items()}
        if arrays and all(axis is None for axis in cut.values()):
            raise ArgumentError(f"no array has the axis {along}")
    files = by_rank({name: arrays[name] for name, axis in cut.items() if axis is None}, ranks)
    for name, axis in cut.items():
        if axis is None:
            continue
        dtype, shape = arrays[name]
        start, stop = [0] * len(shape), list(shape)
        share = -(-shape[axis] // ranks)
        for rank in range(ranks):
            start[axis], stop[axis] = rank * share, min((rank + 1) * share, shape[axis])
            if start[axis] < stop[axis] and arrays[name].size:
                box = Box(tuple(start), tuple(stop))
                region = as_range(box, shape) or box
                files[rank].append(WrittenPiece(name, dtype.name, shape, region, _NONE))
    return files


def _by_patterns(
    arrays: Mapping[str, ArraySpec], axes: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Return the axis that each array is cut along; None for flat."""
    patterns = checked_patterns(axes.keys())
    for each, axis in axes.items():
        if axis is not None:
            as_int(axis, f"the axis of {each!r}")
    refuse_idle(patterns, arrays, "what is written")
    cut: dict[str, int | None] = {}
    for name, array in arrays.items():
        pattern = next((each for each in axes if each == name or fnmatchcase(name, each)), None)
        axis = None if pattern is None else axes[pattern]
        cut[name] = None if axis is None else _axis_of(array, axis)
        if cut[name] is None and axis is not None:
            raise ArgumentError(
                f"{short(name)} of shape {array.shape} does not have the axis {axis} that "
                f"{pattern!r} gives it; put a pattern for it in front, with another axis or None"
            )
    return cut


def _axis_of(array: ArraySpec, axis: int) -> int | None:
    """Return an axis, counted from the end if it is negative; None if there is no such axis."""
    ndim = len(array.shape)
    return axis % ndim if -ndim <= axis < ndim else None


def by_size(arrays: Mapping[str, ArraySpec], nbytes: int) -> list[list[WrittenPiece]]:
    """Return files of at most ``nbytes`` of data each, arrays one behind the other.

    An element that is larger has a file for itself.
    """
    files: list[list[WrittenPiece]] = [[]]
    room = nbytes
    for name, array in arrays.items():
        itemsize, start = array.dtype.itemsize, 0
        while start < array.size:
            count = min(room // itemsize, array.size - start)
            if count == 0 and files[-1]:
                files.append([])
                room = nbytes
                continue
            count = max(count, 1)
            region = Range(start, start + count)
            files[-1].append(WrittenPiece(name, array.dtype.name, array.shape, region, _NONE))
            start += count
            room -= count * itemsize
    return files


def _unit(name: str) -> str:
    kind, param = "", name
    if name.startswith(OPTIMIZER_PREFIX):
        kind, _, param = name.removeprefix(OPTIMIZER_PREFIX).partition("/")
    return f"{kind}/{param.rpartition('.')[0]}"
