"""What applies the optimizers to one rank's shard of a unit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives import all_reduce, broadcast
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.offload.arrays import ArrayKind
from fsdpcore.fsdp.offload.offload_store import OffloadStore
from fsdpcore.fsdp.optim import Optimizer
from fsdpcore.fsdp.optim.bound import BoundUpdate
from fsdpcore.fsdp.optim.groups import elementwise_ranges, whole_parameter_specs
from fsdpcore.fsdp.optim.pieces import AnyOrder, PieceSpec, Reduce, ShardPiece
from fsdpcore.fsdp.units.binding import Binding
from fsdpcore.fsdp.units.flat_parameter import FlatParameter
from fsdpcore.fsdp.units.owners import Dealing, ShardRanks

_Op = Literal["sum", "max"]


class ShardUpdate:
    """The optimizers' state for one shard, and their application.

    Attributes:
        policies: the optimizer of each parameter.
        state: of elementwise optimizers: arrays by name, flat, as large as the shard without
            padding; what an optimizer has no state for stays as it is.
        whole_state: of the others: by parameter, then by name.
        exchanges: of parameters that have owners: bytes of this rank, and how many it sends.
        room: bytes of the buffers for that.
    """

    def __init__(
        self,
        part: FlatParameter,
        binding: Binding,
        policies: Mapping[str, Optimizer],
        store: OffloadStore,
        boxes: Mapping[str, ArrayBox],
    ) -> None:
        groups = binding.groups
        self._label = f"optimizer of unit {part.places.unit}"
        self._algorithm = binding.algorithm
        self._part = part
        self._shards = groups.shards
        self._tensor = groups.tensor
        self._device = groups.device
        self._virtual = binding.leaves.virtual
        self.policies = found = policies
        self.ranges = elementwise_ranges(part.layout.pieces(part.rank), found)
        self.specs = whole_parameter_specs(part.layout, part.rank, found, boxes)
        dtype, size = part.master.dtype, part.valid_size
        dealings = {
            policy: Dealing.of(part.layout, specs, binding.loads)
            for policy, specs in self.specs.items()
            if policy.has_owners
        }
        self._owning = {
            policy: ShardRanks(groups.shards, dealing, binding.pool, self._join, self._label)
            for policy, dealing in dealings.items()
        }
        self.exchanges = [
            (size * dtype.itemsize, sent * dtype.itemsize)
            for dealing in dealings.values()
            for size, sent in dealing.exchanges(part.rank)
        ]
        self.room = sum(each.room(part.rank) for each in dealings.values()) * dtype.itemsize
        self.state: dict[str, Array] = {}
        allocate = store.zeros(ArrayKind.STATE)
        for name in _elementwise_names(found):
            array = self.state[name] = allocate(size, dtype)
            for start, stop, policy in self.ranges:
                if name in policy.state_names and policy.initial_state(name):
                    array[start:stop] = policy.initial_state(name)
        self._updates: list[Callable[..., None]] | None = None
        self.whole_state: dict[str, dict[str, NDArray[Any]]] = {}
        for policy, specs in self.specs.items():
            self.whole_state.update(policy.init_pieces(specs, dtype))
        self._move_whole_state(store, dtype)

    def _move_whole_state(self, store: OffloadStore, dtype: np.dtype[Any]) -> None:
        """Have these arrays, many of which are small, in one that was allocated as it should be."""
        arrays = [(named, name) for named in self.whole_state.values() for name in named]
        size = sum(named[name].size for named, name in arrays)
        self._check_room(store, size * dtype.itemsize)
        # Where there is nothing to allocate, empty arrays still have to be of this device.
        allocate = store.allocate(ArrayKind.STATE) if size else self._device.empty
        flat, start = allocate(size, dtype), 0
        for named, name in arrays:
            values = named[name]
            named[name] = flat[start : start + values.size]
            self._device.assign(named[name], values)
            start += values.size

    def _check_room(self, store: OffloadStore, nbytes: int) -> None:
        """Raise ArgumentError if the store has no place for so much more state."""
        room, nbytes = store.room(ArrayKind.STATE), nbytes + store.held[ArrayKind.STATE]
        if room is not None and nbytes > room:
            names = ", ".join(sorted({type(policy).__name__ for policy in self.specs}))
            raise ArgumentError(
                f"unit {self._part.places.unit!r}: the optimizer's state takes {nbytes} bytes, but "
                f"the file of Offload has {room} for it, as it was declared; let state_shapes of "
                f"{names} name all that init_pieces makes"
            )

    @property
    def has_owners(self) -> bool:
        """Whether whole parameters are updated by their owners."""
        return bool(self._owning)

    @property
    def begun(self) -> bool:
        """Whether ``begin`` was called, and not ``apply`` since."""
        return any(ranks.begun for ranks in self._owning.values())

    def begin(self, grad: Array, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Send what owners need; changes state only."""
        out = self._part.copy
        for policy, ranks in self._owning.items():
            policy.update_pieces(
                self._pieces(self.specs[policy], grad, out),
                step=step,
                reduce=ranks,
                lr=lr,
                grad_scale=grad_scale,
            )

    def make(self) -> None:
        """Have what this rank owns updated; after ``begin``."""
        for ranks in self._owning.values():
            ranks.make()

    def drop(self) -> None:
        """Forget an update that was begun."""
        for ranks in self._owning.values():
            ranks.drop()

    def apply(self, grad: Array, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Update the master shard by ``grad``, and what is gathered by that.

        After ``begin`` and ``make`` with the same arguments, where parameters have owners.
        ``grad`` is the same array in every step.
        """
        for ranks in self._owning.values():
            ranks.give_back()
        out = self._part.copy
        if self._updates is None:  # these arrays stay the same ones as long as the unit is in use
            self._updates = [self._bind(*each, grad, out) for each in self.ranges]
        for update in self._updates:
            update(step=step, lr=lr, grad_scale=grad_scale)
        for policy, specs in self.specs.items():
            if policy in self._owning:
                continue
            for boxed, join in ((False, self._join), (True, self._join_boxes)):
                chosen = [spec for spec in specs if (spec.box is not None) is boxed]
                if chosen:
                    policy.update_pieces(
                        self._pieces(chosen, grad, out),
                        step=step,
                        reduce=self._reduce(join),
                        lr=lr,
                        grad_scale=grad_scale,
                    )

    def _bind(
        self, start: int, stop: int, policy: Optimizer, grad: Array, out: Array | None
    ) -> Callable[..., None]:
        param, gradient = self._part.master[start:stop], grad[start:stop]
        state = {name: self.state[name][start:stop] for name in policy.state_names}
        rounded = None if out is None else out[start:stop]
        if type(policy).update is Optimizer.update:
            return BoundUpdate(policy, param, gradient, state, rounded)
        return functools.partial(policy.update, param, gradient, state, out=rounded)

    def _pieces(self, specs: list[PieceSpec], grad: Array, out: Array | None) -> list[ShardPiece]:
        starts = {p.name: p.shard_start for p in self._part.layout.pieces(self._part.rank)}
        pieces = []
        for spec in specs:
            start = starts.get(spec.name, 0)
            here = slice(start, start + spec.size)
            pieces.append(
                ShardPiece(
                    spec.name,
                    spec.shape,
                    spec.start,
                    spec.stop,
                    param=self._part.master[here],
                    grad=grad[here],
                    state=self.whole_state[spec.name],
                    out=None if out is None else out[here],
                    box=spec.box,
                )
            )
        return pieces

    def _reduce(self, join: Callable[..., None]) -> Reduce:
        return AnyOrder(join, functools.partial(join, op="max")) if self._virtual else join

    def _join(self, array: NDArray[np.float64], op: _Op = "sum") -> None:
        """Sum over the shards; these lie elsewhere on other ranks of ``tensor``, which get it."""
        self._all_reduce(array, self._shards, op)
        if self._tensor is not None:  # by any algorithm: those of sums are not those of broadcast
            broadcast(array, self._tensor, out=array, label=self._label)

    def _join_boxes(self, array: NDArray[np.float64], op: _Op = "sum") -> None:
        self._all_reduce(array, self._shards, op)
        assert self._tensor is not None
        self._all_reduce(array, self._tensor, op)

    def _all_reduce(self, array: NDArray[np.float64], group: Backend, op: _Op) -> None:
        all_reduce(array, group, op=op, out=array, algorithm=self._algorithm, label=self._label)


def state_sizes(
    layout: FlatLayout,
    rank: int,
    optimizers: Mapping[str, Optimizer],
    boxes: Mapping[str, ArrayBox],
) -> list[int]:
    """Return the sizes, in elements, of what ``ShardUpdate`` allocates for one shard, in order."""
    sizes = [layout.valid_size(rank)] * len(_elementwise_names(optimizers))
    whole = 0
    for policy, specs in whole_parameter_specs(layout, rank, optimizers, boxes).items():
        for spec in specs:
            for shape in policy.state_shapes(spec.shape).values():
                whole += spec.size if shape == spec.shape else math.prod(shape)
    return [*sizes, whole] if whole else sizes


def _elementwise_names(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Names of the state that elementwise optimizers have, each of them once."""
    policies = dict.fromkeys(each for each in optimizers.values() if each.elementwise)
    return list(dict.fromkeys(name for policy in policies for name in policy.state_names))
