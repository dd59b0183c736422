"""``Step``: one training step, from its begin to its end."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite
from fsdpcore.core.errors import StateError
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.leaf_passes import LeafPass
from fsdpcore.fsdp.step.step_state import NO_BACKWARD, check_written
from fsdpcore.fsdp.step.step_times import AROUND, WHOLE
from fsdpcore.fsdp.step.unit_blocks import StepWatch, UnitBlocks
from fsdpcore.fsdp.step.whole import Whole, WholeGradients
from fsdpcore.fsdp.units.param_tree import ParamTree
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit
from fsdpcore.fsdp.units.unit import Unit


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


class Step(UnitBlocks):
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
        super().__init__(steps.executor, divisor, training, steps.watch)
        self.training = training
        self.tokens = tokens
        self._steps = steps

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
            if self._state.updated and self._watch is not None:
                found = {"skipped": float(self.skipped), "grad_norm": self._found_norm}
                self._watch.ended({**found, "tokens": self.tokens})

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
                with self.backward(made.unit.name):
                    pass
            else:
                with self.forward(made.unit.name, recompute=made.recompute):
                    pass

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
