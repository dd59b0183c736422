"""Express lanes for larger arrays that all ranks see in place.

Such a call moves a few hundred KiB in less time than it takes Python to find out what to move. But
a loop brings the same arrays again and again. So once all ranks have lent some arrays, a rank keeps
what it did with them as a *plan*, where all parts of all arrays are there already. It finds the
plan by what the ranks have written into their flags, so that arrays may come and go.

A lane takes the same two steps as the functions of ``shared``, to which it leaves everything else:
ranks on different ways meet. Who changes one of these changes the other.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fsdpcore.collectives.output import separated
from fsdpcore.collectives.shared.reducing import prepare
from fsdpcore.collectives.shared.region import DIGEST, OUT, SOURCE
from fsdpcore.core.buffers import Array, bounds_of, split_sizes

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext
    from fsdpcore.collectives.shared.region import SharedRegion
    from fsdpcore.collectives.spec import CallSpec
    from fsdpcore.comm.backend import Backend
    from fsdpcore.diagnostics.recorder import OperationEntry

LARGEST = 4 << 20  # bytes of a call: a plan has a few parts of arrays for each 128 to 512 KiB
_PLANS = 64
_NOTHING = (0, 1)  # as ``SharedRegion.lend`` writes it

# What to do with the input and the output of this rank, both flat.
Plan = Callable[[Array, Array], None]
Work = Callable[["OperationEntry", int, Array, Array], None]


class _Plans(dict[bytes, Plan]):
    """Plans by what all ranks have told; they hold parts of the memory."""


def takes(call: CallSpec) -> bool:
    """Whether there is a lane for calls like this, by ``shared`` and for more than it stages."""
    return call.operation in _PLANNERS and call.nbytes <= LARGEST


def lane(
    backend: Backend,
    link: CollectiveContext,
    area: SharedRegion,
    call: CallSpec,
    other: Work,
) -> Work:
    """Return the lane of a call.

    Args:
        backend, link, area: of the group.
        call: what is called.
        other: the way for arrays of this rank that the others do not see.
    """
    limit, own, others, flags, wait = backend.timeout, area.own, area.others, area.flags, area.wait
    entering, entered, digest = area.entering, area.entered, call.digest
    plans = _Plans()
    area.empty_at_close(plans)
    terms_of = _Terms(link, area, call)
    copies = call.operation == "broadcast" and call.root == link.rank
    # What came last time.
    kept_source: Callable[[], Array | None] = _nobody
    kept_out: Callable[[], Array | None] = _nobody
    kept_terms: Array | None = None

    def work(entry: OperationEntry, sequence: int, source: Array, out: Array) -> None:
        nonlocal kept_source, kept_out, kept_terms
        if kept_source() is source and kept_out() is out:
            terms = kept_terms
        else:
            terms = kept_terms = terms_of(source, out)
            kept_source, kept_out = weakref.ref(source), weakref.ref(out)
        if terms is None:
            other(entry, sequence, source, out)
            return
        begun = False
        try:
            if copies and source is not out:
                out[...] = source
            area.step = step = area.step + 1
            parity = step & 1
            entering[parity][:] = terms
            flags[own[parity]] = step
            for at in others[parity]:
                if flags[at] != step:
                    if not begun:  # once: the deadline is for all of them
                        link.begin(call, sequence, limit, False)
                        begun = True
                    wait(at, step, link)
            flat = source if source.ndim == 1 else source.reshape(-1)
            flat_out = out if out.ndim == 1 else out.reshape(-1)
            key = entered[parity]()
            plan = plans.get(key)
            if plan is None:
                if not begun:
                    link.begin(call, sequence, limit, False)
                    begun = True
                plan = _plan(link, area, call)
                if plan is None:
                    _continue(link, entry, flat, flat_out)
                    return
                if len(plans) >= _PLANS:
                    plans.popitem()  # the newest: arrays that take turns would lose every older one
                plans[key] = plan
            plan(flat, flat_out)
            area.step = step = step + 1
            parity ^= 1
            mine = own[parity]
            flags[mine + DIGEST] = digest
            flags[mine] = step
            for at in others[parity]:
                if flags[at] != step:
                    if not begun:
                        link.begin(call, sequence, limit, False)
                        begun = True
                    wait(at, step, link)
        except BaseException as error:
            if not begun:
                link.begin(call, sequence, limit, False)
            link.broke(entry, error)
            raise

    return work


def _nobody() -> Array | None:
    """Stand in for a weak reference to an array."""
    return None


def _continue(link: CollectiveContext, entry: OperationEntry, source: Array, out: Array) -> None:
    """Carry a call out the ordinary way, after its first step."""
    call = link.call
    assert call.definition is not None
    link.entry, link.entered = entry, True
    try:
        source = separated(source, out, call.definition, call.layout, link.rank)
        call.definition.start(link, call.choice, call.layout, source, out)
    finally:
        link.entered = False
        link.release()


class _Terms:
    """What a rank writes into its flag when it enters the first step of a kind of call."""

    def __init__(self, link: CollectiveContext, area: SharedRegion, call: CallSpec) -> None:
        self._area, self._call, self._rank = area, call, link.rank

    def __call__(self, source: Array, out: Array) -> Array | None:
        """The terms for these arrays; None if the others do not see them, or they overlap."""
        call, area, me = self._call, self._area, self._rank
        places: list[tuple[int, int] | None] = [_NOTHING, _NOTHING]
        if call.operation == "broadcast":
            if call.root == me:
                places[SOURCE] = area.place(out)
        else:
            flat, into = source.reshape(-1), out.reshape(-1)
            assert call.definition is not None
            whole = separated(flat, into, call.definition, call.layout, me)
            if call.operation == "all_reduce":
                places[OUT] = area.place(out)
            places[SOURCE] = area.place(source) if whole is flat or whole is into else None
        if None in places:
            return None
        words = [word for place in places if place is not None for word in place]
        return np.array([call.digest, *words], np.uint64)


# Plans.


def _plan(link: CollectiveContext, area: SharedRegion, call: CallSpec) -> Plan | None:
    """Make the plan for what the ranks have entered the step with; None if some do not lend.

    Raises:
        MismatchError: they are in different collectives.
        The errors of ``SharedRegion.borrowed``.
    """
    if not area.agreed(call.digest):
        link.disagree()
    givers = [call.root] if call.operation == "broadcast" else range(link.size)
    takers = range(link.size) if call.operation == "all_reduce" else ()
    if not (all(map(area.lent, givers)) and all(area.lent(rank, OUT) for rank in takers)):
        return None
    count = call.bounds[-1] if call.operation == "all_gather" else math.prod(call.shape)
    return _PLANNERS[call.operation](link, area, call, count)


def _all_reduce(link: CollectiveContext, area: SharedRegion, call: CallSpec, count: int) -> Plan:
    assert call.dtype is not None
    assert call.reduction is not None
    bounds = bounds_of(split_sizes(count, link.size))
    low, high = bounds[link.rank], bounds[link.rank + 1]
    sources, outs = (
        [area.borrowed(link, rank, call.dtype, count, which) for rank in range(link.size)]
        for which in (SOURCE, OUT)
    )
    steps: list[Callable[[], Any]] = []
    for block in _blocks(low, high, area.block // call.dtype.itemsize):
        result = outs[link.rank][block]
        reduce = prepare(link, call.reduction, [array[block] for array in sources])
        steps.append(partial(reduce, result))
        steps += [
            partial(array[block].__setitem__, ..., result)
            for rank, array in enumerate(outs)
            if rank != link.rank
        ]

    def plan(source: Array, out: Array) -> None:
        for step in steps:
            step()

    return plan


def _reduce_scatter(
    link: CollectiveContext, area: SharedRegion, call: CallSpec, count: int
) -> Plan:
    assert call.dtype is not None
    assert call.reduction is not None
    low, high = call.bounds[link.rank], call.bounds[link.rank + 1]
    sources = [area.borrowed(link, rank, call.dtype, count) for rank in range(link.size)]
    parts = [
        (
            slice(block.start - low, block.stop - low),
            prepare(link, call.reduction, [array[block] for array in sources]),
        )
        for block in _blocks(low, high, area.block // call.dtype.itemsize)
    ]

    def plan(source: Array, out: Array) -> None:
        for place, reduce in parts:
            reduce(out[place])

    return plan


def _all_gather(link: CollectiveContext, area: SharedRegion, call: CallSpec, count: int) -> Plan:
    assert call.dtype is not None
    places = [slice(low, high) for low, high in itertools.pairwise(call.bounds)]
    own = places[link.rank]
    parts = [
        (place, area.borrowed(link, rank, call.dtype, place.stop - place.start))
        for rank, place in enumerate(places)
        if rank != link.rank
    ]
    overlap = np.may_share_memory

    def plan(source: Array, out: Array) -> None:
        if not overlap(source, out):  # if so, it is in its place already
            out[own] = source
        for place, array in parts:
            out[place] = array

    return plan


def _broadcast(link: CollectiveContext, area: SharedRegion, call: CallSpec, count: int) -> Plan:
    assert call.dtype is not None
    if link.rank == call.root:
        return lambda source, out: None
    array = area.borrowed(link, call.root, call.dtype, count)

    def plan(source: Array, out: Array) -> None:
        out[...] = array

    return plan


_PLANNERS: dict[str, Callable[[CollectiveContext, SharedRegion, CallSpec, int], Plan]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
}


def _blocks(low: int, high: int, step: int) -> Iterator[slice]:
    for start in range(low, high, step):
        yield slice(start, min(start + step, high))
