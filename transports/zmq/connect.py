"""How the ranks of the ``zmq`` transport get connected to each other, and nobody else does.

A rank listens at one port for each higher rank and connects to each lower one. Both sides prove
that they know the job's token: who connects, in ZeroMQ's own handshake (mechanism PLAIN), before
the listening socket takes any frame from it; who listens, in its first frame. The proofs are
digests for one direction between two ranks, so that no port ever gets to see the token itself.
This keeps strangers out and jobs apart. It does not encrypt: on a network where others can read
or change the traffic, use a tunnel.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import socket
from typing import TYPE_CHECKING, Any

import zmq

from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.work import Deadline
from fsdpcore.launch.rendezvous import RankInfo, describe_address, resolve, split_address

from .wire import MAX_INLINE

if TYPE_CHECKING:
    from fsdpcore.comm.config import TransportConfig
    from fsdpcore.comm.place import RankPlace

_NEVER_MS = 10 * 24 * 3600 * 1000
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether to let somebody in (its RFC 27)


def proof(token: str, src: int, dst: int) -> str:
    """What rank ``src`` shows to rank ``dst``, and only a rank of this job can know."""
    message = f"fsdpcore zmq: rank {src} to rank {dst}".encode()
    return hmac.new(token.encode(), message, hashlib.sha256).hexdigest()


def open_socket(context: zmq.Context[zmq.Socket[bytes]], host: str) -> zmq.Socket[bytes]:
    """Make the socket of one connection."""
    sock: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    sock.setsockopt(zmq.IPV6, ":" in host)
    # A connection that breaks has lost data: never reconnect behind the scenes. The value that
    # means never, -1, makes libzmq 4.3.5 hang when such a socket is closed at the wrong moment.
    sock.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_INLINE + 4096)
    # What a rank has to say must never be stuck, and it is not much.
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    # A host that is lost says nothing; ZeroMQ's own thread asks it.
    sock.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
    return sock


class Authenticator:
    """Lets each rank that is expected in once, and nobody else.

    Asked by ZeroMQ about everybody who connects to a socket of the context that has a domain.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._socket.bind(_ZAP)
        self._expected: dict[bytes, bytes] = {}

    def fileno(self) -> int:
        """The descriptor that signals changes."""
        return int(self._socket.getsockopt(zmq.FD))

    def expect(self, sock: zmq.Socket[bytes], rank: int, password: str) -> None:
        """Let ``rank``, with its password, in at a socket that does not listen yet."""
        domain = str(rank)
        sock.setsockopt(zmq.PLAIN_SERVER, 1)
        sock.setsockopt_string(zmq.ZAP_DOMAIN, domain)
        self._expected[domain.encode()] = password.encode()

    def answer(self) -> None:
        """Answer all questions that have come."""
        with contextlib.suppress(zmq.Again):
            while True:
                version, number, *question = self._socket.recv_multipart(zmq.NOBLOCK)
                status = b"200" if self._knows(question) else b"400"
                self._socket.send_multipart([version, number, status, b"", b"", b""])

    def _knows(self, question: list[bytes]) -> bool:
        domain, password = question[0], question[-1]
        if not hmac.compare_digest(self._expected.get(domain, b""), password):
            return False
        return self._expected.pop(domain, None) is not None


def listen(sock: zmq.Socket[bytes], host: str, rank: int) -> str:
    """Listen at a free port of ``host``; return the endpoint to connect to.

    Raises:
        RendezvousError: ``host`` is no address of this machine.
    """
    try:
        sock.bind(f"tcp://{_bracketed(host)}:*")
    except zmq.ZMQError as error:
        raise RendezvousError(f"rank {rank} cannot listen at {host}: {error}") from error
    return str(sock.getsockopt_string(zmq.LAST_ENDPOINT))


def host_of(endpoint: str) -> str:
    """Return the address in an endpoint that ``listen`` returned."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def connect(sock: zmq.Socket[bytes], rank_info: RankInfo, rank: int, peer: int, token: str) -> None:
    """Connect ``rank`` to the endpoint that the card of ``peer`` names for it.

    Raises:
        RendezvousError: it names none.
    """
    sock.setsockopt_string(zmq.PLAIN_USERNAME, str(rank))
    sock.setsockopt_string(zmq.PLAIN_PASSWORD, proof(token, rank, peer))
    endpoints: Any = rank_info.get("endpoints")
    endpoint = endpoints.get(str(rank)) if isinstance(endpoints, dict) else None
    try:
        if not isinstance(endpoint, str):
            raise TypeError("it should be text")
        sock.connect(endpoint)
    except (zmq.ZMQError, TypeError) as error:
        raise RendezvousError(
            f"rank {peer} says that rank {rank} shall connect to {endpoint!r}, which is no address "
            f"({error}); do all ranks run the same version of fsdpcore?"
        ) from error


def meeting_point(place: RankPlace, config: TransportConfig, scheme: str) -> tuple[str, int]:
    """Where the ranks meet: what the launcher says, or the address in the URL.

    Raises:
        ConfigError: neither says.
    """
    if place.rendezvous is not None:
        return split_address(place.rendezvous)
    if config.port:
        return config.host, config.port
    hint = ""
    # What else is built on this transport does something that MPI does not.
    if place.mpi and scheme == "zmq" and importlib.util.find_spec("mpi4py") is None:
        hint = '; or install mpi4py (pip install "fsdpcore[mpi]"), and use mpi'
    raise ConfigError(
        f"{place.launcher} does not say where the ranks can meet over ZeroMQ: name an address that "
        f"the host of rank 0 has, as in --transport {scheme}://HOST:PORT{hint}"
    )


def own_address(address: tuple[str, int], deadline: Deadline, *, listening: bool) -> str:
    """The address of this host at which the ranks reach it: loopback if they meet there.

    Raises:
        RendezvousError: the host is unknown, or there is no way to it.
    """
    family, target = resolve(address, deadline)
    if listening:
        return str(target[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)  # no packet is sent: the kernel picks a route
        except OSError as error:
            where = describe_address(*address)
            raise RendezvousError(f"there is no route to rank 0 at {where}: {error}") from error
        return str(probe.getsockname()[0])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
