"""Bodies: very many small operations of all kinds, and what a process has before and after."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from support import oracle
from support.arrays import check_same

import fsdpcore as fc

# What a run may leave: caches fill up, and allocators keep what they had once.
SLACK_KIB = 2048
# Not all of ``Pss``: a page of a library counts more where programs have ended that use it, too.
MEMORY = "Rss", "Pss_Anon", "Pss_Shmem"
ROUND = 86  # operations


def soak(backend: fc.Backend, operations: int) -> dict[str, list[int]]:
    """Do so many operations in rounds that are all alike; compare after the first tenth and last.

    Returns:
        Descriptors, threads and memory (``MEMORY``, in KiB) at both moments, of this rank.
    """
    rounds = operations // ROUND
    warm = max(1, rounds // 10)
    for number in range(warm):
        _round(backend, number)
    before = _settled(backend, threads=1000)
    for number in range(warm, rounds):
        _round(backend, number)
    after = _settled(backend, before["threads"])
    return {name: [before[name], after[name]] for name in before}


def _settled(backend: fc.Backend, threads: int) -> dict[str, int]:
    """What this process has, once threads that end by themselves have done so."""
    backend.barrier()
    gc.collect()
    backend.barrier()
    end = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.01)
    found = {"threads": threading.active_count(), "descriptors": len(os.listdir("/proc/self/fd"))}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in MEMORY:
            found[name] = int(value.split()[0])
    backend.barrier()
    return found


def _round(backend: fc.Backend, number: int) -> None:
    """All kinds of small operations, which are right; what it does depends on ``number % 97``."""
    me, p = backend.rank, backend.world_size
    chance = random.Random(number % 97)
    rows = chance.choice([1, 5, 100, 700])
    lent = backend.empty(rows)
    lent[...] = me
    values = np.full(rows, float(me), np.float32)
    total, ranks = p * (p - 1) / 2, np.arange(p, dtype=np.float32)
    for source in (lent, values):
        for _ in range(12):
            reduced = fc.all_reduce(source, backend)
            gathered = fc.all_gather(source, backend)
            fc.broadcast(source, backend, root=number % p)
        check_same(reduced, np.full(rows, total, np.float32), "sum")
        check_same(gathered, np.repeat(ranks, rows), "all_gather")
        fc.reduce_scatter(source, backend)
        fc.all_to_all(source, backend)
        fc.reduce(source, backend, op="max", root=number % p)
        fc.gather(source, backend, root=number % p)
    backend.barrier()
    large = backend.empty(3000 + rows)
    large[...] = me
    out = backend.empty(large.size) if number % 2 else None
    expected = np.full(large.size, total, np.float32)
    check_same(fc.all_reduce(large, backend, out=out), expected, "large sum")
    works = [fc.all_reduce(values, backend, async_op=True) for _ in range(2)]
    for work in works:
        work.wait()
    _messages(backend, rows)
    if number % 50 == 0:
        _rare(backend, number)


def _messages(backend: fc.Backend, rows: int) -> None:
    me, p = backend.rank, backend.world_size
    if p == 1:
        return
    out = backend.empty(rows, np.int64)
    receiving = backend.irecv(out, (me - 1) % p, tag=3)
    backend.send(np.full(rows, me), (me + 1) % p, tag=3)
    receiving.wait()
    assert (out == (me - 1) % p).all()


def _rare(backend: fc.Backend, number: int) -> None:
    """What makes memory, descriptors and threads of its own."""
    p = backend.world_size
    if backend.capabilities.shared_window:
        window = backend.shared_window(p, np.int32)
        window[backend.rank] = number % 1000
        backend.barrier()
        assert window.tolist() == [number % 1000] * p
    group = backend.sub(range(p))
    parts = [np.full(5000, float(rank)) for rank in range(p)]
    work: Any = fc.all_reduce(parts[backend.rank], group, async_op=True)
    check_same(work.wait(), oracle.reduced(parts, "sum"), "in a group")
    group.barrier()
    group.close()
