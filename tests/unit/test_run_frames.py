"""What comes from a host over ssh, whoever writes it."""

from __future__ import annotations

import pytest

from fsdpcore.launch.run import agent
from fsdpcore.launch.run.agent import Order
from fsdpcore.launch.run.endings import RankEnd, RankEnds
from fsdpcore.launch.run.hosts import HostShare
from fsdpcore.launch.run.output import PrefixedOutput
from fsdpcore.launch.run.remote import run_hosts
from fsdpcore.launch.run.scripts import JobShare

LONG = "x" * 200_000


def heard(tmp_path, text):
    """How a job of one host ends that says ``text``, and ends when it is told to."""
    path = tmp_path / "said"
    path.write_bytes(text)
    order = Order("1", "/", {}, "s.py", [], False, JobShare(1, 1), [])
    launcher = f"sh -c 'cat {path}; read order; read stop' {{host}}"
    return run_hosts([HostShare("a", 1)], [order], launcher, PrefixedOutput())


def test_frames_are_found_behind_what_a_shell_prints_and_at_any_length(tmp_path, capfd):
    ends = agent.encode_ends(RankEnds([RankEnd(0, 3, False, LONG)], 0))
    frames = [b"m127.0.0.1:7", b"o0 " + LONG.encode(), b"f0", b"x" + ends]
    ending = heard(tmp_path, b"welcome" + b"".join(b"\x1e%b\n" % frame for frame in frames))
    assert (ending.code, ending.rank) == (3, 0)
    assert LONG in ending.message
    assert capfd.readouterr() == (f"[0] {LONG}\n", "[a] welcome\n")


@pytest.mark.parametrize("frame", ["one 1", "x[1]", "x{", "fx", "p\udcff", "q", ""])
def test_a_frame_that_makes_no_sense_ends_the_job(tmp_path, frame):
    """It came from the output of something else, which may go on for ever."""
    text = b"\x1em127.0.0.1:7\n\x1e" + frame.encode(errors="surrogateescape") + b"\n"
    ending = heard(tmp_path, text)
    assert ending.code == 2
    assert "host a: what came from there is not what" in ending.message
