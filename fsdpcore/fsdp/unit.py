"""``Unit``: parameters that are gathered, used and freed together, and the state they are in.

::

    parameters   SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
    gradients    NONE --begin_gradients--> LOCAL --reduce_gradients--> REDUCED --update--> NONE

Between uses a rank holds one shard of the unit's flat buffer: parameters, reduced gradients and
optimizer state. Gathered parameters and full gradients live in buffers of the engine's pool.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.collectives import all_gather, reduce_scatter
from fsdpcore.errors import ArgumentError, CommunicationError, StateError
from fsdpcore.fsdp.buffers import BufferPool
from fsdpcore.fsdp.layout import FlatLayout
from fsdpcore.fsdp.optim import Optimizer
from fsdpcore.fsdp.spec import Spec
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


class Params(Mapping[str, Array]):
    """Gathered parameters by name, as read-only views; valid until the unit is resharded."""

    def __init__(self, views: dict[str, Array], unit: str) -> None:
        self._views = views
        self._unit = unit

    def __getitem__(self, name: str) -> Array:
        try:
            return self._views[name]
        except KeyError:
            raise UnknownParameterError(_unknown(self._unit, name, self._views)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class Gradients(Params, MutableMapping[str, Array]):
    """A unit's gradients by name, as writable views that begin as zeros.

    ``grads[name] = array`` copies into the view after checking shape and dtype; views can also be
    written directly, as in ``np.matmul(x.T, dy, out=grads["w"])``. What is not written stays zero.
    """

    def __setitem__(self, name: str, value: Array) -> None:
        view, value = self[name], np.asarray(value)
        if value.shape != view.shape or value.dtype != view.dtype:
            raise ArgumentError(
                f"gradient of {self._unit}.{name} must have shape {view.shape} and dtype "
                f"{view.dtype}, got {value.shape} and {value.dtype}"
            )
        if value is not view:
            view[...] = value

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(f"a gradient cannot be removed; leave {self._unit}.{name} as zeros")


class UnknownParameterError(ArgumentError, KeyError):
    """A unit has no parameter of that name."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class Unit:
    """An ordered set of named parameters of one dtype (float32 or float64).

    The engine that gets it takes over the parameters; use ``engine.units`` and the verbs from then
    on. Verbs that communicate must be called on all ranks in the same order.

    Args:
        name: unique in the engine, equal on all ranks.
        params: maps names to arrays (copied when the engine is made), or to ``Spec`` for deferred
            initialisation, where each rank makes its own shard only.

    Attributes:
        state, grad_state: where parameters and gradients are.
        layout: which parameter lies where in the flat buffer and in the shards.
        shard: this rank's part of the parameters, flat; owned by the unit.
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
        self._shard: Array | None = None
        self._layout: FlatLayout | None = None
        self._binding: Binding | None = None
        self._flat: Array | None = None
        self._gather: Work | None = None
        self._local: Array | None = None

    # Taking over.

    def bind(self, binding: Binding) -> None:
        """Shard the parameters; called by the engine, once."""
        if self._binding is not None or self.initial is None:
            raise StateError(f"unit {self.name!r} belongs to an engine already; make a new one")
        backend = binding.backend
        shapes = {name: value.shape for name, value in self.initial.items()}
        layout = FlatLayout.build(shapes, self.dtype, backend.world_size)
        shard = np.zeros(layout.shard_size, self.dtype)
        for piece in layout.pieces(backend.rank):
            target = shard[piece.shard_start : piece.shard_stop]
            value = self.initial[piece.name]
            if isinstance(value, Spec):
                name = f"{self.name}.{piece.name}"
                value.init.fill(target, piece.param_start, seed=binding.seed, name=name)
            else:
                target[...] = value.reshape(-1)[piece.param_start : piece.param_stop]
        self._binding, self._layout, self._shard = binding, layout, shard
        self.initial = None
        if binding.optimizer is not None:
            self.optimizer_state = binding.optimizer.init_state(self.valid_size, self.dtype)

    @property
    def layout(self) -> FlatLayout:
        """Which parameter lies where."""
        return self._bound(self._layout)

    @property
    def shard(self) -> Array:
        """This rank's part of the flat parameters, padding included."""
        return self._bound(self._shard)

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

        Args:
            async_op: return a ``Work`` at once; ``params`` is there after its ``wait()``, or after
                ``unshard()``.
        """
        binding = self._bound(self._binding)
        if self.state is ParamState.SHARDED:
            self._flat = binding.pool.take(self.layout.padded_size, self.dtype)
            started = all_gather(
                self.shard,
                binding.backend,
                out=self._flat,
                algorithm=binding.algorithm,
                async_op=async_op,
                label=f"unit {self.name}",
            )
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
        assert self._flat is not None
        views = self._views(self._flat)
        for view in views.values():
            view.flags.writeable = False
        return Params(views, self.name)

    def reshard(self) -> None:
        """Free the gathered parameters; does nothing if they are sharded already."""
        gather, self._gather = self._gather, None
        if gather is not None:
            # If it failed, the backend is broken and whatever comes next says so; raised here,
            # it would hide the error that led to this clean-up.
            with contextlib.suppress(CommunicationError):
                gather.wait()
        self.state = ParamState.SHARDED
        if self._flat is not None:
            self._bound(self._binding).pool.give(self._flat)
        self._flat = None

    # Gradients.

    def begin_gradients(self) -> Gradients:
        """Return zeroed gradients to be written, for ``reduce_gradients`` to pick up."""
        binding = self._bound(self._binding)
        if self.grad_state is GradState.LOCAL:
            raise StateError(
                f"unit {self.name!r} has gradients that were not reduced; call reduce_gradients()"
            )
        self._local = binding.pool.take(self.layout.padded_size, self.dtype)
        self._local[:] = 0
        self.grad_state = GradState.LOCAL
        return Gradients(self._views(self._local), self.name)

    def reduce_gradients(
        self, grads: Mapping[str, Array] | None = None, *, divisor: float | None = None
    ) -> None:
        """Sum the gradients of all ranks; each keeps its shard, added to what it had.

        Args:
            grads: gradients by name, where ``begin_gradients`` was not used; those that are
                missing count as zeros.
            divisor: the sum is divided by it; by default the number of ranks, for their mean.
        """
        binding = self._bound(self._binding)
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
        reduced = reduce_scatter(
            self._local,
            binding.backend,
            algorithm=binding.algorithm,
            label=f"unit {self.name}" + ("" if divisor is None else f", divisor {divisor}"),
        )
        ranks = float(binding.backend.world_size)
        np.divide(reduced, ranks if divisor is None else divisor, out=reduced)
        if self.grad_shard is None:
            self.grad_shard = reduced
        else:
            np.add(self.grad_shard, reduced, out=self.grad_shard)
        self.drop_local_gradients()
        self.grad_state = GradState.REDUCED

    def drop_local_gradients(self) -> None:
        """Free gradients that are not reduced; what was reduced before stays."""
        if self._local is not None:
            self._bound(self._binding).pool.give(self._local)
        self._local = None
        self.grad_state = GradState.NONE if self.grad_shard is None else GradState.REDUCED

    def drop_gradients(self) -> None:
        """Free all gradients."""
        self.grad_shard = None
        self.drop_local_gradients()

    def update(self, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Apply the optimizer to this rank's shard; frees gathered parameters and gradients.

        Args:
            step: number of this update, from 1.
            lr: learning rate, if not the optimizer's own.
            grad_scale: the gradients are multiplied by it.
        """
        optimizer = self._bound(self._binding).optimizer
        if optimizer is None:
            raise StateError("the engine has no optimizer; pass one: FSDP(..., optimizer=...)")
        self.reshard()  # what is gathered is about to be out of date
        size = self.valid_size
        grad = self.grad_shard
        if grad is None:  # no gradient counts as zeros
            grad = np.zeros(size, self.dtype)
        optimizer.update(
            self.shard[:size],
            grad[:size],
            self.optimizer_state,
            step=step,
            lr=lr,
            grad_scale=grad_scale,
        )
        self.drop_gradients()

    def _views(self, flat: Array) -> dict[str, Array]:
        return {
            param.name: flat[param.offset : param.stop].reshape(param.shape)
            for param in self.layout.params
        }

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


def _unknown(unit: str, name: str, known: Mapping[str, Any]) -> str:
    return f"unit {unit!r} has no parameter {name!r}; it has {', '.join(known) or 'none'}"
