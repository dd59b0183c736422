"""Watching over the processes of a job: the first that fails ends them all."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, TypeVar

from fsdpcore.core.errors import RankFailedError

# After one rank failed, the others have this long to end by themselves, then to heed SIGTERM.
GRACE_SECONDS = 1.4
TERM_SECONDS = 0.4
_KILL_SECONDS = 10.0
# The longest single wait of a launching thread. A signal that the system delivers just before a
# wait begins only sets a flag, and the wait, which knows nothing of it, is not cut short.
SLICE_SECONDS = 0.2
# Where the system cannot wake us when a process ends, we look this often.
_POLL_SECONDS = 0.01


class LaunchedProcess:
    """A process that leads a session of its own, and that the kernel ends with its launcher.

    So a terminal's Ctrl-C reaches the launcher only, which passes it on once; and whatever the
    process has started can be ended with it. SIGINT is blocked from the start, until a rank is
    able to end without a traceback: ``admit_interrupts``.

    Attributes:
        stopped: it was made to end, by ``stop``.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        self.stopped = False
        self._code: int | None = None
        first = [sys.executable, "-I", "-S", str(Path(__file__).with_name("exec_rank.py"))]
        with _interrupts_blocked():  # inherited by the process
            self._process = subprocess.Popen(  # noqa: S603 (the user's own command)
                [*first, str(os.getpid()), *command],
                env=None if environ is None else dict(environ),
                pass_fds=pass_fds,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # not in every container
                self._pidfd = os.pidfd_open(self.pid)

    @property
    def pid(self) -> int:
        """The process id, which is that of its process group as well."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code (negative: minus the signal) once it has ended, else None.

        An ended process is left as a zombie until ``close``, so that its id, and its group's,
        cannot come to mean another process.
        """
        if self._code is None and hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return None
                exited = ended.si_code == os.CLD_EXITED
                self._code = ended.si_status if exited else -ended.si_status
        if self._code is None:
            self._code = self._process.poll()
        return self._code

    @property
    def failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self.poll() not in (None, 0)

    def watched(self) -> list[int]:
        """Descriptors that become readable when ``poll`` has something new to find."""
        return [self._pidfd]

    def signal(self, number: int) -> None:
        """Send a signal to the process and to what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Wait for the end, and let go of the process."""
        self._process.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class RankProcess(LaunchedProcess):
    """A rank's process; ``rank`` is its number.

    Raises:
        RankFailedError: it cannot be started.
    """

    def __init__(self, rank: int, command: Sequence[str], **options: Any) -> None:
        try:
            super().__init__(command, **options)
        except OSError as error:
            raise RankFailedError(f"rank {rank} cannot be started: {error}", rank) from error
        self.rank = rank


P = TypeVar("P", bound=LaunchedProcess)


class StopRequested(BaseException):
    """Raised where a launcher waits for its ranks and is told to end them.

    Attributes:
        number: the signal that asked for it, which is passed on; 0 to let them end by themselves.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Lifeline(Protocol):
    """What can ask a waiting launcher to end its ranks, apart from signals."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when ``check`` has something to find."""

    def check(self) -> None:
        """Raise ``StopRequested`` if that was asked for; never block."""


def wait(processes: Sequence[P], lifeline: Lifeline | None = None) -> P | None:
    """Wait until all processes have ended well (return None), or one failed (return that one).

    Raises:
        StopRequested: by ``lifeline``.
    """
    while True:
        running = _running(processes)
        for process in processes:  # all of them: one may have ended since it was seen running
            if process.failed:
                return process
        if not running:
            return None
        if lifeline is not None:
            lifeline.check()
        _sleep(running, None, () if lifeline is None else (lifeline.fileno(),))


class Ended(Protocol):
    """A rank that has ended, or will soon; see ``RankProcess``."""

    @property
    def rank(self) -> int: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def failed(self) -> bool: ...


E = TypeVar("E", bound=Ended)


def culprit(ranks: Sequence[E], first: E, reported: Mapping[int, bool]) -> E:
    """Return the rank that failed by itself.

    Args:
        ranks: of the job, which has ended.
        first: the one that was seen to fail first.
        reported: for the ranks that said why they failed, whether another rank was the reason.
    """
    for rank in (first, *ranks):
        silent = rank.rank not in reported and rank.failed and not rank.stopped
        if silent or reported.get(rank.rank) is False:
            return rank
    return first


def stop(
    processes: Sequence[LaunchedProcess], *, first: int | None = None, grace: float | None = None
) -> None:
    """End processes: wait for them, then SIGTERM, then SIGKILL. Returns once all are gone.

    Args:
        processes: those that have ended are left alone.
        first: a signal to begin with.
        grace: seconds to wait before SIGTERM (default: ``GRACE_SECONDS``).
    """
    if first is not None:
        for process in _running(processes):
            process.signal(first)
    grace = GRACE_SECONDS if grace is None else grace
    for seconds, then in ((grace, signal.SIGTERM), (TERM_SECONDS, signal.SIGKILL)):
        if _all_ended(processes, seconds):
            return
        for process in _running(processes):
            process.stopped = True
            process.signal(then)
    _all_ended(processes, _KILL_SECONDS)


def release(processes: Sequence[LaunchedProcess], *, kill: bool) -> None:
    """Let go of processes: with ``kill``, end them and all that they have started, at once."""
    if kill:
        for process in processes:
            process.signal(signal.SIGKILL)
    for process in processes:
        process.close()


def _running(processes: Sequence[P]) -> list[P]:
    return [process for process in processes if process.poll() is None]


def _all_ended(processes: Sequence[LaunchedProcess], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while running := _running(processes):
        if time.monotonic() >= end:
            return False
        _sleep(running, end - time.monotonic())
    return True


def _sleep(
    running: Sequence[LaunchedProcess], seconds: float | None, others: Sequence[int] = ()
) -> None:
    """Sleep until something happens to one of the processes, or ``seconds`` have passed.

    Args:
        running: at least one process.
        seconds: at most; None for no limit.
        others: descriptors that end the sleep as well, when they can be read.
    """
    descriptors = [*others, *(fd for process in running for fd in process.watched())]
    if -1 in descriptors:
        time.sleep(_POLL_SECONDS)
        return
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    limit = SLICE_SECONDS if seconds is None else min(seconds, SLICE_SECONDS)
    poller.poll(max(1.0, limit * 1000))


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def admit_interrupts() -> None:
    """Let SIGINT through in a process that ``LaunchedProcess`` started; one may be waiting."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class Signals:
    """Has SIGINT, SIGTERM and SIGHUP raise ``StopRequested``, once whenever ``raised`` is set.

    While it is not they do nothing: the job is about to end as it is. A signal that this process
    was started to ignore stays ignored.
    """

    def __init__(self) -> None:
        self.raised = False
        self._before: dict[int, Any] = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            self.raised = False
            raise StopRequested(number)

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def describe_exit(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
