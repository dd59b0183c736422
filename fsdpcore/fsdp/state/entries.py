"""All arrays that an engine is responsible for, by name, and this rank's part of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.geometry.layout import FlatLayout, ParamRange
from fsdpcore.fsdp.offload.arrays import GRADIENTS, WRITTEN, ArrayKind
from fsdpcore.fsdp.state.state import RECEIVED, RESIDUAL, optimizer_name
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.updates import ShardUpdate


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One array, sharded over the ranks that share a copy, or whole on every rank.

    Attributes:
        name: of the whole engine: ``unit.param``, ``optimizer/exp_avg/unit.param``.
        unit: that it belongs to.
        shape: of what the ranks that share a copy have together: the array, or the box.
        bounds: where each shard begins in the flattened array, and the end; empty if every rank
            holds all of it.
        start, stop: what this rank holds; equal if nothing.
        data: that part, flat, writable, the engine's own memory.
        kinds: what it is among, for the unit's store.
        box: where it lies in a whole array of which it is a box; None if it is none.
        boxes: of all ranks of the ``tensor`` group; empty if it is none.
        of_all: it is sharded over all ranks, not those that share a copy.
    """

    name: str
    unit: ShardedUnit
    shape: tuple[int, ...]
    bounds: tuple[int, ...]
    start: int
    stop: int
    data: Array
    kinds: tuple[ArrayKind, ...]
    box: ArrayBox | None = None
    boxes: tuple[ArrayBox, ...] = ()
    of_all: bool = False

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self.shape if self.box is None else self.box.whole

    @property
    def size(self) -> int:
        """Elements of ``shape``."""
        return math.prod(self.shape)

    def cut(self, array: Array) -> Array:
        """Return what a whole array has for this rank: elements ``[start, stop)``, flat."""
        own = array if self.box is None else array[self.box.slices]
        return own.reshape(-1)[self.start : self.stop]

    @property
    def split(self) -> bool:
        """Whether each rank of a replica holds another part."""
        return bool(self.bounds)

    @property
    def movable(self) -> Array:
        """The data where collectives can read and write it: itself, or a copy of it on the GPU."""
        away = any(kind in self.unit.store.away for kind in self.kinds)
        return self.data.copy() if away else self.data

    @property
    def counts(self) -> list[int]:
        """How many elements each shard has of it."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]


def bounds_in(layout: FlatLayout, param: ParamRange) -> tuple[int, ...]:
    """Return where each shard begins in the flattened parameter, and the end of the last one."""
    size, begin = layout.shard_size, -param.offset
    ends = range(begin, begin + size * layout.world_size + 1, size) if size else ()
    if not ends:  # an empty buffer
        return (0,) * (layout.world_size + 1)
    most = param.size
    return tuple([0 if end < 0 else most if end > most else end for end in ends])


def param_entries(unit: ShardedUnit) -> Iterator[StateEntry]:
    """Give the parameters of a unit's own at full precision: trained ones, then frozen ones."""
    for part in unit.flat_parameters:
        for param in part.layout.params:
            bounds = bounds_in(part.layout, param)
            data = _cut(part.master, part.layout, param, bounds, part.rank)
            name = f"{unit.name}.{param.name}"
            entry = _entry(name, unit, param.shape, bounds, part.rank, data, WRITTEN)
            yield _boxed(entry, unit, param.name)


def gradient_entries(unit: ShardedUnit) -> Iterator[StateEntry]:
    """Give the reduced gradients of a unit; zeros where nothing was reduced in this step."""
    shard, layout, rank = unit.gradients.zeros(), unit.layout, unit.shard_rank
    for param in layout.params:
        bounds = bounds_in(layout, param)
        data = _cut(shard, layout, param, bounds, rank)
        name = f"{unit.name}.{param.name}"
        entry = _entry(name, unit, param.shape, bounds, rank, data, GRADIENTS)
        yield _boxed(entry, unit, param.name)


def optimizer_entries(unit: ShardedUnit) -> Iterator[StateEntry]:
    """Give what the optimizers keep of a unit's parameters, state by state."""
    update = unit.updater
    if update is None:
        return
    places = [
        (param, bounds_in(unit.layout, param), update.policies[param.name])
        for param in unit.layout.params
    ]
    wholes = {
        param.name: unit.boxes[param.name].whole if param.name in unit.boxes else param.shape
        for param in unit.layout.params
    }
    shapes = {param.name: policy.state_shapes(wholes[param.name]) for param, _, policy in places}
    for state in _states(update):
        for param, whole_bounds, policy in places:
            shape = shapes[param.name].get(state)
            if shape is None:
                continue
            name = optimizer_name(state, f"{unit.name}.{param.name}")
            alike = shape == wholes[param.name]  # cut as the parameter is
            bounds = whole_bounds if alike else ()
            if policy.elementwise:
                data = _cut(update.state[state], unit.layout, param, bounds, unit.shard_rank)
            else:
                data = update.whole_state[param.name][state]
            shape = param.shape if alike else shape
            entry = _entry(name, unit, shape, bounds, unit.shard_rank, data, (ArrayKind.STATE,))
            yield _boxed(entry, unit, param.name) if alike else entry


def quantising_entries(unit: ShardedUnit) -> Iterator[StateEntry]:
    """Give what is kept of a unit where it travels quantised.

    What all ranks have received of each parameter; and what quantising gradients has left out,
    which is each rank's own, and none that another number of ranks could use.
    """
    part, quantised = unit.trained_parameter, unit.gradients.quantised
    for param in part.layout.params:
        if part.received is not None:
            bounds = bounds_in(part.layout, param)
            data = _cut(part.received, part.layout, param, bounds, part.rank)
            name = optimizer_name(RECEIVED, f"{unit.name}.{param.name}")
            yield _entry(name, unit, param.shape, bounds, part.rank, data, WRITTEN)
    if quantised is not None and quantised.residual.size:
        sizes = quantised.residual_sizes
        name = optimizer_name(f"{RESIDUAL}_{len(sizes)}_ranks_{sum(sizes)}", unit.name)
        rank, bounds = quantised.rank, tuple(bounds_of(sizes))
        entry = _entry(name, unit, bounds[-1:], bounds, rank, quantised.residual, GRADIENTS)
        yield replace(entry, of_all=True)


def _states(update: ShardUpdate) -> list[str]:
    names = (policy.state_names for policy in update.policies.values())
    return list(dict.fromkeys(name for each in names for name in each))


def _cut(
    shard: Array, layout: FlatLayout, param: ParamRange, bounds: tuple[int, ...], rank: int
) -> Array:
    """Return the part of a shard that belongs to a parameter; empty if it has none of it."""
    size = bounds[rank + 1] - bounds[rank]
    start = param.offset + bounds[rank] - rank * layout.shard_size if size else 0
    return shard[start : start + size]


def _entry(
    name: str,
    unit: ShardedUnit,
    shape: tuple[int, ...],
    bounds: tuple[int, ...],
    rank: int,
    data: Array,
    kinds: tuple[ArrayKind, ...],
) -> StateEntry:
    whole = (0, math.prod(shape))
    start, stop = bounds[rank : rank + 2] if bounds else whole
    return StateEntry(name, unit, shape, bounds, start, stop, data, kinds)


def _boxed(entry: StateEntry, unit: ShardedUnit, param: str) -> StateEntry:
    """Say of an array that is cut as a parameter is where it lies."""
    if param not in unit.boxes:
        return entry
    return replace(entry, box=unit.boxes[param], boxes=unit.tilings[param])


def by_unit(entries: Iterable[StateEntry]) -> Iterator[list[StateEntry]]:
    """Give neighbours of one unit and kind together, loaded if they are offloaded."""
    for (unit, kinds), group in itertools.groupby(entries, lambda each: (each.unit, each.kinds)):
        unit.store.begin(kinds)
        try:
            yield list(group)
        finally:
            unit.store.end(kinds)


def entries_of(units: Sequence[ShardedUnit], *, optimizer: bool) -> list[StateEntry]:
    """Return all arrays of units but the ignored ones: parameters, then optimizer state.

    The same names in the same order on all ranks.

    Raises:
        ArgumentError: two arrays would have the same name.
    """
    entries = [entry for unit in units for entry in param_entries(unit)]
    if optimizer:
        entries += [entry for unit in units for entry in optimizer_entries(unit)]
        entries += [entry for unit in units for entry in quantising_entries(unit)]
    _check_unique([*(entry.name for entry in entries), *ignored_of(units), *ties_of(units)])
    return entries


def memory_of(units: Sequence[ShardedUnit], *, optimizer: bool) -> list[Array]:
    """Return all arrays of which ``entries_of`` and ``ignored_of`` give parts.

    As long as they are the same objects, so are the entries.
    """
    found: list[Array | None] = []
    for unit in units:
        found += unit.ignored.values()
        for part in unit.flat_parameters:
            found += [part.master, part.received]
        if optimizer and unit.updater is not None:
            found += unit.updater.state.values()
            for each in unit.updater.whole_state.values():
                found += each.values()
        if optimizer and unit.gradients.quantised is not None:
            found.append(unit.gradients.quantised.residual)
    return [each for each in found if each is not None]


def ignored_of(units: Iterable[ShardedUnit]) -> dict[str, tuple[ShardedUnit, str]]:
    """Return where each ignored array is: its unit, and its name there."""
    return {f"{unit.name}.{name}": (unit, name) for unit in units for name in unit.ignored}


def ties_of(units: Iterable[ShardedUnit]) -> dict[str, str]:
    """Return the owner of each tied parameter."""
    return {f"{unit.name}.{name}": str(tie) for unit in units for name, tie in unit.ties.items()}


def _check_unique(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ArgumentError(
                f"two arrays of this engine are both named {name!r} in its state; rename a unit "
                "or a parameter, so that 'unit.param' differs"
            )
        seen.add(name)
