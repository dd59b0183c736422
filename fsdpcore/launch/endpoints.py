"""Where ranks can be reached: names looked up, sockets that listen."""

from __future__ import annotations

import ipaddress
import socket
import time
from typing import Any

from fsdpcore.core.errors import RendezvousError
from fsdpcore.core.work import Deadline
from fsdpcore.launch.addresses import join_address

_MAX_PORT = 65535
_RETRY_SECONDS = 0.05
_LOOKUP_SECONDS = 2.0
# Of a name: more are never needed, and each costs a connection while a rank looks for rank 0.
_MOST_ADDRESSES = 4

Entry = tuple[socket.AddressFamily, Any]


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket; port 0 takes a free one.

    Raises:
        RendezvousError: the address cannot be listened at; the message names it.
    """
    family, address = _look_up((host, port), Deadline(_LOOKUP_SECONDS))[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except (OSError, OverflowError) as error:
        listener.close()
        where = join_address(host, port)
        raise RendezvousError(f"this process cannot listen at {where}: {error}") from error
    return listener


def resolve(address: tuple[str, int], deadline: Deadline) -> list[str]:
    """Look up a host; return its addresses as text, IPv4 first.

    Name servers that do not answer are asked again until the deadline.

    Raises:
        RendezvousError: there is no such host.
    """
    found = [socket.getnameinfo(target, _NUMERIC)[0] for _, target in _look_up(address, deadline)]
    return list(dict.fromkeys(found))[:_MOST_ADDRESSES]


_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


def _look_up(address: tuple[str, int], deadline: Deadline) -> list[Entry]:
    if not 0 <= address[1] <= _MAX_PORT:  # which getaddrinfo would take for another one
        raise RendezvousError(f"{join_address(*address)} names a port that does not exist")
    while True:
        try:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:  # gaierror; a name that no host can have
            if getattr(error, "errno", None) == socket.EAI_AGAIN and deadline.remaining() > 0:
                time.sleep(min(_RETRY_SECONDS, deadline.remaining()))
                continue
            raise RendezvousError(
                f"the host {address[0]!r} where the ranks shall meet cannot be found: {error}"
            ) from error
    entries = [(entry[0], entry[4]) for entry in found]
    return sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)


def own_address(host: str, port: int) -> str:
    """The address of this machine from which another one is reached.

    Raises:
        RendezvousError: there is no way to it.
    """
    family, target = _look_up((host, port), Deadline(_LOOKUP_SECONDS))[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)  # no packet is sent: the kernel picks a route
        except OSError as error:
            where = join_address(host, port)
            raise RendezvousError(f"there is no route to rank 0 at {where}: {error}") from error
        return str(probe.getsockname()[0])


def is_unspecified(host: str) -> bool:
    """Whether an address stands for all of this machine's, as 0.0.0.0 does."""
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
