"""The end of a step: check, clip and apply the gradients of all units."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.buffers import Array
from fsdpcore.errors import NonFiniteGradientError
from fsdpcore.fsdp.agreement import Wanted, agree
from fsdpcore.fsdp.norm import all_finite, joined, local_part

if TYPE_CHECKING:
    from fsdpcore.fsdp.engine import FSDP
    from fsdpcore.fsdp.step import Step


def apply_update(
    engine: FSDP,
    step: Step,
    clip: float | None,
    norm_type: float,
    clip_value: float | None,
    lr: float | None,
    *,
    skip: bool,
) -> tuple[float | None, bool]:
    """Agree with the other ranks that all gradients are finite, then clip and apply them.

    Returns:
        The global norm before clipping, if it is clipped, and whether the update was skipped.

    Raises:
        NonFiniteGradientError: they are not finite, and ``skip`` is False.
        MismatchError: see ``agree``.
    """
    scale = engine.loss_scale
    shards = [
        unit.gradients.shard[: unit.valid_size]
        for unit in engine.units
        if unit.gradients.shard is not None
    ]
    # What several ranks hold alike is read by one of them, and counted once.
    counted = [shard[engine.ranks.part(shard.size)] for shard in shards]
    if clip is None:
        part, finite = 0.0, all_finite(counted)
    else:
        part = local_part(counted, norm_type)
        finite = math.isfinite(part) or all_finite(counted)
    began = time.perf_counter()
    told = agree(
        engine.backend,
        Wanted.of(lr, clip, norm_type, clip_value, step.divisor),
        engine.events,
        [unit.name for unit in engine.units],
        (part, float(finite)),
        algorithm=engine.algorithm,
    )
    engine.stats.waited += time.perf_counter() - began
    norm = None if clip is None else joined(told[:, 0].tolist(), norm_type) / scale
    if not told[:, 1].all() or (norm is not None and not math.isfinite(norm)):
        if skip:
            return norm, True
        raise _not_finite(engine, told[:, 1], norm)
    factor = 1.0 / scale
    if clip is not None and norm is not None and norm > clip:
        factor *= clip / norm
    if clip_value is not None:
        _cut(shards, clip_value * scale)
    for unit in engine.units:
        unit.update(step=engine.steps + 1, lr=lr, grad_scale=factor)
    return norm, False


def _not_finite(engine: FSDP, finite: Array, norm: float | None) -> NonFiniteGradientError:
    where = ", ".join(str(engine.backend.ranks[n]) for n in np.flatnonzero(finite == 0))
    what = f"gradients are inf or nan (in the shards of ranks {where})"
    if not where:
        what = f"the gradients' global norm is {norm}"
    return NonFiniteGradientError(
        f"{what}; no parameter was changed. Leave the step without update, lower the learning "
        "rate, or pass update(skip_nonfinite=True); float16 needs Precision(loss_scale=LossScale())"
    )


def _cut(shards: list[Array], limit: float) -> None:
    for shard in shards:
        with np.errstate(over="ignore"):  # nothing lies beyond inf
            bound = shard.dtype.type(limit)
        np.minimum(shard, bound, out=shard)
        np.maximum(shard, -bound, out=shard)
