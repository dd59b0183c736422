"""``Step``: one training step, as contexts around the forward and backward pass of each unit."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.gradient_verbs import GradientVerbs
from fsdpcore.fsdp.step.leaf_passes import LeafPass
from fsdpcore.fsdp.step.step_state import NO_BACKWARD, check_written
from fsdpcore.fsdp.step.step_times import AROUND, WHOLE
from fsdpcore.fsdp.step.whole import Whole, WholeGradients
from fsdpcore.fsdp.units.param_tree import ParamTree
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.unit import Unit
from fsdpcore.fsdp.units.views import Gradients, ScopedParams


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


class EngineSteps:
    """The steps of an engine.

    Attributes:
        executor: of their passes.
        tree: that the engine was made of.
        open: the one that was entered and not left; there is one at most.
        watch: of the steps; None for none.
    """

    def __init__(
        self,
        executor: StepExecutor,
        tree: ParamTree | None,
        watch: StepWatch | None = None,
    ) -> None:
        self.executor = executor
        self.tree = tree
        self.watch = watch
        self.open: Step | None = None


class Step(GradientVerbs):
    """Made by ``engine.step()`` (or ``engine.evaluation()``) and used in a ``with`` statement.

    Every rank must go through the same units in the same order. A unit's parameters are there
    inside its context only. Several forward passes of a unit need as many backward passes; the
    gradients of all of them are added up until ``update``.

    Attributes:
        divisor: what summed gradients are divided by; None for the number of ranks.
        training: whether there is a backward pass.
        skipped: the update was left out, because gradients were inf or nan.
        tokens: that this rank goes through, or whatever else is counted; None if nobody says.

    Example::

        with engine.step() as step:
            with step.forward("out") as params:
                error = x @ params["w"] - y
            with step.backward("out") as (params, grads):
                grads["w"] = x.T @ error
            step.update(clip=1.0)
    """

    def __init__(
        self,
        steps: EngineSteps,
        divisor: float | None,
        training: bool,
        tokens: float | None = None,
    ) -> None:
        super().__init__(steps.executor, divisor, training)
        self.training = training
        self.tokens = tokens
        self._steps = steps
        self._synchronising = True

    def __enter__(self) -> Step:
        state = self._state
        state.check_first()
        if self.training:
            self._model.status.check_own("a training step")
        # An evaluation keeps nothing for a backward pass.
        self._executor.begin(state.forwards if self.training else Counter())
        self._steps.open = self
        state.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._state.active = False
        self._steps.open = None
        self._executor.end()
        if error is None:
            self._state.check_applied()
            if self._state.updated and self._steps.watch is not None:
                found = {"skipped": float(self.skipped), "grad_norm": self._found_norm}
                self._steps.watch.ended({**found, "tokens": self.tokens})

    @property
    def tokens(self) -> float | None:
        """See the class; may be set."""
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: float | None) -> None:
        self._tokens = None if tokens is None else as_finite(tokens, "tokens", minimum=0)

    def __repr__(self) -> str:
        kind = "training step" if self.training else "evaluation"
        return f"<Step: {kind}, {self._state.words}>"

    @property
    def keeps_params(self) -> bool:
        """Whether units' parameters stay where they are from their forward to the backward pass.

        Arrays that ``forward`` gave can be read in ``backward`` then: the strategy keeps them, or
        they are in windows on all hosts. The same on all ranks. Not so in an evaluation, which has
        no backward pass.
        """
        return self.training and self._executor.keeps_params

    def ignored(self, unit: Unit | str) -> frozenset[str]:
        """Return which of a unit's arrays are ignored: they stay where they are, also after it.

        Args:
            unit: of the engine, or its name.

        Returns:
            Their names, without that of the unit.

        Raises:
            ArgumentError: the engine has no such unit.
        """
        return frozenset(self._model[unit].ignored)

    # Passes.

    def leaves(self) -> Iterator[int]:
        """Go through the virtual ranks that this rank computes, in order.

        The passes of each are made while it is given; of several microbatches of one, all but the
        last in ``no_sync``. A rank that has one fewer than others makes the passes of its last one
        once more, without computing, so that all ranks gather alike. Without ``virtual_ranks`` it
        gives this rank's number, once. ::

            with engine.step(divisor=batch.size) as step:
                for leaf in step.leaves():
                    x, y = batch[leaf]
                    ...  # forward and backward passes
                step.update()

        Raises:
            StateError: outside of the step, or a second time in it; or passes of the leaf before
                are not complete.
        """
        state, passes = self._state, self._leaves
        state.check_entering("leaves()")
        passes.begin()
        for leaf in passes.given:
            if leaf != passes.given.start:
                self._next_leaf()
            yield leaf
        if passes.lacks_one:
            for made in self._next_leaf():
                self._make_again(made)
        state.check_entering("the end of leaves()")
        state.check_passes()
        passes.end()

    def _next_leaf(self) -> list[LeafPass]:
        """Have done with the passes of a virtual rank, and return them."""
        self._state.check_entering("the next virtual rank")
        self._state.check_passes()
        if self.training:
            for unit in self._model.units:
                unit.gradients.end_leaf()
        return self._leaves.next()

    def _make_again(self, made: LeafPass) -> None:
        """Make a pass without computing, for those that gather and reduce with this rank."""
        with contextlib.nullcontext() if made.synchronising else self.no_sync():
            if made.unit is None:
                with self.whole():
                    pass
            elif made.kind == "backward":
                with self._backward(made.unit):
                    pass
            else:
                with self._forward(made.unit, made.recompute):
                    pass

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
        return self._forward(self._model[unit], recompute)

    @contextmanager
    def _forward(self, member: ShardedUnit, recompute: bool) -> Iterator[Mapping[str, Array]]:
        state, executor = self._state, self._executor
        if state.unit is member and state.phase == "backward":
            with _scoped(member) as params:
                yield params
            return
        self._note("forward", member, recompute)
        state.enter(member, "forward")
        counts = 0 if recompute else 1
        state.forwards[member.name] += counts
        try:
            executor.gather(member, "forward")
            self._look()
            params = ScopedParams(member.name, member.params)
            try:
                executor.computes()
                yield params
            finally:
                params.close()
        except BaseException:
            state.forwards[member.name] -= counts  # it can be tried again
            raise
        finally:
            executor.computed()
            if state.leave(member):
                executor.release(member)
                executor.leave()

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
        return self._backward(self._model[unit])

    @contextmanager
    def _backward(self, member: ShardedUnit) -> Iterator[BackwardUnit]:
        state, executor = self._state, self._executor
        state.check_forward(member)
        self._note("backward", member)
        state.enter(member, "backward")
        state.forwards[member.name] -= 1
        try:
            executor.gather(member, "backward")
            self._look()
            params = ScopedParams(member.name, member.params)
            try:
                given = BackwardUnit(params, member.begin_gradients())
                executor.computes()
                yield given
            finally:
                params.close()
            executor.computed()
            executor.release(member)
            self._end_backward(member)
        except BaseException:
            state.forwards[member.name] += 1  # it can be tried again
            if state.active:
                executor.release(member)
                member.drop_local_gradients()
            raise
        finally:
            if state.leave(member):
                executor.leave()

    def _look(self) -> None:
        if self._steps.watch is not None:
            self._steps.watch.look()

    def _end_backward(self, member: ShardedUnit) -> None:
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
        if self._leaves.virtual:
            self._leaves.note(LeafPass(kind, member, recompute, self._synchronising))

    @contextmanager
    def whole(self) -> Iterator[Whole]:
        """Gather all units at once; the body gets all parameters, and gives all gradients.

        For a function of the whole model: it takes as much memory as the model. It is a forward and
        a backward pass of every unit. At the end of the body units are freed one after the other,
        the last one first, while their gradients are reduced, or kept inside ``no_sync``. In an
        evaluation there are no gradients. Where the engine was made of a tree, parameters and
        gradients are nested like that. ::

            with engine.step() as step:
                with step.whole() as (params, grads):
                    loss, found = loss_and_grads(params, batch)
                    grads.update(found)
                step.update()

        Raises:
            ArgumentError: in the body, where gradients are given that do not fit.
            StateError: outside of the step, after ``update``, or inside another context.
        """
        state, units, executor = self._state, self._model.units, self._executor
        state.check_entering("whole()")
        self._note("whole")
        for unit in units:
            check_written(unit)
        tree = self._steps.tree
        given = WholeGradients(units, "" if self.training else NO_BACKWARD, tree)
        params: dict[str, dict[str, Array]] = {}
        state.whole = executor.stats.whole = True
        for unit in units:
            unit.in_use = True
        try:
            for unit in units:
                executor.gather(unit, "forward")
            params.update((unit.name, dict(unit.params)) for unit in units)
            executor.times.mark(WHOLE)
            yield Whole(params if tree is None else tree.build(params), given)
            executor.times.mark(AROUND)
            if self.training:
                given.copy_aliases_of({unit.name: dict(unit.params) for unit in units})
                self._clear(params)
                for unit in reversed(units):
                    self._hand_over(unit, given)
        finally:
            self._clear(params)
            given.close()
            if state.active:
                state.whole = False
                for unit in units:
                    unit.in_use = False
                    executor.free(unit)
                    unit.drop_local_gradients()
                executor.leave()

    @staticmethod
    def _clear(params: dict[str, dict[str, Array]]) -> None:
        """Have nobody find parameters that are about to be freed."""
        for named in params.values():
            named.clear()
        params.clear()

    def _hand_over(self, unit: ShardedUnit, given: WholeGradients) -> None:
        """Free a unit, and reduce or keep its gradients."""
        executor = self._executor
        executor.record(unit, "backward")
        given.hand_over(unit.name, unit.begin_gradients())
        executor.free(unit)
        self._end_backward(unit)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backward passes in this block on their rank, whole, and unreduced.

        They are added to those of the next backward pass of their unit outside of the block, which
        reduces all of them at once: less is sent, and more memory held. For every microbatch
        but the last. They are added up, not averaged: see ``divisor`` of ``FSDP.step``.
        """
        if not self._synchronising:
            raise StateError("no_sync() inside of no_sync(); one is enough")
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = True


@contextmanager
def _scoped(unit: ShardedUnit) -> Iterator[ScopedParams]:
    """Give the parameters of a unit that is gathered, until the end of the block."""
    params = ScopedParams(unit.name, unit.params)
    try:
        yield params
    finally:
        params.close()
