"""``launch`` and ``init``: start the ranks, or become the rank that a launcher started."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdpcore.comm.backend import Backend
from fsdpcore.comm.place import NO_LAUNCHER, RankPlace
from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.launch.addresses import is_loopback
from fsdpcore.launch.blas import blas_limit, limit_for_good
from fsdpcore.launch.config import PREFIX, Config, resolve
from fsdpcore.launch.environment import (
    ELASTIC,
    LAUNCH_VARIABLES,
    detect,
    launched_threads,
    unused,
)
from fsdpcore.launch.external import default_transport, open_reports, place_without_launcher
from fsdpcore.launch.failure_report import report
from fsdpcore.launch.printing import printed_lines, see_launcher
from fsdpcore.launch.processes import run_processes
from fsdpcore.launch.rank import ExceptHook, become, inside_rank, join, name_of, ranks_here
from fsdpcore.launch.rank_process import refuse_during_import
from fsdpcore.launch.supervision import admit_interrupts
from fsdpcore.launch.threads import run_threads

_LOG = logging.getLogger(__name__)


def launch(
    fn: Callable[..., Any],
    *,
    world_size: int | None = None,
    transport: str | None = None,
    args: Sequence[Any] = (),
    **options: Any,
) -> list[Any]:
    """Call ``fn(backend, *args)`` on every rank. Blocks until all have returned.

    ::

        def main(backend):
            return fc.all_reduce(backend.rank, backend)

        if __name__ == "__main__":
            print(fc.launch(main, world_size=4))   # [6, 6, 6, 6]

    In a process that a launcher started (``fsdpcore run``, ``mpirun``, ``srun``, ``torchrun``)
    this joins as that rank, and the launcher's number of ranks counts. Otherwise it starts the
    ranks itself: as threads or as processes of this host, whatever the transport's ranks are. So
    it does when a rank's program calls it in turn.

    Processes import the caller's main module again, so scripts need the
    ``if __name__ == "__main__":`` guard, and ``fn`` must be a function at the top of a module;
    arguments and results are pickled between parent and child, as ``multiprocessing`` does.

    From a notebook, the interactive interpreter or ``python -c``, ``fn`` may be any function, and
    no guard is needed. Ranks get copies of what it uses of the session: what they change stays
    with them. Results that are of the session's classes are of these classes. In a notebook, what
    ranks print appears beneath the cell, with the rank before each line.

    A rank that calls ``sys.exit()`` without a code, or with 0, has ended well, with the result
    None; where this process is itself that rank, it then ends.

    Args:
        fn: the program of one rank.
        world_size: number of ranks to start (default: 1).
        transport: scheme or URL (default: ``sim``; in a launcher's process ``mpi`` if that is an
            MPI's and mpi4py is installed, else ``zmq``).
        args: further arguments of ``fn``.
        **options: settings, options of the transport, and overrides of algorithms. What is not
            given comes from ``FSDPCORE_*`` variables, then from ``fsdpcore.toml``. The settings
            (see ``comm.config.Settings``):

            - ``timeout``, ``rendezvous_timeout``: seconds for an operation, and until all ranks
              have joined; 60 each by default.
            - ``blas_threads``: of each rank; by default the ranks of a host share its cores.
            - ``deterministic``: keep ``algorithm="auto"`` to algorithms that reduce in the
              canonical order, so that the bits are those of every other transport.
            - ``tuning``: file that ``fsdpcore tune`` has written; the same on all ranks.
            - ``algorithms``: what ``"auto"`` is to take, by collective, as in
              ``{"all_reduce": "doubling:0-8KiB;ring:8193-max"}`` (grammar:
              ``collectives.selection.overrides``).
            - ``trace``: directory where every rank writes its last operations when it fails and
              when it closes, for ``fsdpcore trace``; ``trace_operations``: how many, by default
              1000.

    Returns:
        The results of the ranks that this process ran, in rank order.

    Raises:
        ConfigError: an option or URL is wrong; nothing was started.
        ArgumentError: ``fn`` cannot be called, or cannot be passed to a process.
        StateError: called while a rank imports the main module, for want of the guard.
        RankFailedError: a rank failed; ``__cause__`` has its traceback. All ranks were stopped.
            Where this process is itself that rank, its own exception goes through instead.
    """
    refuse_during_import()
    if not callable(fn):
        raise ArgumentError(f"launch() needs a function to call on every rank, got {fn!r}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ArgumentError(f"launch(): args must be a list or tuple of arguments, got {args!r}")
    environ = _environ()
    if environ.get(ELASTIC):
        return [_elastic(fn)(*args)]
    place = _find_place(environ)
    config = _resolve({"transport": transport, "world_size": world_size, **options}, environ, place)
    if place is None and config.transport_class.needs_launcher:
        place = place_without_launcher(config)
    if place is not None:
        place = _meeting(place, config, environ)
        try:
            return [become(fn, args, place, config)]
        except BaseException as error:
            report(place.rank, error, environ)
            raise
    size = launched_threads(environ) or config.world_size or 1
    _warn_of_one(size, config, environ)
    if not config.transport_class.ranks_are_threads:
        return run_processes(fn, args, size, config)
    with blas_limit(config, size), printed_lines():
        return run_threads(fn, args, size, config)


def init(transport: str | None = None, **options: Any) -> Backend:
    """Join as a rank, for those who don't want ``launch``. Blocks until all ranks are there.

    ::

        with fc.init("zmq", timeout=30) as backend:   # run by: fsdpcore run -n 4 script.py
            total = fc.all_reduce(x, backend)

    The rank comes from the launcher that started this process; without one, the job has a single
    rank. An exception that nobody catches then aborts the whole job. Close the backend at the end,
    best with ``with fc.init() as backend:``; what is still open when the interpreter ends is
    closed then.

    Args:
        transport: scheme or URL (default: as for ``launch``).
        **options: as for ``launch``.

    Returns:
        The backend of the whole job, which the caller owns.

    Raises:
        ConfigError: an option or URL is wrong, or nothing says which rank this process is.
        RendezvousError: not all ranks came in time.
        StateError: called while a rank imports the main module, for want of a guard.
    """
    refuse_during_import()
    environ = _environ()
    place = _find_place(environ)
    config = _resolve({"transport": transport, **options}, environ, place)
    cls = config.transport_class
    size = launched_threads(environ) or config.world_size
    if place is None and size > 1:
        raise ConfigError(
            f"init() joins as one rank, but {size} ranks of transport {config.transport!r} are "
            "threads of one process; use launch(), or another transport"
            if cls.ranks_are_threads
            else f"init(): nothing says which of {size} ranks this process is; start it with "
            f"'fsdpcore run -n {size} ...', or use launch()"
        )
    if place is None and config.transport_class.needs_launcher:
        place = place_without_launcher(config)
    if place is None:
        _warn_of_one(1, config, environ)
        place = RankPlace(0, 1, 0, 1, NO_LAUNCHER)
    place = _meeting(place, config, environ)
    backend = cls.threads(1, config)[0] if cls.ranks_are_threads else join(place, config)
    limit_for_good(config, ranks_here(place, backend))
    backend.recorder.configure(config.trace, config.trace_operations)
    if place.world_size > 1:
        ExceptHook(place.rank, environ, backend).install()
    atexit.register(backend.close)
    return backend


def _environ() -> dict[str, str]:
    """Environment variables; without a launcher's, where they speak of the rank that runs this."""
    if not inside_rank():
        return dict(os.environ)
    ours = (*LAUNCH_VARIABLES, "FSDPCORE_WORLD_SIZE")
    return {n: v for n, v in os.environ.items() if n.startswith(PREFIX) and n not in ours}


def _elastic(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, which takes part in an elastic job by being called."""
    if getattr(fn, "elastic_program", False):
        return fn
    raise ConfigError(
        f"fsdpcore run --elastic calls {name_of(fn)}() again when ranks have changed: put "
        "@fc.elastic.run above it, and take a job in place of the backend, or leave --elastic out"
    )


def _find_place(environ: dict[str, str]) -> RankPlace | None:
    """Find out which rank a launcher wants; from then on, uncaught exceptions speak for a rank."""
    place = detect(environ)
    open_reports(environ)
    see_launcher(environ)
    if place is not None:
        ExceptHook(place.rank, environ).install()
        if place.launcher == "fsdpcore run":
            admit_interrupts()
    elif launched_threads(environ):
        ExceptHook(None, environ).install()
        admit_interrupts()
    return place


def _warn_of_one(size: int, config: Config, environ: Mapping[str, str]) -> None:
    """Say so where a job of one is probably one of several that were meant to be one job."""
    if size > 1 or inside_rank():
        return
    if told := unused(environ):
        _LOG.warning(told)
    elif config.port and not is_loopback(config.host):
        _LOG.warning(
            f"this is a job of a single rank, though transport {config.transport!r} names an "
            "address for ranks of several hosts to meet: start them with 'fsdpcore run', or set "
            "FSDPCORE_RANK and FSDPCORE_WORLD_SIZE"
        )


def _meeting(place: RankPlace, config: Config, environ: Mapping[str, str]) -> RankPlace:
    """Let an address in the transport's URL win over one that other software has set."""
    if config.port and "FSDPCORE_RENDEZVOUS" not in environ:
        return replace(place, rendezvous=None)
    return place


def _resolve(
    given: Mapping[str, Any], environ: Mapping[str, str], place: RankPlace | None
) -> Config:
    default = "sim" if place is None else default_transport(place)
    config = resolve(given, environ, Path.cwd(), default_transport=default)
    if place is not None and config.transport_class.ranks_are_threads:
        raise ConfigError(
            f"this process is rank {place.rank} of {place.world_size} ({place.launcher}), but "
            f"ranks of transport {config.transport!r} are threads of one process; start the "
            "script without the launcher, or name a transport between processes"
        )
    return config
