"""``Unit``: parameters that are gathered, used and freed together, and the state they are in.

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
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fsdpcore.core.buffers import DTYPES, Array
from fsdpcore.core.device import Device
from fsdpcore.core.errors import CommunicationError, StateError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.work import AllOf, Work
from fsdpcore.fsdp.offload.offload import (
    GATHERED,
    GRADIENTS,
    INITIAL,
    UPDATED,
    WRITTEN,
    ArrayKind,
    OffloadStore,
)
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.declared import Declared
from fsdpcore.fsdp.units.flat_parameter import FlatParameter
from fsdpcore.fsdp.units.given_arrays import load_arrays, update_shard
from fsdpcore.fsdp.units.gradients import GradState, UnitGradients, check_divisor
from fsdpcore.fsdp.units.precision import Dtypes, Precision
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.fsdp.units.special import Tied
from fsdpcore.fsdp.units.updates import Optimizers, ShardUpdate
from fsdpcore.fsdp.units.views import Gradients, Joined, locked

T = TypeVar("T")


class ParamState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


@dataclass(frozen=True)
class Binding:
    """What the engine gives to each of its units."""

    groups: ProcessGroups
    pool: BufferPool
    optimizers: Optimizers | None
    precision: Precision
    algorithm: str
    seed: int


class Unit(Declared):
    """An ordered set of named parameters.

    The engine that gets it takes over the parameters; use ``engine.units`` and the verbs from then
    on. Verbs that communicate (``unshard``, ``reduce_gradients``, ``update``, ``writing``) must be
    called on all ranks in the same order.

    Args:
        name: unique in the engine, equal on all ranks.
        params: maps names to arrays of NumPy, or on a GPU of CuPy as well (copied when the engine
            is made), to ``Spec`` for deferred initialisation, where each rank makes its own shard
            only, or to ``Tied`` for a parameter that is another one. A ``BoxShard``, or a ``Spec``
            that was cut, is the box that a tensor-parallel rank has of a parameter: for all that
            computes it is the parameter, and the engine needs the ranks with the other boxes.
            The trained ones are all float32 or all float64. An array that occurs again in the
            engine is tied to where it occurs first.
        frozen: names, or patterns of the shell such as ``"*.bias"``, of parameters that are sharded
            like others, but have no gradients and no optimizer state; of any dtype.
        ignored: the same of arrays that are left as they are, whole, on every rank. On a GPU they
            are copied to it.

    Attributes:
        state: where the parameters are.
        store: where this rank's arrays are; set by ``bind``.
    """

    store: OffloadStore

    def __init__(
        self,
        name: str,
        params: Mapping[str, Array | BoxShard | Spec | Tied],
        *,
        frozen: str | Iterable[str] = (),
        ignored: str | Iterable[str] = (),
    ) -> None:
        super().__init__(name, params, frozen, ignored)
        self.state = ParamState.SHARDED
        self.in_use = False  # by a step
        self.owners: dict[str, Unit] = {}  # of the tied parameters; set by the engine
        self._binding: Binding | None = None
        self._gradients: UnitGradients | None = None
        self._update: ShardUpdate | None = None
        self._gathers: list[Work] = []
        self._tied: dict[str, Array] = {}  # gradients that are written now, flat
        self._in_writing = False
        self._filled = False  # by the last gathering, what is held all the time

    # Taking over.

    def bind(self, binding: Binding, flats: Iterable[Array | None], store: OffloadStore) -> None:
        """Shard the parameters; called by the engine, once.

        Args:
            binding: what all units of the engine have in common.
            flats: the parts' flat buffers in the window of the host, or None where there is none.
            store: where the arrays are that this rank holds all the time.
        """
        self.store = store
        for part, flat in zip(self.flat_parameters, flats, strict=True):
            part.bind(
                binding.groups,
                binding.algorithm,
                binding.pool,
                store,
                flat,
                binding.seed,
                trained=part is self.flat_parameters[0],
            )
        trained = self.flat_parameters[0]
        self._gradients = UnitGradients(
            trained.places, binding.groups, binding.algorithm, binding.pool, self._dtypes, store
        )
        if binding.optimizers is not None and self.trainable:
            self._update = ShardUpdate(
                self.name,
                trained,
                binding.optimizers,
                binding.groups,
                binding.algorithm,
                store.allocate(ArrayKind.STATE),
                self.boxes,
            )
        store.end(INITIAL, written=True)
        self._binding, self.initial = binding, None
        if not self.device.on_host:
            self._move_ignored(self.device)

    def _move_ignored(self, device: Device) -> None:
        """Have ignored arrays where the model computes, apart from those that a GPU cannot have."""
        for name, array in self.ignored.items():
            if isinstance(array, np.ndarray) and array.dtype in DTYPES:
                self.ignored[name] = device.from_host(array)

    @property
    def device(self) -> Device:
        """Where the arrays are."""
        return self._bound(self._binding).groups.device

    @property
    def trainable(self) -> bool:
        """Whether any parameters of its own are trained."""
        return bool(self.layout.params)

    @property
    def dtypes(self) -> Dtypes:
        """In which dtypes the trained parameters and their gradients are held."""
        self._bound(self._binding)
        return self._dtypes

    @property
    def layout(self) -> FlatLayout:
        """Which trained parameter lies where in the flat buffer and in the shards."""
        return self.flat_parameters[0].layout if self.flat_parameters else self._bound(None)

    @property
    def shard(self) -> Array:
        """This rank's part of the trained parameters at full precision, flat, padding included.

        Read-only; ``writing`` is for changes.
        """
        self._bound(self._binding)
        return self.flat_parameters[0].shard

    @property
    def valid_size(self) -> int:
        """Elements of this rank's shard that are not padding."""
        self._bound(self._binding)
        return self.flat_parameters[0].valid_size

    @property
    def optimizer_state(self) -> dict[str, Array]:
        """This rank's optimizer state by name, flat, without padding."""
        return {} if self._update is None else self._update.state

    @property
    def updater(self) -> ShardUpdate | None:
        """What updates this rank's shard; None without an optimizer, or trained parameters."""
        return self._update

    @property
    def gradients(self) -> UnitGradients:
        """The gradients, as the engine sees them."""
        return self._bound(self._gradients)

    @property
    def grad_state(self) -> GradState:
        """Where the gradients are."""
        return GradState.NONE if self._gradients is None else self._gradients.state

    @property
    def grad_shard(self) -> Array | None:
        """This rank's part of the reduced gradients, while there are any; padding included.

        Waits for a reduction in the background; all ranks ask for it then.
        """
        gradients = self.gradients
        gradients.wait()
        return gradients.shard

    def _bound(self, value: T | None) -> T:
        if value is None:
            raise StateError(f"unit {self.name!r} belongs to no engine yet: pass it to FSDP(...)")
        return value

    # Parameters.

    def unshard(self, *, async_op: bool = False) -> Work | None:
        """Gather the parameters of all ranks; does nothing if they are gathered already.

        Where they are in a window, no data moves: the ranks wait until all have come here.
        Parameters that are tied to others are gathered with the units that own them.

        Args:
            async_op: return a ``Work`` at once; ``params`` is there after another ``unshard()``,
                which waits for it.
        """
        self._bound(self._binding)
        if self.state is ParamState.SHARDED:
            if self._in_writing:
                raise StateError(f"unshard() of unit {self.name!r} while it is being written")
            self._filled = any(part.storage.fills for part in self.flat_parameters)
            self.store.begin(GATHERED, write=self._filled)
            for part in self.flat_parameters:
                if part.layout.params:
                    started = part.storage.gather(async_op=async_op)
                    if started is not None:
                        self._gathers.append(started)
            self.state = ParamState.GATHERING if self._gathers else ParamState.UNSHARDED
        if self.state is ParamState.GATHERING and not async_op:
            for work in self._gathers:
                work.wait()
            self._gathers.clear()
            self.state = ParamState.UNSHARDED
        return AllOf(self._gathers) if async_op else None

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a gathering was begun that nobody has waited for."""
        return self.state is ParamState.GATHERING

    @property
    def fetched(self) -> int:
        """How many flat buffers move in a gathering; if any, it pays to begin ahead of its use."""
        return sum(part.storage.fetched for part in self.flat_parameters if part.layout.params)

    @property
    def stale(self) -> int:
        """How many of these come from other ranks."""
        return sum(part.storage.stale for part in self.flat_parameters if part.layout.params)

    @property
    def sends(self) -> int:
        """Bytes that this rank sends when the unit is gathered."""
        return sum(part.storage.sends for part in self.flat_parameters)

    @property
    def gathered_bytes(self) -> int:
        """Memory that a gathering takes; 0 where it takes none."""
        return sum(part.storage.gathered_bytes for part in self.flat_parameters)

    @property
    def params(self) -> Mapping[str, Array]:
        """The gathered parameters by name: read-only views, valid until ``reshard``."""
        if self.state is not ParamState.UNSHARDED:
            raise StateError(
                f"parameters of unit {self.name!r} are {self.state.value}; call unshard() first"
            )
        if 0 < len(self.layout.params) == len(self.names):
            return self.flat_parameters[0].storage.params
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

    def reshard(self, *, again: bool = False) -> None:
        """End the use of the gathered parameters; does nothing if they are sharded already.

        Their memory is freed unless they are kept, or in a window. Views must not be read after
        this.

        Args:
            again: the backward pass is still to come, for which the strategy may keep a part.
        """
        gathers, self._gathers = self._gathers, []
        for work in gathers:
            # If it failed, the backend is broken and whatever comes next says so; raised here,
            # it would hide the error that led to this clean-up.
            with contextlib.suppress(CommunicationError):
                work.wait()
        if self.state is not ParamState.SHARDED:
            self.store.end(GATHERED, written=self._filled)
        self.state = ParamState.SHARDED
        for part in self.flat_parameters:
            part.storage.free(again=again)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Array]:
        """Change parameters, for instance to load them: gives this rank's shard to be written.

        All ranks call it, each for its own shard (flat, padding included, at full precision), in
        which ``layout.pieces(unit.shard_rank)`` says what lies where. Gathered parameters are
        resharded; the next ``unshard`` shows what was written. The array is read-only after the
        block. ::

            with unit.writing() as shard:
                for piece in unit.layout.pieces(unit.shard_rank):
                    values = full[piece.name].reshape(-1)[piece.param_start : piece.param_stop]
                    shard[piece.shard_start : piece.shard_stop] = values

        Raises:
            StateError: it is being written already.
        """
        trained = self.flat_parameters[0] if self.flat_parameters else self._bound(None)
        with self._claimed(trained):
            writable = trained.master.view()
            try:
                yield writable
            finally:
                locked(writable)
                trained.publish()

    @contextlib.contextmanager
    def rewriting(self, *, optimizer: bool = False) -> Iterator[tuple[FlatParameter, ...]]:
        """Like ``writing``, frozen parameters too: gives all flat parameters, to write ``master``.

        With ``optimizer`` its state is written, too.
        """
        kinds = (*WRITTEN, ArrayKind.STATE) if optimizer else WRITTEN
        with self._claimed(*self.flat_parameters, kinds=kinds):
            try:
                yield self.flat_parameters
            finally:
                for part in self.flat_parameters:
                    part.publish()

    def update_shards(self, flat: Array) -> None:
        """Replace this rank's shard of the trained parameters; all ranks call it.

        Args:
            flat: as ``shard``, or without its padding: shape ``(shard.size,)`` or
                ``(valid_size,)``; rounded to its dtype. Ranks that hold the same shard
                (``hybrid_shard``, ``no_shard``) give the same, which is not checked.

        Raises:
            ArgumentError: another shape, or a dtype that is no number; nothing was changed.
                ``engine.update_shards`` raises it on all ranks.
        """
        update_shard(self, flat)

    @property
    def shard_rank(self) -> int:
        """Which of the shards this rank has."""
        self._bound(self._binding)
        return self.flat_parameters[0].rank

    def load(self, values: Mapping[str, Array]) -> None:
        """Replace parameters by ``values``, whole arrays by name; others stay as they are.

        Of a parameter that is a box, the box.

        All ranks call it with the same names, and keep their shards. Arrays of another floating
        dtype are rounded; those for tied parameters go to their owner, in a ``load`` of its own.

        Raises:
            ArgumentError: a name that is not the unit's own, a wrong shape or dtype; nothing was
                changed.
        """
        load_arrays(self, values)

    @contextlib.contextmanager
    def _claimed(
        self, *parts: FlatParameter, kinds: Sequence[ArrayKind] = WRITTEN
    ) -> Iterator[None]:
        self._bound(self._binding)
        if self._in_writing:
            raise StateError(f"unit {self.name!r} is being written already")
        if self.in_use:
            raise StateError(
                f"unit {self.name!r} is written inside of its own context; leave that first"
            )
        self.gradients.wait()
        self.reshard()
        for part in parts:
            part.storage.claim()
        self._in_writing = True
        try:
            self.store.begin(kinds, write=True)
            yield
        finally:
            self._in_writing = False
            self.store.end(kinds, written=True)

    # Gradients.

    def begin_gradients(self) -> Gradients:
        """Return zeroed gradients to be written, for ``reduce_gradients`` to pick up."""
        binding, gradients = self._bound(self._binding), self.gradients
        gradients.check_closed()
        views = {}
        for name, tie in self.ties.items():
            places = self.owners[name].flat_parameters[0].places
            if tie.param in places:
                shape = places.shape(tie.param)
                flat = binding.pool.take(math.prod(shape), self.owners[name].dtypes.grad)
                self._tied[name], views[name] = flat, flat.reshape(shape)
        return gradients.begin(views)

    def reduce_gradients(
        self,
        grads: Mapping[str, Array] | None = None,
        *,
        divisor: float | None = None,
        async_op: bool = False,
    ) -> None:
        """Sum the gradients of all ranks; each keeps its shard, added to what it had.

        Whether the unit is resharded before or after must be the same on all ranks; before is
        better (see ``storage.py``).

        Args:
            grads: gradients by name, where ``begin_gradients`` was not used; those that are
                missing count as zeros.
            divisor: the sum is divided by it; by default the number of ranks, for their mean.
            async_op: begin only; ``grad_shard`` and ``update`` wait for the end.
        """
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
        label = f"unit {self.name}" if sharded else f"unit {self.name}, before reshard"
        gradients.reduce(divisor, label=label, async_op=async_op)
        if sharded:  # frozen parts are written by ``load`` alone, which claims them
            self.flat_parameters[0].storage.reduced()

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
            self._bound(self._binding).pool.give(flat)
        self.gradients.drop_open()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.drop_local_gradients()
        self.gradients.drop()

    def update(self, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Apply the optimizer to this rank's shard; reshards the unit and forgets the gradients.

        All ranks call it. They wait for each other if the unit may be in use somewhere. No gradient
        counts as zeros.

        Args:
            step: number of this update, from 1.
            lr: learning rate, if not the optimizer's own.
            grad_scale: the gradients are multiplied by it.
        """
        binding, gradients = self._bound(self._binding), self.gradients
        if binding.optimizers is None:
            raise StateError("the engine has no optimizer; pass one: FSDP(..., optimizer=...)")
        if self._update is None:
            return
        self.store.begin(GRADIENTS)
        with self._claimed(
            self.flat_parameters[0], kinds=UPDATED
        ):  # what is gathered is about to be out of date
            self._update.apply(gradients.zeros(), step=step, lr=lr, grad_scale=grad_scale)
        gradients.drop()

    def __repr__(self) -> str:
        return f"<Unit {self.name!r} {self.state.value}, gradients {self.grad_state.value}>"
