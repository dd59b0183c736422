"""The calls of a batch whose arrays are on a GPU: launched together, from array to array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fsdpcore.collectives.batch.packs import Item
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.device_transport import device_transport_of
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.collectives.spec import Choice
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.reductions import Reduction


class DeviceItem(NamedTuple):
    """One call; the parts of ``item.bounds`` are elements."""

    collective: str
    item: Item
    root: int
    reduction: Reduction | None


def carry_out_on_device(
    link: CollectiveContext, group: Backend, items: list[DeviceItem]
) -> dict[int, Array | None]:
    """Enqueue the calls; return the results by the numbers of the calls.

    Those that the transport carries out by itself are launched as one group, the others after it.
    """
    ready = [each._replace(item=_apart(each.item, items, group)) for each in items]
    grouped: list[tuple[DeviceItem, Choice]] = []
    single: list[tuple[DeviceItem, Choice]] = []
    for each in ready:
        reduction = each.reduction
        name = reduction.name if reduction is not None else ""
        flat = each.item.flat
        choice = choose(each.collective, "auto", flat.nbytes, group, flat.dtype, name)
        canonical = state_of(group).own_algorithms[each.collective][choice.name].canonical
        # Canonical ones compute between their messages, which in a group come at its end.
        (single if canonical and reduction is not None else grouped).append((each, choice))
    with device_transport_of(group).device_group():
        for each, choice in grouped:
            _STARTERS[each.collective](link, choice.function, each)
    for each, choice in single:
        _STARTERS[each.collective](link, choice.function, each)
    return {
        each.item.number: None if each.item.output is None else each.item.output.deliver()
        for each in ready
    }


def _apart(item: Item, items: list[DeviceItem], group: Backend) -> Item:
    """Copy an input that any call of the batch writes to: all are read before that."""
    outputs = [each.item.output for each in items if each.item.output is not None]
    if any(group.moves.overlap(item.flat, output.flat) for output in outputs):
        return item._replace(flat=item.flat.copy())
    return item


def _all_reduce(link: CollectiveContext, function: Callable[..., Any], call: DeviceItem) -> None:
    output = _output(call)
    output.flat[...] = call.item.flat
    function(link, output.flat, call.reduction)


def _reduce(link: CollectiveContext, function: Callable[..., Any], call: DeviceItem) -> None:
    function(link, call.item.flat, _target(call), call.root, call.reduction)


def _reduce_scatter(
    link: CollectiveContext, function: Callable[..., Any], call: DeviceItem
) -> None:
    function(link, call.item.flat, _output(call).flat, call.item.bounds, call.reduction)


def _broadcast(link: CollectiveContext, function: Callable[..., Any], call: DeviceItem) -> None:
    output = _output(call)
    if link.rank == call.root:
        output.flat[...] = call.item.flat
    function(link, output.flat, call.root)


def _all_gather(link: CollectiveContext, function: Callable[..., Any], call: DeviceItem) -> None:
    function(link, call.item.flat, _output(call).flat, _even(link, call.item.flat.size))


def _gather(link: CollectiveContext, function: Callable[..., Any], call: DeviceItem) -> None:
    flat = call.item.flat
    function(link, flat, _target(call), _even(link, flat.size), call.root)


def _all_to_all(link: CollectiveContext, function: Callable[..., Any], call: DeviceItem) -> None:
    target = _output(call).flat
    arriving = _even(link, target.size // link.size)
    function(link, call.item.flat, call.item.bounds, target, arriving)


def _output(call: DeviceItem) -> Output:
    assert call.item.output is not None
    return call.item.output


def _target(call: DeviceItem) -> Array | None:
    return None if call.item.output is None else call.item.output.flat


def _even(link: CollectiveContext, size: int) -> list[int]:
    return bounds_of([size] * link.size)


_STARTERS: dict[str, Callable[[CollectiveContext, Callable[..., Any], DeviceItem], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "all_to_all": _all_to_all,
}
