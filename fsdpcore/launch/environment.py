"""What a launcher told this process through environment variables: which rank it is to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ConfigError
from fsdpcore.launch import secret
from fsdpcore.launch.addresses import join_address, parse_address


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
# Set by a torchrun that really runs, to the name of its run.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_TORCH = _Launcher(
    "torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("MASTER_ADDR",)
)

# A batch script has SLURM_PROCID too, but is no rank: only srun sets the step's task count.
_SRUN = _Launcher("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",))

# Launchers nest, and the innermost started the rank: torchrun runs under mpirun or srun, and
# mpirun inside a Slurm allocation. A torchrun that really runs names its run; without that name
# its variables may be left over from somewhere, and count only where no MPI set others.
_LAUNCHERS = (
    _OURS,
    _TORCH._replace(also=("MASTER_ADDR", _TORCHRUN)),
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
    _SRUN,
    # By hand, with an address in the transport's URL.
    _TORCH._replace(name="whoever set RANK and WORLD_SIZE", also=()),
)

# Of ranks that come and go: the descriptor of their end of the way to their agent, and its inode.
ELASTIC = "FSDPCORE_ELASTIC"

# Set by ``fsdpcore run``. Who starts ranks in other ways may set them by hand, but for the
# descriptors; FSDPCORE_RANK, FSDPCORE_WORLD_SIZE and FSDPCORE_RENDEZVOUS suffice on one host.
LAUNCH_VARIABLES = (
    "FSDPCORE_RANK",
    "FSDPCORE_LOCAL_RANK",
    "FSDPCORE_LOCAL_WORLD_SIZE",
    "FSDPCORE_RANKS_PER_HOST",
    "FSDPCORE_THREADS",
    "FSDPCORE_RENDEZVOUS",
    "FSDPCORE_RENDEZVOUS_FD",
    "FSDPCORE_REPORT_FD",
    "FSDPCORE_REPORT_FIFO",
    ELASTIC,
    secret.TOKEN,
    secret.TOKEN_FILE,
    secret.JOB,
)

# What says of a process that it is one of several, where no launcher of the table above says which:
# a variable, the one that says "1" in a job of one, and what to do.
_SIGNS = (
    ("FSDPCORE_RENDEZVOUS", "FSDPCORE_WORLD_SIZE", "set FSDPCORE_RANK and FSDPCORE_WORLD_SIZE too"),
    ("RANK", "WORLD_SIZE", "set WORLD_SIZE too"),
    ("WORLD_SIZE", "WORLD_SIZE", "set RANK too"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "start it with mpirun"),
    ("PMI_RANK", "PMI_SIZE", "start it with mpiexec"),
    ("SLURM_NTASKS", "SLURM_NTASKS", "start it with srun"),
    (
        "JOB_COMPLETION_INDEX",
        "FSDPCORE_WORLD_SIZE",
        "start it with 'fsdpcore run --nnodes N --node-rank $JOB_COMPLETION_INDEX ...'",
    ),
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


def unused(environ: Mapping[str, str]) -> str:
    """What to tell the user of a job of one rank whose variables speak of more; or empty."""
    for name, size, advice in _SIGNS:
        if environ.get(name) and environ.get(size) != "1":
            return (
                f"this is a job of a single rank, though {name}={environ[name]} is set: if it is "
                f"to be one rank of several, {advice}; if not, unset {name}"
            )
    return ""


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
        local_size = _slurm_tasks_here(environ, size)
    local_known = local_size is not None
    if local_size is None:
        local_size = size
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
        _rendezvous(environ)
        or _master_address(environ)
        or (_slurm_address(environ) if _is_task(environ, launcher, rank, size) else None),
        None if fd < 0 else fd,
        secret.token(environ),
        launcher.mpi,
        secret.job_id(environ),
        local_known,
        environ.get("FSDPCORE_RANKS_PER_HOST", "") if ours else "",
    )


def _rendezvous(environ: Mapping[str, str]) -> str | None:
    """Where a user, or ``fsdpcore run``, says that the ranks meet."""
    text = environ.get("FSDPCORE_RENDEZVOUS")
    if text and not parse_address(text)[1]:
        raise ConfigError(
            f"FSDPCORE_RENDEZVOUS={text} names no port: write HOST:PORT, a port that is free on "
            "the host of rank 0"
        )
    return text


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
    """The address that PyTorch's convention names; under torchrun one port higher.

    There the port itself is held by torchrun's own store.
    """
    if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT"):
        return None
    torchrun = _TORCHRUN in environ
    host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT") + torchrun
    if not 0 < port < 65536:
        raise ConfigError(
            f"MASTER_PORT={environ['MASTER_PORT']} leaves no port for the ranks to meet"
            + (": under torchrun they use the next one" if torchrun else "")
        )
    return join_address(host, port)


def meeting_hint(place: RankPlace, environ: Mapping[str, str]) -> str:
    """How the ranks came to meet where they do, for errors; empty where a user has said so."""
    if place.rendezvous is None or environ.get("FSDPCORE_RENDEZVOUS"):
        return ""
    if _TORCHRUN in environ and place.rendezvous == _master_address(environ):
        return "under torchrun the ranks meet at the port after MASTER_PORT, which it holds itself"
    if place.rendezvous == _slurm_address(environ):
        return (
            "under srun the ranks meet on the step's first node, at a port made from the job's id; "
            "name another address with FSDPCORE_TRANSPORT=zmq://HOST:PORT"
        )
    return ""


def _is_task(environ: Mapping[str, str], launcher: _Launcher, rank: int, size: int) -> bool:
    """Whether srun started the rank, perhaps speaking PMI.

    What another launcher starts within a step may have the step's variables on some nodes only.
    """
    if launcher is not _SRUN and launcher.rank != "PMI_RANK":
        return False
    step = (environ.get(_SRUN.rank), environ.get(_SRUN.world_size))
    return step == (str(rank), str(size))


def _slurm_address(environ: Mapping[str, str]) -> str | None:
    """The first node of a Slurm step, where its rank 0 is, and a port of the step's own.

    The port is below those that systems give out by themselves.
    """
    # The first entry, such as r[1-2]n[01-04,07]-ib, and of each pair of brackets the first number.
    nodes = re.match(r"(?:[^,\[]|\[\d[^\]]*\])+", environ.get("SLURM_STEP_NODELIST", ""))
    job, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    if nodes is None or not job.isdecimal() or not step.isdecimal():
        return None
    host = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes[0])
    return join_address(host, 10_000 + (int(job) * 31 + int(step)) % 20_000)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r} is not an integer") from None
