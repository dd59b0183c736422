"""``Visit``: a rank's connection to one of the addresses at which it looks for rank 0."""

from __future__ import annotations

import json
import zlib
from typing import Any

import zmq

from fsdpcore.core.work import Deadline
from fsdpcore.launch.addresses import join_address

from .keys import KeyPair
from .monitors import events

Socket = zmq.Socket[bytes]

# How soon to try again where nobody listens, or somebody else.
RETRY_SECONDS = 0.05
_MAX_TABLE = 1 << 28
# How long who listens may take for the handshake; rank 0 may be held up.
_HANDSHAKE_MS = 10_000
# Events of a connection: its handshake is done; who listens is no one that it can be done with, and
# of that the one after which ZeroMQ does not try again.
GREETED, _BROKEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
GIVEN_UP = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
UNLIKE = GIVEN_UP | int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)


class Visit:
    """A connection to one of the addresses that rank 0 may have, to meet there.

    Args:
        context: of the rank.
        server: the keys of whom it looks for.
        host, port: the address.

    Attributes:
        host: the address.
        greeted: who is there knows the job's secret.
        refused: who is there does not.
        given_up: ZeroMQ does not try again, as where ranks of an earlier job, which do not encrypt,
            still listen at a port that a launcher keeps open.
    """

    def __init__(self, context: zmq.Context[Socket], server: KeyPair, host: str, port: int) -> None:
        self.host = host
        self.socket: Socket = context.socket(zmq.DEALER)
        self.greeted = self.refused = self.given_up = False
        sock = self.socket
        set_up(sock, host, _MAX_TABLE)
        # Rank 0 may come later than the others.
        sock.setsockopt(zmq.RECONNECT_IVL, int(1000 * RETRY_SECONDS))
        public, secret = zmq.curve_keypair()
        sock.setsockopt(zmq.CURVE_SERVERKEY, server.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self.monitor: Socket = sock.get_monitor_socket(GREETED | _BROKEN | UNLIKE)
        sock.connect(f"tcp://{join_address(host, port)}")

    def look(self) -> bool:
        """Note what happened to the connection; return whether it broke after the greeting."""
        for event, _, _ in events(self.monitor):
            if event & GREETED:
                self.greeted = True
            elif event & UNLIKE:
                self.refused = True
                self.given_up |= event == GIVEN_UP
            elif self.greeted:
                return True
        return False

    def thank(self, end: Deadline) -> None:
        """Say that the table is there, and wait until the port is free for links to rank 0."""
        self.socket.send(b"{}")
        while not self.look() and end.remaining() > 0:
            self.monitor.poll(int(1000 * end.patience()) + 1)

    def close(self) -> None:
        """End it."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


def packed(table: dict[str, Any]) -> bytes:
    """Return what all ranks are sent; it is some 15 times as long where it is not compressed."""
    return zlib.compress(json.dumps(table).encode())


def unpacked(data: bytes) -> dict[str, Any]:
    """Return what rank 0 has sent: a table, or JSON as it is, which tells of an error.

    Raises:
        ValueError, TypeError, RecursionError, zlib.error: it makes no sense.
    """
    if not data.startswith(b"{"):
        data = zlib.decompressobj().decompress(data, _MAX_TABLE)
    return dict(json.loads(data))


def set_up(sock: Socket, host: str, most: int) -> None:
    """Set what both ends of a meeting have in common; ``most``: bytes of a message."""
    sock.setsockopt(zmq.IPV6, ":" in host)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, most)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # A rank that waits for the others hears of rank 0's end even if its host is lost.
    sock.setsockopt(zmq.HEARTBEAT_IVL, 1_000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5_000)
