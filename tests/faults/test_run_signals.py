"""Ctrl-C, SIGTERM and the death of a launcher: the ranks end, and nobody prints a wall of text."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.jobs import SOON, fsdpcore, patient_fsdpcore, python, started

SCRIPT = """
import os, signal, sys, time

def main(backend):
    backend.barrier()
    try:
        os.write(1, b"ready\\n")  # in one piece, whatever the others print
        if backend.rank == 0:
            time.sleep(100)
        backend.barrier()
    except KeyboardInterrupt:
        if backend.rank == 0:
            os.write(1, b"interrupted\\n")
        raise

if __name__ == "__main__":
    {prelude}
    import fsdpcore as fc
    fc.launch(main, world_size=2{more})
"""


def source(prelude="pass", more=""):
    """The script, with something before the launch, and more options of it."""
    return SCRIPT.format(prelude=prelude, more=more)


pytestmark = pytest.mark.side_by_side(4)


def to_process(process, number):
    os.kill(process.pid, number)


def to_group(process, number):
    """As a terminal does."""
    os.killpg(process.pid, number)


def interrupted(command, number=signal.SIGINT, send=to_process, *, ready=2, environ=None):
    with started(command, environ) as job:
        job.wait_for("ready", ready)
        sent = time.time()
        send(job.process, number)
        done = job.finish()
    assert done.ended - sent < SOON
    return done


@pytest.mark.parametrize(
    ("number", "code", "words", "heard"),
    [
        (signal.SIGINT, 130, "fsdpcore: interrupted (SIGINT)", ["interrupted"]),
        (signal.SIGTERM, 143, "fsdpcore: terminated (SIGTERM)", []),
    ],
)
def test_run_passes_the_signal_on_and_ends_with_one_line(script, number, code, words, heard):
    done = interrupted(patient_fsdpcore("run", "-n", 2, script(source())), number, to_group)
    assert (done.code, done.err) == (code, f"{words}; all ranks were stopped\n")
    assert done.out.split() == ["ready", "ready", *heard]


def test_run_with_threads_ends_with_one_line(script):
    done = interrupted(
        fsdpcore("run", "-n", 2, "--transport", "sim", script(source())), send=to_group
    )
    assert done.code == 130
    assert done.err == "fsdpcore: interrupted (SIGINT); all ranks were stopped\n"


def test_an_interrupt_before_the_ranks_have_joined_prints_no_tracebacks(script):
    prelude = "os.write(1, b'ready\\n'); time.sleep(100)"
    done = interrupted(fsdpcore("run", "-n", 2, script(source(prelude))), send=to_group)
    assert done.code == 130
    assert done.err == "fsdpcore: interrupted (SIGINT); all ranks were stopped\n"


def test_a_second_interrupt_ends_stubborn_ranks_at_once(script):
    prelude = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'ready\\n'); time.sleep(100)"
    )
    with started(fsdpcore("run", "-n", 2, script(source(prelude)))) as job:
        job.wait_for("ready", 2)
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        job.process.send_signal(signal.SIGINT)
        done = job.finish()
    assert done.code == 130
    assert len(done.err.splitlines()) == 1


def test_killing_the_launcher_leaves_no_rank(script):
    with started(fsdpcore("run", "-n", 2, script(source()))) as job:
        job.wait_for("ready", 2)
        assert len(job.pids()) == 3
        job.process.kill()
        job.assert_gone()


def test_killing_a_script_that_launched_processes_leaves_no_rank(script):
    with started(python(script(source(more=", transport='zmq'")))) as job:
        job.wait_for("ready", 2)
        assert len(job.pids()) == 3
        job.process.kill()
        job.assert_gone()


@pytest.mark.parametrize(
    ("send", "transport"), [(to_process, "zmq"), (to_group, "zmq"), (to_process, "sim")]
)
def test_launch_passes_keyboard_interrupt_to_its_caller(script, transport, send):
    guarded = source(more=f", transport={transport!r}")
    call = guarded[guarded.index("    fc.launch") :]
    guarded = guarded.replace(call, f"    try:\n    {call}    except KeyboardInterrupt:\n")
    guarded += "        print('caught', flush=True)\n"
    done = interrupted(python(script(guarded)), send=send)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("caught\n")
