"""``StateVerbs``: what an engine does with its parameters and optimizer state between steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int
from fsdpcore.fsdp.state.averaged import averaged
from fsdpcore.fsdp.state.full import full_params, full_tree
from fsdpcore.fsdp.state.load import load_params, load_state
from fsdpcore.fsdp.state.save import ShardedState, full_state
from fsdpcore.fsdp.state.state import EngineState, LoadReport, Progress
from fsdpcore.fsdp.state.writing import set_progress, update_shards, writing_state
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.param_tree import ParamTree
from fsdpcore.fsdp.units.unit import Unit


class StateVerbs:
    """The part of ``FSDP`` that gives and takes state; the functions of this folder do the work.

    Attributes:
        tree: that the engine was made of; None for a list of units.
    """

    tree: ParamTree | None
    _model: ShardedModel
    _sharded: ShardedState

    def averaged(self, kind: str | None = None) -> AbstractContextManager[None]:
        """Have an average of the weights in the place of the weights, for a ``with`` block.

        All ranks enter and leave it, outside of steps. Each exchanges its shards, so that nothing
        is sent and no memory is taken. In the block: evaluation, ``full_params()``, ``full_tree()``
        and ``state_dict(optimizer=False)``; no training step, no load, no save of the optimizer.

        Args:
            kind: "ema" or "mean"; may be left out where the optimizer keeps one of them. Where an
                average has not begun, or a parameter has none, it stays as it is.

        Raises:
            StateError: the optimizer keeps none (see ``fc.optim.Average``); or inside of a step,
                of ``full_params``, or of another ``averaged``.
            ArgumentError: it keeps none of this kind; or both, and ``kind`` is missing.

        Example::

            with engine.averaged(), engine.evaluation() as step:
                ...
        """
        return averaged(self._model, kind)

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return self._model.status.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._model.status.steps = as_int(value, "steps of an engine", minimum=0)

    @property
    def partially_updated(self) -> bool:
        """Whether an update, or a load, was left half done, for instance by an interrupt."""
        return self._model.status.partially_updated

    @partially_updated.setter
    def partially_updated(self, value: bool) -> None:
        self._model.status.partially_updated = value

    def state_dict(
        self, *, full: bool = False, optimizer: bool = True, to: int | str = "all"
    ) -> EngineState:
        """Return everything that training needs to go on, at full precision.

        Parameters have the name ``unit.param``, arrays of the optimizer
        ``optimizer/<state>/unit.param``; a tied parameter is in ``info["ties"]``, with its owner.

        Args:
            full: whole arrays of NumPy, which belong to the caller, gathered one after the other;
                then it is a collective. Without it nothing is sent or copied: each rank gets its
                own parts, as ``ShardedArray`` of read-only views, which later updates change.
                Ignored arrays are plain arrays. Arrays of a GPU cannot be made read-only, and must
                not be written nevertheless.
            optimizer: with the optimizer's arrays.
            to: of ``full``: the rank of ``backend`` that gets the arrays, the others get ``info``
                only. Of several such ranks, the first in their ``tensor`` group.

        Raises:
            ArgumentError: two arrays have the same name, or there is no such rank.
            MismatchError: the ranks want different things.
        """
        if full:
            return full_state(self._model, optimizer=optimizer, to=to)
        return self._sharded.get(optimizer=optimizer, to=to)

    def load_state_dict(
        self,
        state: EngineState | None,
        *,
        strict: bool = True,
        optimizer: bool = True,
        src: int | None = None,
    ) -> LoadReport:
        """Go on from what ``state_dict`` returned; a collective, outside of steps.

        Whole arrays come from any number of ranks and any strategy, and are rounded to the dtypes
        of this engine. Shards must be this rank's: the layout has to be the same. An ignored array
        of other values replaces the one that ``unit.params`` shows; the caller's is not written.

        Args:
            state: on every rank, equal where it is full; or on ``src`` only.
            strict: names that are missing or unexpected are an error; else they are returned.
            optimizer: False loads parameters only: optimizer state, the number of steps and
                the scale of the loss stay as they are, and need not be in the state.
            src: the rank that has the (full) state, which deals it out array by array; what the
                others pass is ignored. It counts as ``to`` of ``state_dict``.

        Raises:
            ArgumentError: something does not fit on some rank; on all ranks, nothing was changed.
            MismatchError: the ranks have states of different names or steps; likewise.
            StateError: inside of a step, or of ``full_params``.
        """
        return load_state(self._model, state, strict=strict, optimizer=optimizer, src=src)

    def load_full(self, params: Any, *, strict: bool = True, src: int | None = None) -> LoadReport:
        """Load whole parameters by ``unit.param``; a collective, outside of steps.

        Optimizer state and the number of steps stay. A tied parameter may have its own name, or
        that of its owner. Ignored arrays may be left out.

        Args:
            params: whole arrays by name, or nested as ``full_tree`` gives them; equal on all
                ranks, or on ``src`` only. Rounded to the dtypes of this engine.
            strict, src: as of ``load_state_dict``.

        Returns:
            Which names were missing, and which were not expected.

        Raises:
            ArgumentError, MismatchError, StateError: as ``load_state_dict``.
        """
        return load_params(self._model, self.tree, params, strict=strict, src=src)

    def writing_state(self, *, optimizer: bool = True) -> AbstractContextManager[EngineState]:
        """Give ``state_dict()`` to be written in place, without another copy; for all ranks.

        What is written to the arrays in the ``with`` block is there after it, also if it ends by
        an exception. ``load_info`` has the rest.

        Args:
            optimizer: with the optimizer's arrays.

        Raises:
            StateError: inside of a step, or of ``full_params``.
        """
        return writing_state(self._model, optimizer=optimizer)

    def load_info(self, info: Mapping[str, Any]) -> None:
        """Take over the number of steps and the loss scale from ``EngineState.info``.

        Args:
            info: of ``state_dict``; equal on all ranks, which is not checked.

        Raises:
            ArgumentError: a value is missing or makes no sense, or it is of another format.
        """
        set_progress(self._model, Progress.of(info))

    def full_params(
        self,
        *,
        write: bool = False,
        names: str | Iterable[str] | None = None,
        unit: Unit | str | None = None,
    ) -> AbstractContextManager[Mapping[str, Array]]:
        """Gather parameters at full precision, by ``unit.param``, for a ``with`` block.

        All ranks enter it, outside of steps, and begin no step inside. Tied, frozen and ignored
        parameters are there, too. After the block the arrays must not be used.

        Args:
            write: False gives read-only arrays. True gives copies to be written, the same on
                all ranks; what they are at the end of the block is kept, unless an exception ends
                it. Ignored arrays stay read-only.
            names: patterns (of the shell) of names; by default all of them.
            unit: of this unit only.

        Raises:
            ArgumentError: a pattern matches nothing.
            MismatchError: the ranks ask for different parameters, or have written different
                values; on all ranks, and nothing was kept.
            StateError: inside of a step, or of another ``full_params``.
        """
        return full_params(self._model, write=write, names=names, unit=unit)

    def full_tree(self, *, to: int | str = "all") -> Any:
        """Return the parameters nested as the engine got them, for evaluation or export.

        A collective, outside of steps. What is no parameter is in its place, too.

        Args:
            to: the rank of ``backend`` that gets the tree, the others get None; "all" for all.

        Returns:
            The tree, with whole arrays of NumPy at full precision, which belong to the caller.

        Raises:
            StateError: the engine was made of a list of units; inside of a step, or of
                ``full_params``; or as ``state_dict``.
            ArgumentError: there is no such rank.
        """
        return full_tree(self._model, self.tree, to)

    def update_shards(self, shards: Mapping[str, Array]) -> None:
        """Replace this rank's shards of some units; a collective, outside of steps.

        Args:
            shards: by the name of the unit what ``Unit.update_shards`` takes; on all ranks those of
                the same units. The others stay.

        Raises:
            ArgumentError: a unit or an array that does not fit, on some rank; on all ranks, and
                nothing was changed.
            MismatchError: the ranks give shards of different units; likewise.
        """
        update_shards(self._model, shards)
