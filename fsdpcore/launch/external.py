"""Ranks that an MPI launcher starts: when to join them, and how they report failures."""

from __future__ import annotations

import contextlib
import importlib.util
import os

from fsdpcore.comm.place import NO_LAUNCHER, RankPlace
from fsdpcore.core.errors import ConfigError
from fsdpcore.launch import failure_report
from fsdpcore.launch.config import Config
from fsdpcore.launch.failure_report import FIFO_VARIABLE
from fsdpcore.launch.rank import inside_rank
from fsdpcore.launch.supervision import admit_interrupts


def default_transport(place: RankPlace) -> str:
    """The transport of ranks that a launcher has started, where nothing names one."""
    return "mpi" if place.mpi and importlib.util.find_spec("mpi4py") is not None else "zmq"


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
