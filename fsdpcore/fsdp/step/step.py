"""``Step``: one training step, as contexts around the forward and backward pass of each unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite, as_positive
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.step.schedule import Phase
from fsdpcore.fsdp.step.update import apply_update
from fsdpcore.fsdp.step.whole import Whole, WholeGradients
from fsdpcore.fsdp.units.gradients import check_divisor
from fsdpcore.fsdp.units.unit import Unit
from fsdpcore.fsdp.units.views import Gradients, LentParams

if TYPE_CHECKING:
    from fsdpcore.fsdp.engine import FSDP

_NO_BACKWARD = "an evaluation has no backward pass; use engine.step()"


class BackwardUnit(NamedTuple):
    """What a backward pass gets of a unit."""

    params: Mapping[str, Array]
    grads: Gradients


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

    def __init__(self, engine: FSDP, divisor: float | None, training: bool) -> None:
        self.divisor = check_divisor(divisor)
        self.training = training
        self.skipped = False
        self._engine = engine
        self._forwards: Counter[str] = Counter()
        self._open: Unit | None = None
        self._whole = False
        self._phase: Phase = "forward"
        self._synchronising = True
        self._reduced = False
        self._updated = False
        self._entered = self._active = False

    def __enter__(self) -> Step:
        if self._entered:
            raise StateError("a step is entered once; make a new one with engine.step()")
        self._engine.begin(self)
        self._entered = True
        self._active = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._active = False
        unfinished = self._reduced and not self._updated
        self._engine.end()
        if error is None and unfinished:
            raise StateError(
                "the step ended with gradients that were never applied; call step.update() "
                "before the end of the with block"
            )

    def awaits_backward(self, unit: Unit) -> bool:
        """Whether a forward pass of the unit has not had its backward pass so far."""
        return self.training and self._forwards[unit.name] > 0

    @property
    def keeps_params(self) -> bool:
        """Whether units' parameters stay where they are from their forward to the backward pass.

        Arrays that ``forward`` gave can be read in ``backward`` then: the strategy keeps them, or
        they are in windows on all hosts. The same on all ranks. Not so in an evaluation, which has
        no backward pass.
        """
        engine = self._engine
        if not self.training:
            return False
        if engine.all_windowed or engine.placement.keeps_for_backward:
            return True
        brought = engine.offload is not None and not engine.device.on_host
        return engine.placement.whole_parameters and not brought

    def ignored(self, unit: Unit | str) -> frozenset[str]:
        """Return which of a unit's arrays are ignored: they stay where they are, also after it."""
        return frozenset(self._engine[unit].ignored)

    # Passes.

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
        member = self._engine[unit]
        if self._open is member and self._phase == "backward":
            with _lent(member) as params:
                yield params
            return
        self._enter(member, "forward")
        counts = 0 if recompute else 1
        self._forwards[member.name] += counts
        try:
            self._engine.executor.gather(member, "forward")
            with _lent(member) as params:
                yield params
        except BaseException:
            self._forwards[member.name] -= counts  # it can be tried again
            raise
        finally:
            self._leave(member)

    @contextmanager
    def backward(self, unit: Unit | str) -> Iterator[BackwardUnit]:
        """Gather a unit for its backward pass; the body gets parameters and zeroed gradients.

        At the end of the body the gradients are summed over the ranks and divided, in the
        background if the engine's ``prefetch`` says so; inside ``no_sync`` they are kept.
        """
        if not self.training:
            raise StateError(_NO_BACKWARD)
        member = self._engine[unit]
        if not self._context and self._active and not self._forwards[member.name]:
            raise StateError(
                f"backward of unit {member.name!r} without a forward pass in this step; call "
                "step.forward(unit) first, once for each backward"
            )
        self._enter(member, "backward")
        self._forwards[member.name] -= 1
        try:
            self._engine.executor.gather(member, "backward")
            with _lent(member) as params:
                yield BackwardUnit(params, member.begin_gradients())
            # Before the reduction, which needs the room, and ends all reading.
            self._engine.executor.release(member)
            if self._synchronising:
                self._engine.executor.reduce(member, self.divisor)
            else:
                member.keep_gradients()
            self._reduced = True
        except BaseException:
            self._forwards[member.name] += 1  # it can be tried again
            raise
        finally:
            if self._leave(member):
                member.drop_local_gradients()

    @contextmanager
    def whole(self) -> Iterator[Whole]:
        """Gather all units at once; the body gets all parameters, and gives all gradients.

        For a function of the whole model: it takes as much memory as the model. It is a forward and
        a backward pass of every unit. At the end of the body units are freed one after the other,
        the last one first, while their gradients are reduced, or kept inside ``no_sync``. In an
        evaluation there are no gradients. ::

            with engine.step() as step:
                with step.whole() as (params, grads):
                    loss, found = loss_and_grads(params, batch)
                    grads.update(found)
                step.update()

        Raises:
            ArgumentError: in the body, where gradients are given that do not fit.
            StateError: outside of the step, after ``update``, or inside another context.
        """
        self._check_entering("whole()")
        units, executor = self._engine.units, self._engine.executor
        for unit in units:
            self._check_written(unit)
        given = WholeGradients(units, "" if self.training else _NO_BACKWARD)
        params: dict[str, dict[str, Array]] = {}
        self._whole = executor.stats.whole = True
        for unit in units:
            unit.in_use = True
        try:
            for unit in units:
                executor.gather(unit, "forward")
            params.update((unit.name, dict(unit.params)) for unit in units)
            yield Whole(params, given)
            if self.training:
                given.copy_aliases_of({unit.name: dict(unit.params) for unit in units})
                self._clear(params)
                for unit in reversed(units):
                    self._hand_over(unit, given)
        finally:
            self._clear(params)
            given.close()
            if self._active:
                self._whole = False
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

    def _hand_over(self, unit: Unit, given: WholeGradients) -> None:
        """Free a unit, and reduce or keep its gradients."""
        executor = self._engine.executor
        executor.record(unit, "backward")
        given.hand_over(unit.name, unit.begin_gradients())
        executor.free(unit)
        if self._synchronising:
            executor.reduce(unit, self.divisor)
        else:
            unit.keep_gradients()
        self._reduced = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backward passes in this block on their rank, whole, and unreduced.

        They are added to those of the next backward pass of their unit outside of the block, which
        reduces all of them at once: less is sent, and more memory held. For every microbatch
        but the last.
        """
        if not self._synchronising:
            raise StateError("no_sync() inside of no_sync(); one is enough")
        self._synchronising = False
        try:
            yield
        finally:
            self._synchronising = True

    # The end.

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
            clip: scale the gradients down to this global norm if theirs is larger.
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
        lr = None if lr is None else as_finite(lr, "lr", minimum=0.0)
        self._check_update()
        self._updated = True  # also if it is skipped, or raises: nothing is left to apply
        norm, self.skipped = apply_update(
            self._engine, self.divisor, clip, norm_type, clip_value, lr, skip=bool(skip_nonfinite)
        )
        return norm

    def _check_update(self) -> None:
        if self._updated:
            raise StateError("update() was called already in this step; begin a new step")
        if self._context:
            raise StateError(f"update() inside the context of {self._context}; leave it first")
        if not self._active or not self._reduced:
            raise StateError(
                "update() without gradients; run step.forward and step.backward of the units first"
            )
        left = [name for name, count in self._forwards.items() if count]
        if left:
            raise StateError(
                f"units {left} had a forward pass without its backward; run it before update()"
            )
        kept = [unit.name for unit in self._engine.units if unit.gradients.kept]
        if kept:
            raise StateError(
                f"gradients of units {kept} were kept by no_sync() and never reduced; run the "
                "backward pass of the last microbatch outside of no_sync()"
            )

    def _leave(self, member: Unit) -> bool:
        """End the use of a unit; False if the step has ended before, and its units with it."""
        if not self._active:
            return False
        self._open, member.in_use = None, False
        self._engine.executor.release(member)
        return True

    def _enter(self, member: Unit, phase: Phase) -> None:
        self._check_entering(phase, f" of unit {member.name!r}")
        self._check_written(member)
        self._open, self._phase = member, phase
        member.in_use = True

    @staticmethod
    def _check_written(member: Unit) -> None:
        if member.gradients.writable is not None:
            raise StateError(f"unit {member.name!r} has gradients that were not reduced")

    def _check_entering(self, what: str, which: str = "") -> None:
        if not self._active:
            raise StateError(f"{what} outside of the step; use it inside 'with engine.step()'")
        if self._updated:
            raise StateError(f"{what} after update(); begin a new step")
        if self._context:
            raise StateError(
                f"{what}{which} inside the context of {self._context}; leave that one first"
            )

    @property
    def _context(self) -> str:
        """What the step is inside of; empty if nothing."""
        if self._whole:
            return "whole()"
        return "" if self._open is None else f"unit {self._open.name!r}"


@contextmanager
def _lent(unit: Unit) -> Iterator[LentParams]:
    """Give the parameters of a unit that is gathered, until the end of the block."""
    params = LentParams(unit.name, unit.params)
    try:
        yield params
    finally:
        params.close()
