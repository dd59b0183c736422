"""Ranks under a real ``mpirun``: they end well, or all of them end, with the reason."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from support.jobs import finished, python, started
from support.spmd_mpi import mpi_environ, mpirun

pytestmark = pytest.mark.side_by_side(4)

HEAD = """
import os, signal, sys, time
import numpy as np
import fsdpcore as fc

def say(*words):  # in one piece, whatever the other ranks print
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

# Rank 1 does what the first argument names, while the others wait for it.
SCRIPT = (
    HEAD
    + """
def misbehave(how):
    say("failing", time.time())
    if how == "raise":
        raise ValueError("rank one is unwell")
    if how == "exit":
        sys.exit(5)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(300)

def main(backend):
    total = fc.all_reduce(np.full(2, backend.rank + 1.0), backend)
    say("joined", backend.capabilities.transport, backend.rank, *total)
    backend.barrier()
    if backend.rank == 1:
        misbehave(sys.argv[1])
    elif sys.argv[2:] == ["numpy"]:
        while True:
            np.ones((100, 100)) @ np.ones((100, 100))
    fc.all_reduce(np.ones(2), backend, timeout=100 if sys.argv[1] != "sleep" else 1)

if __name__ == "__main__":
    fc.launch(main)
    if sys.argv[2:] == ["after"]:
        if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
            raise KeyError("after the launch")
        time.sleep(300)
"""
)


def under_mpirun(ranks, *arguments, **environ):
    """How a job ended, within what is left to it after the longest deadline in it."""
    command = [*mpirun(ranks), *python(*arguments)]
    start = time.time()
    done = finished(command, mpi_environ(**environ))
    assert done.ended - start < 50, "a rank was waited for"
    return done


def test_several_launches_and_init_in_one_process(script):
    source = (
        HEAD
        + """
def main(backend, number):
    total = float(fc.all_reduce(np.float64(number + backend.rank), backend))
    return backend.capabilities.transport, backend.rank, total

if __name__ == "__main__":
    say(*(fc.launch(main, args=[number])[0] for number in range(3)))
    backend = fc.init()
    say("init", fc.all_gather(np.int64(backend.rank), backend).tolist())
    # Closed when the interpreter ends.
"""
    )
    done = under_mpirun(3, script(source))
    assert (done.code, done.err) == (0, "")
    said = [f"('mpi', {me}, 3.0) ('mpi', {me}, 6.0) ('mpi', {me}, 9.0)" for me in range(3)]
    assert sorted(done.out.splitlines()) == [*said, *["init [0, 1, 2]"] * 3]


def test_an_exception_ends_all_ranks(script):
    done = under_mpirun(2, script(SCRIPT), "raise", "numpy")
    assert done.code == 1
    assert "rank 1 failed:\nTraceback" in done.err
    assert "ValueError: rank one is unwell" in done.err


# The other ranks have longer to say theirs, and wait longer for what they must not wait for.
PATIENT = """
from fsdpcore.transports.mpi import backend, library
backend._FAILED_SECONDS, library.GRACE_SECONDS, library.FOLLOWING_SECONDS = 20, 6, 40
"""


def test_all_ranks_have_last_words_and_the_code_is_that_of_the_first(script):
    done = under_mpirun(3, script(PATIENT + SCRIPT), "exit")
    assert done.code == 5
    for rank in (0, 2):
        assert f"rank {rank}: stopped, because rank 1 failed: SystemExit: 5\n" in done.err


def test_an_exception_after_the_launch_ends_all_ranks(script):
    done = under_mpirun(2, script(SCRIPT), "well", "after")
    assert done.code == 1
    assert "KeyError: 'after the launch'" in done.err


def test_the_exit_code_of_a_rank_that_is_killed(script):
    assert under_mpirun(2, script(SCRIPT), "kill").code == 137


def test_a_rank_that_is_late_is_named(script):
    done = under_mpirun(2, script(SCRIPT), "sleep")
    assert done.code == 1
    assert "CommTimeoutError: all_reduce #3" in done.err
    assert "rank 1 is missing: finished barrier #2" in done.err


def test_a_rank_that_is_killed_leaves_none(script):
    source = SCRIPT.replace("misbehave(sys.argv[1])", "say('pid', os.getpid()); time.sleep(300)")
    command = [*mpirun(3), *python(script(source), "sleeps")]
    with started(command, mpi_environ()) as job:
        job.wait_for("pid")
        (pid,) = re.findall(r"pid (\d+)", job.seen)
        os.kill(int(pid), signal.SIGKILL)
        assert job.finish().code == 137


# A rank inside MPI waits awake. It is ended sooner than it would be.
INSIDE = """
from fsdpcore.transports.mpi import guard
from fsdpcore.transports.mpi.native import MpiCollectives
guard._FAILED_SECONDS, guard._LATE_SECONDS = 0.5, 0.3
"""


def test_a_rank_that_stops_inside_mpi_ends_the_job_at_the_deadline(script):
    source = (
        HEAD
        + INSIDE
        + """
def main(backend):
    if backend.rank == 1:  # the ranks have agreed on the call; it never enters MPI
        MpiCollectives.all_reduce = lambda *args: time.sleep(300)
    backend.barrier()
    fc.all_reduce(np.ones(100), backend, algorithm="native", timeout=1)

if __name__ == "__main__":
    fc.launch(main)
"""
    )
    done = under_mpirun(2, script(source))
    assert done.code == 1
    words = "rank 0 failed: CommTimeoutError: all_reduce #2 on ranks [0, 1] did not end in time"
    assert words in done.err


def test_a_failure_while_others_are_inside_mpi_ends_the_job(script):
    source = (
        HEAD
        + INSIDE
        + """
def fail(*args):
    time.sleep(0.5)  # the other one is inside by then, and cannot be told any more
    raise MemoryError("no room")

def main(backend):
    if backend.rank == 1:
        MpiCollectives.broadcast = fail
    try:
        fc.broadcast(np.ones(100), backend, root=1, algorithm="native", timeout=12)
    except MemoryError:  # and it goes on by itself
        time.sleep(300)

if __name__ == "__main__":
    fc.launch(main)
"""
    )
    done = under_mpirun(2, script(source))
    assert done.code == 1
    assert "rank 0: stopped in broadcast #1" in done.err
    assert "MemoryError: no room" in done.err


def test_zmq_under_mpirun(script, free_port):
    source = SCRIPT.replace("fc.launch(main)", "fc.launch(main, transport='zmq://127.0.0.1:{}')")
    done = under_mpirun(2, script(source.replace("{}", str(free_port()))), "well")
    assert done.code == 0, done.err
    assert "joined zmq 0 3.0 3.0\n" in done.out


def test_the_launcher_of_another_mpi_is_explained(script):
    environ = mpi_environ(PMI_RANK="1", PMI_SIZE="4", MPI_LOCALNRANKS="4", MPI_LOCALRANKID="1")
    done = finished(python(script(SCRIPT), "well"), environ)
    assert done.code == 1
    assert "as rank 1 of 4, but the MPI library that mpi4py uses" in done.err
    assert "knows of a single rank" in done.err
    assert "Traceback" not in done.err


def test_variables_that_contradict_mpi_are_explained(script):
    one_of_one = {"FSDPCORE_RANK": "0", "FSDPCORE_WORLD_SIZE": "1"}
    done = under_mpirun(2, script(SCRIPT), "well", FSDPCORE_TRANSPORT="mpi", **one_of_one)
    assert done.code == 1
    assert "of 2, but by the variables of fsdpcore run it is rank 0 of 1" in done.err


def test_one_rank_needs_no_launcher(script):
    source = SCRIPT.replace("fc.launch(main)", "fc.launch(main, transport='mpi')")
    done = finished(python(script(source), "well"), mpi_environ())
    assert (done.code, done.err) == (0, "")
    assert done.out == "joined mpi 0 1.0 1.0\n"


def test_ranks_that_never_come_are_not_waited_for_forever(script):
    source = SCRIPT.replace(
        "    fc.launch(main)",
        "    if os.environ.get('OMPI_COMM_WORLD_RANK') == '1':\n"
        "        time.sleep(300)\n"
        "    fc.launch(main, rendezvous_timeout=2)",
    )
    done = under_mpirun(2, script(source), "well")
    assert done.code != 0
    assert "_start_while_all_ranks_come" in done.err
