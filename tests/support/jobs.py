"""Real processes for tests: commands with a clean environment, and a mark to find them all by."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "TEST_JOB_MARK"
# Nothing here takes longer unless it hangs.
PATIENCE = 120.0
# In seconds. What a failure or a signal ends has ended by then, also on a machine that is busy
# with other things. Whatever would end it otherwise, a deadline or a sleep, takes longer.
SOON = 40.0
# What a launcher may set, and what must not leak from the shell that runs the tests.
_FOREIGN = ("FSDPCORE_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_", "MPI_LOCAL")
_FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}


def clean_environ(**extra: str) -> dict[str, str]:
    """This process's environment without any launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    return {**kept, **extra}


def marked(variable: str) -> list[int]:
    """All processes that have ``NAME=VALUE`` in their environment, zombies apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if variable.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def kill_marked(variable: str) -> None:
    """End all processes that have ``NAME=VALUE`` in their environment."""
    for pid in marked(variable):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@dataclass
class Finished:
    """How a command ended. ``ended`` is the wall clock time at which it was gone."""

    code: int
    out: str
    err: str
    ended: float

    def moment(self, word: str) -> float:
        """The time that the output gives in a line ``WORD TIME``."""
        (line,) = [line for line in self.out.splitlines() if line.startswith(f"{word} ")]
        return float(line.split()[1])


class Job:
    """A command that runs, and everything that it has started.

    Attributes:
        seen: of its output, what ``wait_for`` has read.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            command,
            env={**clean_environ(), **(environ or {}), _MARK: self.mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a signal to its group does not reach the tests
        )
        self.seen = ""

    def finish(self) -> Finished:
        """Wait for the end; nothing of it may be left then."""
        out, err = self.process.communicate(timeout=PATIENCE)
        ended = time.time()
        self.assert_gone()
        return Finished(self.process.returncode, self.seen + out, err, ended)

    def wait_for(self, word: str, count: int = 1) -> None:
        """Read the output until ``count`` lines begin with ``word``."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(PATIENCE, self._kill_all)
        watchdog.start()
        try:
            seen = 0
            while seen < count:
                line = self.process.stdout.readline()
                assert line, f"{self.seen}, but then the end: {self.process.communicate()[1]}"
                self.seen += line
                seen += line.startswith(word)
        finally:
            watchdog.cancel()
            watchdog.join()

    def pids(self) -> list[int]:
        """All processes that have this job's mark in their environment, zombies apart."""
        return marked(f"{_MARK}={self.mark}")

    def assert_gone(self, within: float = SOON) -> None:
        """Check that no process of the job is left; the kernel gets a moment to end them."""
        end = time.monotonic() + within
        while self.pids() and time.monotonic() < end:
            time.sleep(0.02)
        assert not self.pids(), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.pids()]

    def wait_until_gone(self, pid: int) -> None:
        """Wait until one of the job's processes has ended."""
        end = time.monotonic() + SOON
        while pid in self.pids():
            assert time.monotonic() < end, f"process {pid} does not end"
            time.sleep(0.02)

    def kill(self) -> None:
        """End everything, whatever the test came to."""
        self._kill_all()
        self.process.wait(PATIENCE)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _kill_all(self) -> None:
        kill_marked(f"{_MARK}={self.mark}")


@contextlib.contextmanager
def started(
    command: Sequence[str], environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Iterator[Job]:
    """Start a command; at the end, nothing of it is left."""
    job = Job(command, environ, cwd)
    try:
        yield job
    finally:
        job.kill()


def finished(
    command: Sequence[str], environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Finished:
    """Run a command to its end."""
    with started(command, environ, cwd) as job:
        return job.finish()


def fsdpcore(*arguments: object) -> list[str]:
    """The command line of the ``fsdpcore`` command."""
    return [sys.executable, "-m", "fsdpcore", *map(str, arguments)]


def patient_fsdpcore(*arguments: object) -> list[str]:
    """The same, but when a rank fails it lets the others say why they end, however slow they are.

    By itself it stops them after a second or two, which on a busy machine may be before that.
    """
    home = f"from fsdpcore.launch import supervision as s; s.GRACE_SECONDS = {SOON / 2}; "
    home += "from fsdpcore.commands.main import app; app()"
    return [sys.executable, "-c", home, *map(str, arguments)]


def python(*arguments: object) -> list[str]:
    """The command line of a script, or whatever else the interpreter takes."""
    return [sys.executable, *map(str, arguments)]
