"""Averages of the weights in the place of the weights, for a while: ``engine.averaged``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fsdpcore.collectives import barrier
from fsdpcore.core.array_module import array_module
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError, CommunicationError, StateError
from fsdpcore.fsdp.optim.average import AVERAGES
from fsdpcore.fsdp.optim.bound import BLOCK_ELEMENTS
from fsdpcore.fsdp.state.entries import optimizer_entries, param_entries
from fsdpcore.fsdp.state.state import optimizer_name
from fsdpcore.fsdp.units.model import ShardedModel


@contextmanager
def averaged(model: ShardedModel, kind: str | None) -> Iterator[None]:
    """Exchange weights and averages for a block; see ``FSDP.averaged``."""
    state = _chosen(model, kind)
    status = model.status
    status.check_idle("averaged()")
    status.check_own("averaged()")
    status.check_whole()
    barrier(model.groups.everyone, label=f"averaged({state!r})")
    received = [part.received for unit in model.units for part in unit.flat_parameters]
    before = [None if each is None else each.copy() for each in received]
    _exchange(model, state)
    status.averaged = True
    try:
        yield
    except BaseException:
        # A failure of the transport must not hide the one that ends the block.
        with suppress(CommunicationError):
            _back(model, state, before)
        raise
    _back(model, state, before)


def _chosen(model: ShardedModel, kind: str | None) -> str:
    """Return the state array of an average."""
    kept = [name for name in AVERAGES if AVERAGES[name] in _kept(model)]
    if not kept:
        raise StateError(
            "this engine keeps no average of its weights; have its optimizer keep one: "
            "fc.optim.Average(fc.optim.AdamW(lr=3e-4), ema=0.999)"
        )
    if kind is None and len(kept) > 1:
        raise ArgumentError(f"the engine keeps {' and '.join(kept)}; say which: averaged('ema')")
    if kind is not None and kind not in kept:
        raise ArgumentError(f"averaged({kind!r}): the engine keeps {' and '.join(kept)}")
    return AVERAGES[kind or kept[0]]


def _kept(model: ShardedModel) -> set[str]:
    rules = () if model.optimizers is None else model.optimizers.groups.rules
    return {name for _, policy in rules for name in policy.state_names}


def _back(model: ShardedModel, state: str, received: Sequence[Array | None]) -> None:
    model.status.averaged = False
    _exchange(model, state, iter(received))


def _exchange(
    model: ShardedModel, state: str, received: Iterator[Array | None] | None = None
) -> None:
    """Have weights and averages change places, each rank in its shards; a collective.

    Args:
        model: of the engine.
        state: the name of the averages.
        received: what all ranks had of the weights, by flat parameter; None for averages.
    """
    model.status.partially_updated = True
    for unit in model.units:
        known = [None if received is None else next(received) for _ in unit.flat_parameters]
        if unit.updater is None:
            continue
        with unit.rewriting(optimizer=True, received=received is not None) as parts:
            for part, values in zip(parts, known, strict=True):
                if part.received is not None and values is not None:
                    part.received[...] = values
            averages = {entry.name: entry.data for entry in optimizer_entries(unit)}
            for entry in param_entries(unit):
                average = averages.get(optimizer_name(state, entry.name))
                if average is not None:
                    _swap(entry.data, average)
    model.status.partially_updated = False


def _swap(weights: Array, average: Array) -> None:
    """Exchange two arrays, but where an average has not begun, which is nan."""
    xp = array_module(weights)
    for start in range(0, weights.size, BLOCK_ELEMENTS):
        one, other = (each[start : start + BLOCK_ELEMENTS] for each in (weights, average))
        begun, kept = ~xp.isnan(other), one.copy()
        xp.copyto(one, other, where=begun)
        xp.copyto(other, kept, where=begun)
