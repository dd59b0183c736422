"""Somebody on the network: who reads, records, replays and changes what two hosts say."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from support.hosts import recording
from support.hosts.lab import Lab
from support.hosts.middle import Flow, Frames, Middle
from support.hosts.ranks import on_hosts
from support.zmq_ranks import Line, Outcome, ready

import fsdpcore as fc

pytestmark = pytest.mark.usefixtures("needs_hosts")
waits = pytest.mark.side_by_side(4)

TOKEN = "a secret that all ranks of this test know"
PAYLOAD = b"what the ranks tell each other, and nobody else"
JOBS = int(os.environ.get("TEST_JOBS", "200"))
COUNT = int(os.environ.get("TEST_FRAMES", "100000"))
# Bytes of an encrypted PING; a PONG has two less. ZeroMQ goes on if one of them never comes.
PING = 42


def telling(backend: fc.Backend, line: Line) -> bool:
    """Send the payload, in one piece and in many; then sums, until the test says so."""
    secret = np.frombuffer(PAYLOAD, np.uint8)
    large = np.tile(secret, 20_000)
    other = 1 - backend.rank
    for mine in (secret, large):
        sent = backend.isend(mine, other)
        assert (backend.recv(np.empty_like(mine), other) == mine).all()
        sent.wait()
    line.tell("ready")
    asked = threading.Thread(target=line.ask, daemon=True)
    asked.start()
    going = True
    while going:
        total = fc.all_reduce(np.array([1, int(asked.is_alive())]), backend)
        assert total[0] == 2, "wrong sum"
        going = total[1] > 0
        time.sleep(0.005)
    return True


@waits
def test_a_listener_reads_neither_payload_nor_secret(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "job.pcap"
    for security, readable in (("auto", False), ("none", True)):
        with Lab(2) as lab:
            lab.record(path)
            with on_hosts(telling, lab, token=TOKEN, security=security) as ranks:
                ready(ranks)
                for rank in ranks:
                    rank.say("enough")
                assert [rank.outcome() for rank in ranks] == [Outcome(True)] * 2
            lab.record(None)
        said = b"\n".join(recording.words(path).values())
        assert len(said) > 2 * 20_000 * len(PAYLOAD)
        assert TOKEN.encode() not in said
        assert (PAYLOAD in said) is readable


def flipped(frames: list[bytes], drawn: random.Random) -> list[bytes]:
    """A bit of one frame."""
    at = drawn.randrange(len(frames))
    changed = bytearray(frames[at])
    changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
    return [*frames[:at], bytes(changed), *frames[at + 1 :]]


def truncated(frames: list[bytes], drawn: random.Random) -> list[bytes]:
    at = drawn.randrange(len(frames))
    return [*frames[:at], frames[at][: drawn.randrange(len(frames[at]))], *frames[at + 1 :]]


def replayed(frames: list[bytes], drawn: random.Random) -> list[bytes]:
    at = drawn.randrange(len(frames))
    return [*frames[: at + 1], *frames[at:]]


def reordered(frames: list[bytes], drawn: random.Random) -> list[bytes]:
    if len(frames) < 2:
        return frames
    at = drawn.randrange(len(frames) - 1)
    return [*frames[:at], frames[at + 1], frames[at], *frames[at + 2 :]]


def dropped(frames: list[bytes], drawn: random.Random) -> list[bytes]:
    said = [at for at, frame in enumerate(frames) if len(frame) > PING]
    if not said:
        return frames
    at = drawn.choice(said)
    return [*frames[:at], *frames[at + 1 :]]


Mutation = Callable[[list[bytes], random.Random], list[bytes]]
MUTATIONS: list[Mutation] = [flipped, truncated, replayed, reordered, dropped]


@waits
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda each: each.__name__)
def test_what_is_changed_on_the_way_ends_the_job_with_an_error(mutate: Mutation) -> None:
    check_changed(mutate, random.Random(7))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(JOBS))
def test_whatever_is_changed_on_the_way_ends_the_job_with_an_error(seed: int) -> None:
    drawn = random.Random(seed)
    check_changed(drawn.choice(MUTATIONS), drawn)


def check_changed(mutate: Mutation, drawn: random.Random) -> None:
    """Change frames of one connection that works, at some moment: never a wrong result."""
    moment = drawn.random() * 0.1
    cutters: defaultdict[Flow, Frames] = defaultdict(Frames)
    armed, hit = threading.Event(), threading.Event()

    def change(flow: Flow, data: bytes) -> bytes:
        frames = cutters[flow].cut(data)
        if frames and armed.is_set() and not hit.is_set():
            changed = mutate(frames, drawn)
            if changed != frames:
                hit.set()
                frames = changed
        return b"".join(frames)

    with Lab(4) as lab, Middle(lab, change):
        with on_hosts(telling, lab.hosts[:2], token=TOKEN, heartbeat=1) as ranks:
            ready(ranks)
            time.sleep(moment)
            armed.set()
            for rank in ranks:
                found = rank.outcome()
                assert found.error in ("PeerFailedError", "ProtocolError"), found
        assert hit.is_set()


@pytest.mark.campaign
@pytest.mark.parametrize("same_job", [True, False])
def test_a_stranger_who_has_recorded_a_job_cannot_join_or_harm_it(same_job: bool) -> None:
    """Everything that was ever said to a rank is said to it again, changed or as it was."""
    drawn = random.Random(same_job)
    cutters: defaultdict[Flow, Frames] = defaultdict(Frames)
    said: defaultdict[Flow, list[bytes]] = defaultdict(list)

    def listen(flow: Flow, data: bytes) -> bytes:
        if flow.sender == flow.opener and len(said[flow]) < 6:  # more than a handshake
            said[flow] += cutters[flow].cut(data)
        return data

    with Lab(4) as lab, Middle(lab, listen) as middle, contextlib.ExitStack() as stack:

        def begin() -> list:
            job = on_hosts(telling, lab.hosts[:2], token=TOKEN)
            ranks = stack.enter_context(job)
            ready(ranks)
            return ranks

        ranks = begin()
        recorded = {flow: frames[:] for flow, frames in said.items() if frames}
        if not same_job:
            end(ranks)
            said.clear()
            ranks = begin()
        ports = sorted({(flow.opener, flow.port) for flow in said})
        count = 0
        deadline = time.monotonic() + 600
        while count < COUNT and time.monotonic() < deadline:
            frames = recorded[drawn.choice(list(recorded))]
            for _ in range(drawn.randrange(3)):
                changed = drawn.choice(MUTATIONS)(frames, drawn)
                frames = [frame for frame in changed if frame] or frames
            count += say(middle, *drawn.choice(ports), frames)
        assert count >= COUNT, count
        end(ranks)


def say(middle: Middle, opener: int, port: int, frames: list[bytes]) -> int:
    """Open a connection as if from a host, and say frames; how many there were, if it let us."""
    try:
        sock = middle.call(opener, port)
    except OSError:
        return 0
    with sock, contextlib.suppress(OSError):
        sock.settimeout(1)
        sock.sendall(b"".join(frames))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    return len(frames)


def end(ranks: list) -> None:
    for rank in ranks:
        rank.say("enough")
    assert [rank.outcome() for rank in ranks] == [Outcome(True)] * 2
