"""Links between the agents of an elastic job, over ZeroMQ.

An agent listens at one socket, and has another one for each agent that it has sent something to
lately. All is encrypted with keys of the job's secret, whatever ``security`` says: who doesn't know
the secret gets no further than the handshake, on either side.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from typing import Any

import zmq

from fsdpcore.launch.addresses import join_address, parse_address
from fsdpcore.launch.endpoints import listen

from .keys import JobKeys, KeyPair
from .monitors import events
from .visit import GIVEN_UP, GREETED, UNLIKE

Socket = zmq.Socket[bytes]
Message = dict[str, Any]

# Of a message: one that names all hosts and seats of a job of thousands is far below.
_MAX_MESSAGE = 1 << 24
# So many messages are kept for an agent that cannot be reached, or does not read: the newest.
_MOST_WAITING = 50
# How soon a connection is tried again, and how long one may take. Where a network was down, the
# next ones are heard again about so much later.
_RETRY_MS, _CONNECT_MS, _HANDSHAKE_MS = 50, 1_000, 3_000
_HEARTBEAT_MS, _SILENT_MS = 500, 2_000
# An agent that was sent nothing for so many seconds is forgotten: it may be gone for good.
_IDLE_SECONDS = 60.0
_LAST_MS = 500


class ZmqAgentLinks:
    """See ``AgentLinks`` in ``comm/agents.py``.

    Args:
        address: where to listen; port 0 takes a free one.
        token: the job's secret.

    Raises:
        RendezvousError: the address cannot be listened at.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        with listen(*address) as listener:
            host, port = listener.getsockname()[:2]
            self.address = join_address(host, port)
            self._keys = JobKeys(token).agents()
            self._context: zmq.Context[Socket] = zmq.Context()
            self._inbox: Socket = self._context.socket(zmq.ROUTER)
            _set_up(self._inbox, host)
            self._inbox.setsockopt(zmq.CURVE_SERVER, 1)
            self._inbox.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
            self._inbox.setsockopt(zmq.USE_FD, listener.detach())
            self._inbox.bind(f"tcp://{self.address}")
        self._lines: dict[str, _Line] = {}

    def send(self, address: str, message: Message) -> None:
        line = self._lines.get(address)
        if line is None or line.given_up:
            if line is not None:
                line.close()
            line = self._lines[address] = _Line(self._context, self._keys, address)
        data = json.dumps({"from": self.address, "message": message}, separators=(",", ":"))
        line.send(data.encode())

    def take(self) -> list[tuple[str, Message]]:
        found = []
        while int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts = self._inbox.recv_multipart()
            # Who knows the secret sends what is right, unless it is of another version.
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                content = json.loads(parts[-1])
                found.append((str(content["from"]), dict(content["message"])))
        for address, line in list(self._lines.items()):
            line.look()
            if line.idle:
                self._lines.pop(address).close()
        return found

    def refused(self) -> set[str]:
        return {address for address, line in self._lines.items() if line.refused}

    def watched(self) -> list[int]:
        sockets = [self._inbox, *(sock for line in self._lines.values() for sock in line.watched())]
        return [int(sock.getsockopt(zmq.FD)) for sock in sockets]

    def close(self) -> None:
        for line in self._lines.values():
            line.close(_LAST_MS)
        self._inbox.close(0)
        self._context.term()


class _Line:
    """A connection to another agent, over which this one sends.

    What cannot be sent waits here, not in ZeroMQ, which would lose the newest.

    Attributes:
        refused: who listens there does not know the secret.
        given_up: ZeroMQ doesn't try again.
    """

    def __init__(self, context: zmq.Context[Socket], keys: KeyPair, address: str) -> None:
        host, port = parse_address(address)
        self.refused = self.given_up = False
        self._used = time.monotonic()
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._socket: Socket = context.socket(zmq.DEALER)
        _set_up(self._socket, host)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        public, secret = zmq.curve_keypair()
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._monitor: Socket = self._socket.get_monitor_socket(GREETED | UNLIKE)
        self._socket.connect(f"tcp://{join_address(host, port)}")

    @property
    def idle(self) -> bool:
        """Whether nothing was sent for long."""
        return time.monotonic() > self._used + _IDLE_SECONDS

    def watched(self) -> list[Socket]:
        """The sockets that wake when there is something to look at."""
        return [self._monitor, self._socket] if self._waiting else [self._monitor]

    def send(self, data: bytes) -> None:
        """Send, now or once that is possible."""
        self._used = time.monotonic()
        self._waiting.append(data)
        self._flush()

    def look(self) -> None:
        """Note what happened to the connection, and send what waits for it."""
        for event, _, _ in events(self._monitor):
            self.refused = not event & GREETED
            self.given_up = event == GIVEN_UP
        self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(zmq.Again):
            while self._waiting:
                self._socket.send(self._waiting[0], zmq.NOBLOCK)
                self._waiting.popleft()

    def close(self, linger: int = 0) -> None:
        """End it; ``linger``: milliseconds for what was sent last."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)


def _set_up(sock: Socket, host: str) -> None:
    """Set what both ends have in common."""
    sock.setsockopt(zmq.IPV6, ":" in host)
    sock.setsockopt(zmq.SNDHWM, _MOST_WAITING)
    sock.setsockopt(zmq.RCVHWM, _MOST_WAITING)
    sock.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sock.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
    sock.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
    sock.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
