"""Ranks that are processes under a real ``mpirun``, started once per number of ranks.

MPI cannot be started twice in a process, nor with another number of ranks, so there is a fleet for
each number. Every job makes new backends in it, on communicators of their own, so that a broken
one costs nothing. As a program, this module is what ``mpirun`` starts.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from support.jobs import clean_environ
from support.spmd_job import Job, Outcome
from support.spmd_pool import Pool
from support.spmd_processes import Fleet, serve

from fsdpcore.launch.run.mpirun import find_mpirun


def mpirun(world_size: int) -> list[str]:
    """The command line of MPI's launcher, up to the program."""
    return find_mpirun(world_size, os.environ)


def mpi_environ(**extra: str) -> dict[str, str]:
    """The environment for ranks of a test: without this process's launcher, and quick to start.

    Looking for networks takes Open MPI a second, which ranks on one host have no use for. An mpirun
    that was killed leaves its files behind, and the next one of that process id refuses to start:
    so each has its own folder for them.
    """
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    own = {"OMPI_MCA_btl": "self,sm", "TMPDIR": tempfile.mkdtemp(dir=_folder().name)}
    return clean_environ(PYTHONPATH=path, **own | extra)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="mpi", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)  # or its end may be blamed on the test that runs then
    return folder


class MpiRanks:
    """Runs jobs on fleets of processes; starts each when it is first needed."""

    def __init__(self) -> None:
        self._pool = Pool(lambda size: MpiFleet("mpi", size))

    def run(self, job: Job) -> list[Outcome]:
        # The oracle has the bits of the canonical order, which MPI's own reductions do not keep.
        job = dataclasses.replace(job, options={"deterministic": True, **job.options})
        return self._pool.run(job, job.world_size)

    def close(self) -> None:
        self._pool.close()


class MpiFleet(Fleet):
    """Processes of one ``mpirun`` that wait for jobs."""

    def _launch(self) -> None:
        content = [self._listener.address, self._key.hex(), self._directory.name]
        known = Path(self._directory.name, "fleet.json")
        known.write_text(json.dumps(content))
        command = [*mpirun(self.size), sys.executable, "-m", "support.spmd_mpi", str(known)]
        ended = subprocess.run(
            command,
            env=mpi_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        # Jobs that break end their processes by MPI_Abort, so an exit code says nothing; but a
        # fleet that ends before all its processes have come has not started.
        self._error = RuntimeError(f"mpirun ended with {ended.returncode}:\n{ended.stderr}")
        self._arrivals.put(None)


def _main(known: str) -> None:
    address, key, stacks = json.loads(Path(known).read_text())
    number = next(int(os.environ[n]) for n in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    serve(number, tuple(address) if isinstance(address, list) else address, _bytes(key), stacks)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text)


if __name__ == "__main__":
    _main(sys.argv[1])
