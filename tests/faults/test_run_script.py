"""``fsdpcore run``: scripts that end well, that fail, and what their user sees."""

from __future__ import annotations

import shlex
import socket

import pytest
from support.jobs import SOON, finished, fsdpcore, patient_fsdpcore

pytestmark = pytest.mark.side_by_side(4)

SAY = """
import os, signal, sys, time

def say(*words):  # in one piece, whatever the other ranks print
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
HEAD = (
    SAY
    + """
import numpy as np
import fsdpcore as fc
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
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

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


# It looks at all that it was given, and launches several times, also a job within a job.
GOOD = (
    HEAD
    + """
NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "THREADS"]

def weighted(backend, factor):
    total = fc.all_reduce(np.full(3, backend.rank + 1.0), backend)
    return float(factor * total.sum() + backend.rank)

def settings(backend):
    return backend.capabilities.transport, backend.timeout, backend.world_size

def inner(backend, outer):
    return outer, backend.rank, fc.all_reduce([1], backend).tolist()

def outer(backend):
    backend.barrier()
    inside = []
    if backend.rank == 1:
        inside = [fc.launch(inner, world_size=2, transport=t, args=[1]) for t in ("sim", "zmq")]
    backend.barrier()
    return inside

if __name__ == "__main__":
    me = os.environ.get("FSDPCORE_RANK")
    say(me, "arguments", sys.argv[1:])
    say(me, "input", repr(sys.stdin.read()))
    say(me, "launcher", [os.environ.get("FSDPCORE_" + name) for name in NAMES])
    for factor in (10, 100):
        say(me, factor, fc.launch(weighted, args=[factor], world_size=9))
    say(me, "settings", fc.launch(settings))
    say(me, "inner", fc.launch(outer))
    if me is not None:
        fc.init().barrier()  # and closed at the end of the interpreter
"""
)
ARGUMENTS = ["-n", "7", "--transport", "none"]


def good(script, transport):
    """What the script says under ``run``, by its first words; an outer launcher's variables lie."""
    options = ["--ranks", 2, "--timeout", 70, "--transport", transport]
    command = shlex.join(fsdpcore("run", *options, script(GOOD), *ARGUMENTS))
    outer = {"FSDPCORE_RANK": "4", "FSDPCORE_WORLD_SIZE": "5", "FSDPCORE_TOKEN": "old"}
    done = finished(["sh", "-c", f"echo hello | {command}"], outer)
    assert (done.code, done.err) == (0, "")
    lines = [line.split(maxsplit=2) for line in done.out.splitlines()]
    said = {(who, what): words for who, what, words in lines}
    assert len(said) == len(lines)  # each once
    return said


def inner(rank):
    return [[(rank, each, [2]) for each in range(2)]] * 2 if rank == 1 else []


def test_every_rank_runs_the_script_and_may_launch_again(script, free_port):
    said = good(script, f"zmq://127.0.0.1:{free_port()}?segment_bytes=64KiB")
    assert len(said) == 14
    for rank in range(2):
        me = str(rank)
        assert said[me, "arguments"] == str(ARGUMENTS)
        assert said[me, "input"] == ("''" if rank else "'hello\\n'")
        assert said[me, "launcher"] == str([me, "2", me, "2", None])
        for factor in (10, 100):
            assert said[me, str(factor)] == str([factor * 9.0 + rank])
        assert said[me, "settings"] == "[('zmq', 70.0, 2)]"
        assert said[me, "inner"] == str([inner(rank)])


def test_the_same_script_with_threads(script):
    said = good(script, "sim")
    assert said == {
        ("None", "arguments"): str(ARGUMENTS),
        ("None", "input"): "'hello\\n'",
        ("None", "launcher"): str([None, "5", None, None, "2"]),
        ("None", "10"): str([90.0, 91.0]),
        ("None", "100"): str([900.0, 901.0]),
        ("None", "settings"): str([("sim", 70.0, 2)] * 2),
        ("None", "inner"): str([inner(0), inner(1)]),
    }


def test_a_module(script):
    package = script("", "pack/__init__.py").parent
    (package / "part.py").write_text(SAY + "say(os.environ['FSDPCORE_RANK'], sys.argv[1:])")
    command = fsdpcore("run", "-n", 2, "-m", "pack.part", "-m", "x")
    done = finished(command, cwd=package.parent)
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.splitlines()) == ["0 ['-m', 'x']", "1 ['-m', 'x']"]


# Failing.


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "rank 1 failed (exit code 1: ValueError: rank one is unwell)"),
        ("kill", 137, "rank 1 failed (killed by SIGKILL)"),
    ],
)
def test_one_rank_that_fails_ends_the_job(script, how, code, words):
    ranks = 3 if how == "kill" else 2
    done = finished(patient_fsdpcore("run", "-n", ranks, script(BAD), how))
    assert done.code == code
    assert last_line(done) == f"fsdpcore: {words}; the other ranks were stopped"
    assert done.ended - done.moment("failing") < SOON
    for rank in (0, 2)[: ranks - 1]:
        (line,) = [line for line in done.err.splitlines() if line.startswith(f"rank {rank}")]
        assert "stopped, because" in line
        assert "rank 1" in line
    assert done.err.count("Traceback") == (how == "raise")
    assert done.err.count("\nValueError: rank one is unwell\n") == (how == "raise")


# It prints word by word, as every rank does, then one rank hangs.
HANGS = (
    HEAD
    + """
def read_for_ever():
    time.sleep(60)

def main(backend):
    for line in range(300):
        print("rank", backend.rank, *range(30), line)
    backend.barrier()
    if backend.rank == 1:
        read_for_ever()
    backend.barrier(timeout=0.5)

if __name__ == "__main__":
    fc.launch(main, world_size=2)
"""
)


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_ranks_print_whole_lines_and_one_that_hangs_says_where(script, transport):
    path = script(HANGS)
    command = fsdpcore("run", "-n", 2, "--transport", transport, path)
    done = finished(command, {"PYTHONUNBUFFERED": "1"})
    words = " ".join(map(str, range(30)))
    expected = [f"rank {rank} {words} {line}" for rank in (0, 1) for line in range(300)]
    assert sorted(done.out.splitlines()) == sorted(expected)
    assert done.code == 1
    number = HANGS.splitlines().index("    time.sleep(60)") + 1
    assert "CommTimeoutError: barrier #2 on ranks [0, 1] timed out after 0.5 s" in last_line(done)
    assert f"/script.py:{number} in read_for_ever, called from " in last_line(done)


def test_a_failure_with_threads(script):
    done = finished(fsdpcore("run", "-n", 3, "--transport", "sim", script(BAD), "raise"))
    assert done.code == 1
    assert "rank 1 failed: ValueError: rank one is unwell" in last_line(done)
    assert "in fail" in done.err
    assert done.ended - done.moment("failing") < SOON


def test_a_rank_that_fails_before_it_joins(script):
    source = (
        SAY
        + """
if __name__ == "__main__":
    if os.environ["FSDPCORE_RANK"] == "1":
        say("failing", time.time())
        raise ImportError("something is not installed")
    import fsdpcore as fc
    fc.launch(print)
"""
    )
    done = finished(fsdpcore("run", "-n", 2, script(source)))
    assert done.code == 1
    assert last_line(done).startswith("fsdpcore: rank 1 failed (exit code 1)")
    assert done.err.count("Traceback") == 1
    assert done.ended - done.moment("failing") < SOON


def test_ranks_that_heed_nothing_are_killed_with_what_they_started(script):
    source = (
        SAY
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


def test_an_uncaught_exception_after_init_ends_the_job(script):
    source = (
        HEAD
        + """
backend = fc.init()
backend.barrier()
if backend.rank == 1:
    say("failing", time.time())
    raise ValueError("rank one is unwell")
backend.barrier()
"""
    )
    done = finished(patient_fsdpcore("run", "-n", 2, script(source)))
    assert done.code == 1
    assert "rank 1 failed (exit code 1: ValueError" in last_line(done)
    assert done.err.count("Traceback") == 1
    assert done.err.count("stopped, because rank 1 failed: ValueError: rank one is unwell") == 1
    assert done.ended - done.moment("failing") < SOON


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


def test_a_wrong_configuration_in_the_script_is_one_line_of_each_rank(script):
    done = finished(fsdpcore("run", "-n", 2, script(HEAD + "fc.init('sim')")))
    assert done.code == 1
    *ranks, last = done.err.splitlines()
    assert 1 <= len(ranks) <= 2, "the second may be stopped before it says the same"
    assert all("threads of one process" in line for line in ranks)
    assert last.startswith("fsdpcore: rank ")


def test_a_port_that_is_taken_is_one_line(script):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        url = f"zmq://127.0.0.1:{port}"
        done = finished(fsdpcore("run", "-n", 2, "--transport", url, script("")))
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert f"127.0.0.1:{port}" in done.err
