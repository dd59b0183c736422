"""Bodies: arrays to write to that do not fit are refused, and nothing was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support.bodies.point_to_point import check_words, expect
from support.spmd_job import meet

import fsdpcore as fc

Call = Callable[[Any], Any]  # takes ``out``


def _calls(backend: fc.Backend) -> Iterator[tuple[str, Call, Any, str]]:
    """Give the collectives: name, call, result, and what this rank knows of ``out`` before.

    That is "all" of it, or all but the "rows", or that it is an "array". The result is None where
    there is none, and ``out`` is not looked at.
    """
    me, p = backend.rank, backend.world_size
    ones, root = np.ones((p, 2)), me == 0
    rows = np.full((me, 2), float(me))
    joined = np.concatenate([np.full((rank, 2), float(rank)) for rank in range(p)])
    mine = np.arange(2.0 * p).reshape(p, 2)
    counts, every = [1] * p, np.ones((p * p, 2))
    for name in ("all_reduce", "broadcast", "scan"):
        function = getattr(fc, name)
        expected = {"all_reduce": p * ones, "broadcast": ones, "scan": (me + 1) * ones}[name]
        yield name, lambda out, f=function: f(ones, backend, out=out), expected, "all"
    yield "reduce", lambda out: fc.reduce(ones, backend, out=out), p * ones if root else None, "all"
    yield "gather", lambda out: fc.gather(ones, backend, out=out), every if root else None, "all"
    yield "all_gather", lambda out: fc.all_gather(ones, backend, out=out), every, "all"
    yield "all_to_all", lambda out: fc.all_to_all(ones, backend, out=out), ones, "all"
    yield (
        "reduce_scatter",
        lambda out: fc.reduce_scatter(ones, backend, out=out),
        np.full((1, 2), float(p)),
        "all",
    )
    yield (
        "reduce_scatter_v",
        lambda out: fc.reduce_scatter_v(ones, backend, counts, out=out),
        np.full((1, 2), float(p)),
        "all",
    )
    yield "all_gather_v", lambda out: fc.all_gather_v(rows, backend, out=out), joined, "rows"
    yield (
        "gather_v",
        lambda out: fc.gather_v(rows, backend, out=out),
        joined if root else None,
        "rows",
    )
    yield (
        "all_to_all_v",
        lambda out: fc.all_to_all_v(ones, backend, counts, out=out),
        ones,
        "rows",
    )
    yield (
        "all_to_all_v, told",
        lambda out: fc.all_to_all_v(ones, backend, counts, recv_counts=counts, out=out),
        ones,
        "all",
    )
    given, known = (mine, "all") if root else (None, "array")
    told = counts if root else None
    yield "scatter", lambda out: fc.scatter(given, backend, out=out), mine[me : me + 1], known
    yield (
        "scatter_v",
        lambda out: fc.scatter_v(given, backend, told, out=out),
        mine[me : me + 1],
        known,
    )


def _wrong(result: Any, known: str) -> Iterator[Any]:
    """Give arrays that cannot take the result, as far as is known of it."""
    read_only = np.zeros_like(result)
    read_only.flags.writeable = False
    yield from (result.tolist(), read_only, np.zeros(()), np.zeros(result.shape, "S8"))
    if known != "array":
        yield np.zeros(result.shape, np.float32)
        yield np.zeros((*result.shape[:-1], 3))
        yield np.zeros(result.size)
    if known == "all":
        yield np.zeros((len(result) + 1, *result.shape[1:]))


def refused(backend: fc.Backend) -> None:
    """The ranks take turns in passing what is wrong; the job goes on, to the right result."""
    for number in range(len(list(_calls(backend)))):
        name, call, result, known = list(_calls(backend))[number]
        if result is None:
            assert call([]) is None
            continue
        for out in _wrong(result, known):
            error = expect(fc.ArgumentError, call, out)
            assert "out " in str(error), f"{name}: {error}"
        out = np.zeros_like(result)
        assert call(out) is out
        np.testing.assert_array_equal(out, result, name)
    with fc.coalesce(backend) as batch:
        expect(fc.ArgumentError, batch.all_reduce, np.ones(3), out=np.ones(4))
        work = batch.all_reduce(np.ones(3))
    np.testing.assert_array_equal(work.result(), np.full(3, float(backend.world_size)))


def not_foreseen(backend: fc.Backend, what: str) -> None:
    """What the others send does not fit: it says so on every rank, and the job has ended."""
    me, last = backend.rank, backend.world_size - 1
    call, result = {name: each for name, *each, _ in _calls(backend)}[what]
    at = 0 if what == "gather_v" else last
    out = np.zeros((len(result) + 2, 2)) if me == at else None

    def both() -> None:
        call(out)
        backend.barrier()

    error = expect(fc.MismatchError, both)
    check_words(error, f"{what} #1: ", f"does not fit into out of rank {at}", "pass no out")
    meet()
