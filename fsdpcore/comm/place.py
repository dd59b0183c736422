"""``RankPlace``: which rank a process is to become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# The launcher of a place that no launcher's variables name.
NO_LAUNCHER = "no launcher"


@dataclass(frozen=True)
class RankPlace:
    """A rank that a process is to become.

    Attributes:
        rank, world_size: in the whole job.
        local_rank, local_world_size: among the ranks of this host; as if all ranks were on one
            host, where ``local_known`` is not set.
        launcher: who started the process, in words.
        rendezvous: ``host:port`` where the ranks meet, if the launcher says.
        listener_fd: file descriptor of the listening socket at that address, for rank 0, if the
            launcher opened it (so that no other process can take the port in between).
        token: a secret of this job, without which nobody is let in; empty for none.
        mpi: the launcher is an MPI's.
        job: the job's id, as its launcher names it, the same on all ranks and another one for
            each job; empty where nothing names it.
        local_known: the launcher says which ranks share a host.
        ranks_per_host: what a launcher that runs on each host was told about all of them, as in
            "2,4"; empty where one launcher starts all ranks.
        given_up: asked while the ranks meet: says why this one is not to go on with that, and ""
            as long as it is.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    rendezvous: str | None = None
    listener_fd: int | None = None
    token: str = field(default="", repr=False)
    mpi: bool = False
    job: str = ""
    local_known: bool = True
    ranks_per_host: str = ""
    given_up: Callable[[], str] | None = field(default=None, repr=False, compare=False)
