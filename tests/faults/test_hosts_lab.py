"""The hosts that other tests use: links are as asked for, and nothing of them stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hosts import recording
from support.hosts.lab import Host, Lab
from support.hosts.middle import Flow, Frames, Middle
from support.hosts.places import environs
from support.hosts.plain import connected, goodput, round_trip
from support.jobs import python, started

pytestmark = pytest.mark.usefixtures("needs_hosts")
waits = pytest.mark.side_by_side(4)


@pytest.mark.tools  # on a machine that is quiet
@waits
def test_a_link_carries_what_was_asked_for() -> None:
    with Lab(2, rate=100e6) as lab:
        for rate in (100e6, 10e6):
            lab.set_rate(1, rate)
            found = [8 * goodput(*lab.hosts, int(rate / 80)) for _ in range(3)]
            # A plain stream loses 5 % to the heads of packets. It comes in lumps of up to 64 KiB,
            # and where the machine is busy, too late or all at once.
            assert max(found) > 0.85 * rate, found
            assert min(found) < 1.1 * rate, found


@waits
def test_a_packet_takes_as_long_as_was_asked_for() -> None:
    with Lab(2, delay=0.01) as lab:
        assert round_trip(*lab.hosts, 10) >= 0.02
        lab.set_delay(0.0)
        assert min(round_trip(*lab.hosts, 10) for _ in range(10)) < 0.02


@pytest.mark.tools  # on a machine that is quiet
@waits
def test_a_switch_in_user_space_carries_a_gigabit() -> None:
    with Lab(2, delay=1e-9) as lab:
        assert max(8 * goodput(*lab.hosts, 20_000_000) for _ in range(3)) > 1e9


@contextlib.contextmanager
def datagrams(one: Host, other: Host) -> Iterator[tuple[socket.socket, socket.socket]]:
    with one.socket(socket.SOCK_DGRAM) as mine, other.socket(socket.SOCK_DGRAM) as theirs:
        mine.bind((one.address, 0))
        theirs.bind((other.address, 0))
        mine.connect(theirs.getsockname())
        theirs.connect(mine.getsockname())
        yield mine, theirs


def arrives(sender: socket.socket, receiver: socket.socket) -> bool:
    said = os.urandom(8)
    with contextlib.suppress(OSError):  # there may be no way at all
        sender.send(said)
    receiver.settimeout(0.05)
    try:
        while receiver.recv(8) != said:  # what was said before may be late
            pass
    except TimeoutError:
        return False
    return True


def arrives_soon(sender: socket.socket, receiver: socket.socket) -> bool:
    """The kernel may take a second to find that a cable is there again."""
    return any(arrives(sender, receiver) for _ in range(100))


@waits
def test_what_is_lost_is_lost_without_a_word() -> None:
    with Lab(2) as lab, datagrams(*lab.hosts) as (one, other):
        lab.lose(0, 1)
        assert not arrives(one, other)
        assert arrives_soon(other, one)
        lab.mend()
        assert arrives_soon(one, other)
        assert arrives_soon(other, one)
        for fail in (lab.silence, lab.cut):
            fail(1)
            assert not arrives(one, other)
            assert not arrives(other, one)
            lab.mend()
            assert arrives_soon(one, other)


@waits
def test_a_connection_survives_a_short_loss_and_none_is_told_of_a_host_that_vanishes() -> None:
    with Lab(2) as lab, connected(*lab.hosts) as (mine, theirs):
        lab.lose(0, 1)
        mine.sendall(b"late")
        theirs.settimeout(0.2)
        with pytest.raises(TimeoutError):
            theirs.recv(4)
        lab.mend()
        theirs.settimeout(30)
        assert theirs.recv(4) == b"late"
        sleeper = subprocess.Popen(lab.hosts[1].command("sleep", 600))
        while sleeper.pid not in lab.pids():
            time.sleep(0.005)
        lab.vanish(1)
        assert sleeper.wait(10) == -signal.SIGKILL
        theirs.close()  # which the kernel of that host says to nobody
        mine.settimeout(0.3)
        with pytest.raises(TimeoutError):
            mine.recv(1)


HOLDER = """
import subprocess, sys, time
from support.hosts.lab import Lab
lab = Lab(2, delay=0.001)
held = subprocess.Popen(lab.hosts[1].command("sleep", "600"), start_new_session=True)
while held.pid not in lab.pids():
    time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""


@waits
def test_nothing_stays_of_a_test_that_is_killed(script: Callable[..., Path]) -> None:
    tests = str(Path(__file__).parents[1])
    with started(python(script(HOLDER)), {"PYTHONPATH": tests}) as job:
        job.wait_for("ready")
        assert len(job.pids()) == 3  # the script, who keeps the hosts, who sleeps on one
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        job.assert_gone()


@waits
def test_all_that_is_said_can_be_read_by_a_listener(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    said, path = os.urandom(300_000), tmp_path_factory.mktemp("recorded") / "words.pcap"
    with Lab(2) as lab, connected(*lab.hosts) as (mine, theirs):
        lab.record(path)
        mine.sendall(said)
        theirs.sendall(b"short")
        assert mine.recv(100) == b"short"
        with theirs.makefile("rb") as heard:
            assert heard.read(len(said)) == said
        lab.record(None)
    found = recording.words(path)
    assert sorted(map(len, found.values())) == [5, len(said)]
    assert set(found.values()) == {said, b"short"}
    assert {each.source for each in found} == {host.address for host in lab}


@waits
def test_somebody_in_the_middle_can_change_what_is_said() -> None:
    flows = set()

    def change(flow: Flow, data: bytes) -> bytes | None:
        flows.add(flow)
        return None if data == b"stop" else data.replace(b"one", b"two") + b"!"

    with Lab(4) as lab, Middle(lab, change), connected(lab.hosts[1], lab.hosts[0]) as ends:
        mine, theirs = ends
        assert theirs.getpeername()[0] == lab.hosts[1].address
        mine.sendall(b"one and one")
        assert theirs.recv(100) == b"two and two!"
        theirs.sendall(b"stop")
        with pytest.raises(ConnectionResetError):
            mine.recv(1)
        port = theirs.getsockname()[1]
    assert flows == {Flow(0, 1, 1, port), Flow(0, 0, 1, port)}


def test_frames_of_zeromq_are_cut_wherever_the_stream_is() -> None:
    greeting, short = bytes(64), b"\x04\x03abc"
    long = b"\x02" + (300).to_bytes(8, "big") + bytes(300)
    stream = greeting + short + long + b"\x00\x00"
    for step in (1, 7, 1000):
        frames, found = Frames(), list[bytes]()
        for at in range(0, len(stream), step):
            found += frames.cut(stream[at : at + step])
        # Both wait for the beginning of the other's greeting: it is passed on as it comes.
        assert len(found) == -(-len(greeting) // step) + 3
        assert b"".join(found) == stream
        assert found[-3:] == [short, long, b"\x00\x00"]


SUM = """
import sys
import numpy as np
import fsdpcore as fc
with fc.init(sys.argv[1]) as backend:
    print("sum", fc.all_reduce(np.int64(backend.rank + 1), backend), backend.hosts, flush=True)
"""


@waits
def test_ranks_on_two_hosts_meet_by_variables_set_by_hand(script: Callable[..., Path]) -> None:
    path = script(SUM)
    with Lab(2) as lab, contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                started(host.command(*python(path, f"zmq://?host_id={host.name}")), environ)
            )
            for host, environ in zip(lab, environs(lab.hosts), strict=True)
        ]
        for job in jobs:
            done = job.finish()
            assert (done.code, done.out) == (0, "sum 3 (0, 1)\n"), done.err
        assert lab.pids() == []
