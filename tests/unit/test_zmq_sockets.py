"""What a rank of zmq sends when, who watches whom, and how it waits: with as little as can be."""

from __future__ import annotations

import functools
import itertools
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq
from fsdpcore.transports.zmq import monitors, options, poller
from fsdpcore.transports.zmq.keys import JobKeys
from fsdpcore.transports.zmq.links import IO_THREADS, Links
from fsdpcore.transports.zmq.monitors import InboundConnections
from fsdpcore.transports.zmq.outlet import UNCOPIED, Flow, Outlet
from fsdpcore.transports.zmq.poller import AwaitedMessage, Poller, Waker, _PollSet
from fsdpcore.transports.zmq.watch import neighbours
from hypothesis import given
from hypothesis import strategies as st
from support.interrupts import Interrupt
from support.zmq_ranks import PATIENCE
from support.zmq_rogue import Keys

from fsdpcore.comm.polled import PolledMessage
from fsdpcore.core.errors import ConfigError


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
    waker.wake()  # a thread that has waited may be late


@pytest.mark.parametrize("others", ["have waited", "wait meanwhile"])
def test_who_waits_for_an_answer_has_it_polled_for(
    monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    """Where no other thread polls, the own one does, though it rests when others have waited."""
    monkeypatch.setattr(poller, "_AWAY_SECONDS", PATIENCE)
    monkeypatch.setattr(poller, "_LONGEST_AWAY_SECONDS", PATIENCE)
    link, come = Waker(), list[None]()
    polled = Poller(threading.RLock(), lambda: None, lambda error: None, "polls")
    polled.add(link.fileno(), lambda: (link.clear(), come.append(None)))
    polled.start()

    def wait() -> None:
        for _ in range(3):  # the own thread takes the first of several waits for a long one
            polled.wait(PolledMessage(polled), 0.1)
        time.sleep(0.1)  # until the own thread rests
        link.wake()

    waiting = threading.Thread(target=wait)
    waiting.start()
    if others == "have waited":
        waiting.join()
    else:
        time.sleep(0.25)  # until it waits for the third time
    assert polled.until(lambda: come, PATIENCE / 2)
    waiting.join()
    polled.stop()
    link.close()


# What is sent when.

SEGMENT, WINDOW = 10, 25


class Source:
    """A large message: its segments are named by it and their numbers."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.ready, self.count, self.told = name, size, 0, 0

    def next_segment(self, most: int) -> tuple[bytes, Any]:
        size = min(self.ready, most)
        self.ready -= size
        self.count += 1
        return f"{self.name}{self.count}".encode(), bytes(size)

    def sent(self) -> None:
        self.told += 1


class Sent:
    """An outlet, what it has sent so far, and of which frames the memory was asked back."""

    def __init__(self, uncopied: int = UNCOPIED) -> None:
        self.frames: list[tuple[bytes, Any]] = []
        self.reclaimed: list[bytes] = []
        self.outlet = Outlet(self._send, Flow(SEGMENT, WINDOW, uncopied=uncopied))

    def _send(self, header: bytes, payload: Any, copy: bool = True) -> Callable[[], None] | None:
        self.frames.append((header, payload))
        return None if copy else lambda: self.reclaimed.append(header)

    def names(self) -> list[str]:
        """The headers of what was sent since the last call."""
        found = [header.decode() for header, _ in self.frames]
        self.frames.clear()
        return found


def test_no_more_is_sent_than_the_window_until_credit_comes() -> None:
    there = Sent()
    there.outlet.add(Source("a", 100))
    assert there.names() == ["a1", "a2", "a3"]  # the last one begins inside of the window
    there.outlet.credited(4)
    assert there.names() == []
    there.outlet.credited(5)
    assert there.names() == ["a4"]
    there.outlet.credited(3)  # an older word
    there.outlet.credited(14)
    assert there.names() == []
    there.outlet.credited(2**63)  # of what was not sent, nothing can have come
    assert there.names() == ["a5", "a6", "a7"]
    assert not there.outlet.flushed
    there.outlet.credited(70)
    assert there.names() == ["a8", "a9", "a10"]
    assert there.outlet.flushed


def test_large_messages_take_turns_and_small_ones_pass_them() -> None:
    there = Sent()
    there.outlet.put(b"0", bytes(26))
    for source in (Source("a", 25), Source("b", 15), Source("c", 5)):
        there.outlet.add(source)
    there.outlet.put(b"1", b"x")
    there.outlet.put(b"2")
    assert there.names() == ["0"]
    for total in range(1, 200):
        there.outlet.credited(total)
    assert there.names() == ["1", "2", "a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_large_frame_is_its_owners_again_when_the_other_rank_has_it() -> None:
    there = Sent(uncopied=SEGMENT)
    source = Source("a", 2 * SEGMENT + 1)
    there.outlet.add(source)
    assert (source.count, source.told) == (3, 1)  # the last byte was copied
    there.outlet.credited(SEGMENT - 1)
    assert source.told == 1
    there.outlet.credited(SEGMENT)
    assert source.told == 2
    there.outlet.withdraw(Source("b", 0))
    there.outlet.withdraw(source)
    assert there.reclaimed == [b"a2"]
    there.outlet.credited(2 * SEGMENT)
    assert source.told == 2


def test_memory_is_reclaimed_from_a_link_that_does_not_take_it() -> None:
    with zmq.Context(IO_THREADS) as context, socket.create_server(("127.0.0.1", 0)) as silent:
        links = Links(
            context, 0, 2, JobKeys("", ""), encrypted=False, heartbeat=60, lost=lambda *_: None
        )
        links.introduce(b"", [("127.0.0.1", 1), silent.getsockname()])
        data = np.zeros(1 << 20, np.uint8)
        reclaim = links.send(1, b"header", data, copy=False)
        held = weakref.ref(data)
        del data
        assert reclaim is not None
        assert held() is not None
        reclaim()
        end = time.monotonic() + PATIENCE
        while held() is not None:  # pyzmq says so a moment earlier
            assert time.monotonic() < end
            time.sleep(0.001)
        links.close(0)


@pytest.mark.parametrize("again", [False, True])
def test_a_frame_that_was_interrupted_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Nor if ending it was interrupted, too."""
    abandon, begun = Links._abandon, list[Links]()

    def interrupted(links: Links, *args: Any) -> None:
        begun.append(links)
        if len(begun) % 2:
            raise KeyboardInterrupt
        abandon(links, *args)

    if again:
        monkeypatch.setattr(Links, "_abandon", interrupted)

    def make(rank: int) -> Links:
        return Links(context, rank, 2, keys, encrypted=False, heartbeat=60, lost=lambda *_: None)

    def receive() -> bytes:
        end = time.monotonic() + PATIENCE
        while (frame := receiver.receive()) is None:
            assert time.monotonic() < end
        return frame.header

    keys = JobKeys("")
    with zmq.Context[zmq.Socket[bytes]](IO_THREADS) as context:
        sender, receiver = make(0), make(1)
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        for links in (sender, receiver):
            links.introduce(b"", [("127.0.0.1", 1), address])
        receiver.listen(listener, address, [])
        whole, lost = 0, 0
        for moment in itertools.count():
            interrupt = Interrupt(moment)
            payload = b"payload" if moment % 2 else None
            interrupt.during(functools.partial(sender.send, 1, b"interrupted", payload))
            sender.send(1, b"%d" % moment)
            found = receive()
            if found == b"interrupted":
                whole += 1
                found = receive()
            else:
                lost += 1
            assert found == b"%d" % moment
            if not interrupt.raised and moment % 2:
                break
        assert lost > 3
        assert whole > 1
        sender.close(0)
        receiver.close(0)


def test_small_messages_stay_in_order_and_as_they_were() -> None:
    there, data, owner = Sent(), bytearray(30), Source("offer", 0)
    there.outlet.put(b"0", data)
    data[:] = b"1" * 30
    there.outlet.put(b"1", data)
    there.outlet.post(b"2", bytearray(b"of its owner"), owner)
    there.outlet.put(b"3", b"")
    data[:] = b"?" * 30
    assert there.names() == ["0"]
    assert not there.outlet.flushed
    assert owner.told == 0
    there.outlet.credited(30)
    assert bytes(there.frames[0][1]) == b"1" * 30
    assert there.names() == ["1"]
    there.outlet.credited(60)
    assert there.names() == ["2", "3"]
    assert owner.told == 1


def test_a_note_goes_at_once() -> None:
    there = Sent()
    there.outlet.put(b"0", bytes(26))
    there.outlet.put(b"1")
    there.outlet.say(b"note")
    assert there.names() == ["0", "note"]


def test_what_is_withdrawn_is_not_sent() -> None:
    there, offer, source = Sent(), Source("offer", 0), Source("a", 100)
    there.outlet.put(b"0", bytes(26))
    there.outlet.post(b"1", b"x", offer)
    there.outlet.put(b"2")
    there.outlet.add(source)
    there.outlet.withdraw(offer)
    there.outlet.withdraw(source)
    there.outlet.credited(26)
    assert there.names() == ["0", "2"]
    assert (offer.told, source.count) == (0, 0)
    assert there.outlet.flushed


def test_a_link_that_has_ended_takes_everything_and_sends_nothing() -> None:
    there = Sent()
    there.outlet.put(b"0", bytes(26))
    there.outlet.add(Source("a", 100))
    there.outlet.end()
    assert there.outlet.flushed
    there.outlet.say(b"1")
    there.outlet.put(b"2")
    there.outlet.post(b"3", b"x", Source("b", 0))
    there.outlet.add(Source("c", 100))
    there.outlet.credited(26)
    assert there.names() == ["0"]
    assert there.outlet.flushed


# Who watches whom.


@given(st.integers(2, 1000))
def test_a_few_neighbours_for_each_and_none_far_away(world_size: int) -> None:
    found = [neighbours(rank, range(world_size)) for rank in range(world_size)]
    for rank, others in enumerate(found):
        assert 1 <= len(others) <= 4
        assert rank not in others
        assert len(set(others)) == len(others)
        assert all(rank in found[other] for other in others)
    steps, queue = {0: 0}, deque([0])
    while queue:
        rank = queue.popleft()
        for other in found[rank]:
            if other not in steps:
                steps[other] = steps[rank] + 1
                queue.append(other)
    assert len(steps) == world_size
    assert max(steps.values()) <= math.isqrt(world_size) + 2


# Which connections have broken.


def test_a_descriptor_that_is_used_again_hides_no_broken_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int, str]] = []
    monkeypatch.setattr(monitors, "events", lambda monitor: [told.pop(0) for _ in list(told)])
    accepted, broken = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)
    sock: Any = SimpleNamespace(get_monitor_socket=lambda mask: None)
    frame: Any = SimpleNamespace(get=lambda option: 20)
    inbound = InboundConnections(sock)
    told += [(accepted, 20, ""), (broken, 20, ""), (accepted, 20, "")]
    assert inbound.broken() == []  # a stranger
    inbound.know(frame, 1)
    told += [(broken, 20, ""), (accepted, 20, "")]
    assert inbound.broken() == [1]
    assert inbound.broken() == []
    told.append((broken, 20, ""))
    assert inbound.broken() == []
    inbound.know(frame, 2)  # its frame is read late
    assert inbound.broken() == [2]


def test_a_link_that_broke_before_its_first_frame_was_read_is_lost_when_it_is() -> None:
    """Whose it was shows then; nothing more will be told of it."""
    keys, lost = JobKeys(""), list[tuple[int, bool]]()
    end = time.monotonic() + PATIENCE
    with zmq.Context[zmq.Socket[bytes]](IO_THREADS) as context:
        sender, receiver = (
            Links(
                context,
                rank,
                2,
                keys,
                encrypted=False,
                heartbeat=60,
                lost=lambda *what: lost.append(what),
            )
            for rank in range(2)
        )
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        for links in (sender, receiver):
            links.introduce(b"", [("127.0.0.1", 1), address])
        receiver.listen(listener, address, [])
        sender.send(1, b"last words")
        sender.close(PATIENCE)
        while not receiver._inbound._closed:
            receiver.look()
            assert time.monotonic() < end
        assert lost == []
        while (frame := receiver.receive()) is None:
            assert time.monotonic() < end
        assert frame.header == b"last words"
        assert lost == [(0, False)]
        receiver.close(0)


# What only the ranks of a job know.


@pytest.mark.parametrize("job", ["", "a job's id"])
def test_keys_and_names_are_those_that_are_written_down(job: str) -> None:
    """They depend on the secret, the job and the meeting."""
    ours, written, nonce = JobKeys("a secret", job), Keys("a secret", job), bytes(range(32))
    assert ours.meeting().secret == written.meeting()
    for rank in (0, 1, 1000):
        assert ours.listening(rank).secret == written.listening(rank)
        assert ours.link_name(rank, 7, nonce) == written.link(rank, 7, nonce)


# Options.


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", [0]), ("5", [5]), ("5-5", [5]), ("5-7", [5, 6, 7]), ("65535", [65535])],
)
def test_ports(text: str, found: list[int]) -> None:
    assert list(options.ports(text)) == found


@pytest.mark.parametrize("text", ["", "-1", "x", "7-5", "0-5", "65536", "1-65536", "1-2-3", "5-"])
def test_ports_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="port must be 0, N or N-M"):
        options.ports(text)


class Hasty(AwaitedMessage):
    """Finishes right after somebody has looked whether it has, at that look."""

    __slots__ = ("looks",)

    @property
    def finished(self) -> bool:
        was = AwaitedMessage.finished.__get__(self)
        if hasattr(self, "looks"):
            self.looks -= 1
            if not was and not self.looks:
                self.finish()
        return was

    @finished.setter
    def finished(self, value: bool) -> None:
        AwaitedMessage.finished.__set__(self, value)


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_what_finishes_between_two_looks_wakes_who_waits(looks: int) -> None:
    polled = Poller(threading.RLock(), lambda: None, lambda error: None, "polls")
    polled.start()
    message = Hasty(polled)
    message.looks = looks
    begin = time.monotonic()
    polled.wait(message, 10.0)
    assert time.monotonic() - begin < 5.0
    polled.stop()
