"""``Unit``: parameters that are gathered, used and freed together, and the state they are in.

::

    parameters   SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
    gradients    NONE --begin_gradients--> LOCAL --reduce_gradients--> REDUCED --update--> NONE

Between uses a rank holds one shard of the unit's flat buffer: parameters, reduced gradients and
optimizer state. All parameters together are in the window of the host or, while they are in use,
in a buffer of the engine's pool (``storage.py``); full gradients are in buffers of the pool.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.collectives import reduce_scatter
from fsdpcore.errors import ArgumentError, CommunicationError, StateError
from fsdpcore.fsdp.buffers import BufferPool
from fsdpcore.fsdp.layout import FlatLayout
from fsdpcore.fsdp.optim import Optimizer
from fsdpcore.fsdp.spec import Spec
from fsdpcore.fsdp.storage import Separate, Storage, Windowed
from fsdpcore.fsdp.views import Gradients, Params, Places
from fsdpcore.work import Work

T = TypeVar("T")

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


class ParamState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"


class GradState(enum.Enum):
    """Where a unit's gradients are."""

    NONE = "none"
    LOCAL = "local"
    REDUCED = "reduced"


@dataclass(frozen=True)
class Binding:
    """What the engine gives to each of its units."""

    backend: Backend
    pool: BufferPool
    optimizer: Optimizer | None
    algorithm: str
    seed: int


class Unit:
    """An ordered set of named parameters of one dtype (float32 or float64).

    The engine that gets it takes over the parameters; use ``engine.units`` and the verbs from then
    on. Verbs that communicate (``unshard``, ``reduce_gradients``, ``update``, ``writing``) must be
    called on all ranks in the same order.

    Args:
        name: unique in the engine, equal on all ranks.
        params: maps names to arrays (copied when the engine is made), or to ``Spec`` for deferred
            initialisation, where each rank makes its own shard only.

    Attributes:
        state, grad_state: where parameters and gradients are.
        layout: which parameter lies where in the flat buffer and in the shards.
        shard: this rank's part of the parameters, flat and read-only; ``writing`` is for changes.
        grad_shard: this rank's part of the reduced gradients, while there are any.
        optimizer_state: this rank's optimizer state by name, flat, without padding.
    """

    def __init__(self, name: str, params: Mapping[str, Array | Spec]) -> None:
        if not name or not isinstance(name, str):
            raise ArgumentError(f"a unit's name must be a non-empty string, got {name!r}")
        self.name = name
        self.state = ParamState.SHARDED
        self.grad_state = GradState.NONE
        self.initial: dict[str, Array | Spec] | None = {
            key: value if isinstance(value, Spec) else np.asarray(value)
            for key, value in params.items()
        }
        self.dtype = _common_dtype(name, self.initial)
        self.optimizer_state: dict[str, Array] = {}
        self.grad_shard: Array | None = None
        self._layout: FlatLayout | None = None
        self._binding: Binding | None = None
        self._storage: Storage | None = None
        self._gather: Work | None = None
        self._local: Gradients | None = None
        self._grad_buffer: Array | None = None  # what grad_shard is, whenever it is there
        self._in_writing = False

    # Taking over.

    def lay_out(self, world_size: int) -> FlatLayout:
        """Fix how the parameters are sharded; called by the engine, before ``bind``."""
        if self._layout is not None or self.initial is None:
            raise StateError(f"unit {self.name!r} belongs to an engine already; make a new one")
        shapes = {name: value.shape for name, value in self.initial.items()}
        self._layout = FlatLayout.build(shapes, self.dtype, world_size)
        return self._layout

    def bind(self, binding: Binding, flat: Array | None) -> None:
        """Shard the parameters; called by the engine, once.

        Args:
            binding: what all units of the engine have in common.
            flat: the unit's flat buffer in the window of the host, if there is one.
        """
        assert self.initial is not None
        backend, places = binding.backend, Places(self.name, self.layout)
        storage: Storage
        if flat is None:
            storage = Separate(backend, places, binding.algorithm, binding.pool)
        else:
            storage = Windowed(backend, places, flat)
        for piece in self.layout.pieces(backend.rank):
            target = storage.own[piece.shard_start : piece.shard_stop]
            value = self.initial[piece.name]
            if isinstance(value, Spec):
                name = f"{self.name}.{piece.name}"
                value.init.fill(target, piece.param_start, seed=binding.seed, name=name)
            else:
                target[...] = value.reshape(-1)[piece.param_start : piece.param_stop]
        self._binding, self._storage, self.initial = binding, storage, None
        if binding.optimizer is not None:
            self.optimizer_state = binding.optimizer.init_state(self.valid_size, self.dtype)

    @property
    def layout(self) -> FlatLayout:
        """Which parameter lies where."""
        return self._bound(self._layout)

    @property
    def shard(self) -> Array:
        """This rank's part of the flat parameters, padding included; read-only."""
        return self._bound(self._storage).shard

    @property
    def valid_size(self) -> int:
        """Elements of this rank's shard that are not padding."""
        return self.layout.valid_size(self._bound(self._binding).backend.rank)

    def _bound(self, value: T | None) -> T:
        if value is None:
            raise StateError(f"unit {self.name!r} belongs to no engine yet: pass it to FSDP(...)")
        return value

    # Parameters.

    def unshard(self, *, async_op: bool = False) -> Work | None:
        """Gather the parameters of all ranks; does nothing if they are gathered already.

        Where they are in a window, no data moves: the ranks wait until all have come here.

        Args:
            async_op: return a ``Work`` at once; ``params`` is there after its ``wait()``, or after
                ``unshard()``.
        """
        storage = self._bound(self._storage)
        if self.state is ParamState.SHARDED:
            if self._in_writing:
                raise StateError(f"unshard() of unit {self.name!r} while it is being written")
            started = storage.gather(async_op=async_op)
            self.state = ParamState.UNSHARDED
            if async_op:
                self._gather, self.state = started, ParamState.GATHERING
        if self.state is ParamState.GATHERING and not async_op:
            assert self._gather is not None
            self._gather.wait()
            self._gather, self.state = None, ParamState.UNSHARDED
        return self._gather

    @property
    def params(self) -> Params:
        """The gathered parameters by name: read-only views, valid until ``reshard``."""
        if self.state is not ParamState.UNSHARDED:
            raise StateError(
                f"parameters of unit {self.name!r} are {self.state.value}; call unshard() first"
            )
        return self._bound(self._storage).params

    def reshard(self) -> None:
        """End the use of the gathered parameters; does nothing if they are sharded already.

        Their memory is freed unless they are in a window. Views must not be read after this.
        """
        gather, self._gather = self._gather, None
        if gather is not None:
            # If it failed, the backend is broken and whatever comes next says so; raised here,
            # it would hide the error that led to this clean-up.
            with contextlib.suppress(CommunicationError):
                gather.wait()
        if self.state is not ParamState.SHARDED:
            self.state = ParamState.SHARDED
            self._bound(self._storage).free()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Array]:
        """Change parameters, for instance to load them: gives this rank's shard to be written.

        All ranks call it, each for its own shard (flat, padding included), in which
        ``layout.pieces(rank)`` says what lies where. Gathered parameters are resharded; the next
        ``unshard`` shows what was written. The array is read-only after the block. ::

            with unit.writing() as shard:
                for piece in unit.layout.pieces(backend.rank):
                    values = full[piece.name].reshape(-1)[piece.param_start : piece.param_stop]
                    shard[piece.shard_start : piece.shard_stop] = values

        Raises:
            StateError: it is being written already.
        """
        storage = self._bound(self._storage)
        if self._in_writing:
            raise StateError(f"unit {self.name!r} is being written already")
        self.reshard()
        storage.claim()
        writable = storage.own.view()
        self._in_writing = True
        try:
            yield writable
        finally:
            self._in_writing = False
            writable.flags.writeable = False

    # Gradients.

    def begin_gradients(self) -> Gradients:
        """Return zeroed gradients to be written, for ``reduce_gradients`` to pick up."""
        binding = self._bound(self._binding)
        if self._local is not None:
            raise StateError(
                f"unit {self.name!r} has gradients that were not reduced; call reduce_gradients()"
            )
        flat = binding.pool.take(self.layout.padded_size, self.dtype)
        self._local = Gradients(flat, self._bound(self._storage).places)
        self.grad_state = GradState.LOCAL
        return self._local

    def reduce_gradients(
        self, grads: Mapping[str, Array] | None = None, *, divisor: float | None = None
    ) -> None:
        """Sum the gradients of all ranks; each keeps its shard, added to what it had.

        Whether the unit is resharded before or after must be the same on all ranks; before is
        better (see ``storage.py``).

        Args:
            grads: gradients by name, where ``begin_gradients`` was not used; those that are
                missing count as zeros.
            divisor: the sum is divided by it; by default the number of ranks, for their mean.
        """
        self._bound(self._binding)
        check_divisor(divisor)
        if grads is not None:
            target = self.begin_gradients()
            try:
                for name, value in grads.items():
                    target[name] = value
            except BaseException:
                self.drop_local_gradients()
                raise
        if self._local is None:
            raise StateError(
                f"unit {self.name!r} has no gradients to reduce; pass them, or call "
                "begin_gradients() and write them first"
            )
        self._reduce(self._local.finish(), divisor)
        self.drop_local_gradients()

    def _reduce(self, flat: Array, divisor: float | None) -> None:
        """Reduce the full gradients of all ranks to shards; ``flat`` may be overwritten."""
        binding, storage = self._bound(self._binding), self._bound(self._storage)
        backend, total = binding.backend, self.grad_shard
        if total is None:
            own = self._own_grad_buffer()
        else:  # a collective may write to this rank's part of what it reads
            start, stop = self.layout.shard_bounds(backend.rank)
            own = flat[start:stop]
        sharded = self.state is ParamState.SHARDED
        label = f"unit {self.name}" if sharded else f"unit {self.name}, before reshard"
        reduce_scatter(
            flat,
            backend,
            op="mean" if divisor is None else "sum",
            out=own,
            algorithm=binding.algorithm,
            label=label if divisor is None else f"{label}, divisor {divisor}",
        )
        if sharded:
            storage.reduced()
        if divisor is not None:
            np.divide(own, divisor, out=own)
        if total is None:
            self.grad_shard = own
        else:
            np.add(total, own, out=total)

    def drop_local_gradients(self) -> None:
        """Free gradients that are not reduced; what was reduced before stays."""
        if self._local is not None:
            self._bound(self._binding).pool.give(self._local.close())
        self._local = None
        self.grad_state = GradState.NONE if self.grad_shard is None else GradState.REDUCED

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self.grad_shard = None
        self.drop_local_gradients()

    def update(self, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Apply the optimizer to this rank's shard; reshards the unit and forgets the gradients.

        All ranks call it. They wait for each other if the unit may be in use somewhere.

        Args:
            step: number of this update, from 1.
            lr: learning rate, if not the optimizer's own.
            grad_scale: the gradients are multiplied by it.
        """
        optimizer = self._bound(self._binding).optimizer
        if optimizer is None:
            raise StateError("the engine has no optimizer; pass one: FSDP(..., optimizer=...)")
        storage, size = self._bound(self._storage), self.valid_size
        self.reshard()  # what is gathered is about to be out of date
        storage.claim()
        grad = self.grad_shard
        if grad is None:  # no gradient counts as zeros
            grad = self._own_grad_buffer()
            grad[:] = 0
        optimizer.update(
            storage.own[:size],
            grad[:size],
            self.optimizer_state,
            step=step,
            lr=lr,
            grad_scale=grad_scale,
        )
        self.drop_gradients()

    def _own_grad_buffer(self) -> Array:
        if self._grad_buffer is None:
            self._grad_buffer = np.empty(self.layout.shard_size, self.dtype)
        return self._grad_buffer

    def __repr__(self) -> str:
        return f"<Unit {self.name!r} {self.state.value}, gradients {self.grad_state.value}>"


def check_divisor(divisor: float | None) -> None:
    """Raise ArgumentError if gradients cannot be divided by ``divisor``."""
    if divisor is not None and not (math.isfinite(divisor) and divisor > 0):
        raise ArgumentError(f"divisor must be a positive number, got {divisor}")


def _common_dtype(unit: str, params: Mapping[str, Array | Spec]) -> np.dtype[Any]:
    dtypes = {name: value.dtype for name, value in params.items()}
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ArgumentError(
                f"parameter {unit}.{name} has dtype {dtype}; parameters are float32 or float64"
            )
    if len(set(dtypes.values())) > 1:
        raise ArgumentError(
            f"the parameters of unit {unit!r} must share one dtype, got "
            + ", ".join(f"{name}: {dtype}" for name, dtype in dtypes.items())
        )
    return next(iter(dtypes.values()), np.dtype(np.float32))
