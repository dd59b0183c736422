"""How arrays are cut into files: as an engine of so many ranks shares them, or by size. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fsdpcore.checkpoint.interchange.array_sources import ArraySpec
from fsdpcore.checkpoint.plan.save_plan import Rows, WrittenPiece
from fsdpcore.checkpoint.plan.shard_specs import flat_cuts
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.geometry.regions import Range
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
