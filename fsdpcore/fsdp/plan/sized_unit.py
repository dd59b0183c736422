"""A unit that has sizes in place of arrays: it writes down what it would move and hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.offload.arrays import ArrayKind
from fsdpcore.fsdp.plan.sizes import UnitBytes
from fsdpcore.fsdp.plan.step_log import CollectiveKind, StepLog
from fsdpcore.fsdp.sharding.placement import StorageKind, all_gather_sends
from fsdpcore.fsdp.sharding.travel import Travel
from fsdpcore.fsdp.sharding.virtual_ranks import Leaves
from fsdpcore.fsdp.units.sharded_unit import ParamState


class _InMemory:
    """Nothing has to be loaded: a plan does not count what files are read."""

    depth = 0

    def ahead(self, kinds: Sequence[ArrayKind]) -> None:
        """Nothing to do."""


class _Collective(NamedTuple):
    """One that moves a flat buffer; sizes in bytes."""

    kind: CollectiveKind
    ranks: int
    nbytes: int
    padding: int
    sent: int


class SizedGradients:
    """The gradients of one unit.

    Args:
        sizes: of the unit.
        leaves: whose gradients are summed.
        reductions: the collectives that sum them.
        log: of the step.

    Attributes:
        sends: bytes that this rank sends in a reduction.
    """

    def __init__(
        self, sizes: UnitBytes, leaves: Leaves, reductions: Sequence[_Collective], log: StepLog
    ) -> None:
        self._name = sizes.name
        self._nbytes = sizes.gradients
        self._reductions = reductions
        self._room = leaves.room(sizes.trained) * sizes.dtypes.grad.itemsize
        self._leaves = leaves
        self._ended = 0  # virtual ranks that are complete
        self._sums = 0  # buffers that theirs are added up in
        self._log = log
        self.sends = sum(each.sent for each in reductions)
        self._kept = False
        self._tied: dict[str, int] = {}  # bytes that uses in other units have added, by name
        self._reducing: list[int] | None = None  # the numbers of the collectives under way
        self._reduced = 0  # bytes of the buffers that they read

    @property
    def unclaimed(self) -> bool:
        """Whether there are gradients that no reduction has taken along: of ties, or of leaves."""
        of_leaves = self._leaves.virtual and (self._kept or self._sums > 0)
        return of_leaves or bool(self._tied)

    def begin(self) -> None:
        """Take a buffer to be written."""
        self._log.take(gradients=self._nbytes)

    def add_tied(self, name: str, nbytes: int) -> None:
        """Add what a use of a parameter elsewhere has given, whose buffer it takes over."""
        if name in self._tied:  # it is added to what waits here already
            self._log.take(gradients=-nbytes)
        elif nbytes:
            self._tied[name] = nbytes

    def keep(self) -> None:
        """Add what was written to what is kept, or let it be that."""
        if self._kept or self._idle:
            self._log.take(gradients=-self._nbytes)
        self._kept = not self._idle and self._nbytes > 0

    @property
    def _idle(self) -> bool:
        """Whether this rank goes through passes for the sake of others, which have more leaves."""
        return self._leaves.virtual and self._ended == len(self._leaves.mine)

    def end_leaf(self) -> None:
        """Add up the gradients of a virtual rank with those of the others, along the tree."""
        if self._idle:
            return
        self._ended += 1
        if self._kept:
            first, before = self._leaves.mine.start, self._sums
            self._sums = len(self._leaves.tree.cover(range(first, first + self._ended)))
            self._log.take(gradients=(self._sums - before - 1) * self._nbytes)
            self._kept = False
        self._drop_tied()

    def _drop_tied(self) -> None:
        self._log.take(gradients=-sum(self._tied.values()))
        self._tied.clear()

    def reduce(self, *, background: bool) -> None:
        """Sum what was written, what is kept and what ties have left."""
        if self._leaves.virtual:
            self.keep()
            self.end_leaf()
        else:
            if self._kept:
                self.keep()
                self._kept = False
            self._drop_tied()
        self._reduced = self._nbytes * (self._sums if self._leaves.virtual else 1) + self._room
        self._log.take(gradients=self._room)
        self._ended = self._sums = 0
        self._reducing = [self._issue(each, background=background) for each in self._reductions]
        if not background:
            self.wait()

    def wait(self) -> None:
        """End a reduction that was begun, and free its buffer."""
        if self._reducing is None:
            return
        for collective in self._reducing:
            self._log.wait(collective)
        self._reducing = None
        self._log.take(gradients=-self._reduced)

    def _issue(self, each: _Collective, *, background: bool) -> int:
        return self._log.issue(
            each.kind,
            self._name,
            each.ranks,
            each.nbytes,
            each.padding,
            sent=each.sent,
            background=background,
        )


class SizedUnit:
    """A unit in a planned step, which is such as every step but the first one is.

    Args:
        sizes: of its flat buffers.
        leaves: who keeps what, and computes what.
        storage: where its parameters are.
        log: of the step.
        travel: what is quantised on its way; None for nothing.

    Attributes:
        owners: the units that its tied parameters belong to, by a name of the tie.
        state: where its parameters are.
    """

    store = _InMemory()

    def __init__(
        self,
        sizes: UnitBytes,
        leaves: Leaves,
        storage: StorageKind,
        log: StepLog,
        travel: Travel | None = None,
    ) -> None:
        self.name = sizes.name
        self.trainable = sizes.trained.size > 0
        self.owners: Mapping[str, SizedUnit] = {}
        self.state = ParamState.SHARDED
        placement = leaves.placement
        reductions = _reductions(sizes, leaves, travel) if self.trainable else ()
        self.gradients = SizedGradients(sizes, leaves, reductions, log)
        self._sizes = sizes
        self._placement = placement
        self._log = log
        self._storage = storage
        # An update has made them stale where all are kept; what is frozen then never is.
        self._fresh = not storage.moves
        layouts = (sizes.trained,) if storage.keeps else sizes.parts
        self._from_shards = _gatherings(layouts, placement.shards)
        if travel is not None and travel.gathers and self.trainable:
            quantised = _quantised_gathering(sizes, travel, leaves.rank)
            self._from_shards = (quantised, *self._from_shards[1:])
        # What has been gathered stays, packed, until the update that is the end of a plan.
        self._keeps = travel is not None and travel.keeps and self.trainable
        self._from_parts = _gatherings(layouts, placement.regather)
        self._has_part = False  # a larger part than the shard
        self._gathers: list[int] = []
        self._tied: list[tuple[SizedUnit, str, int]] = []

    def tie(self, units: Sequence[SizedUnit]) -> None:
        """Find the units that own what is tied to it."""
        ties = self._sizes.ties
        self._tied = [(units[owner], name, size) for owner, name, size in ties]
        self.owners = {f"{owner.name}.{name}": owner for owner, name, _ in self._tied}

    # Parameters.

    @property
    def _gatherings(self) -> Sequence[_Collective]:
        """The collectives that gather it now."""
        if self._fresh:
            return ()
        return self._from_parts if self._has_part else self._from_shards

    @property
    def has_pending_prefetch(self) -> bool:
        """Whether a gathering was begun that nobody has waited for."""
        return self.state is ParamState.GATHERING

    @property
    def fetched(self) -> int:
        """Whether anything moves in a gathering."""
        return int(self._storage.takes_buffer or not self._fresh)

    @property
    def stale(self) -> int:
        """How many flat buffers come from other ranks."""
        return len(self._gatherings)

    @property
    def sends(self) -> int:
        """Bytes that this rank sends when it is gathered."""
        return sum(each.sent for each in self._gatherings)

    @property
    def gathered_bytes(self) -> int:
        """Memory that a gathering takes."""
        return self._sizes.gathered if self._storage.takes_buffer else 0

    def unshard(self, *, async_op: bool = False, what: str = "unshard") -> None:
        """Gather the parameters."""
        if self.state is ParamState.SHARDED:
            self._log.take(parameters=self.gathered_bytes)
            self._gathers = [
                self._log.issue(
                    "all_gather",
                    self.name,
                    each.ranks,
                    each.nbytes,
                    each.padding,
                    sent=each.sent,
                    background=async_op,
                )
                for each in self._gatherings
            ]
            self._fresh = self._fresh or self._storage.keeps
            if self._keeps:
                self._from_shards, self._keeps = self._from_shards[1:], False
            self.state = ParamState.GATHERING
        if not async_op:
            for each in self._gathers:
                self._log.wait(each)
            self._gathers = []
            self.state = ParamState.UNSHARDED

    def reshard(self, *, again: bool = False) -> None:
        """End the use of the gathered parameters, ``again`` if a backward pass is to come."""
        gathered = self.state is not ParamState.SHARDED
        self.state = ParamState.SHARDED
        part = self._sizes.gathered // self._placement.regather
        keeps_part = self._storage.takes_buffer and self._placement.keeps_part
        if again and gathered and not self._has_part and keeps_part:
            self._has_part = True
            self._log.take(parameters=part)  # it is copied from what is freed then
        elif self._has_part and not again:
            self._has_part = False
            self._log.take(parameters=-part)
        if gathered:
            self._log.take(parameters=-self.gathered_bytes)

    # Gradients.

    def begin_gradients(self) -> None:
        """Take buffers for its gradients, and for those of tied parameters, which lie apart."""
        self.gradients.begin()
        self._log.take(gradients=sum(nbytes for _, _, nbytes in self._tied_gradients()))

    def keep_gradients(self) -> None:
        """Add what was written to what is reduced with the next ones."""
        self._hand_over_tied()
        self.gradients.keep()

    def reduce_gradients(self, *, divisor: float | None = None, async_op: bool = False) -> None:
        """Sum the gradients of all ranks."""
        self._hand_over_tied()
        self.gradients.reduce(background=async_op)

    def _hand_over_tied(self) -> None:
        for owner, name, nbytes in self._tied_gradients():
            owner.gradients.add_tied(name, nbytes)

    def _tied_gradients(self) -> list[tuple[SizedUnit, str, int]]:
        """Owner, name there, and bytes of the gradient of each tied parameter."""
        return [
            (owner, name, size * owner._sizes.dtypes.grad.itemsize)
            for owner, name, size in self._tied
        ]


def _quantised_gathering(sizes: UnitBytes, travel: Travel, rank: int) -> _Collective:
    """The collective that gathers the trained parameters."""
    packing, ranks = travel.gathering(sizes.trained, sizes.exact), travel.placement.shards
    sent = packing.gather_sends(rank % ranks)
    return _Collective("all_gather", ranks, sum(packing.counts), 0, sent)


def _reductions(sizes: UnitBytes, leaves: Leaves, travel: Travel | None) -> tuple[_Collective, ...]:
    """The collectives that sum gradients."""
    if travel is not None and travel.reduces:
        found = travel.reductions(sizes.trained, sizes.exact, leaves.rank)
    else:
        item = sizes.dtypes.grad.itemsize
        found = [each.in_bytes(item) for each in leaves.reductions(sizes.trained)]
    return tuple(_Collective(*each) for each in found)


def _gatherings(layouts: Iterable[FlatLayout], ranks: int) -> tuple[_Collective, ...]:
    """The collectives by which so many ranks gather flat buffers."""
    return tuple(
        _Collective(
            "all_gather",
            ranks,
            layout.padded_size * layout.dtype.itemsize,
            layout.padding * layout.dtype.itemsize,
            all_gather_sends(layout, ranks),
        )
        for layout in layouts
        if layout.size and ranks > 1
    )
