"""Starting the ranks of a contestant: by our launcher, by mpirun, or one by one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpcore.launch.run.mpirun import find_mpirun
from fsdpcore.launch.supervision import LaunchedProcess

Start = Callable[[Path, str], "list[LaunchedProcess]"]


@dataclass(frozen=True)
class RankProgram:
    """What ``python`` runs to become a rank.

    It gets options as JSON, with the ``path`` of the socket on which orders come.

    Attributes:
        command: its arguments.
        folders: of modules that no installed package has.
        threads: of BLAS in each rank; 0 leaves that to the launcher.
        python: the interpreter, which finds the fsdpcore that is measured.
    """

    command: tuple[str, ...]
    folders: tuple[Path, ...] = ()
    threads: int = 0
    python: str = sys.executable

    @classmethod
    def module(cls, name: str, *folders: Path, threads: int = 0) -> RankProgram:
        """A module, found in these folders."""
        return cls(("-m", name), folders, threads)

    @property
    def environ(self) -> dict[str, str]:
        """The ranks' environment."""
        paths = [*map(str, self.folders), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
            **({"FSDPCORE_BLAS_THREADS": str(self.threads)} if self.threads else {}),
        }

    def under_our_launcher(
        self,
        world_size: int,
        transport: str,
        environ: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Start:
        """Start ranks as ``fsdpcore run`` does, whatever the transport makes of it."""
        run = ["-m", "fsdpcore", "run", "-n", str(world_size), "--transport", transport]
        given = self.environ if environ is None else environ
        return self._start([self.python, *run], given, options)

    def under_mpirun(self, world_size: int, **options: Any) -> Start:
        """Start ``mpirun``, which starts the ranks."""
        return self._start(
            [*find_mpirun(world_size, os.environ), self.python], self.environ, options
        )

    def one_by_one(self, world_size: int, **options: Any) -> Start:
        """Start one process per rank, which meet through a file.

        Options get ``rank``, ``world_size``, ``threads`` and the path of that file, ``store``.
        """

        def start(directory: Path, path: str) -> list[LaunchedProcess]:
            shared = {"store": str(directory / "store"), "world_size": world_size, "path": path}
            return [
                LaunchedProcess(
                    self._command({"threads": self.threads, **options, **shared, "rank": rank}),
                    environ=self.environ,
                )
                for rank in range(world_size)
            ]

        return start

    def starts(
        self,
        world_size: int,
        transport: str,
        ours: Sequence[str],
        others: Sequence[str],
        **options: Any,
    ) -> dict[str, Start]:
        """How to start each contestant's ranks, which get its name as ``contestant``.

        Args:
            world_size: number of ranks of each.
            transport: of ours.
            ours: those on a backend.
            others: those that are started one by one.
            options: of all ranks.
        """
        found: dict[str, Start] = {}
        for name in ours:
            given = {"contestant": name, **options}
            found[name] = self.under_our_launcher(world_size, transport, **given)
        for name in others:
            found[name] = self.one_by_one(world_size, contestant=name, **options)
        return found

    def _start(
        self, launcher: Sequence[str], environ: Mapping[str, str], options: Mapping[str, Any]
    ) -> Start:
        def start(directory: Path, path: str) -> list[LaunchedProcess]:
            _, *arguments = self._command({**options, "path": path})
            return [LaunchedProcess([*launcher, *arguments], environ=_unbound(environ))]

        return start

    def _command(self, options: Mapping[str, Any]) -> list[str]:
        return [self.python, *self.command, json.dumps(options)]


def _unbound(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which mpirun binds no rank to a core, as nobody else does here.

    For Open MPI; MPICH binds none by default.
    """
    return {"PRTE_MCA_hwloc_default_binding_policy": "none", **environ}
