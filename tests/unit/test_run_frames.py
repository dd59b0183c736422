"""What comes from a host over ssh, whoever writes it."""

from __future__ import annotations

import time

import pytest

from fsdpcore.launch.output import PrefixedOutput
from fsdpcore.launch.run import agent, remote
from fsdpcore.launch.run.agent import Order
from fsdpcore.launch.run.endings import RankEnd, RankEnds
from fsdpcore.launch.run.hosts import HostShare
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


def test_the_rank_that_failed_first_is_named_whichever_host_it_was_on(tmp_path):
    """Another one fails by itself before it is told to end, and its host comes first."""
    for name, rank, code in (("a", 0, 7), ("b", 1, 5)):
        ends = agent.encode_ends(RankEnds([RankEnd(rank, code, False)], rank))
        for when, frame in (
            ("begin", b"m127.0.0.1:7"),
            ("fail", b"f%d" % rank),
            ("end", b"x" + ends),
        ):
            (tmp_path / f"{name}.{when}").write_bytes(b"\x1e%b\n" % frame)
    program = tmp_path / "agent"
    program.write_text(
        f"cd {tmp_path}; read order; cat $1.begin; [ $1 = b ] && cat b.fail; read stop; cat $1.end"
    )
    shares = [HostShare("a", 1), HostShare("b", 1)]
    orders = [Order("1", "/", {}, "s.py", [], False, JobShare(2, 1, rank), []) for rank in (0, 1)]
    ending = run_hosts(shares, orders, f"sh {program} {{host}}", PrefixedOutput())
    assert (ending.code, ending.rank) == (5, 1)
    assert ending.message.startswith("rank 1 on b failed")


def test_a_host_that_has_not_answered_holds_up_no_end(monkeypatch):
    """There is nobody yet who could end its ranks in their own time."""
    monkeypatch.setattr(remote, "_GRACE_SECONDS", 15.0)
    shares = [HostShare("slow", 1), HostShare("down", 1)]
    orders = [Order("1", "/", {}, "s.py", [], False, JobShare(2, 1, rank), []) for rank in (0, 1)]
    began = time.monotonic()
    launcher = "sh -c 'if [ $0 = slow ]; then sleep 100; fi; exit 255' {host}"
    ending = run_hosts(shares, orders, launcher, PrefixedOutput())
    assert ending.code == 255
    assert ending.message.startswith("host down: the command that starts its ranks ended")
    assert time.monotonic() - began < 10
