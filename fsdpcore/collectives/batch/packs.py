"""How the calls of a batch share one collective of one flat buffer; used by ``coalesce``.

Calls of one operation, dtype, op and root are packed together; movements whatever their dtypes,
as bytes. Where the input is split over the ranks, the buffer is ordered by receiving rank, and by
call within a rank's part; so is, by sending rank, a result that joins what the ranks send.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.spec import CallSpec, Choice, Layout, Operation
from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.reductions import ReduceOp


class BatchedCall(NamedTuple):
    """One call of a batch.

    Attributes:
        number: its place in the batch, from 0.
        spec: what is called.
        source: its input, flat.
        output: where its result goes; None on ranks that get none.
    """

    number: int
    spec: CallSpec
    source: Array
    output: Output | None


class PackKey(NamedTuple):
    """What calls must have in common to share messages."""

    definition: Operation
    dtype: np.dtype[Any]
    op: ReduceOp | None
    root: int

    @classmethod
    def of(cls, spec: CallSpec) -> PackKey:
        """The key of a call."""
        assert spec.definition is not None
        assert spec.dtype is not None
        if spec.reduction is None:
            return cls(spec.definition, np.dtype(np.uint8), None, spec.root)
        return cls(spec.definition, spec.dtype, spec.reduction.op, spec.root)


@dataclass
class Pack:
    """Calls that travel together."""

    key: PackKey
    calls: list[BatchedCall] = field(default_factory=list)

    def load(self, rank: int, size: int) -> LoadedPack:
        """Copy the inputs into one flat buffer."""
        definition = self.key.definition
        bounds: list[int] = []
        arriving: list[int] = []
        if definition.splits:
            parts = [[self._chunk(call, r) for call in self.calls] for r in range(size)]
            bounds = bounds_of([sum(part.size for part in row) for row in parts])
            data = np.concatenate([part for row in parts for part in row])
            if definition.joins:
                arriving = bounds_of([bounds[rank + 1] - bounds[rank]] * size)
        else:
            data = np.concatenate([self._flat(call.source) for call in self.calls])
            if definition.joins:
                bounds = bounds_of([data.size] * size)
        reduction = self.calls[0].spec.reduction
        return LoadedPack(self, data, Layout(self.key.root, reduction, bounds, arriving))

    def targets(self) -> Iterator[Array]:
        """The memory for every call's result, as elements of the buffer."""
        for call in self.calls:
            if call.output is not None:
                yield self._flat(call.output.flat)

    def _flat(self, array: Array) -> Array:
        return array.view(self.key.dtype)

    def _chunk(self, call: BatchedCall, rank: int) -> Array:
        bounds = call.spec.bounds
        return self._flat(call.source[bounds[rank] : bounds[rank + 1]])


class LoadedPack(NamedTuple):
    """A pack with its inputs in one flat buffer, and what an algorithm is told of that."""

    pack: Pack
    data: Array
    layout: Layout

    def move(self, context: CollectiveContext, choice: Choice) -> None:
        """Run an algorithm of the operation, and fill the outputs."""
        key, data, layout, rank = self.pack.key, self.data, self.layout, context.rank
        definition, out = key.definition, data
        if not definition.gives(rank, layout):
            choice.start(context, definition, layout, data, None)
            return
        if definition.joins:
            out = np.empty((layout.arriving or layout.bounds)[-1], data.dtype)
        elif definition.splits:
            out = np.empty(layout.bounds[rank + 1] - layout.bounds[rank], data.dtype)
        choice.start(context, definition, layout, data, out)
        # What is not joined lies one behind the other: that is like what one rank has sent.
        blocks = out.reshape(context.size if definition.joins else 1, -1)
        at = 0
        for target in self.pack.targets():
            parts = target.reshape(blocks.shape[0], -1)
            np.copyto(parts, blocks[:, at : at + parts.shape[1]])
            at += parts.shape[1]
