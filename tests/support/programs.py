"""Programs of ranks, in a module that a rank's process can import quickly."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore import Backend


class Unpicklable:
    """Cannot leave its process."""

    def __reduce__(self) -> Any:
        raise TypeError("this stays here")


class Unloadable:
    """Can leave its process, but arrive nowhere."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("cannot be loaded")


def identify(backend: Backend, *args: object) -> tuple[int, int, tuple[object, ...]]:
    """Return who this is, after everybody has been heard of."""
    total = fc.all_reduce(np.int64(backend.rank), backend)
    assert total == backend.world_size * (backend.world_size - 1) // 2
    return backend.rank, backend.world_size, args


def whereabouts(backend: Backend) -> tuple[int, int]:
    """Return the process and the number of BLAS threads."""
    from threadpoolctl import threadpool_info

    backend.barrier()
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return os.getpid(), max(pools, default=0)


def big(backend: Backend, megabytes: int) -> np.ndarray[Any, Any]:
    """Return an array that tells its rank."""
    return np.full(megabytes * 1_000_000, backend.rank, np.uint8)


def returns(backend: Backend, kind: str) -> object:
    """Rank 1 returns something that cannot travel."""
    backend.barrier()
    things = {"unpicklable": Unpicklable, "unloadable": Unloadable}
    return things[kind]() if backend.rank == 1 else None


def fails(backend: Backend, how: str) -> None:
    """Rank 1 fails in some way, while the others wait for it."""
    backend.barrier()
    if backend.rank == 1:
        _fail(how)
    backend.barrier()
    time.sleep(60)


def _fail(how: str) -> None:
    if how == "raise":
        raise ValueError("rank one is unwell")
    if how == "misuse":
        raise fc.ArgumentError("rank one has too few sequences")
    if how == "exit 3":
        sys.exit(3)
    if how == "os._exit 0":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(how)


def leaves(backend: Backend) -> int:
    """Every rank ends well with sys.exit, the first while others still communicate."""
    if backend.rank == 0:
        backend.send(np.arange(5), 1)
        sys.exit()
    if backend.rank == 1:
        time.sleep(0.2)
        assert backend.recv(np.empty(5, np.int64), 0).sum() == 10
        sys.exit(0)
    return backend.rank


def wraps(backend: Backend) -> None:
    """Rank 0 fails; the others raise an error of their own because of that."""
    if backend.rank == 0:
        time.sleep(0.2)
        raise KeyError("the cause")
    try:
        backend.barrier()
    except fc.PeerFailedError as error:
        raise RuntimeError("training ended early") from error


def computes(backend: Backend) -> None:
    """Rank 0 fails while rank 1 counts, in Python alone, and hears nothing."""
    backend.barrier()
    if backend.rank == 0:
        raise ValueError("rank zero is unwell")
    count = 0
    while True:
        count += 1


def nests(backend: Backend, transport: str) -> list[Any]:
    """Every rank launches a job of its own."""
    backend.barrier()
    inner = fc.launch(identify, world_size=2, transport=transport, args=(backend.rank,))
    backend.barrier()
    return inner


def threads_left() -> list[str]:
    """Names of threads besides the main one."""
    return [thread.name for thread in threading.enumerate()][1:]
