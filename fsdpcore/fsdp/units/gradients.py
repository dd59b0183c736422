"""The gradients of one unit on one rank: written, added up, reduced to what this rank keeps.

That is its shard, or all of them; the placement says which.

::

    NONE --begin--> LOCAL --reduce--> REDUCING --wait--> REDUCED --drop--> NONE
                    LOCAL --keep----> LOCAL                added up locally, to be reduced later

Where an engine has virtual ranks, what is kept are the gradients of one of them. ``end_leaf`` puts
them to those of the others on this rank, in the order of the tree.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fsdpcore.collectives import all_gather_v, all_reduce, reduce_scatter
from fsdpcore.collectives.on_device import in_background
from fsdpcore.comm.backend import Backend
from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_positive
from fsdpcore.core.device import HOST
from fsdpcore.core.errors import StateError
from fsdpcore.core.reductions import BLOCK
from fsdpcore.core.work import Work
from fsdpcore.fsdp.gpu import inplace
from fsdpcore.fsdp.offload.arrays import GRADIENTS, ArrayKind
from fsdpcore.fsdp.offload.offload_store import OffloadStore
from fsdpcore.fsdp.units.binding import Binding
from fsdpcore.fsdp.units.leaf_sums import LeafSums, exchange_sums
from fsdpcore.fsdp.units.precision import Dtypes
from fsdpcore.fsdp.units.views import Gradients, Places
from fsdpcore.fsdp.units.wire import QuantisedReduction


class GradState(enum.Enum):
    """Where a unit's gradients are."""

    NONE = "none"
    LOCAL = "local"
    REDUCING = "being reduced"
    REDUCED = "reduced"


@dataclass
class _Reducing:
    """A reduction that was started.

    Attributes:
        work: None where it has ended.
        flats: full gradients, which it reads and may overwrite, and room for those of others.
        own: what this rank keeps of the sum.
        divisor: of the sum.
        reduced: what is kept in the end, if that is all there is to do; None if ``own`` is to be
            divided and added.
    """

    work: Work | None
    flats: list[Array]
    own: Array
    divisor: float | None
    reduced: Array | None = None


class UnitGradients:
    """See the module's docstring; ``Unit`` has the verbs that users call.

    Args:
        places: where the parameters that have gradients lie.
        binding: of the engine.
        dtypes: of the unit.
        store: where the reduced gradients are, once they are needed.

    Attributes:
        sends: bytes that this rank sends in a reduction, at the least that is possible.
        quantised: how they are summed, if not as they are.
        watch: called with the full gradients of this rank before they are reduced, if it is set.
    """

    def __init__(
        self,
        places: Places,
        binding: Binding,
        dtypes: Dtypes,
        store: OffloadStore,
    ) -> None:
        groups = binding.groups
        self._places = places
        self._layout = places.layout
        self._groups = groups
        self._placement = groups.placement
        shard = slice(*places.layout.shard_bounds(groups.shards.rank))
        whole = groups.placement.whole_gradients
        reductions = binding.leaves.reductions(places.layout)
        self.sends = sum(each.sent for each in reductions) * dtypes.grad.itemsize
        self.quantised: QuantisedReduction | None = None
        if binding.wire is not None and binding.wire.travel.reduces:
            self.quantised = QuantisedReduction(places, binding.wire, groups.whole.rank)
            self.sends = self.quantised.sends
        # Of the full gradients, what is kept; and of that, the shard.
        self._range = slice(0, places.layout.padded_size) if whole else shard
        self._kept_size = self._range.stop - self._range.start
        self._shard = shard if whole else slice(None)
        self.watch: Callable[[Places, Array], None] | None = None
        self._algorithm = binding.algorithm
        self._pool = binding.pool
        self._dtypes = dtypes
        self._store = store
        self._reduced: Array | None = None  # what this rank keeps, while there is any
        self._buffer: Array | None = None  # what ``_reduced`` is, whenever it is there
        self._own: Array | None = None  # the shard of it
        self._open: Gradients | None = None
        self._kept: Array | None = None
        self._reducing: _Reducing | None = None
        # What uses of these parameters in other units have added, by name.
        self._from_ties: dict[str, Array] = {}
        self._leaves = binding.leaves
        self._sums = LeafSums(binding.leaves.tree, binding.leaves.mine.start, self._add_and_free)
        self._missing = 0  # leaves without gradients, that count as zeros if others have some

    @property
    def state(self) -> GradState:
        """Where the gradients are."""
        if self._reducing is not None:
            return GradState.REDUCING
        if self._open is not None or self.kept or self.unclaimed:
            return GradState.LOCAL
        return GradState.NONE if self._reduced is None else GradState.REDUCED

    @property
    def shard(self) -> Array | None:
        """This rank's shard of the reduced gradients, while there are any."""
        return None if self._reduced is None else self._own

    @property
    def nbytes(self) -> int:
        """Bytes of the reduced gradients that this rank keeps, from the first reduction on."""
        return self._kept_size * self._dtypes.grad.itemsize

    @property
    def kept(self) -> bool:
        """Whether there are gradients that wait for the next ones."""
        return self._kept is not None and not self._leaves.virtual

    @property
    def unclaimed(self) -> bool:
        """Whether there are gradients that no reduction has taken along: of ties, or of leaves."""
        of_leaves = self._leaves.virtual and (self._kept is not None or self._sums.count > 0)
        return of_leaves or bool(self._from_ties)

    @property
    def writable(self) -> Gradients | None:
        """What ``begin`` has returned, until it is kept, reduced or dropped."""
        return self._open

    # Writing.

    def begin(self, tied: Mapping[str, Array] | None = None) -> Gradients:
        """Return zeroed gradients to be written, and those of tied parameters, which lie apart."""
        self.check_closed()
        flat = self._pool.take(self._layout.padded_size, self._dtypes.grad)
        device = self._groups.device
        self._open = Gradients(flat, self._places, tied, self._dtypes.param, device)
        return self._open

    def check_closed(self) -> None:
        """Raise StateError if gradients are being written."""
        if self._open is not None:
            raise StateError(
                f"unit {self._places.unit!r} has gradients that were not reduced; call "
                "reduce_gradients()"
            )

    def add_tied(self, name: str, array: Array) -> None:
        """Add what a use of parameter ``name`` elsewhere has given; ``array`` is of the pool."""
        total = self._from_ties.setdefault(name, array)
        if total is not array:
            _add_into(total, array)
            self._pool.give(array)

    def keep(self) -> None:
        """Add what was written to what is kept, to be reduced with the next gradients."""
        if self._idle:
            self.drop_open()
            return
        flat = self._finish()
        if self._kept is None and self._layout.params:
            self._kept = flat
            return
        if self._kept is not None:
            _add_into(self._kept, flat)
        self._pool.give(flat)

    def _finish(self) -> Array:
        if self._open is None:
            raise StateError(
                f"unit {self._places.unit!r} has no gradients to reduce; pass them, or call "
                "begin_gradients() and write them first"
            )
        self._open.finish()
        flat, self._open = self._open.close(), None
        return flat

    @property
    def _idle(self) -> bool:
        """Whether this rank has no leaf left, and goes through passes for the others' sake."""
        leaves = self._leaves
        return leaves.virtual and self._sums.count + self._missing == len(leaves.mine)

    def end_leaf(self) -> None:
        """Have done with the gradients of a virtual rank; the next ones are another's."""
        if self._idle:
            return
        flat, self._kept = self._kept, None
        if flat is None and not self._from_ties:
            self._missing += 1
            return
        if flat is None:
            flat = self._zeros()
        self._add_tied_to(flat)
        self._push_missing()
        self._sums.push(flat)

    def _push_missing(self) -> None:
        for _ in range(self._missing):
            self._sums.push(self._zeros())
        self._missing = 0

    def _zeros(self) -> Array:
        flat = self._pool.take(self._layout.padded_size, self._dtypes.grad)
        flat[:] = 0
        return flat

    def _add_tied_to(self, flat: Array) -> None:
        for name, array in self._from_ties.items():
            _add_into(self._places.view(flat, name).reshape(-1), array)
            self._pool.give(array)
        self._from_ties.clear()

    def _add_and_free(self, total: Array, array: Array) -> Array:
        _add_into(total, array)
        self._pool.give(array)
        return total

    # Reducing.

    def reduce(self, divisor: float | None, *, label: str, async_op: bool) -> None:
        """Sum the gradients of all ranks, divide, and add what this rank keeps to what it has.

        Args:
            divisor: None for the number of ranks.
            label: for the collective.
            async_op: begin only; ``wait`` ends it.
        """
        self.wait()
        flats = self._of_leaves() if self._leaves.virtual else [self._own_sum()]
        if self._reduced is None and ArrayKind.GRADIENT not in self._store.away:
            own = self._own_buffer()
        else:  # a collective may write to this rank's part of what it reads
            own = flats[0][self._range]
        self._store.ahead(GRADIENTS)
        if not self._leaves.direct:
            room = self._leaves.room(self._layout)
            flats.append(self._pool.take(room, self._dtypes.grad))
        try:
            self._reducing = self._begin(flats, own, divisor, label, async_op)
        except BaseException:
            self._free(flats)
            raise
        if not async_op:
            self.wait()

    def _own_sum(self) -> Array:
        """Return what this rank has to reduce, all passes together."""
        if self._kept is not None:
            if self._open is not None:
                self.keep()
            flat, self._kept = self._kept, None
        else:
            flat = self._finish()
        self._add_tied_to(flat)
        if self.watch is not None:
            self.watch(self._places, flat)
        return flat

    def _of_leaves(self) -> list[Array]:
        """Return the sums of this rank's virtual ranks."""
        if self._reduced is not None:
            raise StateError(
                f"unit {self._places.unit!r} has more gradients of a virtual rank after they were "
                "reduced; of several backward passes of a leaf, make all but the last in no_sync()"
            )
        if self._open is not None:
            self.keep()
        self.end_leaf()
        self._push_missing()
        flats = self._sums.take()
        if self.watch is not None:
            for flat in flats:
                self.watch(self._places, flat)
        return flats

    def _free(self, flats: list[Array], unit: str = "") -> None:
        for flat in flats:
            self._pool.give(flat, unit)

    def _begin(
        self, flats: list[Array], own: Array, divisor: float | None, label: str, async_op: bool
    ) -> _Reducing:
        if self._groups.device.on_host:
            started = self._start(flats, own, divisor, label, async_op)
            return _Reducing(started if async_op else None, flats, own, divisor)

        # On a GPU all of it goes on in the background, while the next backward pass computes.
        def reduce() -> None:
            self._start(flats, own, divisor, label, async_op=False)
            reducing.reduced = self._conclude(own, divisor)

        reducing = _Reducing(None, flats, own, divisor)
        reducing.work = in_background(self._groups.whole, label, reduce)
        return reducing

    def _start(
        self, flats: list[Array], own: Array, divisor: float | None, label: str, async_op: bool
    ) -> Any:
        groups = self._groups
        if not self._leaves.direct:
            return self._start_exchange(flats, own, label, async_op)
        flat = flats[0]
        if groups.whole.world_size == 1:
            own[...] = flat[self._range]
            return None
        label = label if divisor is None else f"{label}, divisor {divisor}"
        if self.quantised is not None:
            return self.quantised.start(flat, own, divisor, label, async_op=async_op)
        options: dict[str, Any] = {"op": self._op(divisor), "algorithm": self._algorithm}
        first: dict[str, Any] = {"out": own, "async_op": async_op, "label": label, **options}
        if self._placement.whole_gradients:
            return all_reduce(flat, groups.whole, **first)
        started = reduce_scatter(flat, groups.shards, **first)
        if not self._placement.reduces_twice:
            return started

        label = f"{label}, over replicas"
        if not async_op:
            all_reduce(own, groups.replicas, out=own, label=label, **options)
            return None
        replicas = groups.summing_in_background[1]

        def sum_over_replicas() -> None:
            started.wait()
            all_reduce(own, replicas, out=own, label=label, **options)

        # Replicas are on different hosts, as a rule: that is what is worth hiding most.
        return groups.background("gradients").submit(sum_over_replicas, label)

    def _start_exchange(
        self, flats: list[Array], own: Array, label: str, async_op: bool
    ) -> Work | None:
        """Begin to sum over virtual ranks, where a reduction over ranks has another order."""
        groups = self._groups
        if not async_op:
            self._exchange(flats, own, label, *groups.summing)
            return None
        first, then = groups.summing_in_background
        return groups.background("gradients").submit(
            lambda: self._exchange(flats, own, label, first, then), label
        )

    def _exchange(
        self, flats: list[Array], own: Array, label: str, first: Backend, then: Backend
    ) -> None:
        """Sum over the ranks of a group that has all gradients, each a part; then over groups."""
        leaves = self._leaves
        *parts, room = flats
        taken = 0

        def add(total: Array, array: Array) -> Array:
            _add_into(total, array)
            return total

        def take(size: int) -> Array:
            nonlocal taken
            taken += size
            return room[taken - size : taken]

        def summed(
            runs: list[range], parts: list[Array], group: Backend, label: str
        ) -> list[Array]:
            return exchange_sums(leaves.tree, runs, parts, group, add, take, label)

        parts = summed(leaves.groups[leaves.group], parts, first, label)
        if first is not then:
            parts = summed(leaves.unions, parts, then, f"{label}, over replicas")
        (part,) = parts
        all_gather_v(part, then, out=own, label=label)

    def _op(self, divisor: float | None) -> Literal["mean", "sum"]:
        """Return what the collectives make of the gradients, before the rest is divided."""
        if self._leaves.virtual or self.quantised is not None:
            return "sum"
        if self._dtypes.grad.itemsize < 4:
            # The sum over ranks may be too large for 16 bits where the mean is not.
            small = divisor is None or divisor >= self._groups.whole.world_size
            return "mean" if small else "sum"
        # The same bits as with one group of all ranks, since the sum is divided once.
        return "mean" if divisor is None and not self._placement.reduces_twice else "sum"

    def wait(self) -> None:
        """End a reduction that was begun; blocks. Raises what went wrong with it."""
        reducing = self._reducing
        if reducing is None:
            return
        work = reducing.work
        try:
            if work is not None:
                work.wait()
            self._reducing = None
            reduced = reducing.reduced
            if reduced is None:
                reduced = self._conclude(reducing.own, reducing.divisor)
            self._reduced = reduced
        finally:
            # After an interrupt it goes on, and is waited for again.
            if self._reducing is None or (work is not None and work.done()):
                self._reducing = None
                # Where the sum went elsewhere, the full gradients are what this rank has written.
                intact = reducing.own is self._buffer and len(reducing.flats) == 1
                self._free(reducing.flats, self._places.unit if intact else "")

    def _conclude(self, own: Array, divisor: float | None) -> Array:
        """Divide the sum, and add it to what is kept; return that."""
        op, size = self._op(divisor), self._leaves.tree.leaves
        left = (size if divisor is None else divisor) / (size if op == "mean" else 1)
        if left != 1:
            _divide(own, left)
        reduced = self._reduced
        if reduced is not None:
            self._store.begin(GRADIENTS, write=True)
            _add_into(reduced, own)
        else:
            reduced = self._own_buffer()
            if own is not reduced:  # it is not where a collective can write to
                reduced[:] = own
        self._store.end(GRADIENTS, written=True)
        return reduced

    def _own_buffer(self) -> Array:
        if self._buffer is None:
            allocate = self._store.allocate(ArrayKind.GRADIENT)
            self._buffer = allocate(self._kept_size, self._dtypes.grad)
            self._own = self._buffer[self._shard]
        return self._buffer

    def zeros(self) -> Array:
        """Return the shard, which is zeros if nothing was reduced."""
        if self._reduced is None:
            self._reduced = self._own_buffer()
            self._reduced[:] = 0
        assert self._own is not None
        return self._own

    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients of this rank's shard by a number."""
        shard = self.shard
        if shard is not None:
            self._store.begin(GRADIENTS, write=True)
            _divide(shard, 1.0 / factor)
            self._store.end(GRADIENTS, written=True)

    # Forgetting.

    def drop_open(self) -> None:
        """Free what was begun and not finished; everything else stays."""
        if self._open is not None:
            self._pool.give(self._open.close())
            self._open = None

    def drop(self, applied: float = 0.0) -> None:
        """Forget all gradients.

        Args:
            applied: by what they were multiplied for the optimizer; 0 if it has not seen them.
        """
        if self.state is GradState.NONE and not self._missing and self._kept is None:
            return
        reducing, self._reducing = self._reducing, None
        if reducing is not None:
            # If it failed, the backend is broken and whatever comes next says so; raised here,
            # it would hide the error that led to this clean-up.
            with contextlib.suppress(Exception):
                if reducing.work is not None:
                    reducing.work.wait()
            self._free(reducing.flats)
        if self.quantised is not None and (reducing is not None or self._reduced is not None):
            self.quantised.scale(applied)
        self.drop_open()
        for array in (*self._from_ties.values(), self._kept, *self._sums.take()):
            if array is not None:
                self._pool.give(array)
        self._missing = 0
        self._from_ties.clear()
        if self._reduced is not None:
            self._store.discard(GRADIENTS)
        self._kept = self._reduced = None

    def free(self) -> None:
        """Let go of the memory, too; after ``drop``, for good."""
        self._buffer = self._own = None


def check_divisor(divisor: float | None) -> float | None:
    """Return ``divisor`` as a Python float, whatever number it is, so that all ranks divide alike.

    Raises:
        ArgumentError: gradients cannot be divided by it.
    """
    return None if divisor is None else as_positive(divisor, "divisor")


def _add_into(total: Array, values: Array) -> None:
    """Add in place; inf and nan are for the update to find."""
    if not on_host(total):
        inplace.add(total, values)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(total, values, out=total)


def _divide(array: Array, divisor: float) -> None:
    """Divide in place; in float32, and rounded once, where the dtype is narrower."""
    if not on_host(array):
        inplace.divide(array, divisor)
        return
    if array.itemsize >= 4:
        with np.errstate(over="ignore"):
            np.divide(array, divisor, out=array)
        return
    for start in range(0, array.size, BLOCK):
        block = array[start : start + BLOCK]
        HOST.write(block, block.astype(np.float32) / np.float32(divisor))
