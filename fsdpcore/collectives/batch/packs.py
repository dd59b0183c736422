"""How the calls of a batch share one buffer, for each collective; used by ``coalesce``.

A carrier copies the inputs of a pack's calls into one flat buffer when it is made (``load``), and
``move`` runs an algorithm on it and copies the results out. Where each rank gets a part of its own
(reduce_scatter, all_to_all), the buffer is ordered by rank, and by call within a rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.output import Output
from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.reductions import Reduction


class Key(NamedTuple):
    """What calls must have in common to share messages; movements travel as bytes."""

    collective: str
    dtype: np.dtype[Any]
    op: str
    root: int


class Item(NamedTuple):
    """One call of a pack.

    Attributes:
        number: its place in the batch, from 0.
        flat: its input, flat, in the pack's dtype.
        output: where its result goes; None on ranks that get none.
        bounds: where the ranks' parts of ``flat`` begin, and the end, if it is split.
    """

    number: int
    flat: Array
    output: Output | None
    bounds: list[int]


@dataclass
class Pack:
    """Calls that travel together."""

    key: Key
    reduction: Reduction | None
    items: list[Item] = field(default_factory=list)


class Carrier:
    """Base: one collective of a whole pack.

    Attributes:
        elements: the size n by which an algorithm is chosen, in elements of the pack's dtype.
    """

    def __init__(self, link: CollectiveContext, pack: Pack) -> None:
        self.link = link
        self.pack = pack
        self.data = self.load()
        self.elements = self.data.size

    def load(self) -> Array:
        """Return the inputs as one flat array."""
        return np.concatenate([item.flat for item in self.pack.items])

    def move(self, function: Callable[..., Any]) -> None:
        """Run ``function``, an algorithm of the collective, and fill the outputs."""
        raise NotImplementedError

    def targets(self) -> Iterator[tuple[Item, Array]]:
        """Every call with the memory for its result, in the pack's dtype."""
        for item in self.pack.items:
            if item.output is not None:
                flat = item.output.flat
                yield item, flat if self.pack.reduction is not None else flat.view(np.uint8)

    def unload(self, data: Array) -> None:
        """Copy results that lie one behind the other to the outputs."""
        at = 0
        for _, target in self.targets():
            np.copyto(target, data[at : at + target.size])
            at += target.size

    def unload_joined(self, data: Array) -> None:
        """Copy results of which every rank sent a part: one block per rank in ``data``."""
        blocks = data.reshape(self.link.size, -1)
        at = 0
        for _, target in self.targets():
            parts = target.reshape(self.link.size, -1)
            np.copyto(parts, blocks[:, at : at + parts.shape[1]])
            at += parts.shape[1]

    def by_rank(self) -> tuple[Array, list[int]]:
        """Return the inputs ordered by receiving rank, and where the ranks' parts begin."""
        pieces, sizes = [], []
        for rank in range(self.link.size):
            parts = [i.flat[i.bounds[rank] : i.bounds[rank + 1]] for i in self.pack.items]
            pieces += parts
            sizes.append(sum(part.size for part in parts))
        return np.concatenate(pieces), bounds_of(sizes)


class _AllReduce(Carrier):
    def move(self, function: Callable[..., Any]) -> None:
        function(self.link, self.data, self.pack.reduction)
        self.unload(self.data)


class _Reduce(Carrier):
    def move(self, function: Callable[..., Any]) -> None:
        root = self.pack.key.root
        out = self.data if self.link.rank == root else None
        function(self.link, self.data, out, root, self.pack.reduction)
        if out is not None:
            self.unload(out)


class _ReduceScatter(Carrier):
    def load(self) -> Array:
        data, self.bounds = self.by_rank()
        return data

    def move(self, function: Callable[..., Any]) -> None:
        me = self.link.rank
        own = np.empty(self.bounds[me + 1] - self.bounds[me], self.data.dtype)
        function(self.link, self.data, own, self.bounds, self.pack.reduction)
        self.unload(own)


class _Broadcast(Carrier):
    def move(self, function: Callable[..., Any]) -> None:
        function(self.link, self.data, self.pack.key.root)
        self.unload(self.data)


class _AllGather(Carrier):
    def __init__(self, link: CollectiveContext, pack: Pack) -> None:
        super().__init__(link, pack)
        self.elements = self.data.size * link.size

    def move(self, function: Callable[..., Any]) -> None:
        out = np.empty(self.elements, self.data.dtype)
        function(self.link, self.data, out, bounds_of([self.data.size] * self.link.size))
        self.unload_joined(out)


class _Gather(_AllGather):
    def move(self, function: Callable[..., Any]) -> None:
        root = self.pack.key.root
        out = np.empty(self.elements, self.data.dtype) if self.link.rank == root else None
        function(self.link, self.data, out, bounds_of([self.data.size] * self.link.size), root)
        if out is not None:
            self.unload_joined(out)


class _AllToAll(Carrier):
    def load(self) -> Array:
        data, self.bounds = self.by_rank()
        return data

    def move(self, function: Callable[..., Any]) -> None:
        me, p = self.link.rank, self.link.size
        mine = self.bounds[me + 1] - self.bounds[me]
        out = np.empty(p * mine, self.data.dtype)
        function(self.link, self.data, self.bounds, out, bounds_of([mine] * p))
        self.unload_joined(out)


CARRIERS: dict[str, Callable[[CollectiveContext, Pack], Carrier]] = {
    "all_reduce": _AllReduce,
    "reduce": _Reduce,
    "reduce_scatter": _ReduceScatter,
    "broadcast": _Broadcast,
    "all_gather": _AllGather,
    "gather": _Gather,
    "all_to_all": _AllToAll,
}
