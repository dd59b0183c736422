"""The end of a step: check, clip and apply the gradients of all units."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import NonFiniteGradientError
from fsdpcore.fsdp.gpu import inplace
from fsdpcore.fsdp.offload.arrays import GRADIENTS, UPDATED
from fsdpcore.fsdp.step.agreement import AGREED_BYTES, UpdateArguments, compare_updates
from fsdpcore.fsdp.step.executor import StepExecutor
from fsdpcore.fsdp.step.norm import NormPart, all_finite, joined, local_part
from fsdpcore.fsdp.step.shards import (
    GradientShards,
    counted,
    everything,
    held_by_one,
    in_turn,
    not_counted,
)
from fsdpcore.fsdp.step.step_times import AGREEING, NORM, Doing, StepTimes
from fsdpcore.fsdp.units.model import ShardedModel
from fsdpcore.fsdp.units.owners import together


@dataclass
class Clipping:
    """What was found out about a step's gradients before its update, and done to them.

    Attributes:
        factor: the update multiplies them by it.
        finite: they were found to be finite, and nobody could change them since.
    """

    factor: float = 1.0
    finite: bool = False

    def clip(self, norm: float, limit: float) -> None:
        """Have gradients of this norm scaled down to a limit."""
        if math.isfinite(norm) and norm > limit:
            self.factor *= limit / norm


def gradient_norm(
    executor: StepExecutor,
    divisor: float | None,
    clipping: Clipping,
    norm_type: float,
    *,
    limit: float | None = None,
    what: str = "grad_norm",
) -> float:
    """Have all gradients reduced, and return their global norm, as they are applied.

    Args:
        executor: of the step.
        divisor: of the step.
        clipping: of the step; with a ``limit`` the gradients are scaled down to that.
        norm_type, limit: as of ``Step.clip_grad_norm``.
        what: the name of the call.

    Raises:
        MismatchError: see ``compare_updates``.
    """
    model = executor.model
    executor.finish_reductions(divisor)
    wanted = UpdateArguments.of(
        *(None, limit, norm_type, None, divisor, False),
        *(model.status.steps, model.scaler.scale),
    )
    norm, where = _judge(executor, wanted, norm_type, clipping, what)
    assert norm is not None
    clipping.finite = not where and math.isfinite(norm)
    if limit is not None:
        clipping.clip(norm, limit)
    executor.leave()
    return norm


_TO_DO = (
    "Leave the step without update, lower the learning rate, or pass update(skip_nonfinite=True); "
    "float16 needs Precision(loss_scale=LossScale())"
)


def apply_update(
    executor: StepExecutor,
    divisor: float | None,
    clipping: Clipping,
    *,
    clip: float | None,
    norm_type: float,
    clip_value: float | None,
    lr: float | None,
    skip: bool,
) -> tuple[float | None, bool]:
    """Have all gradients reduced, agree that they are finite, clip and apply them.

    The arguments are those of ``Step.update``, and the divisor and the clipping of the step.

    Returns:
        The global norm before clipping, if it is clipped, and whether the update was skipped.

    Raises:
        NonFiniteGradientError: gradients are not finite, and that is no reason to skip.
        MismatchError: see ``compare_updates``.
    """
    model, status, scaler = executor.model, executor.model.status, executor.model.scaler
    executor.finish_reductions(divisor)
    numbers = (lr, clip, norm_type, clip_value, divisor)
    wanted = UpdateArguments.of(*numbers, skip, status.steps, scaler.scale)
    norm, where = _judge(executor, wanted, None if clip is None else norm_type, clipping)
    finite = not where and (norm is None or math.isfinite(norm))
    if not finite and not skip and scaler.policy is None:
        raise _not_finite(executor) if where else _too_large(norm)
    if finite:
        executor.nonfinite.end()
        if clip is not None and norm is not None:
            clipping.clip(norm, clip)
        if clip_value is not None:
            shards = GradientShards(model.units, model.groups, everything, written=True)
            _cut(shards, clip_value * scaler.scale / clipping.factor)
        factor = 1.0 / scaler.scale * clipping.factor
        status.partially_updated = True
        executor.stats.bytes_sent += sum(unit.update_sends for unit in model.units)
        _update(model, executor.times, step=status.steps + 1, lr=lr, grad_scale=factor)
        status.partially_updated = False
        status.steps += 1
    scaler.updated(skipped=not finite)
    executor.updated()
    executor.leave()
    return norm, not finite


def _update(
    model: ShardedModel, times: StepTimes, *, step: int, lr: float | None, grad_scale: float
) -> None:
    """Update all units, one after the other."""
    ahead = {each[0]: each for each in together(model.units, model.groups.shards.world_size)}
    for unit in in_turn(model.units, UPDATED, GRADIENTS):
        times.mark(Doing(unit.name, "update", "optimizer"))
        for each in ahead.get(unit, ()):
            each.begin_update(step=step, lr=lr, grad_scale=grad_scale)
        for each in ahead.get(unit, ()):
            each.make_update()
        unit.update(step=step, lr=lr, grad_scale=grad_scale, agreed=True)


def _judge(
    executor: StepExecutor,
    wanted: UpdateArguments,
    p: float | None,
    clipping: Clipping,
    what: str = "update",
) -> tuple[float | None, list[int]]:
    """Return the global Lp norm, unless p is None, and the ranks whose shards are not finite."""
    model, groups, everyone = executor.model, executor.model.groups, executor.model.groups.everyone
    executor.times.mark(NORM)
    # What several ranks hold alike is read by one of them, and counted once.
    if p is None:
        shards = GradientShards(model.units, groups, held_by_one)
        part, finite = NormPart(1.0, 0.0), clipping.finite or all_finite(shards)
    else:
        shards = GradientShards(model.units, groups, counted)
        part = local_part(shards, p, by_blocks=model.leaves.virtual)
        finite = math.isfinite(part.largest)
        if not groups.leads:  # what is no box was counted by another, but is it the same?
            finite = finite and all_finite(GradientShards(model.units, groups, not_counted))
    executor.stats.bytes_sent += AGREED_BYTES * (everyone.world_size - 1)
    executor.times.mark(AGREEING)
    told = compare_updates(
        everyone,
        wanted,
        executor.events,
        [unit.name for unit in model.units],
        (*part, float(finite)),
        algorithm=model.host_algorithm,
        what=what,
    )
    executor.times.mark(NORM)
    norm = None
    if p is not None:
        parts = [NormPart(*row) for row in told[:, :-1].tolist()]
        single = all(unit.dtypes.grad.itemsize <= 4 for unit in model.units)
        norm = joined(parts, p, single=single) / model.scaler.scale * clipping.factor
    return norm, [everyone.ranks[rank] for rank in np.flatnonzero(told[:, -1] == 0)]


def _not_finite(executor: StepExecutor) -> NonFiniteGradientError:
    found = executor.nonfinite.find(executor.events)
    text = f"{found.words}; no parameter was changed. {_TO_DO}"
    return NonFiniteGradientError(text, found.parameters)


def _too_large(norm: float | None) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"the gradients' global norm is {norm}; no parameter was changed. {_TO_DO}"
    )


def _cut(shards: Iterable[Array], limit: float) -> None:
    for shard in shards:
        if not on_host(shard):
            inplace.cut(shard, limit)
            continue
        with np.errstate(over="ignore"):  # nothing lies beyond inf
            bound = shard.dtype.type(limit)
        np.minimum(shard, bound, out=shard)
        np.maximum(shard, -bound, out=shard)
