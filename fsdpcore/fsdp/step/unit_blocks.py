"""``UnitBlocks``: the forward and backward passes of a step's units, as blocks of ``with``.

They are classes, not generators, since each unit of each step goes through two of them: a
generator and its ``contextmanager`` take a microsecond more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, TypeVar

from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.gradient_verbs import GradientVerbs
from fsdpcore.fsdp.step.leaf_passes import LeafPass
from fsdpcore.fsdp.step.schedule import Phase
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.unit import Unit
from fsdpcore.fsdp.units.views import Gradients, ScopedParams

Given = TypeVar("Given", covariant=True)


class BackwardUnit(NamedTuple):
    """What a backward pass gets of a unit."""

    params: Mapping[str, Array]
    grads: Gradients

    def __setitem__(self, name: str, value: object) -> None:
        raise ArgumentError(
            "step.backward gives two mappings: with step.backward(unit) as (params, grads), then "
            f"grads[{name!r}] = ..."
        )


class StepWatch(Protocol):
    """Who is told of steps."""

    def look(self) -> None:
        """A pass of a unit begins."""

    def ended(self, found: Mapping[str, float | None]) -> None:
        """A training step is over, and the units updated; it has found these numbers."""


class UnitBlocks(GradientVerbs):
    """The part of ``Step`` that makes passes of single units.

    Args:
        executor, divisor, training: as of ``GradientVerbs``.
        watch: is told when a pass begins; None for nobody.
    """

    def __init__(
        self,
        executor: StepExecutor,
        divisor: float | None,
        training: bool,
        watch: StepWatch | None,
    ) -> None:
        super().__init__(executor, divisor, training)
        self._watch = watch
        self._synchronising = True

    def forward(
        self, unit: Unit | str, *, recompute: bool = False
    ) -> AbstractContextManager[Mapping[str, Array]]:
        """Gather a unit for its forward pass; the body gets its parameters.

        Inside ``backward`` of the same unit it is for recomputation: the parameters are there.

        Args:
            unit: of this engine.
            recompute: this pass only makes anew what an earlier one has not kept; no backward pass
                of its own belongs to it.

        Raises:
            StateError: another block is in the way.
            ArgumentError: this engine has no such unit.

        Example::

            with step.forward("out") as params:
                y = h @ params["w"]
        """
        return _ForwardBlock(self, self._model[unit], recompute)

    def backward(self, unit: Unit | str) -> AbstractContextManager[BackwardUnit]:
        """Gather a unit for its backward pass; the body gets parameters and zeroed gradients.

        At the end of the body the gradients are summed over the ranks and divided, in the
        background if the engine's ``prefetch`` says so; inside ``no_sync`` they are kept.

        Args:
            unit: the unit, or its name. Its forward pass of this step is over.

        Raises:
            StateError: there was no such forward pass, or another block is in the way.
            ArgumentError: no such unit, or a gradient that does not fit; before
                anything was reduced.

        Example::

            with step.backward("out") as (params, grads):
                grads["w"] = h.T @ dy                     # or: np.matmul(h.T, dy, out=grads["w"])
        """
        return _BackwardBlock(self, self._model[unit])

    def _begin(self, member: ShardedUnit, phase: Phase, recompute: bool = False) -> None:
        """Enter the context of a unit."""
        self._note(phase, member, recompute)
        self._state.enter(member, phase)

    def _gather(self, member: ShardedUnit, phase: Phase) -> ScopedParams:
        self._executor.gather(member, phase)
        if self._watch is not None:
            self._watch.look()
        return ScopedParams(member.name, member.params)

    def _end_backward(self, member: ShardedUnit) -> None:
        """Reduce or keep the gradients of a pass."""
        reduce = self._synchronising
        if self._leaves.virtual:
            # Once in a step, with all gradients of the last virtual rank; else at the update.
            complete = not self._state.forwards[member.name] and member not in self._model.tied
            reduce = reduce and self._leaves.last and complete
        self._apply_clipping()  # of gradients that others are added to now
        self._executor.settle(member, self.divisor, reduce=reduce)
        self._state.reduced = True

    def _note(
        self,
        kind: Literal["forward", "backward", "whole"],
        member: ShardedUnit | None = None,
        recompute: bool = False,
    ) -> None:
        """Have a pass made again by a rank that lacks a virtual rank."""
        if self._leaves.virtual:
            self._leaves.note(LeafPass(kind, member, recompute, self._synchronising))


class _Block(AbstractContextManager[Given]):
    """A pass of a unit.

    Args:
        step, member: whose.
    """

    _params: ScopedParams

    def __init__(self, step: UnitBlocks, member: ShardedUnit) -> None:
        self._step = step
        self._member = member

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._params.close()
        self._end(failed=kind is not None)

    @abstractmethod
    def _end(self, *, failed: bool) -> None:
        """End the pass; one that has failed can be tried again."""


class _ForwardBlock(_Block[Mapping[str, Array]]):
    """The forward pass of a unit, or the use of its parameters inside of its backward pass."""

    def __init__(self, step: UnitBlocks, member: ShardedUnit, recompute: bool) -> None:
        super().__init__(step, member)
        self._recompute = recompute

    def __enter__(self) -> Mapping[str, Array]:
        step, member = self._step, self._member
        state = step._state
        self._inside = state.unit is member and state.phase == "backward"
        if self._inside:
            self._params = ScopedParams(member.name, member.params)
            return self._params
        step._begin(member, "forward", self._recompute)
        state.forwards[member.name] += not self._recompute
        try:
            self._params = step._gather(member, "forward")
            step._executor.computes()
            return self._params
        except BaseException:
            self._end(failed=True)
            raise

    def _end(self, *, failed: bool) -> None:
        if self._inside:
            return
        member, executor, state = self._member, self._step._executor, self._step._state
        if failed:
            state.forwards[member.name] -= not self._recompute
        executor.computed()
        if state.leave(member):
            executor.release(member)
            executor.leave()


class _BackwardBlock(_Block[BackwardUnit]):
    """The backward pass of a unit."""

    def __enter__(self) -> BackwardUnit:
        step, member = self._step, self._member
        state = step._state
        state.check_forward(member)
        step._begin(member, "backward")
        state.forwards[member.name] -= 1
        try:
            self._params = step._gather(member, "backward")
            given = BackwardUnit(self._params, member.begin_gradients())
            step._executor.computes()
            return given
        except BaseException:
            self._end(failed=True)
            raise

    def _end(self, *, failed: bool) -> None:
        step, member = self._step, self._member
        executor, state = step._executor, step._state
        reduced = False
        try:
            if not failed:
                executor.computed()
                executor.release(member)
                step._end_backward(member)
                reduced = True
        finally:
            if not reduced:
                state.forwards[member.name] += 1
                if state.active:
                    executor.release(member)
                    member.drop_local_gradients()
            if state.leave(member):
                executor.leave()
