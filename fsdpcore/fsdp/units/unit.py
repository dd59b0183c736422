"""``Unit``: parameters that are gathered, used and freed together, as users see them.

A unit is what its user has declared. The engine that gets it makes a ``ShardedUnit`` of it, to
which the verbs are passed on from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fsdpcore.core.buffers import Array
from fsdpcore.core.device import Device
from fsdpcore.core.errors import StateError
from fsdpcore.core.geometry.boxes import BoxShard
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.core.work import Work
from fsdpcore.fsdp.units.declaration import UnitDeclaration
from fsdpcore.fsdp.units.gradients import GradState
from fsdpcore.fsdp.units.loading import load_arrays, update_shard
from fsdpcore.fsdp.units.precision import Dtypes
from fsdpcore.fsdp.units.sharded_unit import ParamState, ShardedUnit
from fsdpcore.fsdp.units.spec import Spec
from fsdpcore.fsdp.units.special import Tied
from fsdpcore.fsdp.units.views import Gradients


class Unit(UnitDeclaration):
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
            engine is tied to where it occurs first. What is nested gets the keys that lead to it as
            its name, joined by dots: ``{"attn": {"w": w}}`` has ``attn.w``; see ``build``.
        frozen: names, or patterns of the shell such as ``"*.bias"``, of parameters that are sharded
            like others, but have no gradients and no optimizer state; of any dtype.
        ignored: the same of arrays that are left as they are, whole, on every rank. On a GPU they
            are copied to it.

    Attributes:
        name: as given.
        names: of all parameters, in order.
        dtype: of the trained parameters.
        frozen: names of those that are not trained.
        ignored: arrays that are left as they are, by name, read-only.
        ties: by name, the ``Tied`` of each parameter that is another one.

    Raises:
        ArgumentError: what is given is no such mapping, or fits together badly.

    Example::

        hidden = fc.Unit("hidden", {"w": w, "b": b}, frozen="b")
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, Array | BoxShard | Spec | Tied],
        *,
        frozen: str | Iterable[str] = (),
        ignored: str | Iterable[str] = (),
    ) -> None:
        super().__init__(name, params, frozen, ignored)
        self._sharded: ShardedUnit | None = None

    def build(self, params: Mapping[str, Any]) -> Any:
        """Return parameters nested as they were given to the unit.

        Args:
            params: by name, as ``unit.params`` or a pass has them; used as they are, not copied.
        """
        if self.skeleton is None:
            return {name: params[name] for name in self.names}
        return self.skeleton([params[name] for name in self.names])

    def split(self, tree: Any) -> dict[str, Any]:
        """Return by name what a tree has that is nested as the parameters were, such as gradients.

        Where it has None, or nothing, the name is left out. ::

            with step.backward(unit) as (params, grads):
                grads.update(unit.split(gradients(unit.build(params), x)))

        Args:
            tree: nested as the parameters that the unit was given; its leaves are used as they are,
                not copied.

        Raises:
            ArgumentError: it is nested in another way.
        """
        if self.skeleton is None:
            return {name: leaf for name, leaf in tree.items() if leaf is not None}
        leaves = self.skeleton.find(tree, f"what was given for unit {self.name!r}")
        named = zip(self.names, leaves, strict=True)
        return {name: leaf for name, leaf in named if leaf is not None}

    def __dir__(self) -> list[str]:
        # What is public; the rest of what was declared is for the engine.
        attributes = ["dtype", "frozen", "ignored", "name", "names", "ties"]
        return [*(name for name in dir(Unit) if not name.startswith("_")), *attributes]

    @property
    def _taken(self) -> ShardedUnit:
        if self._sharded is None:
            if self.initial is None:
                raise StateError(f"unit {self.name!r} is of no use: its engine was released")
            raise StateError(f"unit {self.name!r} belongs to no engine yet: pass it to FSDP(...)")
        return self._sharded

    @property
    def device(self) -> Device:
        """Where the arrays are."""
        return self._taken.device

    @property
    def trainable(self) -> bool:
        """Whether any parameters of its own are trained."""
        return self._taken.trainable

    @property
    def dtypes(self) -> Dtypes:
        """In which dtypes the trained parameters and their gradients are held."""
        return self._taken.dtypes

    @property
    def layout(self) -> FlatLayout:
        """Which trained parameter lies where in the flat buffer and in the shards."""
        return self._taken.layout

    @property
    def shard(self) -> Array:
        """This rank's part of the trained parameters at full precision, flat, padding included.

        Read-only; ``writing`` is for changes.
        """
        return self._taken.shard

    @property
    def valid_size(self) -> int:
        """Elements of this rank's shard that are not padding."""
        return self._taken.valid_size

    @property
    def shard_rank(self) -> int:
        """Which of the shards this rank has."""
        return self._taken.shard_rank

    @property
    def optimizer_state(self) -> dict[str, Array]:
        """This rank's optimizer state by name, flat, without padding."""
        update = None if self._sharded is None else self._sharded.updater
        return {} if update is None else update.state

    # Parameters.

    @property
    def state(self) -> ParamState:
        """Where the parameters are."""
        return ParamState.SHARDED if self._sharded is None else self._sharded.state

    def unshard(self, *, async_op: bool = False) -> Work | None:
        """Gather the parameters of all ranks; does nothing if they are gathered already.

        Where they are in a window, no data moves. The ranks wait for each other once after
        parameters were written, at the first ``unshard`` that follows.
        Parameters that are tied to others are gathered with the units that own them. A collective;
        blocks unless ``async_op``.

        Args:
            async_op: return a ``Work`` at once; ``params`` is there after another ``unshard()``,
                which waits for it.

        Raises:
            StateError: the unit belongs to no engine, or is being written.
            The errors of a collective (``CommTimeoutError``, ``MismatchError``, ...).
        """
        return self._taken.unshard(async_op=async_op)

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a gathering was begun that nobody has waited for."""
        return self.state is ParamState.GATHERING

    @property
    def gathered_bytes(self) -> int:
        """Memory that a gathering takes; 0 where it takes none."""
        return self._taken.gathered_bytes

    @property
    def params(self) -> Mapping[str, Array]:
        """The gathered parameters by name: read-only views, valid until ``reshard``."""
        return self._taken.params

    def reshard(self, *, again: bool = False) -> None:
        """End the use of the gathered parameters; does nothing if they are sharded already.

        Their memory is freed unless they are kept, or in a window. Views must not be read after
        this.

        Args:
            again: the backward pass is still to come, for which the strategy may keep a part.
        """
        if self._sharded is not None:
            self._sharded.reshard(again=again)

    def writing(self) -> AbstractContextManager[Array]:
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
        return self._taken.writing()

    def update_shards(self, flat: Array) -> None:
        """Replace this rank's shard of the trained parameters; all ranks call it.

        Args:
            flat: as ``shard``, or without its padding: shape ``(shard.size,)`` or
                ``(valid_size,)``; rounded to its dtype. Ranks that hold the same shard
                (``hybrid_shard``, ``no_shard``) give the same, which is not checked.

        Raises:
            ArgumentError: another shape, or a dtype that is not floating; nothing was changed.
                ``engine.update_shards`` raises it on all ranks.
        """
        update_shard(self._taken, flat)

    def load(self, values: Mapping[str, Array]) -> None:
        """Replace parameters by whole arrays; those that are not named stay as they are.

        All ranks call it with the same names, and keep their shards. Those for tied parameters go
        to their owner, in a ``load`` of its own.

        Args:
            values: arrays in the parameters' shapes, by the names in the unit; only read. Of a
                parameter that is a box, the box. Those of another floating dtype are rounded.

        Raises:
            ArgumentError: a name that is not the unit's own, a wrong shape or dtype; nothing was
                changed.
        """
        load_arrays(self._taken, values)

    # Gradients.

    @property
    def grad_state(self) -> GradState:
        """Where the gradients are."""
        return GradState.NONE if self._sharded is None else self._sharded.grad_state

    @property
    def grad_shard(self) -> Array | None:
        """This rank's part of the reduced gradients, while there are any; padding included.

        Waits for a reduction in the background; all ranks ask for it then.
        """
        gradients = self._taken.gradients
        gradients.wait()
        return gradients.shard

    def begin_gradients(self) -> Gradients:
        """Return zeroed gradients to be written, for ``reduce_gradients`` to pick up."""
        return self._taken.begin_gradients()

    def reduce_gradients(
        self,
        grads: Mapping[str, Array] | None = None,
        *,
        divisor: float | None = None,
        async_op: bool = False,
    ) -> None:
        """Sum the gradients of all ranks; each keeps its shard, added to what it had.

        Whether the unit is resharded before or after must be the same on all ranks; before is
        better.

        Args:
            grads: gradients by name, where ``begin_gradients`` was not used; those that are
                missing count as zeros.
            divisor: the sum over the ranks is divided by it; by default the number of ranks, for
                their mean. What is reduced M times before an update is added up: for the mean of
                all, divide by M times the number of ranks each time.
            async_op: begin only; ``grad_shard`` and ``update`` wait for the end.

        Raises:
            ArgumentError: a gradient of another shape or dtype, or of a name that is not trained.
            StateError: the unit belongs to no engine, or there are no gradients.
            The errors of a collective (``CommTimeoutError``, ``MismatchError``, ...).
        """
        self._taken.reduce_gradients(grads, divisor=divisor, async_op=async_op)

    def keep_gradients(self) -> None:
        """Add what was written since ``begin_gradients`` to what is reduced with the next ones."""
        self._taken.keep_gradients()

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        self._taken.drop_gradients()

    def update(self, *, step: int, lr: float | None, grad_scale: float) -> None:
        """Apply the optimizer to this rank's shard; reshards the unit and forgets the gradients.

        All ranks call it. They wait for each other if the unit may be in use somewhere. No gradient
        counts as zeros.

        Args:
            step: number of this update, from 1.
            lr: learning rate, if not the optimizer's own.
            grad_scale: the gradients are multiplied by it.
        """
        self._taken.update(step=step, lr=lr, grad_scale=grad_scale)

    def __repr__(self) -> str:
        state = self.state.value if self._sharded is None else self._sharded.state_word
        return f"<Unit {self.name!r} {state}, gradients {self.grad_state.value}>"


def hand_over(unit: Unit, sharded: ShardedUnit) -> None:
    """Have a unit take note that an engine has its parameters now."""
    unit._sharded, unit.initial = sharded, None


def let_go(unit: Unit) -> None:
    """Have a unit take note that its engine, and its parameters with it, are gone."""
    unit._sharded = None


def sharded_of(unit: Unit) -> ShardedUnit | None:
    """Return what an engine has made of a unit; None if it belongs to none yet."""
    return unit._sharded
