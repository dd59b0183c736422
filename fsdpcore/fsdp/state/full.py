"""Whole parameters for a while, all at once: ``engine.full_params``."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fsdpcore.collectives import barrier
from fsdpcore.collectives.consensus import compare
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.device import Device
from fsdpcore.core.digests import hex_digest
from fsdpcore.core.disagreement import Disagreement
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.core.text import listed, name_ranks, nearest
from fsdpcore.fsdp.state.entries import StateEntry, by_unit, ignored_of, param_entries, ties_of
from fsdpcore.fsdp.state.save import full_state, gathered
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.param_tree import ParamTree
from fsdpcore.fsdp.units.sharded_unit import ParamState, ShardedUnit
from fsdpcore.fsdp.units.unit import Unit
from fsdpcore.fsdp.units.views import ClosingArrays, UnknownParameterError, read_only


class FullParams(ClosingArrays[Array]):
    """Whole parameters by ``unit.param``, until the end of ``engine.full_params()``.

    With ``write=True`` they are written in place, as in ``params["u.w"][...] = 0``, or assigned:
    ``params["u.w"] = array`` copies an array of the same shape, rounded to the parameter's dtype.

    Args:
        arrays: on the device.
        device: where they are.
        writable: names of those that may be assigned to.
    """

    def __init__(
        self, arrays: Mapping[str, Array], device: Device, writable: Collection[str]
    ) -> None:
        super().__init__(arrays)
        self._device = device
        self._writable = writable

    def __getitem__(self, name: str) -> Array:
        arrays = self._open()
        try:
            return arrays[name]
        except KeyError:
            raise UnknownParameterError(
                f"no parameter {name!r} here{nearest(name, arrays)}; they are named 'unit.param'"
            ) from None

    def __setitem__(self, name: str, value: Array) -> None:
        target, value = self[name], self._device.given(value, f"what is assigned to {name}")
        if name not in self._writable:
            raise StateError(
                f"{name} is read-only here; full_params(write=True) gives parameters to be "
                "written, but for ignored ones, which are not the engine's"
            )
        if value.shape != target.shape or not np.can_cast(value.dtype, target.dtype, "same_kind"):
            raise ArgumentError(
                f"{name} has shape {target.shape} and dtype {target.dtype}, but what is assigned "
                f"to it {value.shape} and {value.dtype}"
            )
        if value is not target:
            self._device.assign(target, value)

    def _closed(self) -> str:
        return (
            "full_params() has ended, and its arrays with it; use them inside of the with "
            "block, or copy them there"
        )


@contextmanager
def full_params(
    model: ShardedModel,
    *,
    write: bool,
    names: str | Iterable[str] | None,
    unit: Unit | str | None,
) -> Iterator[FullParams]:
    """Give whole parameters; see ``FSDP.full_params``."""
    chosen = _chosen(model, names, unit)
    what = f"full_params(write={write})"
    model.status.check_idle(what)
    if write:
        model.status.check_own(what)
    hashed = hex_digest(repr(chosen).encode(), 8)
    barrier(model.groups.everyone, label=f"{what} of {len(chosen)} parameters, {hashed}")
    model.status.full_params_open = True
    opened: list[ShardedUnit] = []
    arrays: dict[str, Array] = {}
    params: FullParams | None = None
    try:
        own = {chosen[name] for name in chosen}
        arrays.update(_own(model, own, opened, write=write))
        ignored = ignored_of(model.units)
        writable = {name for name, owner in chosen.items() if write and owner not in ignored}
        found = {name: arrays[owner] for name, owner in chosen.items()}
        params = FullParams(found, model.device, writable)
        yield params
        if write:
            names = [entry.name for entry in _entries(model.units, own)]
            check_written_alike(model, what, names, arrays)
            _keep(model.units, own, arrays)
    finally:
        if params is not None:
            params.close()
        arrays.clear()
        for each in opened:
            each.reshard()
        model.status.full_params_open = False


def full_tree(model: ShardedModel, tree: ParamTree | None, to: int | str) -> Any:
    """Return whole parameters in a tree; see ``FSDP.full_tree``."""
    if tree is None:
        raise StateError(
            "full_tree() needs an engine that was made of a tree; this one was made of units: "
            "state_dict(full=True) has their parameters by name"
        )
    model.status.check_idle("full_tree()")
    state = full_state(model, optimizer=False, to=to)
    if not state.arrays:
        return None
    owners = ties_of(model.units)
    return tree.build({name: state[owners.get(name, name)] for name in tree.names})


def _chosen(
    model: ShardedModel, patterns: str | Iterable[str] | None, unit: Unit | str | None
) -> dict[str, str]:
    """Return the parameters to be shown, each with the one that it is, in order of declaration."""
    units = model.units if unit is None else (model[unit],)
    owners = {
        f"{each.name}.{name}": str(each.ties.get(name, f"{each.name}.{name}"))
        for each in units
        for name in each.names
    }
    if patterns is None:
        return owners
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = fnmatch.filter(owners, pattern)
        if not matching:
            raise ArgumentError(
                f"names={pattern!r} matches no parameter{nearest(pattern, owners)}; they are named "
                f"'unit.param': {listed(list(owners))}"
            )
        found.update(matching)
    return {name: owner for name, owner in owners.items() if name in found}


def _own(
    model: ShardedModel, own: set[str], opened: list[ShardedUnit], *, write: bool
) -> dict[str, Array]:
    """Return the arrays; take note of units that are to be resharded in the end."""
    arrays: dict[str, Array] = {}
    for unit in model.units:
        for name in unit.ignored:
            arrays[f"{unit.name}.{name}"] = unit.ignored[name]
        here = [entry for entry in param_entries(unit) if entry.name in own]
        if here and not write and _is_there(model, unit):
            if unit.state is not ParamState.UNSHARDED:
                unit.unshard()
                opened.append(unit)
            for entry in here:
                arrays[entry.name] = unit.params[entry.name[len(unit.name) + 1 :]]
            continue
        for entry in itertools.chain.from_iterable(by_unit(here)):
            array = gathered(model.groups, entry)
            arrays[entry.name] = array if write else read_only(array)
    return arrays


def _is_there(model: ShardedModel, unit: ShardedUnit) -> bool:
    """Whether whole parameters take no memory, since each rank, or the host, has them anyway.

    The ranks that share a copy find the same, but those of ``tensor`` may not: they are on other
    hosts, or have boxes of other sizes. So these gather together in any case.
    """
    if model.groups.tensor is not None:
        return False
    return not unit.gathered_bytes and not any(part.mixed for part in unit.flat_parameters)


def check_written_alike(
    model: ShardedModel, what: str, names: Sequence[str], arrays: Mapping[str, Array]
) -> None:
    """Raise MismatchError on all ranks if they have written different values; a collective.

    Args:
        model: of the engine.
        what: they were written in.
        names: of those that are compared, in the same order on all ranks.
        arrays: by name.
    """
    digests = []
    for name in names:
        data = byte_view(model.device.to_host(arrays[name])).data
        digests.append(hex_digest(data))

    def message(found: Disagreement) -> str:
        return (
            f"{what}: {names[found.position]} was written differently on rank {found.first} and on "
            f"{name_ranks(found.others)}; write the same on all of them. Nothing was kept"
        )

    compare(model.groups.everyone, f"{what}: the end", digests, message)


def _keep(units: Sequence[ShardedUnit], own: set[str], arrays: Mapping[str, Array]) -> None:
    """Write this rank's part of each array back."""
    for unit in units:
        here = [entry for entry in param_entries(unit) if entry.name in own]
        if here:
            with unit.rewriting():
                for entry in here:
                    entry.data[:] = entry.cut(arrays[entry.name])


def _entries(units: Sequence[ShardedUnit], own: set[str]) -> list[StateEntry]:
    return [entry for unit in units for entry in param_entries(unit) if entry.name in own]
