"""The meeting of the ranks: who is missing, who is wrong, and strangers that come by."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import zmq
from fsdpcore.transports.zmq.backend import ZmqBackend
from fsdpcore.transports.zmq.keys import JobKeys
from fsdpcore.transports.zmq.meeting import MeetingGuest, MeetingHost
from support.zmq_ranks import (
    PATIENCE,
    Line,
    Outcome,
    config,
    joined,
    listener,
    place,
)
from support.zmq_rogue import TOKEN, Guest, Keys, card_of

import fsdpcore as fc
from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import RendezvousError
from fsdpcore.core.work import Deadline
from fsdpcore.launch.endpoints import listen

pytestmark = pytest.mark.side_by_side(8)

# Seconds in which all come who do come.
LACKING = 3


class Meeting:
    """Ranks, each a thread, that meet; every rank's card is its number and what the test adds."""

    def __init__(self, world_size: int, timeout: float, port: int | None) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self.sock = listener() if port is None else listen("127.0.0.1", port)
        self.port = int(self.sock.getsockname()[1])
        self.found: dict[int, Any] = {}
        self._threads: list[threading.Thread] = []

    def start(
        self, rank: int, delay: float = 0.0, version: str = fc.__version__, **other: Any
    ) -> None:
        """Let a rank come, after a while; ``other`` replaces fields of its place."""
        here = place(rank, self.world_size, self.port, TOKEN, None if rank else self.sock)
        number = len(self._threads)
        args = (number, replace(here, **other), delay, version)
        thread = threading.Thread(target=self._come, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _come(self, number: int, here: RankPlace, delay: float, version: str) -> None:
        time.sleep(delay)
        address, deadline = ("127.0.0.1", self.port), Deadline(self.timeout)
        keys, card = JobKeys(here.token, here.job), {"number": here.rank}
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            if here.rank == 0:
                descriptor = self.sock.dup().detach()
                host = MeetingHost(context, here, keys, descriptor, address, version)
                met = host.meet(card, deadline)
            else:
                with MeetingGuest(context, here, keys, address, deadline, version) as guest:
                    assert guest.greet() == address[0]
                    met = guest.meet(card)
            self.found[number] = met
        except BaseException as error:
            self.found[number] = error
        finally:
            context.destroy()

    def connect(self, data: bytes = b"") -> socket.socket:
        """Come as a stranger, and say something."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(data)
        return connection

    def ends(self) -> list[Any]:
        """What every rank that was started got: the cards of all, or an error."""
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a rank hangs"
        return [self.found[number] for number in range(len(self._threads))]

    def check_complete(self) -> None:
        """All ranks have met."""
        met = self.ends()
        assert len({found.nonce for found in met}) == 1
        for found in met:
            assert [card["number"] for card in found.cards] == list(range(self.world_size))


@contextlib.contextmanager
def meeting(
    world_size: int, timeout: float = PATIENCE / 2, port: int | None = None
) -> Iterator[Meeting]:
    found = Meeting(world_size, timeout, port)
    try:
        yield found
    finally:
        found.ends()
        found.sock.close()


def errors(ends: list[Any]) -> list[str]:
    for end in ends:
        assert isinstance(end, RendezvousError), end
        assert "\n" not in str(end)
    return [str(end) for end in ends]


@pytest.mark.parametrize("world_size", [2, 3, 9])
def test_all_come(world_size: int) -> None:
    with meeting(world_size) as ranks:
        for rank in reversed(range(world_size)):
            ranks.start(rank)
        ranks.check_complete()


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_starter(slow: int) -> None:
    with meeting(3) as ranks:
        for rank in range(3):
            ranks.start(rank, delay=0.5 if rank == slow else 0.0)
        ranks.check_complete()


def test_ranks_that_come_before_anybody_listens(free_port: Callable[[], int]) -> None:
    with meeting(2, port=free_port()) as ranks:
        ranks.sock.close()
        ranks.start(1)
        time.sleep(0.3)
        ranks.sock = listen("127.0.0.1", ranks.port)
        ranks.start(0)
        ranks.check_complete()


def test_a_rank_that_comes_while_an_earlier_job_still_listens() -> None:
    """As where a script launches several jobs in turn: the launcher keeps their port open."""
    unencrypted = GREETING + b"NULL".ljust(52, b"\0")
    with meeting(2) as ranks:
        ranks.start(1)
        ranks.sock.settimeout(PATIENCE)
        connection, _ = ranks.sock.accept()
        ranks.sock.setblocking(True)
        with connection:
            connection.sendall(unencrypted)
            while connection.recv(1 << 10):  # until ZeroMQ gives up
                pass
        ranks.start(0)
        ranks.check_complete()


def test_one_rank_is_missing() -> None:
    with meeting(3, timeout=LACKING) as ranks:
        ranks.start(0)
        ranks.start(1)
        for text in errors(ranks.ends()):
            where = f"127.0.0.1:{ranks.port}"
            assert text == f"rank 2 of 3 did not come to the rendezvous at {where} within 3 s"


def test_several_ranks_are_missing() -> None:
    """Who came before rank 0 waits for its word about the others."""
    with meeting(5, timeout=LACKING) as ranks:
        ranks.start(0, delay=1.0)
        ranks.start(2)
        for text in errors(ranks.ends()):
            assert text.startswith("ranks 1, 3, 4 of 5 did not come to the rendezvous")


def test_on_several_hosts_the_error_says_that_loopback_does_not_do() -> None:
    with meeting(2, timeout=LACKING) as ranks:
        ranks.start(0, local_world_size=1)
        (text,) = errors(ranks.ends())
        assert text.endswith("no other host reaches that address, name one that this host has")


def test_nobody_listens(free_port: Callable[[], int]) -> None:
    with meeting(3, timeout=LACKING, port=free_port()) as ranks:
        ranks.sock.close()
        ranks.start(1)
        ranks.start(2)
        for rank, text in zip([1, 2], errors(ranks.ends()), strict=True):
            where = f"127.0.0.1:{ranks.port}"
            assert text == f"rank {rank} found no rank 0 at the rendezvous at {where} within 3 s"


def test_rank_0_is_missing_though_its_launcher_listens() -> None:
    with meeting(2, timeout=LACKING) as ranks:
        ranks.start(1)
        (text,) = errors(ranks.ends())
        assert text.startswith("rank 1 found no rank 0 at the rendezvous at 127.0.0.1:")


def test_a_rank_twice() -> None:
    with meeting(3) as ranks:
        ranks.start(0)
        ranks.start(1)
        ranks.start(1)
        texts = errors(ranks.ends())
        assert "two processes came as rank 1; every rank must be started once" in texts[0]
        assert texts[1:] != []


def test_rank_0_twice() -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        with Guest(ranks.port, card_of(0)) as second:
            (text,) = errors(ranks.ends())
            assert "two processes came as rank 0" in text
            assert second.answer() == {"error": text}


def test_another_version() -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        ranks.start(1, version="0.0.1")
        for text in errors(ranks.ends()):
            ours = fc.__version__
            assert text.startswith(f"rank 1 runs fsdpcore 0.0.1, rank 0 {ours}: install one")


def test_another_world_size() -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        ranks.start(1, world_size=3)
        for text in errors(ranks.ends()):
            assert text == "rank 1 was started for a job of 3 ranks, rank 0 for one of 2"


def test_launchers_that_were_told_different_numbers_of_ranks_per_host() -> None:
    """Their sums agree; and a rank that comes a little later hears of it, too."""
    with meeting(4) as ranks:
        for rank, given, delay in [(0, "2,2", 0.0), (1, "2,2", 0), (2, "1,3", 0), (3, "1,3", 0.3)]:
            ranks.start(rank, delay, ranks_per_host=given)
        (text,) = set(errors(ranks.ends()))
        assert re.search("that of rank [23] 1,3, that of rank 0 2,2; give all the same --nno", text)


@pytest.mark.parametrize("rank", [2, -1, "1", True, None, 1.0, [1]])
def test_a_rank_that_does_not_exist(rank: object) -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        with Guest(ranks.port, {**card_of(1), "rank": rank}):
            (text,) = errors(ranks.ends())
            assert "which does not exist" in text


def test_nobody_waits_for_a_rank_that_is_lost_when_all_have_come() -> None:
    """Its links tell that it is; rank 0 would wait for its thanks until the deadline."""
    with meeting(2, timeout=10) as ranks:
        ranks.start(0)
        with Guest(ranks.port, card_of(1, card={"number": 1})) as guest:
            assert len(guest.answer()["table"]) == 2
        since = time.monotonic()
        ranks.check_complete()
        assert time.monotonic() - since < 5


@pytest.mark.parametrize("card", [3, "x", []])
def test_a_rank_without_a_card(card: object) -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        with Guest(ranks.port, card_of(1, card=card)):
            (text,) = errors(ranks.ends())
            assert "rank 1 came without a card" in text


@pytest.mark.parametrize("other", [{"token": "yours"}, {"job": "another"}])
def test_another_secret_or_job(other: dict[str, str]) -> None:
    with meeting(2, timeout=LACKING) as ranks:
        ranks.start(0)
        ranks.start(1, **other)
        texts = errors(ranks.ends())
        assert "rank 1 of 2 did not come" in texts[0]
        assert "is their secret (FSDPCORE_TOKEN) the same one?" in texts[0]
        where = f"127.0.0.1:{ranks.port}"
        assert f"who listens at {where} does not know the secret of rank 1" in texts[1]
        assert "FSDPCORE_TOKEN" in texts[1]


@contextlib.contextmanager
def false_rank_0() -> Iterator[tuple[zmq.Socket[bytes], int]]:
    """A socket where rank 0 should be, that knows the secret."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sock = context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, Keys().meeting())
        yield sock, sock.bind_to_random_port("tcp://127.0.0.1")
    finally:
        context.destroy(0)


def come(port: int, rank: int = 1) -> Any:
    here, address = place(rank, 2, port, TOKEN), ("127.0.0.1", port)
    keys, deadline = JobKeys(TOKEN), Deadline(PATIENCE)
    with (
        zmq.Context() as context,
        MeetingGuest(context, here, keys, address, deadline, "") as guest,
    ):
        return guest.meet({})


def test_rank_0_dies_before_it_answers() -> None:
    with false_rank_0() as (sock, port):
        closing = threading.Thread(target=lambda: (sock.recv(), sock.close(0)))
        closing.start()
        with pytest.raises(RendezvousError, match=r"rank 0 ended the rendezvous .* it failed"):
            come(port)
        closing.join()


ANSWERS = {
    "nothing": b"",
    "no JSON": b"{{",
    "no text": b"\xff\xfe",
    "deep JSON": b"[" * 100_000,
    "deep JSON in a table": zlib.compress(b"[" * 100_000),
    "a table that is cut off": zlib.compress(b'{"table": [{}, {}], "nonce": "00"}')[:-12],
    "a list": b"[]",
    "neither table nor error": b'{"a": 1}',
    "a table of another size": b'{"table": [{}], "nonce": "00"}',
    "a table that is none": b'{"table": 5, "nonce": "00"}',
    "a table without a nonce": b'{"table": [{}, {}]}',
    "a table with a nonce that is none": b'{"table": [{}, {}], "nonce": "xy"}',
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_makes_no_sense(name: str) -> None:
    def answer() -> None:
        who, _ = sock.recv_multipart()
        sock.send_multipart([who, ANSWERS[name]])
        if b"table" in ANSWERS[name]:
            sock.recv_multipart()
        sock.close()

    with false_rank_0() as (sock, port):
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(RendezvousError, match=r"rank 0 sent rank 1 .* that makes no sense"):
            come(port)
        thread.join()


def waiting(backend: fc.Backend, line: Line) -> None:
    raise AssertionError("met though a rank never came")


def come_as(here: RankPlace) -> Any:
    return ZmqBackend.join(here, config())


def come_first(here: RankPlace, sock: socket.socket) -> Any:
    with sock:
        return ZmqBackend.join(replace(here, listener_fd=sock.fileno()), config())


def test_a_rank_that_is_killed_while_others_meet_ends_the_meeting_at_once() -> None:
    with listener() as sock:
        port = sock.getsockname()[1]
        places = [place(rank, 4, port, TOKEN) for rank in range(3)]  # one never comes
        joins = [partial(come_first, places[0], sock), *(partial(come_as, p) for p in places[1:])]
        with joined(waiting, joins) as ranks:
            while established(port) < 2:
                time.sleep(0.01)
            time.sleep(0.2)  # to say who they are
            start = time.monotonic()
            ranks[1].send_signal(signal.SIGKILL)
            found = [ranks[0].outcome(), ranks[2].outcome()]
    for outcome in found:
        assert isinstance(outcome, Outcome)
        assert outcome.error == "RendezvousError", outcome
        assert "rank 1 was lost while the ranks met: its process ended" in outcome.text
        assert outcome.ended - start < 5


def established(port: int) -> int:
    """How many connections a listening port has, by the kernel's word."""
    with open("/proc/net/tcp") as lines:
        rows = [line.split() for line in lines][1:]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


# The job must go on as if nobody had come.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
STRANGERS = {
    "nothing": b"",
    "a web request": b"GET / HTTP/1.0\r\n\r\n",
    "zeros": bytes(1000),
    "half a greeting": GREETING[:5],
    "without encryption": GREETING + b"NULL".ljust(52, b"\0"),
    "half a CURVE handshake": GREETING + b"CURVE".ljust(52, b"\0") + b"\x04\xc8\x05HELLO",
    "a CURVE handshake of zeros": GREETING
    + b"CURVE".ljust(52, b"\0")
    + b"\x04\xc8\x05HELLO\x01\x00"
    + bytes(192),
    "a huge command": GREETING + b"CURVE".ljust(52, b"\0") + b"\x06" + b"\x7f" * 8,
}


@pytest.mark.parametrize("name", STRANGERS)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stranger_changes_nothing(name: str, leaves: bool) -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        stranger = ranks.connect(STRANGERS[name])
        if leaves:
            stranger.close()
        ranks.start(1)
        ranks.check_complete()
        if not leaves:
            assert len(received(stranger)) < 300  # of a handshake; above all not the table
            stranger.close()


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    connection.settimeout(PATIENCE)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            data += piece
    return data


MESSAGES = {
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "a list": b"[1, 2]",
    "deep JSON": b"[" * 60_000,
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_no_card_changes_nothing(name: str) -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        with Guest(ranks.port, MESSAGES[name]):
            ranks.start(1)
            ranks.check_complete()


def test_a_card_that_is_too_large_changes_nothing() -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        with Guest(ranks.port, card_of(1, card={"a": "x" * (1 << 16)})):
            ranks.start(1)
            ranks.check_complete()


def test_many_strangers() -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        strangers = [ranks.connect(b"x") for _ in range(200)]
        ranks.start(1)
        ranks.check_complete()
        for stranger in strangers:
            stranger.close()


def test_listen_at_a_port_that_is_taken() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"cannot listen at 127.0.0.1:{port}: "):
            listen("127.0.0.1", port)


def test_listen_at_an_address_of_another_host() -> None:
    with pytest.raises(RendezvousError, match="this host has no such address"):
        listen("192.0.2.1")


def test_listen_at_a_port_that_does_not_exist() -> None:
    with pytest.raises(RendezvousError, match=r"127\.0\.0\.1:70000"):
        listen("127.0.0.1", 70000)


def test_an_address_of_one_network_interface_is_refused() -> None:
    with pytest.raises(RendezvousError, match="fe80::1%lo is a link-local address"):
        listen("fe80::1%lo")
