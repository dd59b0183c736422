"""A rank 1 that speaks the meeting and the frames of ``zmq`` by hand, so as to break them.

Keys, names and frames are made here once more, and nothing is taken from the package: what the
two do not agree on is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from fsdpcore.transports.zmq.backend import ZmqBackend
from fsdpcore.transports.zmq.meeting import PROTOCOL
from fsdpcore.transports.zmq.visit import unpacked
from support.zmq_ranks import PATIENCE, config, listener, place
from zmq.utils import z85

import fsdpcore as fc

TOKEN = "the token of the job"
EAGER, OFFER, GRANT, DATA = 2, 3, 4, 5
FAIL, BYE, QUERY, STATUS, SEEN, MEMORY = 7, 8, 9, 10, 11, 12
LEND, PIECE, TAKEN, REFUSE, NOTE, CREDIT, REPORT = range(13, 20)
HEADER_BYTES = 48
_HOST = "one host"
MESSAGES = (EAGER, OFFER, GRANT, DATA, MEMORY, LEND, PIECE, TAKEN, REFUSE)

Address = tuple[str, int]
Frame = tuple[bytes, ...]
Socket = zmq.Socket[bytes]
# Given the address of a listening socket, returns the one to connect to instead.
Via = Callable[[Address], Address]


def frame(
    kind: int,
    *,
    channel: int = 0,
    tag: int = 0,
    message: int = 0,
    size: int = 0,
    offset: int = 0,
    signature: bytes = b"",
    payload: bytes | None = None,
) -> Frame:
    """Encode a frame: header with signature, and the payload if there is one."""
    size = size or len(payload or b"")
    header = struct.pack(
        "<4sBBHQQQQQ", b"FDP1", 4, kind, len(signature), channel, tag, message, size, offset
    )
    return (header + signature,) if not payload else (header + signature, payload)


class Keys:
    """The keys of a job and the names of its links: HKDF (RFC 5869) with SHA-256."""

    def __init__(self, token: str = TOKEN, job: str = "") -> None:
        salt = hashlib.sha256(b"fsdpcore job " + job.encode()).digest()
        self._extracted = hmac.new(salt, token.encode(), hashlib.sha256).digest()

    def _expand(self, info: bytes) -> bytes:
        return hmac.new(self._extracted, b"fsdpcore " + info + b"\x01", hashlib.sha256).digest()

    def meeting(self) -> bytes:
        """The secret key of rank 0 while the ranks meet."""
        return z85.encode(self._expand(b"meeting"))

    def listening(self, rank: int) -> bytes:
        """The secret key with which a rank listens."""
        return z85.encode(self._expand(f"rank {rank}".encode()))

    def link(self, src: int, dst: int, nonce: bytes) -> bytes:
        """What ``src`` calls itself when it connects to ``dst``."""
        return b"fc" + self._expand(f"link {src} {dst} ".encode() + nonce)[:22]


def url(address: Address) -> str:
    """Write an address as ZeroMQ reads it."""
    return f"tcp://{address[0]}:{address[1]}"


def know(sock: Socket, server: bytes) -> Socket:
    """Let a socket that will connect know who listens, by its secret key."""
    public, secret = zmq.curve_keypair()
    sock.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(server))
    sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
    return sock


def card_of(rank: int, world_size: int = 2, card: Any = None, **other: Any) -> dict[str, Any]:
    """What a rank says when it comes to the meeting."""
    message = {
        "fsdpcore": PROTOCOL,
        "version": fc.__version__,
        "rank": rank,
        "world_size": world_size,
    }
    return {**message, "card": {} if card is None else card, **other}


class Guest:
    """Somebody who comes to the meeting with a message.

    Args:
        port: of the meeting at this host.
        message: what to say, as JSON or as it is.
        keys: with those of the job, rank 0 listens.
    """

    def __init__(self, port: int, message: Any, keys: Keys | None = None) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._socket = know(self._context.socket(zmq.DEALER), (keys or Keys()).meeting())
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        self._gone = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(url(("127.0.0.1", port)))
        self.say(message)

    def say(self, message: Any) -> None:
        """Send a message."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        self._socket.send(data)

    def answer(self) -> Any:
        """What rank 0 says."""
        return unpacked(self._socket.recv())

    def thank(self) -> None:
        """Confirm the answer, and wait until rank 0 has ended the meeting."""
        self.say({})
        assert self._gone.poll(int(PATIENCE * 1000)), "the meeting does not end"

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._gone.close(0)
        self._context.destroy(0)


class Rogue:
    """Rank 1 of 2, by hand.

    Args:
        port: where the ranks meet.
        encrypted: as rank 0 is.
        via: what is put between the two.

    Attributes:
        address: where rank 0 listens.
        number: of the next frame to rank 0.
        credits: it says how many bytes have come.
    """

    def __init__(self, port: int, *, encrypted: bool = False, via: Via = lambda at: at) -> None:
        self.keys, self.encrypted, self.credits, self.number = Keys(), encrypted, True, 0
        self._read = self._came = 0
        self._context: zmq.Context[Socket] = zmq.Context()
        self._inbox = self._make()
        if encrypted:
            self._inbox.setsockopt(zmq.CURVE_SERVER, 1)
            self._inbox.setsockopt(zmq.CURVE_SECRETKEY, self.keys.listening(1))
        own = self._inbox.bind_to_random_port("tcp://127.0.0.1")
        card = {"address": via(("127.0.0.1", own)), "encrypted": encrypted, "host": _HOST}
        with Guest(via(("127.0.0.1", port))[1], card_of(1, card=card)) as guest:
            answer = guest.answer()
            guest.thank()
        self.nonce = bytes.fromhex(answer["nonce"])
        self.address: Address = via(tuple(answer["table"][0]["address"]))
        self.name = self.keys.link(1, 0, self.nonce)
        self.outbox = self.dial(self.name, self.keys.listening(0) if encrypted else None)

    def _make(self) -> Socket:
        sock: Socket = self._context.socket(zmq.ROUTER)
        sock.setsockopt(zmq.LINGER, 1000)
        sock.setsockopt(zmq.RCVTIMEO, int(PATIENCE * 1000))
        sock.setsockopt(zmq.SNDHWM, 0)
        return sock

    def dial(self, name: bytes, server: bytes | None = None) -> Socket:
        """Make a socket for a link to rank 0, with CURVE if a key is given; not connected."""
        sock = self._make()
        sock.setsockopt(zmq.ROUTING_ID, name)
        sock.setsockopt(zmq.CONNECT_ROUTING_ID, b"rank 0")
        return sock if server is None else know(sock, server)

    def connect(self) -> None:
        """Connect to rank 0."""
        self.outbox.connect(url(self.address))

    def send(self, *frames: Frame) -> None:
        """Send frames, with the next numbers."""
        for head, *payload in frames:
            self.raw(struct.pack("<Q", self.number) + head, *payload)

    def raw(self, *parts: bytes) -> None:
        """Send the parts of one ZeroMQ message as they are; it counts as a frame."""
        self.number += 1
        self.outbox.send_multipart([b"rank 0", *parts])

    def hang_up(self) -> None:
        """End the link to rank 0."""
        self.outbox.close(0)

    def deafen(self) -> None:
        """Listen no more, and end the link from rank 0."""
        self._inbox.close(0)

    def read(self, kind: int) -> bytes:
        """Return the next frame of a kind, passing over others."""
        while (data := self.next())[5] != kind:
            pass
        return data

    def next_message(self) -> bytes:
        """Return the next frame that is about a message."""
        while (data := self.next())[5] not in MESSAGES:
            pass
        return data

    def next(self) -> bytes:
        """Return the next frame."""
        name, head, *rest = self._inbox.recv_multipart()
        assert name == self.keys.link(0, 1, self.nonce)
        assert len(rest) <= 1
        assert head[:8] == struct.pack("<Q", self._read)
        self._read += 1
        data = head[8:] + b"".join(rest)
        if rest and data[5] in MESSAGES:
            self._came += len(rest[0])
            if self.credits:
                self.send(frame(CREDIT, size=self._came))
        return data

    def __enter__(self) -> Rogue:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy()


@contextlib.contextmanager
def stranger_job(**options: Any) -> Iterator[tuple[int, Any]]:
    """Let a rank 0 of 2 wait for its rank 1; yields the port, and a function for its backend.

    The two are on one host, and share no memory unless the options say so.
    """
    options = {"host_id": _HOST, "shm": "off", **options}
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
def rogue_job(
    *, near: bool = False, via: Via = lambda at: at, **options: Any
) -> Iterator[tuple[ZmqBackend, Rogue]]:
    """A rank 0 whose rank 1 has come and is in the test's hand; ``near``: memory may be shared."""
    if near:
        options.setdefault("shm", "auto")
    encrypted = options.get("security") == "curve"
    with (
        stranger_job(**options) as (port, joined),
        Rogue(port, encrypted=encrypted, via=via) as rogue,
    ):
        rogue.connect()
        backend = joined()
        assert isinstance(backend, ZmqBackend), backend
        yield backend, rogue
