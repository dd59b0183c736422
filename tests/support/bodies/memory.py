"""Bodies: memory of ``empty`` and ``shared_window``, and collectives on it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import platform
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support import oracle, published
from support.arrays import Array, array_of, arrays_of, check_same
from support.mappings import segments
from support.spmd import meet

import fsdpcore as fc
from fsdpcore.collectives.shared import region
from fsdpcore.collectives.state import state_of

# Bytes of an input: what goes through one step, a room, a block of a reduction; and around them.
AT_ONCE, ROOM, BLOCK = 8 * 1024, 256 * 1024, 512 * 1024


# Arrays.


def arrays_of_empty(backend: fc.Backend) -> None:
    """Shape and dtype as asked for; writable; views keep it; it is another one every time."""
    shapes: list[Any] = [
        (),
        0,
        1,
        7,
        (3,),
        [2, 3],
        (0, 3),
        (3, 0, 2),
        (5, 1, 2),
        np.int64(4),
        (70, 1000),
    ]
    kept = []
    for number, (dtype, shape) in enumerate(itertools.product(oracle.DTYPES, shapes)):
        array = backend.empty(shape, dtype)
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        assert type(array) is np.ndarray
        assert (array.shape, array.dtype) == (sizes, dtype)
        assert array.flags.carray
        values = array_of(backend.rank, array.shape, dtype, str(number))
        array[...] = values
        kept.append((array[...] if array.ndim else array, values))
        del array
    for array, values in kept:
        check_same(array, values, "an array of empty")
    assert backend.empty(3).dtype == np.float32
    for wrong in (-1, (2, -1), (0, -1), 2.5, (2, 2.0), "ab", None):
        with pytest.raises((fc.ArgumentError, ValueError, TypeError)):
            backend.empty(wrong)  # type: ignore[arg-type]
    for wrong in ("U3", object, ">f4", np.clongdouble):
        with pytest.raises(fc.ArgumentError):
            backend.empty(3, wrong)
    check_same(backend.empty(0), np.zeros(0, np.float32), "empty(0)")
    check_same(fc.all_reduce(kept[0][0], backend), _expected_first(backend), "one of them")


def _expected_first(backend: fc.Backend) -> Array:
    parts = [array_of(rank, (), oracle.DTYPES[0], "0") for rank in range(backend.world_size)]
    return oracle.reduced(parts, "sum")


def blocks_are_used_again(backend: fc.Backend) -> None:
    """After the last view has gone, and never before; collectives keep nothing."""
    me, p = backend.rank, backend.world_size
    sharing = backend.root.memory
    for size in (3000, 300_000):
        array = backend.empty(size)
        lends = sharing is not None and sharing.locate(array) is not None
        array[...] = me
        place, last = array.ctypes.data, array[size // 2 :][-2:]
        check_same(fc.all_reduce(array, backend), np.full(size, p * (p - 1) / 2, np.float32), "")
        check_same(fc.all_gather(array[:1], backend), np.arange(p, dtype=np.float32), "")
        del array
        others = [backend.empty(size) for _ in range(3)]
        for other in others:
            other[...] = -1
        assert last.tolist() == [me, me]
        if lends:
            assert place not in [other.ctypes.data for other in others]
        del other, others, last
        gc.collect()
        if lends:
            assert backend.empty(size).ctypes.data == place
        backend.barrier()


# Collectives.


def sizes_around_every_bound(backend: fc.Backend) -> None:
    """Each collective, on arrays of all ranks' published, of none, and of some."""
    p = backend.world_size
    reducing = (p * ROOM, p * BLOCK)
    moving = (ROOM, 2 * ROOM)
    numbers = itertools.count()
    for kind in published.KINDS:
        larger = reducing if "reduce" in kind else moving
        bounds = [(AT_ONCE, -1), (AT_ONCE, 0), (AT_ONCE, 1), (larger[0], 0), (larger[1], 1)]
        for bound, over in bounds:
            number = next(numbers)
            rows = bound // 12 // (p if kind.endswith("_v") else 1) + over
            ragged = (2 * rows, 0, rows, 1) if kind.endswith("_v") else (rows,)
            places = _places(p, number)
            case = published.Case(kind, ragged, 3, "float32", "sum", number % p, *places)
            published.run_case(backend, case, str(number))


def _places(p: int, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All lend, or all but one, or some; in place for a part of them."""
    outs = ("published", "new", published.IN_PLACE)
    style = number % 4
    if style == 0:
        return ("published",) * p, (outs[number // 4 % 3],) * p
    if style == 1:
        odd_one = number // 4 % p
        return tuple("private" if r == odd_one else "published" for r in range(p)), (
            "published",
        ) * p
    if style == 2:
        odd_one = number // 4 % p
        return ("published",) * p, tuple("private" if r == odd_one else "within" for r in range(p))
    chance = random.Random(number)
    return (
        tuple(chance.choice(list(published.SOURCES)) for _ in range(p)),
        tuple(
            chance.choice([*published.OUTS, published.NEW, published.IN_PLACE]) for _ in range(p)
        ),
    )


def every_dtype_and_op(backend: fc.Backend) -> None:
    """Reductions of published arrays to the bit; an odd number of elements."""
    p = backend.world_size
    for number, (dtype, op) in enumerate(oracle.COMBINATIONS):
        kind = ("all_reduce", "reduce_scatter", "reduce")[number % 3]
        rows = 2 * AT_ONCE // dtype.itemsize + 1
        places = _places(p, 4 * number) if number % 2 else _places(p, number)
        case = published.Case(kind, (rows,), 1, dtype.name, op, number % p, *places)
        published.run_case(backend, case, str(number))


def every_place(backend: fc.Backend, seed: int, count: int) -> None:
    """Random calls with random places, while ranks are slow at random moments."""
    p = backend.world_size
    with slow_readers(seed + backend.rank):
        for number in range(count):
            published.run_case(backend, random_case(p, seed + number), str(number))


def random_case(p: int, seed: int) -> published.Case:
    """A case of medium size, from a number."""
    chance = random.Random(seed)
    kind = chance.choice(published.KINDS)
    dtype, op = chance.choice(oracle.COMBINATIONS)
    rows = tuple(chance.choice([0, 1, p, 100, 3001, 9000]) for _ in range(p))
    return published.Case(
        kind,
        rows,
        chance.choice([1, 3]),
        dtype.name,
        op,
        chance.randrange(p),
        tuple(chance.choice(["published", "published", *published.SOURCES]) for _ in range(p)),
        tuple(
            chance.choice(["published", *published.OUTS, published.NEW, published.IN_PLACE])
            for _ in range(p)
        ),
    )


@contextlib.contextmanager
def slow_readers(seed: int) -> Iterator[None]:
    """In this process, ranks pause at times before they use what another one has published.

    For ranks that are processes: what is changed here, threads have in common.
    """
    chance, peer_view = random.Random(seed), region.SharedRegion.peer_view

    def late(self: Any, *args: Any, **options: Any) -> Any:
        found = peer_view(self, *args, **options)
        if chance.random() < 0.3:
            time.sleep(0.003 * chance.random())
        return found

    region.SharedRegion.peer_view = late  # type: ignore[method-assign]
    try:
        yield
    finally:
        region.SharedRegion.peer_view = peer_view  # type: ignore[method-assign]


def input_may_change_at_once(backend: fc.Backend) -> None:
    """Who is done first changes its input, and drops it, while others are still slow."""
    me, p = backend.rank, backend.world_size
    rows = 3 * AT_ONCE
    with slow_readers(me) if me else contextlib.nullcontext():
        for number in range(30):
            parts = arrays_of(p, (rows,), np.float32, str(number))
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"):
                source = backend.empty(rows)
                source[...] = parts[me]
                out = backend.empty(rows) if kind == "all_reduce" else None
                result = getattr(fc, kind)(source, backend, out=out)
                source[...] = np.nan
                del source
                again = backend.empty(rows)  # most likely the same memory
                again[...] = np.inf
                check_same(result, _result(kind, parts, me), f"{kind} {number}")
                result[...] = np.nan
                del again, result, out


def _result(kind: str, parts: Sequence[Array], me: int) -> Array:
    p = len(parts)
    if kind == "all_gather":
        return oracle.joined(parts)
    if kind == "broadcast":
        return parts[0]
    if kind == "all_to_all":
        return oracle.joined([oracle.pieces(part, p)[me] for part in parts])
    total = oracle.reduced(parts, "sum")
    return total if kind == "all_reduce" else oracle.pieces(total, p)[me]


def nothing_stays_mapped(backend: fc.Backend) -> None:
    """Of a backend that was closed, though it and a group of it are still there."""
    before, group = segments(), backend.sub(range(backend.world_size))
    for each in (backend, group):
        for rows in (1, AT_ONCE, ROOM):
            private, source, out = np.ones(rows, np.float32), each.empty(rows), each.empty(rows)
            source[...] = 1
            for _ in range(3):  # the third time by what is kept of the second
                fc.all_reduce(private, each)
                fc.all_reduce(source, each, out=out)
                fc.all_gather(source, each)
                fc.all_gather_v(private, each)
                fc.all_reduce(source, each, async_op=True).wait()
    assert segments() - before
    backend.close()
    source[...] = 2  # arrays stay usable
    del private, source, out
    gc.collect()
    assert segments() - before == set()
    assert "closed" in repr(group)


def started_ones(backend: fc.Backend) -> None:
    """Started collectives on published arrays, several at once, in the whole job and in a group."""
    p, me = backend.world_size, backend.rank
    pair = backend.sub([0, 1]) if me < 2 else None
    rows = AT_ONCE
    works = []
    for number in range(6):
        parts = arrays_of(p, (rows,), np.float32, str(number))
        source, out = backend.empty(rows), backend.empty(rows)
        source[...] = parts[me]
        work = fc.all_reduce(source, backend, out=out, async_op=True)
        works.append((work, oracle.reduced(parts, "sum")))
        if pair is not None:
            work = fc.all_gather(source, pair, async_op=True)
            works.append((work, oracle.joined(parts[:2])))
        del source, out
    for work, expected in works:
        check_same(work.wait(), expected, "started")


def as_on_a_weak_memory_model(backend: fc.Backend) -> None:
    """With the fences of ARM, on the fast path as well."""
    machine, platform.machine = platform.machine, lambda: "aarch64"
    try:
        group = backend.sub(range(backend.world_size))
        for number in range(40):
            published.run_case(group, random_case(group.world_size, number), str(number))
        found = state_of(group).context.region if state_of(group).context is not None else None
        if type(found) is region.SharedRegion:
            assert found.fence is not None
        for number in range(300):
            total = fc.all_reduce(np.full(3, number + backend.rank), group)
            p = backend.world_size
            assert total.tolist() == [p * number + p * (p - 1) // 2] * 3
        group.close()
    finally:
        platform.machine = machine


# Windows.


def windows(backend: fc.Backend) -> None:
    """Zeros; all see what one writes; the memory outlives whoever made it."""
    p, me = backend.world_size, backend.rank
    for shape in ((), (0,), (p,), (p, 3, 2), (p, 70_000)):
        for dtype in (np.float32, oracle.HALVES[1], np.bool_):
            window = backend.shared_window(shape, dtype)
            assert (window.shape, window.dtype) == (shape, np.dtype(dtype))
            assert window.flags.carray
            check_same(window, np.zeros(shape, dtype), "a window")
            backend.barrier()
            if len(shape) > 1:
                window[me] = me + 1
                backend.barrier()
                for rank in range(p):
                    assert (window[rank] == window.dtype.type(rank + 1)).all()
            backend.barrier()
    first, second = backend.shared_window(p), backend.shared_window((p,), np.float32)
    first[me], second[me] = 1, 2
    backend.barrier()
    assert (first.tolist(), second.tolist()) == ([1] * p, [2] * p)
    backend.barrier()
    if me == 0:
        del first
        gc.collect()
    else:
        backend.barrier()
        first[me] = 5
        assert first[0] == 1
    if me == 0:
        backend.barrier()
    backend.barrier()


def collectives_on_windows(backend: fc.Backend) -> None:
    """A window as input and, each rank's own part of it, as output."""
    p, me = backend.world_size, backend.rank
    for rows in (4, AT_ONCE):
        window = backend.shared_window((p, rows))
        parts = arrays_of(p, (rows,), np.float32)
        window[me] = parts[me]
        backend.barrier()
        check_same(window, np.stack(parts), "what all have written")
        check_same(fc.all_reduce(window[me], backend), oracle.reduced(parts, "sum"), "input")
        backend.barrier()
        fc.all_gather(window[me], backend, out=window.reshape(-1))  # every part in its place
        check_same(window, np.stack(parts), "all_gather in place")
        backend.barrier()
        fc.reduce_scatter(np.stack(parts), backend, out=window[me : me + 1])
        backend.barrier()
        expected = np.stack([oracle.reduced([part] * p, "sum") for part in parts])
        check_same(window, expected, "reduce_scatter into parts")
        backend.barrier()
        fc.broadcast(parts[0], backend, out=window[me])
        backend.barrier()
        check_same(window, np.stack([parts[0]] * p), "broadcast into parts")
        backend.barrier()


def windows_of_groups(backend: fc.Backend) -> None:
    """Each group has its own."""
    p, me = backend.world_size, backend.rank
    members = [r for r in range(p) if r % 2 == me % 2]
    group = backend.sub(members)
    window = group.shared_window(len(members), np.int64)
    window[group.rank] = me
    group.barrier()
    assert window.tolist() == members
    backend.barrier()
    group.close()
    assert window.tolist() == members


def windows_outlive_their_maker(backend: fc.Backend) -> None:
    """The first rank leaves the job; what it has made stays."""
    p, me = backend.world_size, backend.rank
    window = backend.shared_window((p, 1000), np.int32)
    window[me] = me
    backend.barrier()
    if me == 0:
        del window
        backend.close()
        meet()
        return
    meet()
    for rank in range(p):
        assert (window[rank] == rank).all()
    window[0] = 7
    assert (window[0] == 7).all()


def windows_per_host(backend: fc.Backend) -> list[int]:
    """Ranks of one host see each other's numbers, and nobody else's; empty without windows."""
    if not backend.capabilities.shared_window:
        return []
    window = backend.shared_window(backend.world_size, np.int32)
    backend.barrier()
    window[backend.rank] = backend.rank + 1
    backend.barrier()
    found = window.tolist()
    backend.barrier()
    group = backend.host_group()
    assert group is backend.host_group()
    assert [number for number in found if number] == [rank + 1 for rank in group.ranks]
    return found


def refused_windows(backend: fc.Backend) -> None:
    """All ranks are told, and the backend goes on; a wrong shape is refused before that."""
    p = backend.world_size
    for wrong in (-1, (2, -3), 2.5, (2, 2.0), None, (1 << 40, 1 << 40)):
        with pytest.raises(fc.ArgumentError):
            backend.shared_window(wrong)  # type: ignore[arg-type]
    for dtype in (object, ">f4"):
        with pytest.raises(fc.ArgumentError):
            backend.shared_window(3, dtype)
    if p > 1 and not backend.capabilities.shared_window:
        for _ in range(2):
            with pytest.raises(fc.UnsupportedError, match="share no memory"):
                backend.shared_window((3, 2))
    else:
        window = backend.shared_window((3, 2))
        check_same(window, np.zeros((3, 2), np.float32), "a window")
    check_same(fc.all_reduce(np.ones(3), backend), np.full(3, float(p)), "after it")


def different_windows(backend: fc.Backend) -> None:
    """Ranks that ask for different ones are told so."""
    with pytest.raises(fc.MismatchError, match="shared_window"):
        backend.shared_window(3 + backend.rank % 2)
