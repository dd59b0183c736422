"""Whole parameters during an update, each on one rank: its owner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives import all_to_all_v
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.optim.pieces import Give, Make, PieceSpec, Ranks, Reduce, ShardPiece
from fsdpcore.fsdp.units.buffer_pool import BufferPool


@dataclass(frozen=True)
class Dealing:
    """Which rank owns which parameters, and how many elements of them each rank holds.

    Attributes:
        sizes: by rank and parameter.
        owners: by parameter.
    """

    sizes: tuple[tuple[int, ...], ...]
    owners: tuple[int, ...]

    @classmethod
    def of(cls, layout: FlatLayout, specs: Sequence[PieceSpec], loads: list[int]) -> Dealing:
        """Deal parameters out: the costliest first, each to the rank that has least to do.

        Of a matrix of m rows and n columns, m <= n, ``m * m * n`` is what its products cost.

        Args:
            layout: of their unit.
            specs: of any rank; all have the same names in the same order.
            loads: what each rank has to do for other units; what comes here is added.
        """
        held = []
        for rank in range(layout.world_size):
            sizes = {piece.name: piece.size for piece in layout.pieces(rank)}
            held.append(tuple(sizes.get(spec.name, 0) for spec in specs))
        costs = [math.prod(spec.shape) * min(spec.shape, default=1) for spec in specs]
        owners = [0] * len(specs)
        for number in sorted(range(len(specs)), key=lambda number: -costs[number]):
            owners[number] = loads.index(min(loads))
            loads[owners[number]] += costs[number]
        return cls(tuple(held), tuple(owners))

    def given(self, rank: int) -> list[int]:
        """Elements that a rank gives to each owner."""
        counts = [0] * len(self.sizes)
        for owner, size in zip(self.owners, self.sizes[rank], strict=True):
            counts[owner] += size
        return counts

    def owned(self, rank: int) -> list[int]:
        """Elements that a rank gets of each rank, as an owner."""
        return [
            sum(size for owner, size in zip(self.owners, sizes, strict=True) if owner == rank)
            for sizes in self.sizes
        ]

    def exchanges(self, rank: int) -> list[tuple[int, int]]:
        """Return what a rank passes to each exchange, there and back, and sends to others of it."""
        if len(self.sizes) == 1:
            return []
        ways = (self.given(rank), self.owned(rank))
        return [(sum(counts), sum(counts) - counts[rank]) for counts in ways]

    def room(self, rank: int) -> int:
        """Elements of the buffers that a rank needs meanwhile."""
        exchanged = sum(size for size, _ in self.exchanges(rank))
        return exchanged or sum(self.sizes[rank])


class _Sent:
    """What a rank has given to the owners of some parameters, and has of those that it owns.

    Args:
        pieces, make, take: as of ``Ranks.by_owners``.
        own: what it gives, owner by owner, and gets back.
        parts: the place of each piece in that.
    """

    def __init__(
        self,
        pieces: Sequence[ShardPiece],
        make: Make,
        take: Give,
        own: Array,
        parts: Mapping[int, Array],
    ) -> None:
        self.pieces, self.make, self.take, self.own, self.parts = pieces, make, take, own, parts
        self.held: Array | None = None


class ShardRanks(Ranks):
    """The ranks that share a unit's parameters; each parameter goes to its owner and back.

    In three parts, so that several units can be at each of them together: ``by_owners`` sends what
    pieces give, ``make`` has the owners work, ``give_back`` sends what came of it.

    Args:
        group: of them.
        dealing: of the parameters that are passed to ``by_owners``.
        pool: of the buffers.
        reduce: sums.
        label: of the collectives.
    """

    def __init__(
        self, group: Backend, dealing: Dealing, pool: BufferPool, reduce: Reduce, label: str
    ) -> None:
        self._group = group
        self._dealing = dealing
        self._pool = pool
        self._reduce = reduce
        self._label = label
        self._sent: _Sent | None = None

    def __call__(self, array: NDArray[np.float64]) -> None:
        self._reduce(array)

    def by_owners(
        self, pieces: Sequence[ShardPiece], *, give: Give, make: Make, take: Give
    ) -> None:
        """See ``Ranks.by_owners``; ``make`` and ``take`` are called later."""
        own = self._pool.take(sum(piece.size for piece in pieces), pieces[0].param.dtype)
        parts: dict[int, Array] = {}
        self._sent = sent = _Sent(pieces, make, take, own, parts)
        start = 0
        for number in sorted(range(len(pieces)), key=self._dealing.owners.__getitem__):
            stop = start + pieces[number].size
            parts[number], start = own[start:stop], stop
            give(pieces[number], parts[number])
        if self._group.world_size > 1:
            given, owned = self._counts()
            sent.held = self._pool.take(sum(owned), own.dtype)
            self._exchange(own, sent.held, given, owned)

    def make(self) -> None:
        """Have something made of the parameters that this rank owns."""
        sent = self._sent
        if sent is None:
            return
        if sent.held is None:
            for number, part in sent.parts.items():
                sent.make(part.reshape(sent.pieces[number].shape))
            return
        starts = bounds_of(self._counts()[1])
        for number, piece in enumerate(sent.pieces):
            if self._dealing.owners[number] == self._group.rank:
                self._make_whole(sent.held, starts, number, piece, sent.make)

    def _make_whole(
        self, held: Array, starts: list[int], number: int, piece: ShardPiece, make: Make
    ) -> None:
        """Put a parameter together from the parts of all ranks, and take it apart again.

        ``starts`` says where the next part of each rank begins, and is moved on.
        """
        whole = self._group.device.empty(math.prod(piece.shape), held.dtype)
        places, stop = [], 0
        for rank, sizes in enumerate(self._dealing.sizes):
            begin, size = starts[rank], sizes[number]
            places.append((slice(begin, begin + size), slice(stop, stop + size)))
            starts[rank] += size
            stop += size
        for there, here in places:
            whole[here] = held[there]
        make(whole.reshape(piece.shape))
        for there, here in places:
            held[there] = whole[here]

    def give_back(self) -> None:
        """Send what was made to the ranks that hold the parameters, who take it."""
        sent = self._sent
        if sent is None:
            return
        if sent.held is not None:
            given, owned = self._counts()
            self._exchange(sent.held, sent.own, owned, given)
        for number, part in sent.parts.items():
            sent.take(sent.pieces[number], part)
        self.drop()

    def drop(self) -> None:
        """Forget what was sent."""
        sent, self._sent = self._sent, None
        if sent is not None:
            self._pool.give(sent.own)
            if sent.held is not None:
                self._pool.give(sent.held)

    @property
    def begun(self) -> bool:
        """Whether something was sent that was not given back."""
        return self._sent is not None

    def _counts(self) -> tuple[list[int], list[int]]:
        rank = self._group.rank
        return self._dealing.given(rank), self._dealing.owned(rank)

    def _exchange(self, source: Array, out: Array, sent: list[int], received: list[int]) -> None:
        all_to_all_v(source, self._group, sent, recv_counts=received, out=out, label=self._label)


class _Owning(Protocol):
    @property
    def has_owners(self) -> bool: ...


_Unit = TypeVar("_Unit", bound=_Owning)


def together(units: Iterable[_Unit], ranks: int) -> list[list[_Unit]]:
    """Group the units whose parameters have owners: those of a group are with them together.

    As many as there are ranks, so that each has something to do even where a unit has a single
    matrix. Their buffers take no more than one unit does that is gathered, with its gradients.
    """
    owning = [unit for unit in units if unit.has_owners]
    return [owning[start : start + ranks] for start in range(0, len(owning), ranks)]
