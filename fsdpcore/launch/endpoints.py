"""Where ranks can be reached: names looked up, sockets that listen."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import time
from typing import Any

from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.work import Deadline
from fsdpcore.launch.addresses import join_address

_LOG = logging.getLogger("fsdpcore")

_MAX_PORT = 65535
# A host is looked up again after the first, and then after twice as long, up to the last.
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 0.05, 1.0
_LOOKUP_SECONDS = 2.0
# Name servers that do not answer, or do not know the host: it may get its name a little later.
_NOT_YET = {socket.EAI_AGAIN, socket.EAI_NONAME, socket.EAI_NODATA}
# What to do where one cannot listen.
_ADVICE = {
    errno.EADDRINUSE: "; use another port ('ss -ltnp' shows who has this one)",
    errno.EADDRNOTAVAIL: "; this host has no such address",
    errno.EACCES: "; use a port from 1024 up",
}
# Of a name: more are never needed, and each costs a connection while a rank looks for rank 0.
_MOST_ADDRESSES = 4

Entry = tuple[socket.AddressFamily, Any]


def listen(host: str, port: int = 0, seconds: float = _LOOKUP_SECONDS) -> socket.socket:
    """Open a listening socket; port 0 takes a free one.

    Args:
        host, port: where.
        seconds: how long the host's name may take to exist.

    Raises:
        RendezvousError: the address cannot be listened at; the message names it.
    """
    family, address = _look_up((host, port), Deadline(seconds))[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except (OSError, OverflowError) as error:
        listener.close()
        where, advice = join_address(host, port), _ADVICE.get(getattr(error, "errno", 0), "")
        raise RendezvousError(f"this process cannot listen at {where}: {error}{advice}") from error
    return listener


def resolve(address: tuple[str, int], deadline: Deadline) -> list[str]:
    """Look up a host; return its addresses as text, IPv4 first.

    One that is not known is looked up again until the deadline: those of a cluster may get their
    names after they have started.

    Raises:
        RendezvousError: there is no such host.
    """
    found = [socket.getnameinfo(target, _NUMERIC)[0] for _, target in _look_up(address, deadline)]
    return list(dict.fromkeys(found))[:_MOST_ADDRESSES]


_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


def _look_up(address: tuple[str, int], deadline: Deadline) -> list[Entry]:
    if not 0 <= address[1] <= _MAX_PORT:  # which getaddrinfo would take for another one
        raise RendezvousError(f"{join_address(*address)} names a port that does not exist")
    pause, told = _RETRY_SECONDS, False
    while True:
        try:
            found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            break
        except (OSError, UnicodeError) as error:  # gaierror; a name that no host can have
            looked = getattr(error, "errno", None) in _NOT_YET
            if looked and deadline.remaining() > 0:
                if pause >= _MOST_RETRY_SECONDS and not told:
                    _LOG.warning("waiting for a host named %r: %s", address[0], error)
                    told = True
                time.sleep(min(pause, deadline.remaining()))
                pause = min(2 * pause, _MOST_RETRY_SECONDS)
                continue
            within = f" within {deadline.seconds:g} s" if looked else ""
            raise RendezvousError(
                f"the host {address[0]!r} where the ranks shall meet cannot be found{within}: "
                f"{error}"
            ) from error
    entries = [(entry[0], entry[4]) for entry in found if not _is_link_local(entry[4][0])]
    if not entries:
        raise RendezvousError(
            f"{address[0]} is a link-local address, which works on one network interface only: "
            "name another address of that host"
        )
    return sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)


def _is_link_local(host: str | int) -> bool:
    """Whether an address means nothing without the name of a network interface."""
    found = ipaddress.ip_address(str(host).partition("%")[0])
    return found.version == 6 and found.is_link_local


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
    """Whether an address stands for all of this machine's, as 0.0.0.0 does; a name does not."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def check_reachable(host: str) -> None:
    """Refuse an address that stands for all of a host's own, where others need one.

    Raises:
        ConfigError: it is one.
    """
    if is_unspecified(host):
        raise ConfigError(
            f"ranks of other hosts cannot come to {host}: name an address of the host"
        )
