"""``ShardedUnit``: what an engine makes of a unit, and the state that its parameters are in.

::

    parameters   SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
    gradients    NONE --begin_gradients--> LOCAL --reduce_gradients--> REDUCED --update--> NONE

Between uses a rank holds one shard of the unit's flat buffer: parameters, reduced gradients and
optimizer state. Where the parameters are while they are in use follows from the strategy, see
``storage.py``; full gradients are in buffers of the engine's pool, see ``gradients.py``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fsdpcore.core.buffers import DTYPES, Array
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import StateError
from fsdpcore.core.waiting import AllOf
from fsdpcore.core.work import Work
from fsdpcore.fsdp.offload.arrays import (
    GATHERED,
    GRADIENTS,
    INITIAL,
    UPDATED,
    WRITTEN,
    ArrayKind,
)
from fsdpcore.fsdp.offload.offload_store import OffloadStore
from fsdpcore.fsdp.units.binding import Binding
from fsdpcore.fsdp.units.declaration import UnitDeclaration
from fsdpcore.fsdp.units.flat_parameter import FlatParameter, lay_out
from fsdpcore.fsdp.units.gradients import GradState, UnitGradients, check_divisor
from fsdpcore.fsdp.units.precision import Precision
from fsdpcore.fsdp.units.storage import ParameterStorage
from fsdpcore.fsdp.units.updates import ShardUpdate
from fsdpcore.fsdp.units.views import Gradients, Joined, locked


class ParamState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class ShardedUnit:
    """The parameters of a unit on this rank, their gradients and optimizer state.

    It is made in two steps: laid out first, because a window and the files of all units follow from
    their layouts, then ``bind`` makes the memory. The verbs that users call are those of ``Unit``,
    which says what they mean.

    Attributes:
        declaration: what was declared.
        name, names, ties, boxes, tilings, ignored: of it; the same objects.
        dtypes: in which the trained parameters and their gradients are held.
        flat_parameters: what is trained, then what is frozen, by dtype.
        trained_parameter: the first of these.
        layout: which trained parameter lies where in the flat buffer and in the shards.
        trainable: any parameters of its own are trained.
        owners: of the tied parameters, by name; set by the engine.
        device: where the arrays are; set by ``bind``, as all that follows.
        store: where this rank's arrays are.
        gradients: of the trained parameters.
        updater: what updates this rank's shard; None without an optimizer, or trained parameters.
        state: where the parameters are.
        in_use: by a step.
        cuts: for those who go through shards of gradients, parts of them by what they want.
    """

    store: OffloadStore
    gradients: UnitGradients
    _binding: Binding

    def __init__(
        self,
        declaration: UnitDeclaration,
        precision: Precision,
        shards: int,
        block: int = 1,
        *,
        lags: bool = False,
    ) -> None:
        self.declaration = declaration
        self.name, self.names = declaration.name, declaration.names
        self.ties, self.ignored = declaration.ties, declaration.ignored
        self.boxes, self.tilings = declaration.boxes, declaration.tilings
        self.dtypes = replace(precision.dtypes(declaration.dtype), lags=lags)
        self.flat_parameters = lay_out(declaration, self.dtypes, shards, block)
        self.trained_parameter = self.flat_parameters[0]
        self.layout = self.trained_parameter.layout
        self.trainable = bool(self.layout.params)
        self.owners: dict[str, ShardedUnit] = {}
        self.device: Device = HOST
        self.updater: ShardUpdate | None = None
        self.state = ParamState.SHARDED
        self.in_use = False
        self.cuts: dict[object, list[slice]] = {}
        self._storages: list[ParameterStorage] = []  # of flat parameters that are not empty
        self._gathers: list[Work] = []
        self._tied: dict[str, Array] = {}  # gradients that are written now, flat
        self._in_writing = False
        self._filled = False  # by the last gathering, what is held all the time
        self._resharded = False  # completely, and nothing was gathered since

    def bind(self, binding: Binding, flats: Iterable[Array | None], store: OffloadStore) -> None:
        """Take over the parameters: make this rank's memory, and write its shard; once.

        Args:
            binding: what all units of the engine have in common.
            flats: the flat buffers in the window of the host, or None where there is none.
            store: where the arrays are that this rank holds all the time.
        """
        trained = self.trained_parameter
        self.store, self.device, self._binding = store, binding.groups.device, binding
        for part, flat in zip(self.flat_parameters, flats, strict=True):
            part.bind(binding, store, flat, trained=part is trained)
            if part.layout.params:
                self._storages.append(part.storage)
        self.gradients = UnitGradients(trained.places, binding, self.dtypes, store)
        if binding.optimizers is not None and self.trainable:
            self.updater = ShardUpdate(
                trained,
                binding,
                binding.optimizers.of_unit(self.name),
                store,
                self.boxes,
            )
        store.end(INITIAL, written=True)
        if not self.device.on_host:
            self._move_ignored()

    def _move_ignored(self) -> None:
        """Have ignored arrays where the model computes, apart from those that a GPU cannot have."""
        for name, array in self.ignored.items():
            if isinstance(array, np.ndarray) and array.dtype in DTYPES:
                self.ignored[name] = self.device.from_host(array)

    @property
    def shard(self) -> Array:
        """This rank's part of the trained parameters at full precision; read-only."""
        return self.trained_parameter.shard

    @property
    def held(self) -> dict[ArrayKind, int]:
        """Bytes of the arrays that were made, by kind; and of gradients before they are made."""
        return {**self.store.held, ArrayKind.GRADIENT: self.gradients.nbytes}

    @property
    def valid_size(self) -> int:
        """Elements of this rank's shard that are not padding."""
        return self.trained_parameter.valid_size

    @property
    def has_owners(self) -> bool:
        """Whether whole parameters are updated by their owners."""
        return self.updater is not None and self.updater.has_owners

    @property
    def update_sends(self) -> int:
        """Bytes of parameters that this rank sends in an update."""
        return 0 if self.updater is None else sum(sent for _, sent in self.updater.exchanges)

    @property
    def shard_rank(self) -> int:
        """Which of the shards this rank has."""
        return self.trained_parameter.rank

    # Parameters.

    def unshard(self, *, async_op: bool = False, what: str = "unshard") -> Work | None:
        """Gather the parameters of all ranks; does nothing if they are gathered already.

        ``what`` is the user's word for it, for errors and traces; the same on all ranks.
        """
        if self.state is ParamState.UNSHARDED and not async_op:
            return None
        self._resharded = False
        if self.state is ParamState.SHARDED:
            if self._in_writing:
                raise StateError(f"unshard() of unit {self.name!r} while it is being written")
            self._filled = any(storage.fills for storage in self._storages)
            self.store.begin(GATHERED, write=self._filled)
            for storage in self._storages:
                started = storage.gather(what, async_op=async_op)
                if started is not None:
                    self._gathers.append(started)
            self.state = ParamState.GATHERING if self._gathers else ParamState.UNSHARDED
        if self.state is ParamState.GATHERING and not async_op:
            for work in self._gathers:
                work.wait()
            self._gathers.clear()
            self.state = ParamState.UNSHARDED
        return AllOf(self._gathers) if async_op else None

    def prefetch(self) -> None:
        """Begin to gather by hand, if that takes something; see ``FSDP.prefetch``."""
        if self.fetched:
            self.unshard(async_op=True)

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a gathering was begun that nobody has waited for."""
        return self.state is ParamState.GATHERING

    @property
    def fetched(self) -> int:
        """How many flat buffers move in a gathering; if any, it pays to begin ahead of its use."""
        return sum([storage.fetched for storage in self._storages])

    @property
    def stale(self) -> int:
        """How many of these come from other ranks."""
        return sum([storage.stale for storage in self._storages])

    @property
    def sends(self) -> int:
        """Bytes that this rank sends when the unit is gathered."""
        return sum(part.storage.sends for part in self.flat_parameters)

    @property
    def gathered_bytes(self) -> int:
        """Memory that a gathering takes; 0 where it takes none."""
        return sum([storage.gathered_bytes for storage in self._storages])

    @property
    def params(self) -> Mapping[str, Array]:
        """The gathered parameters by name: read-only views, valid until ``reshard``."""
        if self.state is not ParamState.UNSHARDED:
            raise StateError(
                f"parameters of unit {self.name!r} are {self.state.value}; call unshard() first"
            )
        if 0 < len(self.layout.params) == len(self.names):
            return self.trained_parameter.storage.params
        return Joined(self.name, {name: self._source(name) for name in self.names})

    def _source(self, name: str) -> Any:
        if name in self.ties:
            return functools.partial(self._tied_to, name)
        if name in self.ignored:
            return functools.partial(self.ignored.__getitem__, name)
        part = next(part for part in self.flat_parameters if name in part.places)
        return functools.partial(part.storage.params.__getitem__, name)

    def _tied_to(self, name: str) -> Array:
        owner = self.owners[name]
        if owner.state is not ParamState.UNSHARDED:
            raise StateError(
                f"{self.name}.{name} is tied to {self.ties[name]}, which is {owner.state.value}; "
                f"call unshard() of unit {owner.name!r} first"
            )
        return owner.params[self.ties[name].param]

    @property
    def state_word(self) -> str:
        """What the parameters are on this rank, in a word; between uses the strategy says it."""
        replicated = self._binding.groups.placement.whole_parameters
        if self.state is ParamState.SHARDED and replicated:
            return "replicated"
        return self.state.value

    def reshard(self, *, again: bool = False) -> None:
        """End the use of the gathered parameters; does nothing if they are sharded already.

        Args:
            again: the backward pass is still to come, for which the strategy may keep a part.
        """
        if self._resharded:
            return
        self._resharded = not again
        for work in self._gathers:
            # If it failed, the backend is broken and whatever comes next says so; raised here,
            # it would hide the error that led to this clean-up.
            with contextlib.suppress(Exception):
                work.wait()
        self._gathers.clear()
        if self.state is not ParamState.SHARDED:
            self.store.end(GATHERED, written=self._filled)
        self.state = ParamState.SHARDED
        for part in self.flat_parameters:
            part.storage.free(again=again)

    def free(self) -> None:
        """Let go of all arrays; the unit is of no use after that."""
        self.reshard()
        self.drop_gradients()
        self.updater = None
        self.ignored = {}
        self.gradients.free()
        self._storages.clear()
        for part in self.flat_parameters:
            part.free()
        del self.store

    # Writing.

    @contextlib.contextmanager
    def writing(self) -> Iterator[Array]:
        """Give this rank's shard of the trained parameters, to be written; all ranks call it."""
        trained = self.trained_parameter
        with self._claimed(trained):
            writable = trained.master.view()
            try:
                yield writable
            finally:
                locked(writable)
                trained.publish()

    @contextlib.contextmanager
    def rewriting(
        self, *, optimizer: bool = False, received: bool | None = False
    ) -> Iterator[tuple[FlatParameter, ...]]:
        """Like ``writing``, frozen parameters too: gives all flat parameters, to write ``master``.

        Args:
            optimizer: its state is written, too.
            received: ``received`` is, too; None if that is still to be seen. It is nan until then.
        """
        kinds = (*WRITTEN, ArrayKind.STATE) if optimizer else WRITTEN
        with self._claimed(*self.flat_parameters, kinds=kinds):
            before = []
            for part in self.flat_parameters:
                if received is None and part.received is not None:
                    before.append((part, part.received.copy()))
                    part.received.fill(np.nan)
            try:
                yield self.flat_parameters
            except BaseException:
                for part, kept in before:
                    part.complete_received(kept)
                raise
            finally:
                for part in self.flat_parameters:
                    part.publish(received=received is not False)

    @contextlib.contextmanager
    def _claimed(
        self, *parts: FlatParameter, kinds: Sequence[ArrayKind] = WRITTEN, agreed: bool = False
    ) -> Iterator[None]:
        if self._in_writing:
            raise StateError(f"unit {self.name!r} is being written already")
        if self.in_use:
            raise StateError(
                f"unit {self.name!r} is written inside of its own context; leave that first"
            )
        self.gradients.wait()
        self.reshard()
        for part in parts:
            part.storage.claim(agreed=agreed)
        self._in_writing = True
        try:
            self.store.begin(kinds, write=True)
            yield
        finally:
            self._in_writing = False
            for part in parts:
                part.storage.end_writing()
            self.store.end(kinds, written=True)

    # Gradients.

    @property
    def grad_state(self) -> GradState:
        """Where the gradients are."""
        return self.gradients.state

    def begin_gradients(self) -> Gradients:
        """Return zeroed gradients to be written, for ``reduce_gradients`` to pick up."""
        gradients = self.gradients
        gradients.check_closed()
        views = {}
        for name, tie in self.ties.items():
            owner = self.owners[name]
            places = owner.trained_parameter.places
            if tie.param in places:
                shape = places.shape(tie.param)
                flat = self._binding.pool.take(math.prod(shape), owner.dtypes.grad)
                self._tied[name], views[name] = flat, flat.reshape(shape)
        return gradients.begin(views)

    def reduce_gradients(
        self,
        grads: Mapping[str, Array] | None = None,
        *,
        divisor: float | None = None,
        async_op: bool = False,
    ) -> None:
        """Sum the gradients of all ranks; each keeps its shard, added to what it had."""
        divisor = check_divisor(divisor)
        gradients = self.gradients
        if grads is not None:
            target = self.begin_gradients()
            try:
                for name, value in grads.items():
                    target[name] = value
            except BaseException:
                self.drop_local_gradients()
                raise
        self._hand_over_tied()
        if not self.trainable:
            gradients.drop_open()
            return
        sharded = self.state is ParamState.SHARDED
        label = f"gradients of unit {self.name}{'' if sharded else ', before reshard'}"
        gradients.reduce(divisor, label=label, async_op=async_op)
        if sharded:  # frozen parameters are written by ``load`` alone, which claims them
            self.trained_parameter.storage.reduced()

    def keep_gradients(self) -> None:
        """Add what was written since ``begin_gradients`` to what is reduced with the next ones."""
        self._hand_over_tied()
        self.gradients.keep()

    def _hand_over_tied(self) -> None:
        """Give the gradients of tied parameters to their owners, on all ranks alike."""
        written = self.gradients.writable
        tied, self._tied = self._tied, {}
        for name, flat in tied.items():
            assert written is not None
            _ = written[name]  # zeros, if nobody has asked for it
            self.owners[name].gradients.add_tied(self.ties[name].param, flat)

    def drop_local_gradients(self) -> None:
        """Free gradients that were begun and neither kept nor reduced; all others stay."""
        tied, self._tied = self._tied, {}
        for flat in tied.values():
            self._binding.pool.give(flat)
        self.gradients.drop_open()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.drop_local_gradients()
        self.gradients.drop()
        if self.updater is not None:
            self.updater.drop()

    def begin_update(self, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Send what the owners of whole parameters need for ``update``, if there are such."""
        if self.updater is None or not self.updater.has_owners:
            return
        self.gradients.wait()
        kinds = (ArrayKind.STATE,)
        self.store.begin(GRADIENTS)
        self.store.begin(kinds, write=True)
        grad = self.gradients.zeros()
        self.updater.begin(grad, step=step, lr=lr, grad_scale=grad_scale)
        self.store.end(kinds, written=True)
        self.store.end(GRADIENTS)

    def make_update(self) -> None:
        """Have what this rank owns updated; after ``begin_update``."""
        if self.updater is not None:
            self.updater.make()

    def update(
        self, *, step: int, lr: float | None, grad_scale: float, agreed: bool = False
    ) -> None:
        """Apply the optimizer to this rank's shard; reshards the unit and forgets the gradients.

        ``agreed`` is that of ``ParameterStorage.claim``.
        """
        gradients = self.gradients
        if self._binding.optimizers is None:
            raise StateError("the engine has no optimizer; pass one: FSDP(..., optimizer=...)")
        if self.updater is None:
            return
        if not self.updater.begun:
            self.begin_update(step=step, lr=lr, grad_scale=grad_scale)
            self.make_update()
        self.store.begin(GRADIENTS)
        # What is gathered is about to be out of date.
        with self._claimed(self.trained_parameter, kinds=UPDATED, agreed=agreed):
            self.updater.apply(gradients.zeros(), step=step, lr=lr, grad_scale=grad_scale)
        gradients.drop(applied=grad_scale)
