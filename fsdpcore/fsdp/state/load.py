"""``engine.load_state_dict`` and ``load_full``: checked on all ranks before anything is changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdpcore.collectives import broadcast, scatter_v
from fsdpcore.collectives.consensus import agree
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int, rounds_into
from fsdpcore.core.device import HOST
from fsdpcore.core.digests import hex_digest
from fsdpcore.core.disagreement import check_same
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.text import listed
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.sharding.tensor_group import described
from fsdpcore.fsdp.state.boxes import scatter_boxes
from fsdpcore.fsdp.state.entries import (
    StateEntry,
    entries_of,
    ignored_of,
    quantising_entries,
    ties_of,
)
from fsdpcore.fsdp.state.state import (
    EngineState,
    LoadReport,
    Progress,
    ShardedArray,
    is_residual,
    of_compression,
)
from fsdpcore.fsdp.state.writing import UNCHANGED, same_bits, set_ignored, set_progress
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.param_tree import ParamTree
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit

Arrays = Mapping[str, "ShardedArray | Array"]
_SHOWN = 8  # names in a message


@dataclasses.dataclass(frozen=True)
class _LoadContents:
    """What is about to be loaded; the same on all ranks, plain values only.

    Attributes:
        present: names of the arrays to be loaded.
        missing, unexpected: see ``LoadReport``.
        step, scale: see ``Progress``; step -1 to leave both as they are.
    """

    present: Sequence[str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    step: int = -1
    scale: Sequence[Any] | None = None


def load_state(
    model: ShardedModel,
    state: EngineState | None,
    *,
    strict: bool,
    optimizer: bool,
    src: int | None,
) -> LoadReport:
    """Load what ``state_dict`` gave; see ``FSDP.load_state_dict``."""
    what = f"load_state_dict(strict={strict}, optimizer={optimizer}, src={src})"
    loading = _StateLoader(model, what, optimizer=optimizer, src=src)
    if not loading.reads:
        return loading.run(None, None, strict=strict)
    try:
        if not isinstance(state, EngineState):
            raise ArgumentError(
                f"a state is what state_dict() returns, got {type(state).__name__}; for parameters "
                "in a mapping use load_full, and with the state on one rank only, src=that rank"
            )
        progress = Progress.of(state.info) if optimizer else None
        loading.stale = state.info.get("step") != model.status.steps
    except ArgumentError as error:
        loading.problems.append(str(error))
        return loading.run({}, None, strict=False)
    return loading.run(state.arrays, progress, strict=strict)


def load_params(
    model: ShardedModel, tree: ParamTree | None, params: Any, *, strict: bool, src: int | None
) -> LoadReport:
    """Load whole parameters by name; see ``FSDP.load_full``."""
    loading = _StateLoader(
        model, f"load_full(strict={strict}, src={src})", optimizer=False, src=src
    )
    if not loading.reads:
        return loading.run(None, None, strict=strict)
    if tree is not None:
        params = _by_name(tree, params)
    if not isinstance(params, Mapping):
        nested = "" if tree is None else ", or nested as by full_tree()"
        loading.problems.append(
            f"parameters come as a mapping from 'unit.param' to arrays{nested}, got "
            f"{type(params).__name__}"
        )
        return loading.run({}, None, strict=False)
    return loading.run(params, None, strict=strict, optional=ignored_of(model.units))


def _by_name(tree: ParamTree, params: Any) -> Any:
    """Return parameters that are nested like the tree by name; anything else as it is."""
    named = isinstance(params, Mapping) and any(name in params for name in tree.names)
    if named or params is None:
        return params
    try:
        return tree.named(params)
    except ArgumentError:
        return params


class _StateLoader:
    """One call of ``load_state``, ``load_params``.

    Attributes:
        reads: this rank has arrays to load.
        problems: what is wrong with them.
        stale: the model was trained since they were taken.
    """

    def __init__(self, model: ShardedModel, what: str, *, optimizer: bool, src: int | None) -> None:
        model.status.check_idle(what)
        model.status.check_own(what)
        self._model = model
        self._device = model.device
        self._everyone = model.groups.everyone
        self._what = what
        self._optimizer = optimizer
        self._src = None if src is None else as_int(src, "src (the rank that has it)", minimum=0)
        backend = model.groups.whole
        if self._src is not None and self._src >= backend.world_size:
            raise ArgumentError(f"src={src}, but there are {backend.world_size} ranks")
        self._entries = entries_of(model.units, optimizer=optimizer)
        self._ignored = ignored_of(model.units)
        here = self._src == backend.rank and model.groups.leads
        self.reads = self._src is None or here
        self.problems: list[str] = []
        self.stale = False

    def run(
        self,
        given: Arrays | None,
        progress: Progress | None,
        *,
        strict: bool,
        optional: Iterable[str] = (),
    ) -> LoadReport:
        """Agree with the other ranks, then load."""
        arrays: dict[str, ShardedArray | Array] = {}
        plan = _LoadContents((), (), ())
        if given is not None:
            arrays = self._untied(given)
            plan = self._plan(arrays, progress)
            free = {*optional, *filter(of_compression, (*plan.missing, *plan.unexpected))}
            left, more = (
                [name for name in names if name not in free]
                for names in (plan.missing, plan.unexpected)
            )
            if strict and (left or more):
                self.problems.append(self._misfit(left, more, len(arrays)))
        plan = self._agreed(plan)
        self._load(arrays, set(plan.present))
        if plan.step >= 0:
            scale = None if plan.scale is None else (float(plan.scale[0]), int(plan.scale[1]))
            set_progress(self._model, Progress(plan.step, scale))
        if self._optimizer and all(map(of_compression, plan.missing)):
            self._model.status.partially_updated = False
        return LoadReport(tuple(plan.missing), tuple(plan.unexpected))

    # Checking.

    def _untied(self, given: Arrays) -> dict[str, ShardedArray | Array]:
        """Return the arrays, those of tied parameters under the names of their owners."""
        arrays: dict[str, ShardedArray | Array] = {}
        for name, value in given.items():
            named: object = name
            if isinstance(named, str):
                arrays[name] = value
            else:
                self.problems.append(f"a name must be a string such as 'unit.param', got {name!r}")
        for name, owner in ties_of(self._model.units).items():
            tied = arrays.pop(name, None)
            if tied is None:
                continue
            other = arrays.setdefault(owner, tied)
            if other is not tied and not same_bits(other, tied, self._device):
                self.problems.append(
                    f"{name} is tied to {owner}, but their arrays differ; give one of them"
                )
        return arrays

    def _plan(
        self, arrays: dict[str, ShardedArray | Array], progress: Progress | None
    ) -> _LoadContents:
        known: dict[str, StateEntry | None] = {entry.name: entry for entry in self._entries}
        known |= dict.fromkeys(self._ignored)
        present = [name for name in known if name in arrays]
        for name in present:
            problem = self._check(name, known[name], arrays[name])
            if problem:
                self.problems.append(f"{name} {problem}")
        missing = [name for name in known if name not in arrays]
        unexpected = [name for name in arrays if name not in known]
        if not self._optimizer:  # then it does not matter whether there is any
            unexpected = [name for name in unexpected if not _of_optimizer(name)]
        if progress is None:
            return _LoadContents(present, missing, unexpected)
        return _LoadContents(present, missing, unexpected, progress.step, progress.scale)

    def _check(self, name: str, entry: StateEntry | None, value: ShardedArray | Array) -> str:
        """Say what is wrong with an array for an entry, or for an ignored array; "" for nothing."""
        if not isinstance(value, ShardedArray):
            try:
                value = self._device.given(value, "")
            except ArgumentError as error:
                return str(error).strip()
        if entry is None:
            return self._check_ignored(name, value)
        if isinstance(value, ShardedArray) and self._src is not None:
            return "is sharded, but with src one rank gives whole arrays"
        wanted = entry.data.dtype
        if value.shape != entry.whole:
            return f"has shape {value.shape}, but here it is {entry.whole}"
        if not rounds_into(value.dtype, wanted):
            return f"has dtype {value.dtype}, but here it is {wanted}"
        if isinstance(value, ShardedArray):
            if _cut(value.box) != _cut(entry.box):
                return _other_box(value.box, entry.box)
            have = [(piece.start, piece.stop) for piece in value.pieces]
            needed = [(entry.start, entry.stop)] if entry.data.size else []
            if have != needed:
                return (
                    f"comes in the ranges {have}, but this rank holds {needed}: that is another "
                    "layout (another strategy, or number of ranks); a checkpoint loads into any, "
                    "and so does state_dict(full=True)"
                )
            if self.stale and any(self._shares(p.array, entry) for p in value.pieces):
                return (
                    "is a view of what the engine has now, not of what it had; copy the arrays of "
                    "a state_dict that is to outlive an update, or take state_dict(full=True)"
                )
        return ""

    def _shares(self, array: Array, entry: StateEntry) -> bool:
        return self._device.owns(array) and self._device.overlap(array, entry.data)

    def _check_ignored(self, name: str, value: ShardedArray | Array) -> str:
        unit, param = self._ignored[name]
        wanted = unit.ignored[param]
        if isinstance(value, ShardedArray):
            return "is ignored by the engine, and needs a whole array"
        if (value.shape, value.dtype) != (wanted.shape, wanted.dtype):
            return (
                f"has shape {value.shape} and dtype {value.dtype}, but here it is "
                f"{wanted.shape} and {wanted.dtype}"
            )
        return ""

    def _misfit(self, missing: Sequence[str], unexpected: Sequence[str], given: int) -> str:
        parts = []
        if missing:
            parts.append(f"missing are {listed(missing)}")
        if unexpected:
            parts.append(f"unexpected are {listed(unexpected)}")
        hint = "strict=False loads what fits"
        if not given:
            hint = "the state is empty; if one rank has it, pass src=that rank"
        elif any(map(_of_optimizer, (*missing, *unexpected))):
            hint += ", and load_state_dict(optimizer=False) the parameters only"
        return f"{', '.join(parts)} ({hint})"

    def _agreed(self, plan: _LoadContents) -> _LoadContents:
        told = json.dumps(dataclasses.astuple(plan))
        if self._src is None:  # all ranks have one, and long lists need not travel
            told = hex_digest(told.encode())
        elif not self.reads:
            told = ""
        shown, more = self.problems[:_SHOWN], len(self.problems) - _SHOWN
        problem = "; ".join(shown) + (f"; and {more} problems more" if more > 0 else "")
        error = ArgumentError(problem) if problem else None
        everyone = agree(self._everyone, self._what, error, told, ending=UNCHANGED)
        if self._src is not None:
            return _LoadContents(*json.loads(everyone[self._src]))
        check_same(
            [[each] for each in everyone],
            self._everyone.ranks,
            lambda found: (
                f"{self._what}: the ranks have states of different names, steps or loss scales; "
                f"nothing was changed: {found.ranks} differ"
            ),
        )
        return plan

    # Loading.

    def _load(self, arrays: Arrays, present: set[str]) -> None:
        for unit in self._model.units:
            here = [each for each in self._entries if each.unit is unit and each.name in present]
            if not here:
                continue
            lags = {each.name for each in quantising_entries(unit) if not is_residual(each.name)}
            received = bool(lags) and lags <= present
            with unit.rewriting(optimizer=self._optimizer, received=received):
                for entry in here:
                    self._fill(entry, arrays.get(entry.name))
                for entry in self._entries:
                    if entry.unit is unit and entry.name not in present and is_residual(entry.name):
                        entry.data[...] = 0
        for name, (unit, param) in self._ignored.items():
            if name in present:
                self._replace(unit, param, arrays.get(name))

    def _fill(self, entry: StateEntry, value: ShardedArray | Array | None) -> None:
        """Write this rank's part of an array; a collective if one rank gives it."""
        if isinstance(value, ShardedArray):
            for piece in value.pieces:  # one, with what this rank holds
                self._device.assign(entry.data, piece.array)
            return
        whole = None if value is None else self._device.given(value, entry.name)
        if self._src is None:
            assert whole is not None
            self._device.assign(entry.data, entry.cut(whole))
            return
        if whole is not None and not (self._device.owns(whole) and whole.dtype == entry.data.dtype):
            rounded = self._device.empty(whole.shape, entry.data.dtype)
            self._device.assign(rounded, whole)
            whole = rounded
        groups = self._model.groups
        if groups.tensor is not None and groups.whole.rank == self._src:
            whole = scatter_boxes(self._device, entry, whole, groups.tensor)
        _deal(groups, entry, None if whole is None else whole.reshape(-1), self._src)

    def _replace(self, unit: ShardedUnit, param: str, value: ShardedArray | Array | None) -> None:
        assert not isinstance(value, ShardedArray)
        now = unit.ignored[param]
        array = now.copy()
        if value is not None:
            given = self._device.given(value, param)
            if on_host(now):  # as all is that does not travel, on a GPU too
                HOST.assign(array, self._device.to_host(given))
            else:
                self._device.assign(array, given)
        if self._src is not None:
            label = f"state, {unit.name}.{param}"
            broadcast(array, self._everyone, root=self._src, out=array, label=label)
        set_ignored(unit, param, array)


def _deal(groups: ProcessGroups, entry: StateEntry, flat: Array | None, src: int) -> None:
    """Give each rank its part of an array, of which ``src`` has all; nobody else holds more."""
    shards, data = groups.placement.shards, entry.movable
    label = f"state, {entry.name}"
    if not entry.split:
        if flat is not None:
            data[:] = flat
        broadcast(data, groups.whole, root=src, out=data, label=label)
    elif entry.of_all:
        counts = None if flat is None else entry.counts
        scatter_v(flat, groups.whole, counts, root=src, out=data, label=label)
    else:
        home = src // shards
        if groups.replica == home:
            counts = None if flat is None else entry.counts
            scatter_v(flat, groups.shards, counts, root=src % shards, out=data, label=label)
        if groups.replicas.world_size > 1:
            broadcast(data, groups.replicas, root=home, out=data, label=label)
    if data is not entry.data:
        entry.data[:] = data


def _cut(box: ArrayBox | None) -> ArrayBox | None:
    """Return a box unless it is all there is."""
    return None if box is None or box.is_whole else box


def _other_box(given: ArrayBox | None, here: ArrayBox | None) -> str:
    have, needed = ("whole" if box is None else described(box) for box in (given, here))
    return (
        f"comes as {have}, but what this rank has is {needed}: that is another number of ranks in "
        "tensor; a checkpoint loads into any, and so does state_dict(full=True)"
    )


def _of_optimizer(name: str) -> bool:
    return name.startswith("optimizer/")
