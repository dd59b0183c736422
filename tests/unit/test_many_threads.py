"""Simulated jobs of many ranks: what a rank does must not grow with their number."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import fsdpcore as fc


def _much(backend: fc.Backend) -> float:
    for _ in range(10):
        backend.barrier()
    for size in (1, 16, 4096):
        total = fc.all_reduce(np.full(size, backend.rank, np.float32), backend)
    return float(total[0])


def test_hundreds_of_ranks_meet_reduce_and_leave() -> None:
    """It takes about a second; where ranks looked at each other, it took a minute."""
    start = time.monotonic()
    assert fc.launch(_much, world_size=512, transport="sim") == [512 * 511 / 2] * 512
    assert time.monotonic() - start < 15


def test_who_called_something_else_is_told_in_a_large_group() -> None:
    def differ(backend: fc.Backend) -> str:
        backend.barrier()
        with pytest.raises(fc.MismatchError) as found:
            fc.barrier(backend, label="other" if backend.rank == 77 else "")
        return str(found.value)

    texts = fc.launch(differ, world_size=100, transport="sim")
    assert len(set(texts)) == 1
    assert "rank 77" in texts[0]


def _misses(backend: fc.Backend, over: threading.Event) -> None:
    if backend.rank % 3 == 0:
        over.wait(20)
    else:
        try:
            backend.barrier(timeout=0.5)
        finally:
            over.set()


def _differs(backend: fc.Backend, over: threading.Event) -> None:
    fc.all_reduce(np.ones(1 + backend.rank * (backend.rank % 2)), backend)


def _receives(backend: fc.Backend, over: threading.Event) -> None:
    if backend.rank == 0:
        backend.recv(np.ones(1), fc.ANY, timeout=0.5)
    over.wait(1.5)


def _fails(backend: fc.Backend) -> None:
    raise ValueError("on purpose")


def _makes_a_group(backend: fc.Backend, over: threading.Event) -> None:
    group = backend.sub(range(backend.world_size - 1, -1, -1))
    group.close()
    group.barrier()


def _names_others(backend: fc.Backend, over: threading.Event) -> None:
    others = [rank for rank in range(0, backend.world_size, 2) if rank != backend.rank]
    backend.sub([*others, *others])


def _has_other_values(backend: fc.Backend, over: threading.Event) -> None:
    params = {"w": np.full(4, backend.rank % 5, np.float32)}
    fc.FSDP([fc.Unit("one", params)], backend, optimizer=fc.optim.SGD(lr=1))


@pytest.mark.parametrize(
    "breaks",
    [_misses, _receives, _fails, _makes_a_group, _names_others, _has_other_values],
)
def test_errors_of_hundreds_of_ranks_name_a_few(breaks: Any) -> None:
    said = []

    def main(backend: fc.Backend, over: threading.Event) -> None:
        try:
            breaks(backend, *([] if breaks is _fails else [over]))
        except fc.FsdpcoreError as error:
            said.extend([str(error), repr(backend)])
            raise

    with pytest.raises(fc.RankFailedError) as found:
        fc.launch(main, world_size=100, transport="sim", args=(threading.Event(),))
    assert max(map(len, [str(found.value), *said])) < 700


def _groups(backend: fc.Backend) -> tuple[Any, ...]:
    half = backend.split(backend.rank % 2, key=-backend.rank)
    assert half is not None
    other = backend.sub(range(backend.rank % 2, backend.world_size, 2))
    return backend.ranks, backend.hosts, half.ranks, half.hosts, other.ranks, other.hosts


def test_members_of_a_group_have_its_list_of_ranks_in_common() -> None:
    """Lists of all ranks on each of them would be a square of memory."""
    found = fc.launch(_groups, world_size=100, transport="sim://?hosts=10")
    even, odd = tuple(range(0, 100, 2)), tuple(range(1, 100, 2))
    assert found[0][2] == even[::-1]
    assert found[1][2] == odd[::-1]
    assert found[1][4] == odd
    assert len({id(each) for ranks in found for each in ranks}) <= 2 + 3 * 2 + 1
