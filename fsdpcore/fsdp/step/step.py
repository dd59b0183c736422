"""``Step``: one training step, as contexts around the forward and backward pass of each unit."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, NamedTuple

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite, as_positive
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.state.gradients import gradient_arrays
from fsdpcore.fsdp.state.state import ShardedArray
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.leaf_passes import LeafPass, LeafPasses
from fsdpcore.fsdp.step.step_state import NO_BACKWARD, StepState, check_written
from fsdpcore.fsdp.step.update import Clipping, apply_update, gradient_norm
from fsdpcore.fsdp.step.whole import Whole, WholeGradients
from fsdpcore.fsdp.units.gradients import check_divisor
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


class EngineSteps:
    """The steps of an engine.

    Attributes:
        executor: of their passes.
        tree: that the engine was made of.
        open: the one that was entered and not left; there is one at most.
    """

    def __init__(self, executor: StepExecutor, tree: ParamTree | None) -> None:
        self.executor = executor
        self.tree = tree
        self.open: Step | None = None


class Step:
    """Made by ``engine.step()`` (or ``engine.evaluation()``) and used in a ``with`` statement.

    Every rank must go through the same units in the same order. A unit's parameters are there
    inside its context only. Several forward passes of a unit need as many backward passes; the
    gradients of all of them are added up until ``update``.

    Attributes:
        divisor: what summed gradients are divided by; None for the number of ranks.
        training: whether there is a backward pass.
        skipped: the update was left out, because gradients were inf or nan.
    """

    def __init__(self, steps: EngineSteps, divisor: float | None, training: bool) -> None:
        self.divisor = check_divisor(divisor)
        self.training = training
        self.skipped = False
        self._steps = steps
        self._executor = steps.executor
        self._model = steps.executor.model
        self._state = StepState(training)
        self._clipping = Clipping()
        self._synchronising = True
        self._leaves = LeafPasses(self._model.leaves, training)

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
        """Return which of a unit's arrays are ignored: they stay where they are, also after it."""
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

    @contextmanager
    def forward(
        self, unit: Unit | str, *, recompute: bool = False
    ) -> Iterator[Mapping[str, Array]]:
        """Gather a unit for its forward pass; the body gets its parameters.

        Inside ``backward`` of the same unit it is for recomputation: the parameters are there.

        Args:
            unit: of this engine.
            recompute: this pass only makes anew what an earlier one has not kept; no backward pass
                of its own belongs to it.
        """
        with self._forward(self._model[unit], recompute) as params:
            yield params

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
            with _scoped(member) as params:
                yield params
        except BaseException:
            state.forwards[member.name] -= counts  # it can be tried again
            raise
        finally:
            if state.leave(member):
                executor.release(member)

    @contextmanager
    def backward(self, unit: Unit | str) -> Iterator[BackwardUnit]:
        """Gather a unit for its backward pass; the body gets parameters and zeroed gradients.

        At the end of the body the gradients are summed over the ranks and divided, in the
        background if the engine's ``prefetch`` says so; inside ``no_sync`` they are kept.
        """
        with self._backward(self._model[unit]) as given:
            yield given

    @contextmanager
    def _backward(self, member: ShardedUnit) -> Iterator[BackwardUnit]:
        state, executor = self._state, self._executor
        state.check_forward(member)
        self._note("backward", member)
        state.enter(member, "backward")
        state.forwards[member.name] -= 1
        try:
            executor.gather(member, "backward")
            with _scoped(member) as params:
                yield BackwardUnit(params, member.begin_gradients())
            executor.release(member)
            self._end_backward(member)
        except BaseException:
            state.forwards[member.name] += 1  # it can be tried again
            raise
        finally:
            if state.leave(member):
                executor.release(member)
                member.drop_local_gradients()

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
            yield Whole(params if tree is None else tree.build(params), given)
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

    # Gradients.

    def grad_norm(self, *, norm_type: float = 2.0) -> float:
        """Return the global norm of the gradients that ``update`` would apply; a collective.

        It is that of all gradients, however they are sharded, without the scale of the loss, and
        after what ``clip_grad_norm`` has done; inf or nan where a gradient is. After the backward
        passes; waits for reductions in the background.

        Args:
            norm_type: which norm: 2, 1, another p > 0, or ``math.inf``.

        Raises:
            StateError: there are no gradients, or not all of them yet, or they were applied.
            MismatchError: as of ``update``.
        """
        return self._norm("grad_norm", None, norm_type)

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0) -> float:
        """Scale the gradients down to a global norm if theirs is larger; a collective.

        The same as ``update(clip=max_norm)``, bit for bit, but for one small collective more: the
        gradients are multiplied in the update. ::

            norm = step.clip_grad_norm(1.0)
            if norm < 100.0:
                step.update()

        Gradients that are inf or nan stay as they are; ``update`` refuses or skips them.

        Args:
            max_norm: above 0; the same on all ranks.
            norm_type: as of ``grad_norm``.

        Returns:
            The norm before.

        Raises:
            ArgumentError, StateError, MismatchError: as ``grad_norm``.
        """
        max_norm = as_positive(max_norm, "max_norm", infinite=True)
        return self._norm("clip_grad_norm", max_norm, norm_type)

    def _norm(self, what: str, limit: float | None, norm_type: float) -> float:
        norm_type = as_positive(norm_type, "norm_type", infinite=True)
        self._check_gradients(f"{what}()")
        return gradient_norm(
            self._executor, self.divisor, self._clipping, norm_type, limit=limit, what=what
        )

    @contextmanager
    def gradients(
        self, *, full: bool = False, write: bool = False
    ) -> Iterator[Mapping[str, ShardedArray | Array]]:
        """Give the reduced gradients by ``unit.param``, to look at or change before ``update``.

        All ranks enter it, after the backward passes. What ``clip_grad_norm`` has done is done to
        them. Where the engine scales losses they are multiplied by ``engine.loss_scale``. A tied
        parameter is in its owner's; what no backward pass has reached is zeros. With ``Offload``
        the gradients of all units are in memory as long as the block lasts. ::

            with step.gradients(write=True) as grads:  # clipping of one's own
                for array in grads.values():
                    for piece in array.pieces:
                        np.clip(piece.array, -1.0, 1.0, out=piece.array)
            step.update()

        Args:
            full: copies of whole arrays, gathered one after the other and the same on all ranks.
                They belong to the caller. Without it, this rank's parts: ``ShardedArray`` of views,
                which are not to be used after the block.
            write: what is written to the arrays in the block is what ``update`` applies; without
                it views are read-only. Ranks that hold the same part (``array.replica``) write the
                same, which is checked with ``full`` only.

        Raises:
            StateError: as of ``grad_norm``; or the step is updated, or goes on, inside of the
                block.
            MismatchError: the ranks ask for different things, or have written different whole
                arrays; on all ranks, and nothing was kept.
        """
        state = self._state
        self._check_gradients("gradients()")
        self._executor.finish_reductions(self.divisor)
        self._apply_clipping()
        state.shown = True
        try:
            with gradient_arrays(self._model, full=full, write=write) as arrays:
                yield arrays
        finally:
            state.shown = False

    def _apply_clipping(self) -> None:
        """Have what was clipped so far so in memory; it may change from now on."""
        factor, self._clipping = self._clipping.factor, Clipping()
        if factor != 1.0:
            for unit in self._model.units:
                unit.gradients.scale(factor)

    # The end.

    def _check_gradients(self, what: str) -> None:
        self._state.check_gradients(self._model.units, what)
        self._leaves.check_ended(what)

    def update(
        self,
        *,
        clip: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
        lr: float | None = None,
        skip_nonfinite: bool = False,
    ) -> float | None:
        """Apply the optimizer to every unit, once per step.

        Args:
            clip: scale the gradients down to this global norm if theirs is larger, as
                ``clip_grad_norm`` does.
            norm_type: which norm: 2, 1, another p > 0, or ``math.inf``.
            clip_value: cut off every gradient element beyond this value, of either sign.
            lr: learning rate of this step, if not the optimizer's own.
            skip_nonfinite: leave the update out where gradients are inf or nan, and set
                ``skipped``; always so where the engine scales losses.

        Returns:
            The global norm of the gradients before clipping, if ``clip`` was given. It is that of
            all gradients, without the scale of the loss, however they are sharded.

        Raises:
            StateError: there is nothing to apply, or it was applied already.
            NonFiniteGradientError: a gradient is inf or nan; on all ranks, and nothing was changed.
            MismatchError: the ranks called it with different arguments, or went through the units
                in different orders.
        """
        norm_type = as_positive(norm_type, "norm_type", infinite=True)
        clip = None if clip is None else as_positive(clip, "clip", infinite=True)
        if clip_value is not None:
            clip_value = as_positive(clip_value, "clip_value", infinite=True)
            if clip is not None:
                raise ArgumentError("clip by norm, or by clip_value, but not by both")
        if lr is not None:
            lr = as_finite(lr, "lr", minimum=0.0)
            if self._model.optimizers is not None:
                self._model.optimizers.check_takes_lr()
        self._check_gradients("update()")
        self._state.updated = True  # also if it is skipped, or raises: nothing is left to apply
        norm, self.skipped = apply_update(
            self._executor,
            self.divisor,
            self._clipping,
            clip=clip,
            norm_type=norm_type,
            clip_value=clip_value,
            lr=lr,
            skip=bool(skip_nonfinite),
        )
        return norm

    def nonfinite(self) -> dict[str, tuple[int, ...]]:
        """Say in which gradients inf or nan made ``update`` be skipped; a collective.

        Call it on all ranks after ``update``, inside of the step. It reads the gradients once more.

        Returns:
            By ``unit.param``, in the order of the backward pass, the ranks of the job whose own
            gradients had it before the sum over the ranks. There are none if the sum overflowed, or
            if it is not known: most full gradients are freed by then. The next step looks then.

        Raises:
            StateError: the update was not skipped, or the step has ended.

        Example::

            step.update(skip_nonfinite=True)
            if step.skipped:
                print(step.nonfinite())  # {"l2.w": (3,)}: rank 3 gave it
        """
        if not (self._state.active and self.skipped):
            raise StateError(
                "nonfinite() says why update() was skipped; call it after an update with "
                "step.skipped, inside of the step"
            )
        return self._executor.nonfinite.find(self._executor.events).parameters


@contextmanager
def _scoped(unit: ShardedUnit) -> Iterator[ScopedParams]:
    """Give the parameters of a unit that is gathered, until the end of the block."""
    params = ScopedParams(unit.name, unit.params)
    try:
        yield params
    finally:
        params.close()
