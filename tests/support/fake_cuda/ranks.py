"""Ranks of the stand-in's own tests, and of anybody who needs bare communicators: threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 30.0
"""Seconds: longer than anything takes that does not hang."""


def on_ranks(body: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Call ``body(rank)`` on threads, each with its own GPU; raise what the first of them raises.

    Within ``installed()``.
    """
    import cupy

    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            cupy.cuda.Device(rank).use()
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    hanging = [thread.name for thread in threads if thread.is_alive()]
    assert not hanging, f"{hanging} hang"
    return results


def on_comms(body: Callable[[Any], Any], ranks: int = 2) -> list[Any]:
    """Call ``body(communicator)`` on ranks that have one together, and destroy it after.

    They destroy it together, as NCCL asks of the ranks of a host: a root that is the first to leave
    takes along the broadcast that the others have not come to.
    """
    from cupy.cuda import nccl

    unique_id = nccl.get_unique_id()

    def run(rank: int) -> Any:
        comm = nccl.NcclCommunicator(ranks, unique_id, rank)
        return comm, body(comm)

    comms, results = zip(*on_ranks(run, ranks), strict=True)
    on_ranks(lambda rank: comms[rank].destroy(), ranks)
    return list(results)
