"""What a rank does around its program: it calls it, and ends well or badly."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

from fsdpcore.comm.backend import Backend
from fsdpcore.comm.place import RankPlace
from fsdpcore.comm.transport import Transport, transport_of
from fsdpcore.core.errors import ConfigError, ElasticError, RendezvousError, in_one_line
from fsdpcore.launch.blas import blas_limit
from fsdpcore.launch.config import Config
from fsdpcore.launch.environment import meeting_hint
from fsdpcore.launch.failure_report import is_consequence, report
from fsdpcore.launch.printing import print_lines

_inside_rank: ContextVar[bool] = ContextVar("inside_rank", default=False)


def inside_rank() -> bool:
    """Whether the caller is the program of a rank: what it launches is a job of its own."""
    return _inside_rank.get()


def run_rank(fn: Callable[..., Any], backend: Backend, args: Sequence[Any]) -> Any:
    """Return ``fn(backend, *args)``; close the backend, or abort the job if ``fn`` fails.

    ``sys.exit()`` with no code or 0 is a way to end well: the others may still need what this
    rank has sent them.
    """
    ending: SystemExit | None = None
    result = None
    with backend:
        try:
            with program(fn, backend):
                result = fn(backend, *args)
        except SystemExit as exiting:
            if exiting.code not in (None, 0):
                raise
            ending = exiting
    if ending is not None:
        raise ending
    return result


@contextmanager
def program(fn: Callable[..., Any], backend: Backend) -> Iterator[None]:
    """Within it, this thread runs the program of a rank."""
    recorder = transport_of(backend).recorder
    token = _inside_rank.set(True)
    recorder.begin_program(name_of(fn))
    try:
        yield
        recorder.end_program()
    finally:
        _inside_rank.reset(token)


def name_of(fn: Callable[..., Any]) -> str:
    """What to call a rank's function."""
    name = getattr(fn, "__name__", "main")
    return name if str(name).isidentifier() else "main"


def become(fn: Callable[..., Any], args: Sequence[Any], place: RankPlace, config: Config) -> Any:
    """Join as rank ``place.rank``, run ``fn`` and leave, telling the others if it fails."""
    backend = join(place, config)
    with blas_limit(config, ranks_here(place, backend)):
        backend.recorder.configure(config.trace, config.trace_operations)
        return run_rank(fn, backend, args)


def join(place: RankPlace, config: Config) -> Transport:
    """Become rank ``place.rank``; an error of the meeting says how its address came about."""
    print_lines()
    try:
        return config.transport_class.join(place, config)
    except RendezvousError as error:
        if hint := meeting_hint(place, os.environ):
            error.args = (f"{error}; {hint}",)
        raise


def ranks_here(place: RankPlace, backend: Backend) -> int:
    """How many ranks share this host's cores; where no launcher says, those that were found."""
    if place.local_known:
        return place.local_world_size
    return backend.hosts.count(backend.hosts[backend.rank])


class ExceptHook:
    """Ends the job when an exception leaves a rank's program, and prints what its user needs.

    That is a traceback from the rank that failed, one line from each that it took along, one
    line for what a traceback does not explain better, and nothing for Ctrl-C, of which the
    launcher speaks.

    Args:
        rank: of this process; None for a script whose ranks are threads.
        environ: environment variables.
        backend: to abort, if the rank has joined and nobody else will.
    """

    def __init__(
        self, rank: int | None, environ: Mapping[str, str], backend: Backend | None = None
    ) -> None:
        self._rank = rank or 0
        self._label = "the script" if rank is None else f"rank {rank}"
        self._environ = environ
        self._backend = backend
        previous: Any = sys.excepthook
        self._before: Any = previous._before if isinstance(previous, ExceptHook) else previous

    def install(self) -> None:
        """Become ``sys.excepthook``, in the place of an earlier one of this kind."""
        sys.excepthook = self

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        report(self._rank, error, self._environ)
        if self._backend is not None:
            self._backend.abort(in_one_line(error))
        self._print(kind, error, trace)
        if self._backend is not None:
            self._backend.close()

    def _print(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        if is_consequence(error):
            if "KeyboardInterrupt" not in str(error):
                _write(f"{self._label}: stopped, because {_first_line(error)}\n")
        elif isinstance(error, (ConfigError, ElasticError, RendezvousError)):
            _write(f"{self._label} failed: {kind.__name__}: {error}\n")
        elif self._before is sys.__excepthook__:
            lines = traceback.format_exception(kind, error, trace)
            _write(f"{self._label} failed:\n{''.join(lines)}")
        else:
            _write(f"{self._label} failed:\n")
            self._before(kind, error, trace)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _write(text: str) -> None:
    """Print to standard error in one piece, so that what ranks print does not mix."""
    sys.stderr.write(text)
    sys.stderr.flush()
