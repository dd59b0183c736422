"""The end of a step: check, clip and apply the gradients of all units."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.buffers import Array
from fsdpcore.errors import NonFiniteGradientError
from fsdpcore.fsdp.agreement import Wanted, agree
from fsdpcore.fsdp.norm import all_finite, joined, local_part
from fsdpcore.fsdp.offload import GRADIENTS, UPDATED, in_turn

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
    # What several ranks hold alike is read by one of them, and counted once.
    counted = _Shards(engine, counted=True)
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
        _cut(_Shards(engine, written=True), clip_value * scale)
    for unit in in_turn(engine.units, UPDATED, GRADIENTS):
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


class _Shards:
    """Shards of reduced gradients, each of them in memory while it is its turn."""

    def __init__(self, engine: FSDP, *, counted: bool = False, written: bool = False) -> None:
        self._engine = engine
        self._counted = counted
        self._written = written

    def __iter__(self) -> Iterator[Array]:
        units = [unit for unit in self._engine.units if unit.gradients.shard is not None]
        for unit in in_turn(units, GRADIENTS):
            assert unit.gradients.shard is not None
            shard = unit.gradients.shard[: unit.valid_size]
            unit.shelf.begin(GRADIENTS, write=self._written)
            yield shard[self._engine.ranks.part(shard.size)] if self._counted else shard
            unit.shelf.end(GRADIENTS, written=self._written)


def _cut(shards: Iterable[Array], limit: float) -> None:
    for shard in shards:
        with np.errstate(over="ignore"):  # nothing lies beyond inf
            bound = shard.dtype.type(limit)
        np.minimum(shard, bound, out=shard)
        np.maximum(shard, -bound, out=shard)
