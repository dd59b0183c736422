"""Does the launcher mean the same job as the MPI library?"""

from __future__ import annotations

from fsdpcore.comm.place import NO_LAUNCHER, RankPlace
from fsdpcore.core.errors import ConfigError

from .library import MPI, PROCESS, versions


def check_place(place: RankPlace) -> None:
    """Compare the rank that a launcher's variables name with the one that MPI gave.

    Raises:
        ConfigError: they are not the same; says what has probably been mixed up.
    """
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    if (place.rank, place.world_size) == (rank, size) or place.launcher == NO_LAUNCHER:
        return
    PROCESS.doom(1)
    if size == 1:
        raise ConfigError(
            f"{place.launcher} started this process as rank {place.rank} of {place.world_size}, "
            f"but the MPI library that mpi4py uses ({versions()}) knows of a single rank: it was "
            "probably not started by its own launcher. Use the mpirun or mpiexec of that library "
            "('fsdpcore run --transport mpi' finds the one beside this Python), or install an "
            "mpi4py for the MPI whose launcher you use; or take transport zmq"
        )
    raise ConfigError(
        f"MPI ({versions()}) made this process rank {rank} of {size}, but by the variables of "
        f"{place.launcher} it is rank {place.rank} of {place.world_size}; another launcher inside "
        "or outside of mpirun has set them, or they are left over: unset them"
    )
