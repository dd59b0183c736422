"""``GradientVerbs``: what a step does with its gradients after the backward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_finite, as_positive
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.fsdp.state.gradients import gradient_arrays
from fsdpcore.fsdp.state.state import ShardedArray
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.leaf_passes import LeafPasses
from fsdpcore.fsdp.step.step_state import StepState
from fsdpcore.fsdp.step.step_times import AGREEING, OUTSIDE
from fsdpcore.fsdp.step.update import Clipping, apply_update, gradient_norm
from fsdpcore.fsdp.units.gradients import check_divisor


class GradientVerbs:
    """The part of ``Step`` that measures, clips, shows and applies gradients.

    Args:
        executor: of the engine's passes.
        divisor: as of ``Step``.
        training: likewise.

    Attributes:
        divisor: what summed gradients are divided by; None for the number of ranks.
        skipped: the update was left out, because gradients were inf or nan.
    """

    def __init__(self, executor: StepExecutor, divisor: float | None, training: bool) -> None:
        self.divisor = check_divisor(divisor)
        self.skipped = False
        self._found_norm: float | None = None
        self._executor = executor
        self._model = executor.model
        self._state = StepState(training)
        self._clipping = Clipping()
        self._leaves = LeafPasses(self._model.leaves, training)

    def _check_gradients(self, what: str) -> None:
        self._state.check_gradients(self._model.units, what)
        self._leaves.check_ended(what)

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
        with self._callers_time_after():
            norm = gradient_norm(
                self._executor, self.divisor, self._clipping, norm_type, limit=limit, what=what
            )
        if self._found_norm is None:
            self._found_norm = norm
        return norm

    @contextmanager
    def _callers_time_after(self) -> Iterator[None]:
        """Have what comes after the block count as the caller's own code."""
        try:
            yield
        finally:
            self._executor.times.mark(OUTSIDE)

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
        times = self._executor.times
        with self._callers_time_after():
            self._executor.finish_reductions(self.divisor)
            times.mark(AGREEING)
            self._apply_clipping()
            state.shown = True
            try:
                with gradient_arrays(self._model, full=full, write=write) as arrays:
                    times.mark(OUTSIDE)
                    yield arrays
                    times.mark(AGREEING)
            finally:
                state.shown = False

    def _apply_clipping(self) -> None:
        """Have what was clipped so far so in memory; it may change from now on."""
        factor, self._clipping = self._clipping.factor, Clipping()
        if factor != 1.0:
            for unit in self._model.units:
                unit.gradients.scale(factor)

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
        with self._callers_time_after():
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
        if self._found_norm is None:
            self._found_norm = norm
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
        self._executor.times.mark(AGREEING)
        with self._callers_time_after():
            return self._executor.nonfinite.find(self._executor.events).parameters
