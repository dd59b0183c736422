"""The end of a step: check, clip and apply the gradients of all units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import NonFiniteGradientError
from fsdpcore.fsdp.gpu import inplace
from fsdpcore.fsdp.offload.offload import GRADIENTS, UPDATED, in_turn
from fsdpcore.fsdp.sharding.tensor_group import spans
from fsdpcore.fsdp.step.agreement import AGREED_BYTES, UpdateArguments, compare_updates
from fsdpcore.fsdp.step.norm import NormPart, all_finite, joined, local_part

if TYPE_CHECKING:
    from fsdpcore.fsdp.engine import FSDP
    from fsdpcore.fsdp.units.unit import Unit

    _Ranges = Callable[[FSDP, Unit], list[slice]]


def apply_update(
    engine: FSDP,
    divisor: float | None,
    clip: float | None,
    norm_type: float,
    clip_value: float | None,
    lr: float | None,
    *,
    skip: bool,
) -> tuple[float | None, bool]:
    """Have all gradients reduced, agree that they are finite, clip and apply them.

    The arguments are those of ``Step.update``, and the divisor of the step.

    Returns:
        The global norm before clipping, if it is clipped, and whether the update was skipped.

    Raises:
        NonFiniteGradientError: gradients are not finite, and that is no reason to skip.
        MismatchError: see ``compare_updates``.
    """
    engine.executor.finish_reductions(divisor)
    numbers = (lr, clip, norm_type, clip_value, divisor)
    wanted = UpdateArguments.of(*numbers, skip, engine.steps, engine.loss_scale)
    norm, where = _judge(engine, wanted, None if clip is None else norm_type)
    finite = not where and (norm is None or math.isfinite(norm))
    if not finite and not skip and engine.scaler.policy is None:
        raise _not_finite(where, norm)
    if finite:
        factor = 1.0 / engine.loss_scale
        if clip is not None and norm is not None and norm > clip:
            factor *= clip / norm
        if clip_value is not None:
            _cut(_Shards(engine, _all, written=True), clip_value * engine.loss_scale)
        engine.partially_updated = True
        for unit in in_turn(engine.units, UPDATED, GRADIENTS):
            unit.update(step=engine.steps + 1, lr=lr, grad_scale=factor)
        engine.partially_updated = False
        engine.steps += 1
    engine.scaler.updated(skipped=not finite)
    engine.executor.updated()
    return norm, not finite


def _judge(
    engine: FSDP, wanted: UpdateArguments, p: float | None
) -> tuple[float | None, list[int]]:
    """Return the global Lp norm, unless p is None, and the ranks whose shards are not finite."""
    # What several ranks hold alike is read by one of them, and counted once.
    if p is None:
        part, finite = NormPart(1.0, 0.0), all_finite(_Shards(engine, _held_by_one))
    else:
        part = local_part(_Shards(engine, _counted), p)
        finite = math.isfinite(part.largest)
        if not engine.groups.leads:  # what is no box was counted by another, but is it the same?
            finite = finite and all_finite(_Shards(engine, _not_counted))
    engine.stats.bytes_sent += AGREED_BYTES * (engine.everyone.world_size - 1)
    with engine.executor.waiting():
        told = compare_updates(
            engine.everyone,
            wanted,
            engine.executor.events,
            [unit.name for unit in engine.units],
            (*part, float(finite)),
            algorithm=engine.host_algorithm,
        )
    norm = None
    if p is not None:
        parts = [NormPart(*row) for row in told[:, :2].tolist()]
        single = all(unit.dtypes.grad.itemsize <= 4 for unit in engine.units)
        norm = joined(parts, p, single=single) / engine.loss_scale
    return norm, [engine.everyone.ranks[rank] for rank in np.flatnonzero(told[:, 2] == 0)]


def _not_finite(where: list[int], norm: float | None) -> NonFiniteGradientError:
    what = f"gradients are inf or nan (in the shards of ranks {', '.join(map(str, where))})"
    if not where:
        what = f"the gradients' global norm is {norm}"
    return NonFiniteGradientError(
        f"{what}; no parameter was changed. Leave the step without update, lower the learning "
        "rate, or pass update(skip_nonfinite=True); float16 needs Precision(loss_scale=LossScale())"
    )


class _Shards:
    """Shards of reduced gradients, each of them in memory while it is its turn.

    Args:
        engine: whose.
        ranges: which parts of a unit's shard.
        written: they are changed.
    """

    def __init__(self, engine: FSDP, ranges: _Ranges, *, written: bool = False) -> None:
        self._engine = engine
        self._ranges = ranges
        self._written = written

    def __iter__(self) -> Iterator[Array]:
        units = [unit for unit in self._engine.units if unit.gradients.shard is not None]
        for unit in in_turn(units, GRADIENTS):
            assert unit.gradients.shard is not None
            shard = unit.gradients.shard[: unit.valid_size]
            ranges = self._ranges(self._engine, unit)
            unit.store.begin(GRADIENTS, write=self._written)
            try:
                for each in ranges:
                    yield shard[each]
            finally:
                unit.store.end(GRADIENTS, written=self._written)


def _all(engine: FSDP, unit: Unit) -> list[slice]:
    return [slice(None)]


def _held_by_one(engine: FSDP, unit: Unit) -> list[slice]:
    """What this rank reads of a shard that all replicas have."""
    return [engine.groups.part(unit.valid_size)]


def _counted(engine: FSDP, unit: Unit) -> list[slice]:
    """Of that, what no other rank of ``tensor`` counts."""
    here = _held_by_one(engine, unit)[0]
    return [here] if engine.groups.leads else _within(here, spans(unit, boxed=True))


def _not_counted(engine: FSDP, unit: Unit) -> list[slice]:
    return _within(_held_by_one(engine, unit)[0], spans(unit, boxed=False))


def _within(outer: slice, parts: Iterable[slice]) -> list[slice]:
    cut = [slice(max(outer.start, each.start), min(outer.stop, each.stop)) for each in parts]
    return [each for each in cut if each.start < each.stop]


def _cut(shards: Iterable[Array], limit: float) -> None:
    for shard in shards:
        if not on_host(shard):
            inplace.cut(shard, limit)
            continue
        with np.errstate(over="ignore"):  # nothing lies beyond inf
            bound = shard.dtype.type(limit)
        np.minimum(shard, bound, out=shard)
        np.maximum(shard, -bound, out=shard)
