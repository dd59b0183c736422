"""Starting the ranks of ours, Gloo's and MPI's."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpcore.bench.contestants import OURS
from fsdpcore.core.errors import MissingDependencyError
from fsdpcore.launch.external import find_mpirun
from fsdpcore.launch.supervision import RankProcess

PEERS = ("gloo", "mpi")

Start = Callable[[Path, str], "list[RankProcess]"]

_MEMBER = ("-m", "fsdpcore.bench.member")


@dataclass(frozen=True)
class OurOptions:
    """How our ranks are to be.

    Attributes:
        transport: scheme or URL.
        algorithm: as the collectives take it.
        plain: measure arrays of NumPy's rather than ``backend.empty``'s.
        contestants: ours, and "mpi" if a bare loop is to run in the same processes.
    """

    transport: str
    algorithm: str = "auto"
    plain: bool = False
    contestants: tuple[str, ...] = (OURS,)

    def as_dict(self) -> dict[str, Any]:
        """As ``member`` takes them."""
        return {
            "algorithm": self.algorithm,
            "plain": self.plain,
            "contestants": list(self.contestants),
        }


def check_installed(peers: tuple[str, ...]) -> None:
    """Check that what the peers need is there.

    Raises:
        MissingDependencyError: it is not; the message says how to install it.
        ConfigError: there is no mpirun.
    """
    if "gloo" in peers and importlib.util.find_spec("torch") is None:
        raise MissingDependencyError(
            "--against gloo needs PyTorch, which no extra of fsdpcore installs; get the build "
            "for CPUs with: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        )
    if "mpi" in peers:
        if importlib.util.find_spec("mpi4py") is None:
            raise MissingDependencyError(
                '--against mpi needs mpi4py; install it with: pip install "fsdpcore[mpi]"'
            )
        find_mpirun(1, os.environ)


def start_ours(world_size: int, options: OurOptions) -> Start:
    """Start our ranks."""
    return under_our_launcher(world_size, options.transport, _MEMBER, options.as_dict())


def under_our_launcher(
    world_size: int,
    transport: str,
    program: Sequence[str],
    options: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    python: str = sys.executable,
) -> Start:
    """Start ranks as ``fsdpcore run`` does, whatever the transport makes of it.

    Args:
        world_size: number of ranks.
        transport: scheme or URL.
        program: what ``python`` runs; it gets ``options`` and the socket's ``path`` as JSON.
        options: see there.
        environ: the ranks' environment.
        python: the interpreter, which finds the fsdpcore that is measured.
    """

    def start(directory: Path, path: str) -> list[RankProcess]:
        run = ["-m", "fsdpcore", "run", "-n", str(world_size), "--transport", transport]
        command = [python, *run, *program, json.dumps({**options, "path": path})]
        return [RankProcess(0, command, environ=_unbound(environ))]

    return start


def one_by_one(
    world_size: int,
    program: Sequence[str],
    options: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
) -> Start:
    """Start one process per rank, which meet through a file.

    Args:
        world_size: number of ranks.
        program: what ``python`` runs; as JSON it gets ``options``, the socket's ``path``, its
            ``rank``, the ``world_size`` and the path of that file, which is its ``store``.
        options: see there.
        environ: the ranks' environment.
    """

    def start(directory: Path, path: str) -> list[RankProcess]:
        given = {**options, "path": path, "store": str(directory / "store")}
        processes = []
        for rank in range(world_size):
            arguments = json.dumps({**given, "rank": rank, "world_size": world_size})
            command = [sys.executable, *program, arguments]
            processes.append(RankProcess(rank, command, environ=environ))
        return processes

    return start


def start_gloo(world_size: int) -> Start:
    """Start one process per rank."""
    return one_by_one(world_size, _MEMBER, {"contestants": ["gloo"]})


def start_mpi(world_size: int) -> Start:
    """Start mpirun, which starts the ranks."""

    def start(directory: Path, path: str) -> list[RankProcess]:
        options = json.dumps({"contestants": ["mpi"], "path": path})
        command = [*find_mpirun(world_size, os.environ), sys.executable, *_MEMBER, options]
        return [RankProcess(0, command, environ=_unbound(os.environ))]

    return start


def _unbound(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which mpirun binds no rank to a core, as nobody else does here.

    For Open MPI; MPICH binds none by default.
    """
    return {"PRTE_MCA_hwloc_default_binding_policy": "none", **environ}
