"""A rank 1 that speaks the protocols of rendezvous and ``zmq`` by hand, so as to break them."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import zmq
from fsdpcore.transports.zmq.backend import ZmqBackend
from support.zmq_ranks import PATIENCE, config, listener, place

TOKEN = "the token of the job"
HELLO, EAGER, OFFER, GRANT, DATA, _, FAIL, BYE, QUERY, STATUS, SEEN = range(1, 12)
MEMORY, LEND, PIECE, TAKEN, REFUSE, NOTE = range(12, 18)
HEADER_BYTES = 48
MESSAGES = (EAGER, OFFER, GRANT, DATA, MEMORY, LEND, PIECE, TAKEN, REFUSE)


def frame(
    kind: int,
    *,
    channel: int = 0,
    tag: int = 0,
    message: int = 0,
    size: int = 0,
    offset: int = 0,
    signature: bytes = b"",
    payload: bytes = b"",
) -> bytes:
    """Encode a frame."""
    size = size or len(payload)
    header = struct.pack(
        "<4sBBHQQQQQ", b"FDP1", 3, kind, len(signature), channel, tag, message, size, offset
    )
    return header + signature + payload


def proof(src: int, dst: int, token: str = TOKEN) -> str:
    """What ``src`` shows to ``dst``."""
    text = f"fsdpcore zmq: rank {src} to rank {dst}".encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def greeting(src: int, dst: int, token: str = TOKEN) -> bytes:
    """What ``src`` shows to ``dst`` at the beginning of a data connection."""
    text = f"fsdpcore data: rank {src} to rank {dst}".encode()
    return struct.pack("<8sQ", b"fsdpcore", src) + hmac.digest(token.encode(), text, "sha256")


def letter(content: Any) -> bytes:
    """Encode a message of the rendezvous."""
    body = json.dumps(content).encode()
    return struct.pack("<I", len(body)) + body


def card_of(rank: int, world_size: int = 2, token: str = TOKEN, **other: Any) -> dict[str, Any]:
    """What a rank sends to the rendezvous."""
    message = {"fsdpcore": 1, "token": token, "rank": rank, "world_size": world_size}
    return {**message, "card": {"endpoints": {}}, **other}


def read_letter(connection: socket.socket) -> Any:
    """Read a message of the rendezvous."""
    connection.settimeout(PATIENCE)
    with connection.makefile("rb") as stream:
        (length,) = struct.unpack("<I", stream.read(4))
        return json.loads(stream.read(length))


class Rogue:
    """Rank 1 of 2, by hand.

    Attributes:
        endpoint: where rank 0 listens for rank 1.
        data: where it listens for data connections.
        socket: the ZeroMQ connection.
        line: the data connection.
    """

    def __init__(self, port: int, host: str | None = None) -> None:
        ours = {} if host is None else {"card": {"endpoints": {}, "host": host}}
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(letter(card_of(1, **ours)))
            card = read_letter(connection)["table"][0]
        self.endpoint = card["endpoints"]["1"]
        self.data: tuple[str, int] = tuple(card["data"])
        self.line = socket.socket()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.dial()

    def dial(self, user: str | None = "1", password: str = proof(1, 0)) -> zmq.Socket[bytes]:
        """Make a socket that connects to rank 0; without PLAIN if there is no user."""
        sock: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        sock.setsockopt(zmq.LINGER, 1000)
        sock.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        if user is not None:
            sock.setsockopt_string(zmq.PLAIN_USERNAME, user)
            sock.setsockopt_string(zmq.PLAIN_PASSWORD, password)
        return sock

    def connect(self) -> None:
        """Connect to rank 0."""
        self.socket.connect(self.endpoint)

    def greet(self, **wrong: Any) -> None:
        """Say HELLO, and open the data connection."""
        self.hello(**wrong)
        self.line.connect(self.data)
        self.line.settimeout(PATIENCE)
        self.send(greeting(1, 0))

    def hello(self, **wrong: Any) -> None:
        """Say HELLO, with other contents where the test wants them."""
        content = {"rank": 1, "proof": proof(1, 0), **wrong}
        self.say(frame(HELLO, payload=json.dumps(content).encode()))

    def say(self, *parts: bytes) -> None:
        """Send the parts of one ZeroMQ message."""
        self.socket.send_multipart(parts)

    def send(self, data: bytes) -> None:
        """Send bytes on the data connection."""
        self.line.sendall(data)

    def shut(self) -> None:
        """End the data connection on this side."""
        self.line.shutdown(socket.SHUT_WR)

    def answered(self) -> bool:
        """Whether rank 0 answers the greeting on the data connection as it should."""
        return self._take(len(greeting(0, 1))) == greeting(0, 1)

    def read(self, kind: int) -> bytes:
        """Return the next frame of a kind, passing over others."""
        while True:
            data = self.next_message() if kind in MESSAGES else self.socket.recv_multipart()[0]
            if data[5] == kind:
                return data

    def next_message(self) -> bytes:
        """Return the next frame on the data connection."""
        header = self._take(HEADER_BYTES)
        kind, signed, size, offset = header[5], header[6], *struct.unpack("<QQ", header[32:])
        inline = {EAGER: size, OFFER: offset, DATA: size}.get(kind, 0)
        return header + self._take(signed + inline)

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self.line.recv(size - len(data))
            assert got, "rank 0 has ended the data connection"
            data += got
        return data

    def __enter__(self) -> Rogue:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy()
        self.line.close()


@contextlib.contextmanager
def stranger_job(**options: Any) -> Iterator[tuple[int, Any]]:
    """Let a rank 0 of 2 wait for its rank 1; yields the port, and a function for its backend."""
    found: list[Any] = []

    def join() -> None:
        here = place(0, 2, port, TOKEN, meeting)
        try:
            found.append(ZmqBackend.join(here, config(**options)))
        except BaseException as error:
            found.append(error)

    def joined() -> Any:
        thread.join(PATIENCE)
        assert found, "the rank hangs in join()"
        return found[0]

    with listener() as meeting:
        port = meeting.getsockname()[1]
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        try:
            yield port, joined
        finally:
            joined()
            if isinstance(found[0], ZmqBackend):
                found[0].close()


@contextlib.contextmanager
def rogue_job(*, near: bool = False, **options: Any) -> Iterator[tuple[ZmqBackend, Rogue]]:
    """A rank 0 whose rank 1 has greeted it and is in the test's hand; ``near``: on one host."""
    host = "one host" if near else None
    if near:
        options["host_id"] = host
    with stranger_job(**options) as (port, joined), Rogue(port, host) as rogue:
        rogue.connect()
        rogue.greet()
        rogue.read(HELLO)
        assert rogue.answered()
        backend = joined()
        assert isinstance(backend, ZmqBackend), backend
        yield backend, rogue
