"""Ranks that run a script: what ``fsdpcore run`` starts, watches over and ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from types import FrameType, TracebackType
from typing import Any

from fsdpcore.core.errors import ConfigError
from fsdpcore.launch import failure_report, secret, supervision
from fsdpcore.launch.config import Config
from fsdpcore.launch.environment import LAUNCH_VARIABLES
from fsdpcore.launch.external import FIFO_VARIABLE, FifoFailureReports, find_mpirun, needs_launcher
from fsdpcore.launch.failure_report import FailureReports
from fsdpcore.launch.processes import LOOPBACK, meeting_point
from fsdpcore.launch.rendezvous import listen
from fsdpcore.launch.supervision import RankProcess


@dataclass(frozen=True)
class ScriptExit:
    """How a job ended: the exit code for its launcher, and what to say; nothing if all is well."""

    code: int
    message: str = ""


class _SignalReceived(BaseException):
    """Raised in the main thread by SIGINT and SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def script_command(script: str, arguments: Sequence[str], *, module: bool = False) -> list[str]:
    """The command line of a rank.

    Raises:
        ConfigError: there is no such script.
    """
    if module:
        return [sys.executable, "-m", script, *arguments]
    path = Path(script)
    if path.is_dir():
        raise ConfigError(f"{script} is a directory; name the script in it, or use -m PACKAGE")
    if not path.is_file():
        raise ConfigError(f"there is no script {script}")
    return [sys.executable, script, *arguments]


def run_script(
    command: Sequence[str], world_size: int, config: Config, environ: Mapping[str, str]
) -> ScriptExit:
    """Run ``command`` on every rank, to the end. Call it on the main thread.

    The first rank that fails ends the others, within two seconds; so do SIGINT and SIGTERM, which
    are passed on to the ranks. A second one ends them at once.

    Args:
        command: program and arguments.
        world_size: number of ranks.
        config: resolved; the ranks get its transport through their environment.
        environ: what else the ranks find in their environment.
    """
    if needs_launcher(config):
        launcher = find_mpirun(world_size, environ)
        return _run_launcher([*launcher, *command], world_size, config, environ)
    ranks: list[RankProcess] = []
    first: RankProcess | None = None
    well = False
    with FailureReports() as reports, contextlib.ExitStack() as stack, _Signals() as signals:
        try:
            signals.raised = True
            if config.transport_class.ranks_are_threads:
                _start_one(ranks, command, world_size, _shared(config, environ, reports), reports)
            else:
                # Open until the end: a script may launch several times in turn.
                listener = stack.enter_context(listen(config.host or LOOPBACK, config.port))
                shared = _shared(config, environ, reports)
                _start_all(ranks, command, world_size, shared, reports, listener)
            first = supervision.wait(ranks)
            if first is not None:
                supervision.stop(ranks)
            well = first is None
        except _SignalReceived as received:
            with contextlib.suppress(_SignalReceived):
                signals.raised = True
                supervision.stop(ranks, first=received.number)
            return _interrupted(received.number)
        finally:
            signals.raised = False
            supervision.release(ranks, kill=not well)
        return ScriptExit(0) if first is None else _failure(ranks, first, reports, config)


def _run_launcher(
    command: Sequence[str], world_size: int, config: Config, environ: Mapping[str, str]
) -> ScriptExit:
    """Run the command of another launcher, which starts the ranks and ends them when one fails."""
    started: list[RankProcess] = []
    reports = FifoFailureReports()
    with reports, _Signals() as signals:
        try:
            signals.raised = True
            shared = {**_shared(config, environ, reports), FIFO_VARIABLE: reports.path}
            started.append(RankProcess(0, command, environ=shared, stdin=None))
            failed = supervision.wait(started) is not None
        except _SignalReceived as received:
            with contextlib.suppress(_SignalReceived):
                signals.raised = True
                # Launchers pass on SIGTERM in time, and SIGINT as the terminal sends it.
                supervision.stop(started, first=signal.SIGTERM)
            return _interrupted(received.number)
        finally:
            signals.raised = False
            supervision.release(started, kill=False)
        return _failure_of_launcher(started[0], world_size, reports) if failed else ScriptExit(0)


def _failure_of_launcher(
    launcher: RankProcess, world_size: int, reports: FailureReports
) -> ScriptExit:
    code = launcher.poll() or 1
    code = 128 - code if code < 0 else code
    how = supervision.describe_exit(128 - code if 128 < code < 160 else code)
    others = "; the other ranks were stopped" if world_size > 1 else ""
    for report in reports.read().values():
        if not report.consequence:
            return ScriptExit(code, f"rank {report.rank} failed ({how}: {report.error}){others}")
    return ScriptExit(code, f"a rank failed, or MPI's launcher ({how}; see above){others}")


def _shared(config: Config, environ: Mapping[str, str], reports: FailureReports) -> dict[str, str]:
    """The environment of all ranks."""
    shared = {name: value for name, value in environ.items() if name not in LAUNCH_VARIABLES}
    shared["FSDPCORE_TRANSPORT"] = config.transport
    shared[secret.TOKEN], shared[secret.JOB] = secret.new_token(), secret.new_job()
    shared[failure_report.VARIABLE] = reports.value
    return shared


def _start_one(
    ranks: list[RankProcess],
    command: Sequence[str],
    world_size: int,
    shared: Mapping[str, str],
    reports: FailureReports,
) -> None:
    environ = {**shared, "FSDPCORE_THREADS": str(world_size)}
    ranks.append(RankProcess(0, command, environ=environ, pass_fds=[reports.fd], stdin=None))


def _start_all(
    ranks: list[RankProcess],
    command: Sequence[str],
    world_size: int,
    shared: Mapping[str, str],
    reports: FailureReports,
    listener: socket,
) -> None:
    environ = dict(shared)
    environ["FSDPCORE_RENDEZVOUS"] = meeting_point(listener)
    environ["FSDPCORE_WORLD_SIZE"] = environ["FSDPCORE_LOCAL_WORLD_SIZE"] = str(world_size)
    for rank in range(world_size):
        environ["FSDPCORE_RANK"] = environ["FSDPCORE_LOCAL_RANK"] = str(rank)
        own: dict[str, str] = {}
        descriptors = [reports.fd]
        if rank == 0:
            own["FSDPCORE_RENDEZVOUS_FD"] = str(listener.fileno())
            descriptors.append(listener.fileno())
        ranks.append(
            RankProcess(
                rank,
                command,
                environ={**environ, **own},
                pass_fds=descriptors,
                stdin=None if rank == 0 else subprocess.DEVNULL,
            )
        )


class _Signals:
    """Has SIGINT and SIGTERM raise ``_SignalReceived``, once whenever ``raised`` is set.

    While it is not they do nothing: the job is about to end as it is. A signal that this process
    was started to ignore stays ignored.
    """

    def __init__(self) -> None:
        self.raised = False
        self._before: dict[int, Any] = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.raised:
            self.raised = False
            raise _SignalReceived(number)

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
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


def _interrupted(number: int) -> ScriptExit:
    how = "interrupted" if number == signal.SIGINT else "terminated"
    return ScriptExit(
        128 + number, f"{how} ({signal.Signals(number).name}); all ranks were stopped"
    )


def _failure(
    ranks: Sequence[RankProcess], first: RankProcess, reports: FailureReports, config: Config
) -> ScriptExit:
    told = reports.read()
    reported = {rank: report.consequence for rank, report in told.items()}
    culprit = supervision.culprit(ranks, first, reported)
    ended = first if culprit.stopped else culprit  # one that was too slow to end by itself
    code = ended.poll() or 1
    how = supervision.describe_exit(code)
    if culprit.rank in told:
        how += f": {told[culprit.rank].error}"
    threads = config.transport_class.ranks_are_threads
    who = "the script" if threads else f"rank {culprit.rank}"
    others = "; the other ranks were stopped" if len(ranks) > 1 else ""
    return ScriptExit(128 - code if code < 0 else code, f"{who} failed ({how}){others}")
