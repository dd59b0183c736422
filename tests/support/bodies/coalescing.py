"""Bodies: batches of collectives, and all_reduce of lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from support import oracle
from support.arrays import WRITABLE, Array, array_of, arrays_of, check_same
from support.bodies.point_to_point import check_words, expect
from support.bodies.reductions import expect_refusal

import fsdpcore as fc

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 0), (0, 3), (5, 2), (33, 3), (2, 3, 4)]


def _calls(p: int) -> list[tuple[str, Array, dict[str, Any]]]:
    """Kind, an array that stands for shape and dtype, and options, of calls of every sort."""
    calls: list[tuple[str, Array, dict[str, Any]]] = []
    for number, shape in enumerate(SHAPES):
        dtype, op = oracle.COMBINATIONS[5 * number % len(oracle.COMBINATIONS)]
        like = np.empty(shape, dtype)
        root = number % p
        calls.append(("all_reduce", like, {"op": op}))
        calls.append(("reduce", like, {"op": op, "root": root}))
        calls.append(("broadcast", like, {"root": root}))
        calls.append(("all_gather", like, {}))
        calls.append(("gather", like, {"root": root}))
        if shape:
            calls.append(("reduce_scatter", like, {"op": op}))
            calls.append(("all_to_all", like, {}))
    return calls


def _same(result: Any, expected: Any, what: str) -> None:
    if expected is None:
        assert result is None, what
    else:
        check_same(result, expected, what)


def as_single_calls(backend: fc.Backend) -> None:
    """Every call of a batch gives the bits that it gives by itself."""
    me = backend.rank
    calls = [
        (kind, array_of(me, like.shape, like.dtype, str(number)), options)
        for number, (kind, like, options) in enumerate(_calls(backend.world_size))
    ]
    before = [array.copy() for _, array, _ in calls]
    with fc.coalesce(backend, label="all sorts") as batch:
        works = [getattr(batch, kind)(array, **options) for kind, array, options in calls]
        assert not any(work.done() for work in works)
    for work, (kind, array, options), copy in zip(works, calls, before, strict=True):
        what = f"{kind} of {array.dtype} {array.shape}, {options}"
        assert work.done()
        expected = getattr(fc, kind)(array, backend, **options)
        _same(work.result(), expected, what)
        assert work.wait() is work.result()
        check_same(array, copy, f"the input of {what}")


def every_dtype_and_op(backend: fc.Backend) -> None:
    """One batch with all combinations, also of values that are special, at odd positions."""
    me, p = backend.rank, backend.world_size
    works = []
    with fc.coalesce(backend) as batch:
        for number, (dtype, op) in enumerate(oracle.COMBINATIONS):
            for size in (1, 3, 37):
                parts = [_special(rank, size, dtype) for rank in range(p)]
                what = f"{op} of {dtype}, {size}, number {number}"
                works.append((batch.all_reduce(parts[me], op=op), parts, op, what))
    for work, parts, op, what in works:
        check_same(work.result(), oracle.reduced(parts, op), what)


def _special(rank: int, size: int, dtype: np.dtype[Any]) -> Array:
    array = array_of(rank, (size,), dtype)
    if dtype.kind not in "biu":
        array[rank % size] = (np.inf, -np.inf, np.nan, -0.0)[rank % 4]
    return array


def into_out(backend: fc.Backend) -> None:
    """With ``out`` of every layout, and in place, also where calls share arrays."""
    me, p = backend.rank, backend.world_size
    parts = arrays_of(p, (4, 3))
    total = oracle.reduced(parts, "sum")
    for layout, make in WRITABLE.items():
        outs = [make(np.zeros((4, 3), np.float32)) for _ in range(2)]
        joined = make(np.zeros((4 * p, 3), np.float32))
        with fc.coalesce(backend) as batch:
            works = [batch.all_reduce(parts[me], out=outs[0]), batch.broadcast(parts[me])]
            works.append(batch.reduce(parts[me], out=outs[1], root=p - 1))
            works.append(batch.all_gather(parts[me], out=joined))
        assert works[0].result() is outs[0]
        assert works[3].result() is joined
        check_same(outs[0], total, f"all_reduce, {layout}")
        check_same(works[1].result(), parts[0], f"broadcast, {layout}")
        if me == p - 1:
            check_same(outs[1], total, f"reduce, {layout}")
        check_same(joined, oracle.joined(parts), f"all_gather, {layout}")
    # All inputs are read before any result is written.
    first, second = parts[me].copy(), 2 * parts[me]
    with fc.coalesce(backend) as batch:
        batch.all_reduce(first, out=second)
        batch.all_reduce(second, op="max", out=first)
    check_same(second, total, "the second array")
    check_same(first, oracle.reduced([2 * part for part in parts], "max"), "the first array")


def started(backend: fc.Backend) -> None:
    """Batches that are not waited for, between other operations; more than one under way."""
    me, p = backend.rank, backend.world_size
    works = []
    for number in range(6):
        parts = arrays_of(p, (number, 2), salt=str(number))
        with fc.coalesce(backend, async_op=True) as batch:
            total, joined = batch.all_reduce(parts[me], op="max"), batch.all_gather(parts[me])
        works += [(total, oracle.reduced(parts, "max")), (joined, oracle.joined(parts))]
        check_same(fc.all_reduce(np.int32(number), backend), np.asarray(np.int32(p * number)), "")
    for work, expected in works[::-1]:
        check_same(work.wait(), expected, "started")
        assert work.done()


def nothing_and_misuse(backend: fc.Backend) -> None:
    """Batches of nothing; of one rank; calls and waits out of place."""
    with fc.coalesce(backend) as empty:
        pass
    expect(fc.StateError, empty.all_reduce, np.ones(3))
    expect(fc.StateError, empty.__enter__)
    expect(fc.StateError, fc.coalesce(backend).all_reduce, np.ones(3))
    with fc.coalesce(backend) as batch:
        work = batch.all_reduce(np.ones(2))
        expect(fc.StateError, work.wait)
        expect(fc.StateError, work.result)
        expect_refusal(batch.all_reduce, np.ones(2), op="median")
        expect_refusal(batch.all_reduce, np.arange(2), op="mean")
        expect_refusal(batch.all_reduce, np.ones(2), out=np.ones(3))
        expect_refusal(batch.reduce_scatter, np.float32(3))
        expect_refusal(batch.broadcast, np.ones(2), root=backend.world_size)
        expect_refusal(batch.all_gather, np.array(["text"]))
    check_same(work.result(), np.full(2, float(backend.world_size)), "after refusals")
    expect_refusal(fc.coalesce, None)
    expect_refusal(fc.coalesce, backend, timeout=-1)


def left_by_an_exception(backend: fc.Backend) -> None:
    """Nothing is sent, the works say so, and the backend goes on."""

    def leave() -> None:
        with fc.coalesce(backend) as batch:
            works.append(batch.all_reduce(np.ones(3)))
            raise KeyError("why")

    works: list[fc.Work] = []
    expect(KeyError, leave)
    assert works[0].done()
    for _ in range(2):
        check_words(expect(fc.StateError, works[0].wait), "nothing was sent", "KeyError", "why")
    backend.barrier()


def batches_that_differ(backend: fc.Backend, how: str) -> None:
    """The first call that differs is named, with the ranks, and the backend is broken."""
    me, odd = backend.rank, backend.rank == backend.world_size - 1

    def run() -> None:
        with fc.coalesce(backend, label="other" if odd and how == "label" else "") as batch:
            for number in range(40):
                batch.all_gather(np.zeros(3 + (odd and how == "shape" and number == 30)))
            if odd and how == "order":
                batch.broadcast(np.zeros(1))
                batch.reduce(np.zeros(1))
            else:
                batch.reduce(np.zeros(1))
                batch.broadcast(np.zeros(1))
            if odd and how == "length":
                batch.all_reduce(np.zeros(2, np.int8))

    error = expect(fc.MismatchError, run)
    words = {
        "label": ["the batch", "label 'other'", "label ''"],
        "shape": ["call 31 of", "float64 of shape (3,)", "float64 of shape (4,)"],
        "order": ["call 41 of", "broadcast", "reduce"],
        "length": ["call 43 of", "nothing more", "all_reduce(sum, int8"],
    }
    check_words(error, f"rank {backend.world_size - 1}: ", *words[how])
    check_words(expect(fc.MismatchError, backend.barrier), *words[how])
    assert me == backend.rank


def batch_and_other(backend: fc.Backend) -> None:
    """A rank that makes no batch, but calls something else."""

    def run() -> None:
        with fc.coalesce(backend) as batch:
            batch.all_reduce(np.ones(3))

    call = backend.barrier if backend.rank == 0 else run
    check_words(expect(fc.MismatchError, call), "rank 0: barrier", "coalesce")


# Lists.


def lists(backend: fc.Backend) -> None:
    """All sizes of buckets; every dtype, many shapes; results new, given and in place."""
    me, p = backend.rank, backend.world_size
    likes = [
        np.empty(SHAPES[number % len(SHAPES)], oracle.DTYPES[number % 3 * 5])
        for number in range(30)
    ]
    parts = [arrays_of(p, a.shape, a.dtype, str(number)) for number, a in enumerate(likes)]
    totals = [oracle.reduced(part, "sum") for part in parts]
    for bucket_bytes in (1, 50, 400, 25 << 20):
        given = [part[me].copy() for part in parts]
        results = fc.all_reduce_many(given, backend, bucket_bytes=bucket_bytes, label="gradients")
        for number, (result, total) in enumerate(zip(results, totals, strict=True)):
            check_same(result, total, f"number {number}, buckets of {bucket_bytes}")
            check_same(given[number], parts[number][me], f"the input, number {number}")
        outs = [
            (given[n], None, WRITABLE["strided"](np.zeros_like(given[n])))[n % 3]
            for n in range(len(given))
        ]
        results = fc.all_reduce_many(given, backend, out=outs, bucket_bytes=bucket_bytes)
        for number, (result, total) in enumerate(zip(results, totals, strict=True)):
            assert outs[number] is None or result is outs[number]
            check_same(result, total, f"into out, number {number}, buckets of {bucket_bytes}")
    assert fc.all_reduce_many([], backend) == []
    halves = [array_of(me, (number,), np.float16) for number in range(5)]
    for number, mean in enumerate(fc.all_reduce_many(halves, backend, op="mean")):
        expected = oracle.reduced(arrays_of(p, (number,), np.float16), "mean")
        check_same(mean, expected, f"mean, {number}")


def lists_refused(backend: fc.Backend) -> None:
    """What makes no sense is refused before anything is sent."""
    good = [np.ones(3), np.ones(2, np.int32)]
    many = fc.all_reduce_many
    expect_refusal(many, np.ones((2, 3)), backend)
    expect_refusal(many, 3.0, backend)
    expect_refusal(many, good, backend, op="mean")
    expect_refusal(many, good, backend, op="median")
    expect_refusal(many, [np.ones(2), np.array(["text"])], backend)
    expect_refusal(many, good, backend, out=[None])
    expect_refusal(many, good, backend, out=[None, np.ones(2)])
    expect_refusal(many, good, backend, out=np.ones(2))
    expect_refusal(many, good, backend, algorithm="quantum")
    expect_refusal(many, good, backend, timeout=-1)
    expect_refusal(many, good, None)
    for size in (0, -1, 2.5, True, None):
        expect_refusal(many, good, backend, bucket_bytes=size)
    backend.barrier()


def lists_that_differ(backend: fc.Backend) -> None:
    """Lists of equal total size, but of different arrays."""
    sizes = (4, 2) if backend.rank == 0 else (3, 3)
    arrays = [np.ones(size) for size in sizes]
    error = expect(fc.MismatchError, fc.all_reduce_many, arrays, backend)
    check_words(error, "all_reduce", "arrays 0..1 of 2")
