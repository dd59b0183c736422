"""How the ranks of a job find each other: rank 0 collects a card from each, and hands out all.

Plain TCP. A message is its length (4 bytes, little-endian) and that many bytes of JSON; nothing
is allocated for a length before that many bytes have come, and who does not know the job's token
gets nothing. The token keeps strangers out and jobs apart; it does not hide anything from who can
read the network. Where a launcher started the ranks it has opened the listening socket itself and
left it to rank 0, so the port is known before any rank runs and cannot be lost in between.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import selectors
import socket
import struct
import time
from typing import Any, NoReturn

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ConfigError, RendezvousError
from fsdpcore.core.text import name_ranks
from fsdpcore.core.work import Deadline

RankInfo = dict[str, Any]

_LENGTH = struct.Struct("<I")
_PROTOCOL = 1
_MAX_CARD = 1 << 20
_MAX_TABLE = 1 << 28
_MAX_PORT = 65535
_RETRY_SECONDS = 0.05
# Connections that have not shown who they are: more are only strangers', and cost descriptors.
_MAX_UNKNOWN = 64
# Rank 0 gives up at the deadline; the others leave it this long to tell them who was missing.
_GRACE_SECONDS = 2.0


def meet(
    place: RankPlace, address: tuple[str, int], rank_info: RankInfo, timeout: float
) -> list[RankInfo]:
    """Exchange one card per rank. Blocks until all ranks have come.

    Args:
        place: who this process is.
        address: where rank 0 listens; unused on a rank 0 whose launcher opened the listener.
        rank_info: JSON-able, at most 1 MiB.
        timeout: seconds.

    Returns:
        The cards of all ranks, in rank order.

    Raises:
        RendezvousError: ranks are missing at the deadline (named), the address cannot be used,
            or the ranks disagree about the job.
    """
    if place.rank:
        return _attend(place, address, rank_info, timeout)
    if place.listener_fd is not None:
        # A duplicate: the launcher's descriptor stays open for a later meeting.
        listener = socket.socket(fileno=os.dup(place.listener_fd))
    else:
        listener = listen(*address)
    with listener:
        return _MeetingHost(place, listener, rank_info, Deadline(timeout)).serve()


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket; port 0 takes a free one.

    Raises:
        RendezvousError: the address cannot be listened at; the message names it.
    """
    family, address = resolve((host, port), Deadline(_GRACE_SECONDS))
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        where = describe_address(host, port)
        raise RendezvousError(f"rank 0 cannot listen at {where}: {error}") from error
    return listener


def resolve(address: tuple[str, int], deadline: Deadline) -> tuple[socket.AddressFamily, Any]:
    """Look up a host; return the family and socket address to use, IPv4 where there is a choice.

    Name servers that do not answer are asked again until the deadline.

    Raises:
        RendezvousError: there is no such host.
    """
    if not 0 <= address[1] <= _MAX_PORT:  # which getaddrinfo would take for another one
        raise RendezvousError(f"{describe_address(*address)} names a port that does not exist")
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
    family, _, _, _, target = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, target


def describe_address(host: str, port: int) -> str:
    """Write an address as ``split_address`` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``, the host in brackets if it is an IPv6 address.

    Raises:
        ConfigError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    known = port.isascii() and port.isdigit() and len(port) <= 5
    if not known or not 0 < int(port) <= _MAX_PORT:
        raise ConfigError(f"rendezvous address {address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _encode(content: Any) -> bytes:
    body = json.dumps(content).encode()
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes | bytearray) -> dict[str, Any]:
    """Read what ``_encode`` wrote; raises ValueError."""
    try:
        content = json.loads(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("not an object")
    return content


class _JoiningRank:
    """A connection at rank 0, and what has arrived on it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.known = False
        self.rank = -1
        self._data = bytearray()

    def receive(self) -> dict[str, Any] | None:
        """Read what is there; return the message once it is complete.

        Raises:
            ValueError, OSError: the connection ended or did not send a message of ours.
        """
        data = self.connection.recv(65536)
        if not data:
            raise ValueError("connection closed")
        if self.known:
            raise ValueError("a second message")
        self._data += data
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > _MAX_CARD:
            raise ValueError("message too long")
        if len(self._data) < _LENGTH.size + length:
            return None
        return _decode(self._data[_LENGTH.size : _LENGTH.size + length])


class _MeetingHost:
    """Rank 0's side of one meeting."""

    def __init__(
        self, place: RankPlace, listener: socket.socket, rank_info: RankInfo, deadline: Deadline
    ) -> None:
        self._place = place
        self._listener = listener
        self._deadline = deadline
        self._rank_infos: dict[int, RankInfo] = {0: rank_info}
        self._joining: list[_JoiningRank] = []

    def serve(self) -> list[RankInfo]:
        try:
            with selectors.DefaultSelector() as selector:
                self._collect(selector)
            missing = sorted(set(range(self._place.world_size)) - set(self._rank_infos))
            if missing:
                self._fail(self._describe_missing(missing))
            table = [self._rank_infos[rank] for rank in range(self._place.world_size)]
            self._answer({"table": table})
            return table
        finally:
            for joining in self._joining:
                joining.connection.close()

    def _describe_missing(self, missing: list[int]) -> str:
        host, port = self._listener.getsockname()[:2]
        hint = ""
        if self._place.local_world_size < self._place.world_size and _is_loopback(host):
            hint = "; no other host reaches that address, name one that this host has"
        return (
            f"{name_ranks(missing)} of {self._place.world_size} did not come to the rendezvous at "
            f"{describe_address(host, port)} within {self._deadline.seconds:g} s{hint}"
        )

    def _collect(self, selector: selectors.BaseSelector) -> None:
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ)
        while len(self._rank_infos) < self._place.world_size and self._deadline.remaining() > 0:
            for key, _ in selector.select(self._deadline.remaining()):
                if key.data is None:
                    self._welcome(selector)
                elif key.data in self._joining:  # else dropped in this very round
                    self._read(key.data, selector)

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        unknown = [joining for joining in self._joining if not joining.known]
        if len(unknown) >= _MAX_UNKNOWN:
            self._drop(unknown[0], selector)  # a rank speaks at once, and came later
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again before it was accepted, or out of descriptors for a while
            time.sleep(0.01)
            return
        connection.setblocking(False)
        joining = _JoiningRank(connection)
        self._joining.append(joining)
        selector.register(connection, selectors.EVENT_READ, joining)

    def _drop(self, joining: _JoiningRank, selector: selectors.BaseSelector) -> None:
        selector.unregister(joining.connection)
        self._joining.remove(joining)
        joining.connection.close()
        self._rank_infos.pop(joining.rank, None)

    def _read(self, joining: _JoiningRank, selector: selectors.BaseSelector) -> None:
        try:
            message = joining.receive()
            if message is None:
                return
            token = str(message.get("token")).encode(errors="replace")
            right = hmac.compare_digest(token, self._place.token.encode(errors="replace"))
            if message.get("fsdpcore") != _PROTOCOL or not right:
                raise ValueError("not a rank of this job")
        except BlockingIOError:
            return
        except (ValueError, OSError):
            # A stranger, or a rank that died: nothing of it is believed. If it was a rank, it
            # will be missing at the deadline.
            self._drop(joining, selector)
            return
        joining.known = True
        self._admit(joining, message)

    def _admit(self, joining: _JoiningRank, message: dict[str, Any]) -> None:
        rank, size, rank_info = message.get("rank"), message.get("world_size"), message.get("card")
        if size != self._place.world_size:
            self._fail(
                f"rank {rank} was started for a job of {size} ranks, rank 0 for one of "
                f"{self._place.world_size}"
            )
        if type(rank) is not int or not 0 <= rank < self._place.world_size:
            self._fail(f"a process came as rank {rank} of {size}, which does not exist")
        if rank in self._rank_infos:
            self._fail(f"two processes came as rank {rank}; every rank must be started once")
        if not isinstance(rank_info, dict):
            self._fail(f"rank {rank} came without a card; is its version of fsdpcore another one?")
        joining.rank = rank
        self._rank_infos[rank] = rank_info

    def _fail(self, reason: str) -> NoReturn:
        self._answer({"error": reason})
        raise RendezvousError(reason)

    def _answer(self, content: Any) -> None:
        data = _encode(content)
        for joining in self._joining:
            if not joining.known:
                continue
            with contextlib.suppress(OSError):  # it will be found missing by those who need it
                joining.connection.settimeout(_GRACE_SECONDS)
                joining.connection.sendall(data)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _attend(
    place: RankPlace, address: tuple[str, int], rank_info: RankInfo, timeout: float
) -> list[RankInfo]:
    """Every other rank's side: bring the card, wait for the table."""
    deadline = Deadline(timeout + _GRACE_SECONDS)
    where = f"the rendezvous at {describe_address(*address)}"
    with _connect(address, Deadline(timeout), place.rank) as connection:
        message = {"fsdpcore": _PROTOCOL, "token": place.token, "rank": place.rank}
        message |= {"world_size": place.world_size, "card": rank_info}
        try:
            connection.settimeout(max(deadline.remaining(), 0.01))
            connection.sendall(_encode(message))
            answer = _read_message(connection, deadline)
        except socket.timeout:  # noqa: UP041 (an alias of TimeoutError from Python 3.10 on)
            raise RendezvousError(
                f"rank 0 did not answer rank {place.rank} at {where} within {timeout:g} s"
            ) from None
        except (OSError, ValueError) as error:
            raise RendezvousError(
                f"rank 0 ended {where} without an answer to rank {place.rank} ({error}): it "
                "failed, or the job's token (FSDPCORE_TOKEN) or the version of fsdpcore differs"
            ) from error
    if "error" in answer:
        raise RendezvousError(str(answer["error"]))
    table = answer["table"]
    if not isinstance(table, list) or len(table) != place.world_size:
        raise RendezvousError(f"rank 0 sent rank {place.rank} a table that makes no sense")
    return table


def _connect(address: tuple[str, int], deadline: Deadline, rank: int) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(deadline.remaining(), 0.01))
            if connection.getsockname() != connection.getpeername():
                return connection
            # Nobody listens, and the kernel happened to choose this very port for our own end.
            connection.close()
        except (OSError, OverflowError) as error:
            if deadline.remaining() == 0 or isinstance(error, OverflowError):
                raise RendezvousError(
                    f"rank {rank} found no rank 0 at the rendezvous {describe_address(*address)} "
                    f"within {deadline.seconds:g} s: {error}"
                ) from error
            time.sleep(min(_RETRY_SECONDS, deadline.remaining()))


def _read_message(connection: socket.socket, deadline: Deadline) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size, deadline))
    if length > _MAX_TABLE:
        raise ValueError("the answer is too long")
    answer = _decode(_read_exactly(connection, length, deadline))
    if not {"error", "table"} & set(answer):
        raise ValueError("the answer makes no sense")
    return answer


def _read_exactly(connection: socket.socket, count: int, deadline: Deadline) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(max(deadline.remaining(), 0.01))
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ValueError("connection closed")
        data += piece
    return bytes(data)
