"""How many threads the BLAS of a rank may use.

Their number changes the bits of a matrix product, so it must not depend on the transport; and
ranks that share cores must not start more threads than there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

from fsdpcore.launch.config import Config


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(config: Config, local_world_size: int) -> int:
    """What the configuration says, or an even share of this host's cores."""
    return config.blas_threads or max(1, available_cores() // local_world_size)


@contextmanager
def blas_limit(config: Config, local_world_size: int) -> Iterator[None]:
    """Limit the BLAS threads of this process's ranks, and put the old limit back at the end."""
    with threadpool_limits(threads_per_rank(config, local_world_size), user_api="blas"):
        yield


def limit_for_good(config: Config, local_world_size: int) -> None:
    """Limit the BLAS threads for the life of this process."""
    threadpool_limits(threads_per_rank(config, local_world_size), user_api="blas")
