"""The calls of a batch whose arrays are on a GPU: launched together, from array to array."""

from __future__ import annotations

from fsdpcore.collectives.batch.packs import BatchedCall
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.device_transport import device_transport_of
from fsdpcore.collectives.spec import Choice
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array


def carry_out_on_device(
    context: CollectiveContext, group: Backend, calls: list[BatchedCall]
) -> dict[int, Array | None]:
    """Enqueue the calls; return the results by the numbers of the calls.

    Those that the transport carries out by itself are launched as one group, the others after it.
    """
    grouped: list[tuple[BatchedCall, Choice]] = []
    single: list[tuple[BatchedCall, Choice]] = []
    for call in [_separate(call, calls, group) for call in calls]:
        spec = call.spec
        choice = spec.choose(spec.size)
        assert choice.algorithm is not None
        # Canonical ones compute between their messages, which in a group come at its end.
        alone = choice.algorithm.canonical and spec.reduction is not None
        (single if alone else grouped).append((call, choice))
    with device_transport_of(group).device_group():
        for call, choice in grouped:
            _start(context, call, choice)
    for call, choice in single:
        _start(context, call, choice)
    return {call.number: None if call.output is None else call.output.deliver() for call in calls}


def _start(context: CollectiveContext, call: BatchedCall, choice: Choice) -> None:
    definition, out = call.spec.definition, call.output
    assert definition is not None
    target = None if out is None else out.flat
    choice.start(context, definition, call.spec.layout, call.source, target)


def _separate(call: BatchedCall, calls: list[BatchedCall], group: Backend) -> BatchedCall:
    """Copy an input that any call of the batch writes to: all are read before that."""
    outputs = [each.output for each in calls if each.output is not None]
    if any(group.moves.overlap(call.source, output.flat) for output in outputs):
        return call._replace(source=call.source.copy())
    return call
