"""``launch`` and ``init``: start the ranks, or become the rank that a launcher started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from threadpoolctl import threadpool_limits

from fsdpcore.backend import Backend
from fsdpcore.config import Config, resolve
from fsdpcore.environment import Place, detect, launched_threads
from fsdpcore.errors import ConfigError, PeerFailedError
from fsdpcore.launch_processes import run_processes
from fsdpcore.launch_threads import run_threads
from fsdpcore.transport import Transport


def launch(
    fn: Callable[..., Any],
    *,
    world_size: int | None = None,
    transport: str | None = None,
    args: Sequence[Any] = (),
    **options: Any,
) -> list[Any]:
    """Call ``fn(backend, *args)`` on every rank. Blocks until all have returned.

    In a process that a launcher started (``fsdpcore run``, ``mpirun``, ``srun``, ``torchrun``)
    this joins as that rank, and the launcher's number of ranks counts. Otherwise it starts the
    ranks itself: as threads or as processes of this host, whatever the transport's ranks are.
    Processes import the caller's main module again, so scripts need the
    ``if __name__ == "__main__":`` guard, and ``fn`` must be a function at the top of a module;
    arguments and results are pickled between parent and child, as ``multiprocessing`` does.

    Args:
        fn: the program of one rank.
        world_size: number of ranks to start.
        transport: scheme or URL.
        args: further arguments of ``fn``.
        **options: settings (``timeout``, ``rendezvous_timeout``, ``blas_threads``) and options of
            the transport. What is not given comes from ``FSDPCORE_*`` variables, then from
            ``fsdpcore.toml``.

    Returns:
        The results of the ranks that this process ran, in rank order.

    Raises:
        ConfigError: an option or URL is wrong; nothing was started.
        RankFailedError: a rank failed; ``__cause__`` has its traceback. All ranks were stopped.
    """
    environ = dict(os.environ)
    given = {"transport": transport, "world_size": world_size, **options}
    config = resolve(given, environ, Path.cwd())
    place = detect(environ)
    if config.transport_class.ranks_are_threads:
        if place is not None:
            raise ConfigError(_conflict(place, config))
        size = launched_threads(environ) or config.world_size or 1
        with blas_limit(config, size):
            return run_threads(fn, args, size, config)
    if place is None:
        return run_processes(fn, args, config.world_size or 1, config, become)
    return [become(fn, args, place, config)]


def init(transport: str | None = None, **options: Any) -> Backend:
    """Join as a rank, for those who don't want ``launch``. Blocks until all ranks are there.

    The rank comes from the launcher that started this process; without one, the job has a single
    rank. An exception that nobody catches then aborts the whole job. Close the backend at the end,
    best with ``with fc.init() as backend:``.

    Raises:
        ConfigError: an option or URL is wrong, or nothing says which rank this process is.
        RendezvousError: not all ranks came in time.
    """
    environ = dict(os.environ)
    config = resolve({"transport": transport, **options}, environ, Path.cwd())
    place = detect(environ)
    size = launched_threads(environ) or config.world_size
    if config.transport_class.ranks_are_threads:
        if place is not None:
            raise ConfigError(_conflict(place, config))
        if size > 1:
            raise ConfigError(
                f"init() joins as one rank, but {size} ranks of transport {config.transport!r} are "
                "threads of one process; use launch(), or another transport"
            )
        return config.transport_class.threads(1, config)[0]
    if place is None:
        if size > 1:
            raise ConfigError(
                f"init(): nothing says which of {size} ranks this process is; start it with "
                f"'fsdpcore run -n {size} ...', or use launch()"
            )
        place = Place(0, 1, 0, 1, "no launcher")
    # For the life of the process: there is no moment at which this could be taken back.
    threadpool_limits(_blas_threads(config, place.local_world_size), user_api="blas")
    return _join(place, config)


def become(fn: Callable[..., Any], args: Sequence[Any], place: Place, config: Config) -> Any:
    """Join as rank ``place.rank``, run ``fn`` and leave, telling the others if it fails."""
    with blas_limit(config, place.local_world_size), _join(place, config) as backend:
        return fn(backend, *args)


def _join(place: Place, config: Config) -> Transport:
    backend = config.transport_class.join(place, config)
    if place.world_size > 1:
        sys.excepthook = _ExceptHook(backend)
    return backend


class _ExceptHook:
    """Ends the job when an exception leaves a rank's program, and prints what its user needs.

    That is a traceback from the rank that failed, and one line from each that failed with it.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._before = sys.excepthook

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        rank = self._backend.rank
        self._backend.abort(f"{kind.__name__}: {error}")
        if isinstance(error, PeerFailedError):
            print(f"rank {rank}: stopped, because {error}", file=sys.stderr)  # noqa: T201
        elif not issubclass(kind, KeyboardInterrupt):
            print(f"rank {rank} failed:", file=sys.stderr)  # noqa: T201
            self._before(kind, error, traceback)
        self._backend.close()


@contextmanager
def blas_limit(config: Config, local_world_size: int) -> Iterator[None]:
    """Limit the BLAS threads of this process's ranks, and put the old limit back at the end.

    The number of threads changes the bits of a matrix product, so it must not depend on the
    transport; and ranks that share cores must not start more threads than there are.
    """
    with threadpool_limits(_blas_threads(config, local_world_size), user_api="blas"):
        yield


def _blas_threads(config: Config, local_world_size: int) -> int:
    return config.blas_threads or max(1, available_cores() // local_world_size)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _conflict(place: Place, config: Config) -> str:
    return (
        f"this process is rank {place.rank} of {place.world_size} ({place.launcher}), but ranks of "
        f"transport {config.transport!r} are threads of one process; start the script without the "
        "launcher, or name a transport between processes"
    )
