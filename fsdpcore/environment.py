"""What a launcher told this process through environment variables: which rank it is to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fsdpcore.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """A rank that a process is to become.

    Attributes:
        rank, world_size: in the whole job.
        local_rank, local_world_size: among the ranks of this host.
        launcher: who started the process, in words.
        rendezvous: ``host:port`` where the ranks meet, if the launcher says.
        listener_fd: file descriptor of the listening socket at that address, for rank 0, if the
            launcher opened it (so that no other process can take the port in between).
        token: a secret of this job, without which nobody is let in.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    rendezvous: str | None = None
    listener_fd: int | None = None
    token: str = ""


class _Launcher(NamedTuple):
    """The variables of one launcher; all of the first two, and ``also``, must be set."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    also: tuple[str, ...] = ()


# The more specific ones first: mpirun inside a Slurm allocation sets both kinds.
_LAUNCHERS = (
    _Launcher(
        "fsdpcore run",
        "FSDPCORE_RANK",
        "FSDPCORE_WORLD_SIZE",
        "FSDPCORE_LOCAL_RANK",
        "FSDPCORE_LOCAL_WORLD_SIZE",
    ),
    _Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Launcher("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("MASTER_ADDR",)),
    # A batch script has SLURM_PROCID too, but is no rank: only srun sets the step's task count.
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)

# Set by ``fsdpcore run``; users set FSDPCORE_TOKEN and FSDPCORE_RENDEZVOUS by hand where they
# start ranks on their own.
LAUNCH_VARIABLES = (
    "FSDPCORE_RANK",
    "FSDPCORE_LOCAL_RANK",
    "FSDPCORE_LOCAL_WORLD_SIZE",
    "FSDPCORE_THREADS",
    "FSDPCORE_RENDEZVOUS",
    "FSDPCORE_RENDEZVOUS_FD",
    "FSDPCORE_TOKEN",
)


def detect(environ: Mapping[str, str]) -> Place | None:
    """Return the rank that a launcher wants this process to be, or None without a launcher.

    A job of one rank counts as none, unless ``fsdpcore run`` started it.

    Raises:
        ConfigError: the variables are there but make no sense.
    """
    for launcher in _LAUNCHERS:
        needed = (launcher.rank, launcher.world_size, *launcher.also)
        if not all(name in environ for name in needed):
            continue
        rank, size = _number(environ, launcher.rank), _number(environ, launcher.world_size)
        if not 0 <= rank < size:
            raise ConfigError(
                f"{launcher.rank}={rank} is not a rank of {launcher.world_size}={size}"
            )
        if size == 1 and launcher is not _LAUNCHERS[0]:
            continue
        fd = environ.get("FSDPCORE_RENDEZVOUS_FD")
        return Place(
            rank,
            size,
            _number(environ, launcher.local_rank, rank),
            _number(environ, launcher.local_world_size, size),
            launcher.name,
            environ.get("FSDPCORE_RENDEZVOUS") or _master_address(environ),
            None if fd is None else _number(environ, "FSDPCORE_RENDEZVOUS_FD"),
            environ.get("FSDPCORE_TOKEN", ""),
        )
    return None


def launched_threads(environ: Mapping[str, str]) -> int:
    """The number of ranks that ``fsdpcore run`` wants as threads of this process, or 0."""
    return _number(environ, "FSDPCORE_THREADS", 0)


def _master_address(environ: Mapping[str, str]) -> str | None:
    """The address that PyTorch's convention names, one port higher.

    The port itself may be held by the launcher's own store.
    """
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        return None
    return f"{environ['MASTER_ADDR']}:{_number(environ, 'MASTER_PORT') + 1}"


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name) if name else None
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not an integer") from None
