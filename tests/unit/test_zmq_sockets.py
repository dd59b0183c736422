"""How the zmq transport looks for input: with as few calls and as little sleep as there can be."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from fsdpcore.transports.zmq import poller
from fsdpcore.transports.zmq.frame_socket import FrameSocket
from fsdpcore.transports.zmq.poller import Waker, _PollSet
from fsdpcore.transports.zmq.wire import Frame, FrameKind, pack_header
from support.zmq_ranks import PATIENCE


def test_a_thread_that_waits_is_awake_for_a_moment_before_it_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has no time to wait is not."""
    waker, watched = Waker(), _PollSet()
    watched.add(waker.fileno(), waker.clear)
    monkeypatch.setattr(poller, "_LOOK_SECONDS", PATIENCE)
    monkeypatch.setattr(os, "sched_yield", waker.wake)
    assert watched.look(0.0) == []
    assert watched.look(0.001) == [waker.clear]
    waker.close()


class Counted(socket.socket):
    """Counts what reads from it; one of a pair, which has no options of TCP."""

    calls = 0

    def setsockopt(self, *args: Any) -> None:
        pass

    def recv_into(self, *args: Any) -> int:
        self.calls += 1
        return super().recv_into(*args)

    def recvmsg_into(self, *args: Any) -> Any:
        self.calls += 1
        return super().recvmsg_into(*args)


class Payload:
    def __init__(self, size: int) -> None:
        self.room = memoryview(bytearray(size))
        self.whole = False

    def filled(self) -> None:
        self.whole = True


@pytest.mark.parametrize(
    ("sizes", "calls"),
    [([100], 1), ([100, 200], 1), ([10_000], 2), ([10_000, 100], 2), ([3000, 3000], 2)],
)
def test_what_is_there_is_read_at_once_and_nothing_is_asked_for_more(
    sizes: list[int], calls: int
) -> None:
    here, there = socket.socketpair()
    payloads: list[Payload] = []

    def begin(frame: Frame, inline: int) -> tuple[Payload, memoryview]:
        payloads.append(Payload(inline))
        return payloads[-1], payloads[-1].room

    unused: Any = None  # nothing is sent
    with there, Counted(fileno=here.detach()) as counted:
        frames = FrameSocket(counted, unused, begin)
        sent = [bytes([1 + number]) * size for number, size in enumerate(sizes)]
        for data in sent:
            there.sendall(pack_header(FrameKind.EAGER, size=len(data)) + data)
        assert frames.serve()
        assert [payload.room.tobytes() for payload in payloads] == sent
        assert all(payload.whole for payload in payloads)
        assert counted.calls == calls
