"""The meeting of the ranks: who is missing, who is wrong, and strangers that come by."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.zmq_ranks import PATIENCE, listener, place
from support.zmq_rogue import TOKEN, card_of, letter, read_letter

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.launch.rendezvous import describe_address, listen, meet, split_address

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

    def start(self, rank: int, delay: float = 0.0, **other: Any) -> None:
        """Let a rank come, after a while; ``other`` replaces fields of its place."""
        here = place(rank, self.world_size, self.port, TOKEN, None if rank else self.sock)
        number = len(self._threads)
        args = (number, replace(here, **other), delay)
        thread = threading.Thread(target=self._come, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _come(self, number: int, here: RankPlace, delay: float) -> None:
        time.sleep(delay)
        address = ("127.0.0.1", self.port)
        try:
            self.found[number] = meet(here, address, {"number": here.rank}, self.timeout)
        except BaseException as error:
            self.found[number] = error

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
        cards = [{"number": rank} for rank in range(self.world_size)]
        assert self.ends() == [cards] * self.world_size


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
        cards = [{"number": 0}, {"number": 1}]
        assert ranks.ends() == [cards, cards]


def test_one_rank_is_missing() -> None:
    with meeting(3, timeout=LACKING) as ranks:
        ranks.start(0)
        ranks.start(1)
        for text in errors(ranks.ends()):
            where = f"127.0.0.1:{ranks.port}"
            assert text == f"rank 2 of 3 did not come to the rendezvous at {where} within 3 s"


def test_several_ranks_are_missing() -> None:
    with meeting(5, timeout=LACKING) as ranks:
        ranks.start(0)
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
            assert f"rank {rank} found no rank 0 at the rendezvous 127.0.0.1:{ranks.port}" in text
            assert "within 3 s: " in text


def test_rank_0_is_missing_though_its_launcher_listens() -> None:
    with meeting(2, timeout=LACKING) as ranks:
        ranks.start(1)
        (text,) = errors(ranks.ends())
        assert text.startswith("rank 0 did not answer rank 1 at the rendezvous at 127.0.0.1:")


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
        stranger = ranks.connect(letter(card_of(0)))
        (text,) = errors(ranks.ends())
        assert "two processes came as rank 0" in text
        assert "two processes came as rank 0" in read_letter(stranger)["error"]
        stranger.close()


def test_another_world_size() -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        ranks.start(1, world_size=3)
        for text in errors(ranks.ends()):
            assert text == "rank 1 was started for a job of 3 ranks, rank 0 for one of 2"


@pytest.mark.parametrize("rank", [2, -1, "1", True, None, 1.0, [1]])
def test_a_rank_that_does_not_exist(rank: object) -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        stranger = ranks.connect(letter({**card_of(1), "rank": rank}))
        (text,) = errors(ranks.ends())
        assert "which does not exist" in text
        stranger.close()


@pytest.mark.parametrize("card", [None, 3, "x", []])
def test_a_rank_without_a_card(card: object) -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        stranger = ranks.connect(letter(card_of(1, card=card)))
        (text,) = errors(ranks.ends())
        assert "rank 1 came without a card" in text
        stranger.close()


def test_another_token() -> None:
    with meeting(2, timeout=LACKING) as ranks:
        ranks.start(0)
        ranks.start(1, token="yours")
        texts = errors(ranks.ends())
        assert "rank 1 of 2 did not come" in texts[0]
        assert "rank 0 ended the rendezvous at 127.0.0.1:" in texts[1]
        assert "FSDPCORE_TOKEN" in texts[1]


def test_rank_0_dies_before_it_answers() -> None:
    with meeting(2) as ranks:
        ranks.start(1)
        connection, _ = ranks.sock.accept()
        connection.recv(1)
        connection.close()
        (text,) = errors(ranks.ends())
        assert "rank 0 ended the rendezvous" in text


def test_a_rank_that_dies_while_it_waits_can_be_started_again() -> None:
    with meeting(3) as ranks:
        ranks.start(0)
        first = ranks.connect(letter(card_of(1, 3)))
        time.sleep(0.2)
        first.close()
        time.sleep(0.2)
        ranks.start(1)
        ranks.start(2)
        ranks.check_complete()


# A length, and what follows it; the job must go on as if nobody had come.
STRANGERS = {
    "nothing": b"",
    "half a length": b"\x05\x00",
    "a length and nothing": struct.pack("<I", 100),
    "half a message": letter(card_of(1))[:-5],
    "a huge length": struct.pack("<I", 2**32 - 1) + b"x" * 100,
    "a web request": b"GET / HTTP/1.0\r\n\r\n",
    "an empty message": struct.pack("<I", 0),
    "no JSON": struct.pack("<I", 3) + b"\xff\xfe{",
    "a list": letter([1, 2]),
    "deep JSON": struct.pack("<I", 100_000) + b"[" * 100_000,
    "no token": letter({"fsdpcore": 1, "rank": 1, "world_size": 2}),
    "a wrong token": letter(card_of(1, token="x")),
    "a token that is not ASCII": letter(card_of(1, token="ñ")),
    "a token with a lone surrogate": letter(card_of(1, token="\ud800")),
    "a token that is no text": letter(card_of(1, token={"a": 1})),  # type: ignore[arg-type]
    "another protocol": letter({**card_of(1), "fsdpcore": 2}),
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
            assert received(stranger) == b""  # above all not the table
            stranger.close()


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    connection.settimeout(PATIENCE)
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(4096):
            data += piece
    return data


def test_many_strangers() -> None:
    with meeting(2) as ranks:
        ranks.start(0)
        strangers = [ranks.connect(b"x") for _ in range(200)]
        ranks.start(1)
        ranks.check_complete()
        for stranger in strangers:
            stranger.close()


def test_a_rank_that_says_more_than_its_card_is_not_believed() -> None:
    with meeting(3) as ranks:
        ranks.start(0)
        first = ranks.connect(letter(card_of(1, 3)))
        time.sleep(0.2)
        first.sendall(b"more")
        assert received(first) == b""
        first.close()
        ranks.start(1)
        ranks.start(2)
        ranks.check_complete()


ANSWERS = {
    "nothing": b"",
    "a huge length": struct.pack("<I", 2**32 - 1),
    "no JSON": struct.pack("<I", 2) + b"{{",
    "deep JSON": struct.pack("<I", 100_000) + b"[" * 100_000,
    "a list": letter([]),
    "neither table nor error": letter({"a": 1}),
    "a table of another size": letter({"table": [{}]}),
    "a table that is none": letter({"table": 5}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_stranger_where_rank_0_should_be(name: str) -> None:
    with meeting(2) as ranks:
        ranks.start(1)
        connection, _ = ranks.sock.accept()
        assert connection.recv(4096)
        connection.sendall(ANSWERS[name])
        connection.close()
        errors(ranks.ends())


@pytest.mark.parametrize(
    ("text", "host", "port"), [("a.b:5", "a.b", 5), ("[::1]:5", "::1", 5), ("::1:5", "::1", 5)]
)
def test_split_address(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert split_address(describe_address(host, port)) == (host, port)


@pytest.mark.parametrize(
    "text", ["host", "host:", "host:x", "", "host:0", "host:-1", "host:65536", "host: 5"]
)
def test_a_bad_address(text: str) -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        split_address(text)


def test_listen_at_a_port_that_is_taken() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: "):
            listen("127.0.0.1", port)


def test_listen_at_a_port_that_does_not_exist() -> None:
    with pytest.raises(RendezvousError, match=r"127\.0\.0\.1:70000"):
        listen("127.0.0.1", 70000)
