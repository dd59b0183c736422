"""How a rank of the ``zmq`` transport joins its job: where it listens, and who is where."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import ipaddress
import logging
import os
import resource
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from fsdpcore.comm.hosts import identity, number, warn_of_containers
from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.version import VERSION
from fsdpcore.core.work import Deadline
from fsdpcore.launch.addresses import is_loopback, parse_address
from fsdpcore.launch.endpoints import is_unspecified, listen, own_address, resolve

from .keys import MIN_SECRET_CHARACTERS, JobKeys
from .meeting import Card, Meeting, MeetingGuest, MeetingHost
from .options import ZmqOptions, ports

if TYPE_CHECKING:
    from fsdpcore.comm.config import TransportConfig
    from fsdpcore.comm.place import RankPlace

_LOG = logging.getLogger("fsdpcore")
_SIOCGIFADDR = 0x8915
# Sockets that listen, ZeroMQ's own descriptors, and those of its threads.
_OWN_FILES = 24
_CURVE, _NONE = "curve", "none"

Address = tuple[str, int]


@dataclass(frozen=True)
class Joined:
    """What a rank knows once it has met the others.

    Attributes:
        hosts: the number of each rank's host.
        addresses: where each rank is reached.
        own: where this one listens.
        listener: the TCP socket there.
        sources: addresses from which the ranks connect.
        nonce: what rank 0 has drawn.
        encrypted: what travels between the ranks is encrypted.
        unauthenticated: as of ``Job``.
    """

    hosts: tuple[int, ...]
    addresses: list[Address]
    own: Address
    listener: socket.socket
    sources: list[str]
    nonce: bytes
    encrypted: bool
    unauthenticated: str


def meeting_point(place: RankPlace, config: TransportConfig, scheme: str) -> Address:
    """Where the ranks meet: what the launcher says, or the address in the URL.

    Raises:
        ConfigError: neither says.
    """
    if place.rendezvous is not None:
        return parse_address(place.rendezvous)
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


def meet(
    context: zmq.Context[zmq.Socket[bytes]],
    place: RankPlace,
    keys: JobKeys,
    address: Address,
    options: ZmqOptions,
    deadline: Deadline,
) -> Joined:
    """Listen, meet the other ranks, and work out who is where. Blocks.

    Raises:
        RendezvousError: ranks are missing at the deadline, or disagree about the job.
        ConfigError: the job needs a secret and has none.
    """
    _make_room(place)
    with contextlib.ExitStack() as stack:
        if place.rank == 0:
            listener = stack.enter_context(_listen_first(place, address, options))
            own = _address_of(listener)
            encrypted = check_security(place.token, own[0], options.security, warn=True)
            host = MeetingHost(context, place, keys, os.dup(listener.fileno()), own, VERSION)
            met = host.meet(_card(own, encrypted, options), deadline)
        else:
            guest = stack.enter_context(
                MeetingGuest(context, place, keys, address, deadline, VERSION)
            )
            chosen = _interface_address(options.interface)
            # First of all: who has no secret finds nobody.
            check_security(place.token, chosen or guest.hosts[0], options.security)
            # Of several addresses, that one counts at which rank 0 is.
            host0 = guest.hosts[0] if len(guest.hosts) == 1 or chosen else guest.greet()
            here = chosen or own_address(host0, address[1])
            encrypted = check_security(place.token, here, options.security)
            listener = stack.enter_context(_listen_at(here, ports(options.port), place.rank))
            own = _address_of(listener)
            met = guest.meet(_card(own, encrypted, options))
        return _joined(place, met, own, listener, options)


def _make_room(place: RankPlace) -> None:
    """Raise the limit of open files to what the job needs, as far as the system allows.

    Raises:
        ConfigError: rank 0 could not let all ranks meet.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    # Each rank has a connection to rank 0 until all have met; ZeroMQ needs a few files besides.
    needed = opened + _OWN_FILES + (place.world_size if place.rank == 0 else 0)
    wanted = needed + 2 * place.world_size
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if place.rank == 0 and hard != resource.RLIM_INFINITY:
            soft = hard  # strangers who say nothing hold some for a while, too
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise ConfigError(
            f"rank 0 needs {needed} open files to let {place.world_size} ranks meet, and may have "
            f"{allowed}: raise the limit (ulimit -Hn) where it is started"
        )
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        text = (
            "rank %d may open %d files, and needs %d if it talks to all other ranks: raise the "
            "limit (ulimit -Hn) where it is started"
        )
        _LOG.warning(text, place.rank, allowed, wanted)


def _joined(
    place: RankPlace,
    met: Meeting,
    own: Address,
    listener: socket.socket,
    options: ZmqOptions,
) -> Joined:
    cards = met.cards
    identities = [str(card.get("host")) for card in cards]
    if place.rank == 0 and not options.host_id:
        warn_of_containers(identities)
    addresses = [_reach(card, met.reached) for card in cards]
    sources = {address[0] for address in addresses}
    sources |= {str(card["seen"]) for card in cards if card.get("seen")}
    if any(is_loopback(source) for source in sources):
        sources |= {"127.0.0.1", "::1"}
    # A rank may listen where others reach it that meets the rest at the loopback address.
    encrypted = any(card.get("encrypted") for card in cards)
    return Joined(
        number(identities),
        addresses,
        own,
        listener.dup(),
        [source.partition("%")[0] for source in sources if (":" in source) == (":" in own[0])],
        met.nonce,
        encrypted,
        _unauthenticated(place.token, [host for host, _ in addresses], encrypted),
    )


def _unauthenticated(token: str, hosts: Iterable[str], encrypted: bool) -> str:
    """Why somebody else could send in the name of a rank; empty if nobody can.

    Who connects to a rank gives a name that follows from the secret. On the way between hosts it is
    seen and taken over, unless it is encrypted.
    """
    if len(token) < MIN_SECRET_CHARACTERS:
        return (
            "the job has no secret, so that others could take part: let fsdpcore start the ranks, "
            "or put a secret into FSDPCORE_TOKEN"
        )
    if encrypted or all(map(is_loopback, hosts)):
        return ""
    return (
        "with security=none whoever reaches the ranks' network can send in their name: leave that "
        "option out"
    )


def _reach(card: Card, reached: str) -> Address:
    """The address of a rank's listener.

    One that listens at 0.0.0.0 is reached where rank 0 saw it come from; rank 0 itself, at
    ``reached``.
    """
    host, port = card["address"]
    if is_unspecified(host):
        host = card.get("seen") or reached
    return str(host), int(port)


def _card(own: Address, encrypted: bool, options: ZmqOptions) -> Card:
    return {"address": own, "encrypted": encrypted, "host": identity(options.host_id)}


def check_meeting(address: Address, token: str, options: ZmqOptions) -> None:
    """Refuse, for a launcher, what ranks that meet at an address of another host would refuse.

    Raises:
        ConfigError: the job needs a secret and has none.
    """
    host = address[0]
    if len(token) >= MIN_SECRET_CHARACTERS:
        return
    with contextlib.suppress(RendezvousError):  # it may get its name a little later
        host = resolve(address, Deadline(0))[0]
    check_security(token, host, options.security)


def check_security(token: str, host: str, security: str, *, warn: bool = False) -> bool:
    """Return whether ranks that are reached at ``host`` encrypt.

    Args:
        token: the job's secret; empty for none.
        host: an address.
        security: the option.
        warn: say so where others could read and join, and the option allows it.

    Raises:
        ConfigError: others could read and join, and there is no secret that keeps them out.
    """
    if security == _NONE:
        if warn and not is_loopback(host):
            _LOG.warning(
                "security=none: whoever reaches %s can read and change what the ranks send", host
            )
        return False
    if security != _CURVE and is_loopback(host):
        return False
    if len(token) < MIN_SECRET_CHARACTERS:
        what = "has no secret" if not token else "has a secret that can be guessed"
        why = "security=curve needs one" if is_loopback(host) else f"other machines reach {host}"
        raise ConfigError(
            f"the job {what}, and {why}: put one into FSDPCORE_TOKEN, or "
            "into a file that FSDPCORE_TOKEN_FILE names, the same for all ranks; "
            "'openssl rand -hex 32' makes one. On a network where everybody is trusted, "
            "security=none does without"
        )
    return True


# Listening.


def _listen_first(place: RankPlace, address: Address, options: ZmqOptions) -> socket.socket:
    if place.listener_fd is not None:
        # A duplicate: the launcher's descriptor stays open for a later meeting.
        return socket.socket(fileno=os.dup(place.listener_fd))
    return listen(_interface_address(options.interface) or address[0], address[1])


def _listen_at(host: str, allowed: range, rank: int) -> socket.socket:
    for port in allowed[:-1]:
        with contextlib.suppress(RendezvousError):
            return listen(host, port)
    try:
        return listen(host, allowed[-1])
    except RendezvousError as error:
        if not allowed[-1]:  # any port would do: it is the address
            raise RendezvousError(f"rank {rank} has nowhere to listen: {error}") from error
        which = "port" if len(allowed) == 1 else f"port from {allowed[0]} to {allowed[-1]}"
        raise RendezvousError(
            f"rank {rank} finds no free {which}: {error}; a host needs one for each of its ranks: "
            "name a range of them, as in port=29501-29508, or leave port= out for any"
        ) from error


def _address_of(listener: socket.socket) -> Address:
    host, port = listener.getsockname()[:2]
    return str(host), int(port)


def _interface_address(interface: str) -> str:
    """The address that ``interface`` names, by itself or as a network interface."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        try:
            ipaddress.ip_address(interface or "::")
        except ValueError:
            raise ConfigError(
                f"interface={interface} is neither an address nor one of this host's interfaces, "
                f"which are {', '.join(names)}"
            ) from None
        return interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigError(f"interface {interface} has no IPv4 address: {error}") from error
    return socket.inet_ntoa(answer[20:24])
