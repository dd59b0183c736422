"""The process of a rank that ``launch`` started: what it does from its first line to its last."""

from __future__ import annotations

import linecache
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ArgumentError, StateError, in_one_line, in_words, is_misuse
from fsdpcore.launch.config import Config
from fsdpcore.launch.failure_report import is_consequence
from fsdpcore.launch.rank import become
from fsdpcore.launch.supervision import admit_interrupts

_importing_main: ContextVar[bool] = ContextVar("importing_main", default=False)
_GUARD = "'if __name__ == \"__main__\":'"


@dataclass(frozen=True)
class RankTask:
    """What every rank is to do: import ``main_module``, then unpickle ``program``.

    That is a function, its arguments and a ``Config``. Where there is no main module to import,
    they are pickled by value; ``sources`` has the lines of their code, and ``classes`` names their
    classes: see ``session``.
    """

    main_module: dict[str, str]
    arguments: list[str]
    program: bytes
    sources: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankOutcome:
    """What a rank's process reports before it ends; ``result`` is pickled."""

    result: bytes = b""
    error: str = ""
    traceback: str = ""
    consequence: bool = False
    misuse: bool = False


def main(job_fd: int, report_fd: int) -> None:
    """Read what to do, do it, report. Never returns."""
    try:
        admit_interrupts()
        with open(job_fd, "rb") as pipe:
            place: RankPlace = pickle.load(pipe)  # noqa: S301 (from the parent)
            job: RankTask = pickle.load(pipe)  # noqa: S301
        outcome = _run(place, job)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program has ended
        with open(report_fd, "wb") as pipe:
            pickle.dump(outcome, pipe, pickle.HIGHEST_PROTOCOL)
    except KeyboardInterrupt:
        # The parent was interrupted, and speaks for its ranks.
        sys.exit(128 + signal.SIGINT)
    except (EOFError, BrokenPipeError):
        sys.exit(1)  # the parent is gone
    sys.exit(1 if outcome.error else 0)


def _run(place: RankPlace, job: RankTask) -> RankOutcome:
    try:
        fn, args, config = _load(job)
        dumps = _result_dumps(job)
        result = become(fn, args, place, config)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return RankOutcome(pickle.dumps(None))
        return RankOutcome(
            error=in_words(error),
            traceback=traceback.format_exc(),
            consequence=is_consequence(error),
            misuse=is_misuse(error),
        )
    try:
        return RankOutcome(dumps(result))
    except Exception as error:
        reason = f"its result cannot be pickled for the parent process ({in_one_line(error)})"
        return RankOutcome(error=reason, traceback=traceback.format_exc())


def _load(job: RankTask) -> tuple[Callable[..., Any], Sequence[Any], Config]:
    with _main_import():
        multiprocessing.spawn.prepare({"sys_argv": job.arguments, **job.main_module})
    linecache.cache.update(job.sources)
    try:
        fn, args, config = pickle.loads(job.program)  # noqa: S301 (from the parent)
    except Exception as error:
        raise ArgumentError(
            f"the function or its arguments cannot be unpickled in a rank's process "
            f"({in_one_line(error)}); they must come from the top of a module that the process can "
            "import"
        ) from error
    return fn, args, config


def _result_dumps(job: RankTask) -> Callable[[Any], bytes]:
    """How to pickle the result; to be asked once the program is loaded, before it runs."""
    if not job.main_module:
        from fsdpcore.launch.session import SessionClasses

        return SessionClasses(job.classes).dumps
    return lambda result: pickle.dumps(result, pickle.HIGHEST_PROTOCOL)


@contextmanager
def _main_import() -> Iterator[None]:
    token = _importing_main.set(True)
    try:
        yield
    except SystemExit as error:
        raise StateError(
            f"the main module called sys.exit({error.code!r}) when a rank's process imported it: "
            f"put what the script does under {_GUARD}"
        ) from error
    finally:
        _importing_main.reset(token)


def refuse_during_import() -> None:
    """Raise ``StateError`` while a rank's process imports the main module of its parent."""
    if _importing_main.get():
        raise StateError(
            "launch() or init() was called while the process of a rank imported the main module: "
            f"put what the script does under {_GUARD} so that it runs in the first process only"
        )


def main_module() -> dict[str, str]:
    """How a rank's process imports the calling process's main module.

    Empty if it cannot: in a notebook, in the interactive interpreter, or where the program came
    from the command line or from standard input.
    """
    module = sys.modules["__main__"]
    name = getattr(getattr(module, "__spec__", None), "name", None)
    if name is not None:
        return {"init_main_from_name": name}
    file = getattr(module, "__file__", None)
    if file is None or not os.path.isfile(file):
        return {}
    return {"init_main_from_path": os.path.abspath(file)}


def command(job_fd: int, report_fd: int) -> list[str]:
    """The command line of a rank's process: this interpreter with its options, and ``main``."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    # What this process could import, the rank can: this package first of all.
    path = [entry or os.getcwd() for entry in sys.path]
    program = (
        f"import sys; sys.path[:] = {path!r}; "
        f"from fsdpcore.launch.rank_process import main; main({job_fd}, {report_fd})"
    )
    return [sys.executable, *options, "-c", program]
