"""Bodies: systems that run out of memory or descriptors while ranks begin to share memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import published
from support.arrays import check_same
from support.bodies.memory import AT_ONCE, random_case

import fsdpcore as fc
from fsdpcore.collectives.state import state_of


@contextlib.contextmanager
def without(call: str, error: OSError) -> Iterator[None]:
    """In this process, ``os`` has no such call any more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, _failing(error))
        yield


def _failing(error: OSError) -> Any:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def one_rank_without(backend: fc.Backend, culprit: int, call: str, error: OSError) -> list[str]:
    """All fall back together, and all that follows is right; returns what was logged."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("fsdpcore")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with without(call, error) if backend.rank == culprit else contextlib.nullcontext():
            for number in range(12):
                published.run_case(backend, random_case(backend.world_size, number), str(number))
            assert state_of(backend).context is not None
            assert state_of(backend).context.region is None
            if backend.rank == culprit:
                assert backend.empty(3 << 20).shape == (3 << 20,)
            with pytest.raises(fc.UnsupportedError):
                backend.shared_window(3)
            check_same(backend.empty((2, 0)), np.zeros((2, 0), np.float32), "empty")
        backend.barrier()
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    # A group that is made when there is memory again has its own.
    group = backend.sub(range(backend.world_size))
    published.run_case(group, random_case(group.world_size, 5), "5")
    assert state_of(group).context is not None
    assert state_of(group).context.region is not None
    group.close()
    return records


def memory_is_required(backend: fc.Backend, culprit: int, error: OSError) -> str:
    """With ``shm=on`` it is an error of all ranks; returns it in words."""
    with without("os.memfd_create", error) if backend.rank == culprit else contextlib.nullcontext():
        with pytest.raises((fc.ConfigError, fc.PeerFailedError)) as caught:
            fc.all_reduce(np.ones(3), backend)
        return f"{type(caught.value).__name__}: {caught.value}"


def later_without(backend: fc.Backend, culprit: int, call: str, error: OSError) -> None:
    """Where there is an area already: arrays are private, and windows refused to all."""
    p, rows = backend.world_size, 3 * AT_ONCE
    backend.barrier()
    total = np.full(rows, p, np.float32)
    refuses = culprit == 0 or call == "mmap.mmap"  # the others map what the first one makes
    with without(call, error) if backend.rank == culprit else contextlib.nullcontext():
        for _ in range(3):
            if refuses:
                with pytest.raises(fc.UnsupportedError):
                    backend.shared_window((3, 5))
            else:
                check_same(backend.shared_window(2), np.zeros(2, np.float32), "a window")
            source = backend.empty(rows)
            source[...] = 1
            check_same(fc.all_reduce(source, backend), total, "all_reduce")
            check_same(fc.all_reduce(source, backend, out=source), total, "in place")
        backend.barrier()
    check_same(backend.shared_window((3, 5)), np.zeros((3, 5), np.float32), "a window")
    backend.barrier()
