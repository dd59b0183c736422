"""``fsdpcore run``: scripts that end well, that fail, and what their user sees."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from support.jobs import SOON, finished, fsdpcore, patient_fsdpcore

pytestmark = pytest.mark.side_by_side(4)

HEAD = """
import os, signal, sys, time
import numpy as np
import fsdpcore as fc

def say(*words):  # in one piece, whatever the other ranks print
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""

GOOD = (
    HEAD
    + """
def main(backend, factor):
    total = fc.all_reduce(np.full(3, backend.rank + 1.0), backend)
    return factor * total.sum() + backend.rank

if __name__ == "__main__":
    for factor in (10, 100):
        say("result", fc.launch(main, args=[factor], world_size=9), sys.argv[1:])
"""
)

# Rank 1 fails, in the way that the first argument names, while the others wait for it.
BAD = (
    HEAD
    + """
def fail(how):
    say("failing", time.time())
    if how == "raise":
        raise ValueError("rank one is unwell")
    if how == "exit":
        sys.exit(5)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "_exit":
        os._exit(9)

def main(backend):
    backend.barrier()
    if backend.rank == 1:
        fail(sys.argv[1])
    backend.barrier()

if __name__ == "__main__":
    fc.launch(main, world_size=3)
"""
)


def last_line(done):
    return done.err.splitlines()[-1]


# Ending well.


def test_every_rank_runs_the_script_and_may_launch_again(script):
    done = finished(fsdpcore("run", "-n", 3, script(GOOD), "-n", "7", "--transport", "none"))
    assert (done.code, done.err) == (0, "")
    arguments = ["-n", "7", "--transport", "none"]
    expected = [
        f"result {[np.float64(factor * 18.0 + rank)]} {arguments}"
        for factor in (10, 100)
        for rank in range(3)
    ]
    assert sorted(done.out.splitlines()) == sorted(expected)


def test_the_same_script_with_threads(script):
    done = finished(fsdpcore("run", "--ranks", 3, "--transport", "sim", script(GOOD), "a"))
    assert (done.code, done.err) == (0, "")
    expected = [
        f"result {[np.float64(factor * 18.0 + rank) for rank in range(3)]} ['a']"
        for factor in (10, 100)
    ]
    assert done.out.splitlines() == expected


def test_settings_and_transport_reach_the_script(script):
    source = (
        HEAD
        + """
def main(backend):
    return backend.capabilities.transport, backend.timeout, backend.world_size

if __name__ == "__main__":
    say(fc.launch(main))
"""
    )
    options = ["--timeout", "17", "--transport", "zmq://?segment_bytes=64KiB"]
    done = finished(fsdpcore("run", "-n", 2, *options, script(source)))
    assert (done.code, done.err) == (0, "")
    assert done.out == "[('zmq', 17.0, 2)]\n" * 2


def test_a_module(script):
    package = script("", "pack/__init__.py").parent
    (package / "part.py").write_text(HEAD + "say(os.environ['FSDPCORE_RANK'], sys.argv[1:])")
    command = fsdpcore("run", "-n", 2, "-m", "pack.part", "-m", "x")
    done = finished(command, cwd=package.parent)
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == ["0 ['-m', 'x']", "1 ['-m', 'x']"]


def test_standard_input_goes_to_rank_0(script):
    source = HEAD + "say(os.environ['FSDPCORE_RANK'], repr(sys.stdin.read()))"
    path = script(source)
    command = f"echo hello | {' '.join(fsdpcore('run', '-n', 2, path))}"
    done = finished(["sh", "-c", command])
    assert sorted(done.out.splitlines()) == ["0 'hello\\n'", "1 ''"]


@pytest.mark.parametrize("outer", ["zmq", "sim"])
def test_a_rank_may_launch_a_job_of_its_own(script, outer):
    source = (
        HEAD
        + """
def inner(backend, rank):
    return rank, backend.rank, fc.all_reduce([1], backend).tolist()

def main(backend):
    backend.barrier()
    own = [backend.rank]
    results = [fc.launch(inner, world_size=2, transport=t, args=own) for t in ("sim", "zmq")]
    backend.barrier()
    return results

if __name__ == "__main__":
    say(fc.launch(main))
"""
    )
    done = finished(fsdpcore("run", "-n", 2, "--transport", outer, script(source)))
    assert (done.code, done.err) == (0, "")
    each = [[[(rank, inner, [2]) for inner in range(2)]] * 2 for rank in range(2)]
    expected = [str(each)] if outer == "sim" else [str([result]) for result in each]
    assert sorted(done.out.splitlines()) == expected


def test_ranks_know_their_launcher_and_nothing_of_an_outer_one(script):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "THREADS"]
    source = HEAD + f"say([os.environ.get('FSDPCORE_' + name) for name in {names}])"
    outer = {"FSDPCORE_RANK": "4", "FSDPCORE_WORLD_SIZE": "5", "FSDPCORE_TOKEN": "old"}
    done = finished(fsdpcore("run", "-n", 2, script(source)), outer)
    expected = [f"{[rank, '2', rank, '2', None]}" for rank in ("0", "1")]
    assert sorted(done.out.splitlines()) == expected
    done = finished(fsdpcore("run", "-n", 2, "--transport", "sim", script(source)), outer)
    assert done.out.splitlines() == [f"{[None, '5', None, None, '2']}"]


# Failing.


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "rank 1 failed (exit code 1: ValueError: rank one is unwell)"),
        ("exit", 5, "rank 1 failed (exit code 5: SystemExit: 5)"),
        ("kill", 137, "rank 1 failed (killed by SIGKILL)"),
        ("_exit", 9, "rank 1 failed (exit code 9)"),
    ],
)
def test_one_rank_that_fails_ends_the_job(script, how, code, words):
    done = finished(patient_fsdpcore("run", "-n", 3, script(BAD), how))
    assert done.code == code
    assert last_line(done) == f"fsdpcore: {words}; the other ranks were stopped"
    assert done.ended - done.moment("failing") < SOON
    for rank in (0, 2):
        (line,) = [line for line in done.err.splitlines() if line.startswith(f"rank {rank}")]
        assert "stopped, because" in line
        assert "rank 1" in line
    assert done.err.count("Traceback") == (how == "raise")
    assert done.err.count("\nValueError: rank one is unwell\n") == (how == "raise")


def test_a_failure_with_threads(script):
    done = finished(fsdpcore("run", "-n", 3, "--transport", "sim", script(BAD), "raise"))
    assert done.code == 1
    assert "rank 1 failed: ValueError: rank one is unwell" in last_line(done)
    assert "in fail" in done.err
    assert done.ended - done.moment("failing") < SOON


def test_a_rank_that_fails_before_it_joins(script):
    source = (
        HEAD
        + """
if __name__ == "__main__":
    if os.environ["FSDPCORE_RANK"] == "1":
        say("failing", time.time())
        raise ImportError("something is not installed")
    fc.launch(print)
"""
    )
    done = finished(fsdpcore("run", "-n", 3, script(source)))
    assert done.code == 1
    assert last_line(done).startswith("fsdpcore: rank 1 failed (exit code 1)")
    assert done.err.count("Traceback") == 1
    assert done.ended - done.moment("failing") < SOON


def test_ranks_that_heed_nothing_are_killed_with_what_they_started(script):
    source = (
        HEAD
        + """
import subprocess
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    if os.environ["FSDPCORE_RANK"] == "1":
        say("failing", time.time())
        sys.exit(6)
    time.sleep(100)
"""
    )
    done = finished(fsdpcore("run", "-n", 2, script(source)))
    assert done.code == 6
    assert done.ended - done.moment("failing") < SOON


INIT = (
    HEAD
    + """
backend = fc.init()
backend.barrier()
if backend.rank == 1 and sys.argv[1] == "raise":
    say("failing", time.time())
    raise ValueError("rank one is unwell")
backend.barrier()
say("end", backend.rank)
"""
)


def test_an_uncaught_exception_after_init_ends_the_job(script):
    done = finished(patient_fsdpcore("run", "-n", 3, script(INIT), "raise"))
    assert done.code == 1
    assert "rank 1 failed (exit code 1: ValueError" in last_line(done)
    assert done.err.count("Traceback") == 1
    assert done.err.count("stopped, because rank 1 failed: ValueError: rank one is unwell") == 2
    assert done.ended - done.moment("failing") < SOON


def test_init_closes_at_the_end_of_the_interpreter(script):
    done = finished(fsdpcore("run", "-n", 3, script(INIT), "well"))
    assert (done.code, done.err) == (0, "")
    assert done.out.count("end") == 3


def test_an_exception_after_two_launches_is_printed_once(script):
    source = (
        HEAD
        + """
def main(backend):
    backend.barrier()

if __name__ == "__main__":
    fc.launch(main)
    fc.launch(main)
    if os.environ["FSDPCORE_RANK"] == "0":
        raise ValueError("once")
"""
    )
    done = finished(fsdpcore("run", "-n", 2, script(source)))
    assert done.err.count("Traceback") == 1
    assert done.err.count("rank 0 failed:\n") == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("fc.launch(print, transport='zqm')", "did you mean 'zmq'"),
        ("fc.launch(print, timout=3)", "did you mean 'timeout'"),
        ("fc.init('sim')", "threads of one process"),
    ],
)
def test_a_wrong_configuration_in_the_script_is_one_line_of_each_rank(script, call, words):
    done = finished(fsdpcore("run", "-n", 2, script(HEAD + call)))
    assert done.code == 1
    *ranks, last = done.err.splitlines()
    assert 1 <= len(ranks) <= 2, "the second may be stopped before it says the same"
    assert all(words in line for line in ranks)
    assert last.startswith("fsdpcore: rank ")


def test_a_script_that_is_no_program_of_ours(script):
    done = finished(fsdpcore("run", "-n", 2, script("this is no Python")))
    assert done.code == 1
    assert "SyntaxError" in done.err


def test_the_port_can_be_named(script, free_port):
    done = finished(
        fsdpcore("run", "-n", 2, "--transport", f"zmq://127.0.0.1:{free_port()}", script(GOOD))
    )
    assert (done.code, done.err) == (0, "")


def test_a_port_that_is_taken_is_one_line(script):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        url = f"zmq://127.0.0.1:{port}"
        done = finished(fsdpcore("run", "-n", 2, "--transport", url, script(GOOD)))
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert f"127.0.0.1:{port}" in done.err
