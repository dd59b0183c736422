"""What a launcher told this process through environment variables: which rank it is to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ConfigError


class _Launcher(NamedTuple):
    """The variables of one launcher.

    ``rank``, ``world_size`` and all of ``also`` must be set; of the others, the first that is.
    """

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    mpi: bool = False


_OURS = _Launcher(
    "fsdpcore run",
    "FSDPCORE_RANK",
    "FSDPCORE_WORLD_SIZE",
    ("FSDPCORE_LOCAL_RANK",),
    ("FSDPCORE_LOCAL_WORLD_SIZE",),
)
_TORCH = _Launcher(
    "torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("MASTER_ADDR",)
)

# Launchers nest, and the innermost started the rank: torchrun runs under mpirun or srun, and
# mpirun inside a Slurm allocation. A torchrun that really runs names its run; without that name
# its variables may be left over from somewhere, and count only where no MPI set others.
_LAUNCHERS = (
    _OURS,
    _TORCH._replace(also=("MASTER_ADDR", "TORCHELASTIC_RUN_ID")),
    _Launcher(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        mpi=True,
    ),
    _Launcher(
        "mpiexec (PMI)",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS",),
        mpi=True,
    ),
    _TORCH,
    # A batch script has SLURM_PROCID too, but is no rank: only srun sets the step's task count.
    _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",)),
)

# Set by ``fsdpcore run``. Who starts ranks in other ways may set FSDPCORE_RENDEZVOUS and
# FSDPCORE_TOKEN by hand.
LAUNCH_VARIABLES = (
    "FSDPCORE_RANK",
    "FSDPCORE_LOCAL_RANK",
    "FSDPCORE_LOCAL_WORLD_SIZE",
    "FSDPCORE_THREADS",
    "FSDPCORE_RENDEZVOUS",
    "FSDPCORE_RENDEZVOUS_FD",
    "FSDPCORE_REPORT_FD",
    "FSDPCORE_REPORT_FIFO",
    "FSDPCORE_TOKEN",
)


def detect(environ: Mapping[str, str]) -> RankPlace | None:
    """Return the rank that a launcher wants this process to be, or None without a launcher.

    A job of one rank counts as none, unless ``fsdpcore run`` started it. None as well where
    ``fsdpcore run`` wants the ranks as threads: see ``launched_threads``.

    Raises:
        ConfigError: the variables are there but make no sense.
    """
    if launched_threads(environ):
        return None
    if _OURS.rank in environ and _OURS.world_size not in environ:
        raise ConfigError(f"{_OURS.rank} is set, but {_OURS.world_size} is not; set both or none")
    for launcher in _LAUNCHERS:
        needed = (launcher.rank, launcher.world_size, *launcher.also)
        if not all(name in environ for name in needed):
            continue
        place = _place(environ, launcher)
        if place.world_size > 1 or launcher is _OURS:
            return place
    return None


def launched_threads(environ: Mapping[str, str]) -> int:
    """The number of ranks that ``fsdpcore run`` wants as threads of this process, or 0.

    Raises:
        ConfigError: the variable is set, but to no such number.
    """
    if "FSDPCORE_THREADS" not in environ:
        return 0
    count = _number(environ, "FSDPCORE_THREADS")
    if count < 1:
        raise ConfigError(f"environment variable FSDPCORE_THREADS={count} is not positive")
    return count


def _place(environ: Mapping[str, str], launcher: _Launcher) -> RankPlace:
    rank, size = _number(environ, launcher.rank), _number(environ, launcher.world_size)
    if not 0 <= rank < size:
        raise ConfigError(
            f"{launcher.rank}={rank} is not a rank of {launcher.world_size}={size} "
            f"(variables of {launcher.name})"
        )
    local_size = _first(environ, launcher.local_world_size)
    if local_size is None:
        local_size = _slurm_tasks_here(environ, size) or size
    local_rank = _first(environ, launcher.local_rank)
    if local_rank is None:
        local_rank = rank % max(local_size, 1)  # hosts are filled one after the other
    if not 0 <= local_rank < local_size <= size:
        raise ConfigError(
            f"the variables of {launcher.name} contradict each other: rank {rank} of {size} would "
            f"be rank {local_rank} of {local_size} on its host "
            f"({', '.join(launcher.local_rank + launcher.local_world_size)})"
        )
    ours = launcher is _OURS
    fd = _number(environ, "FSDPCORE_RENDEZVOUS_FD", -1) if ours and rank == 0 else -1
    return RankPlace(
        rank,
        size,
        local_rank,
        local_size,
        launcher.name,
        environ.get("FSDPCORE_RENDEZVOUS") or _master_address(environ),
        None if fd < 0 else fd,
        environ.get("FSDPCORE_TOKEN", ""),
        launcher.mpi,
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The value of the first variable that is set."""
    return next((_number(environ, name) for name in names if name in environ), None)


def _slurm_tasks_here(environ: Mapping[str, str], size: int) -> int | None:
    """How many tasks of this Slurm step run on this node, from a list such as ``4(x2),3``."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if environ.get("SLURM_STEP_NUM_TASKS") != str(size) or "SLURM_NODEID" not in environ:
        return None
    nodes: list[int] = []
    for item in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return None
        nodes += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, "SLURM_NODEID")
    return nodes[node] if 0 <= node < len(nodes) else None


def _master_address(environ: Mapping[str, str]) -> str | None:
    """The address that PyTorch's convention names, one port higher.

    The port itself may be held by the launcher's own store.
    """
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
        return None
    host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT") + 1
    if not 0 < port < 65536:
        raise ConfigError(
            f"MASTER_PORT={port - 1} leaves no port for the ranks to meet: they use the next one"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not an integer") from None
