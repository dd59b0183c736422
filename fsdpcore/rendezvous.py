"""How the ranks of a job find each other: rank 0 collects a card from each, and hands out all.

Plain TCP. A message is its length (4 bytes, little-endian) and that many bytes of JSON; nothing
is allocated before the length was checked, and who does not know the job's token gets nothing.
Where a launcher started the ranks it has opened the listening socket itself and left it to rank
0, so the port is known before any rank runs and cannot be lost in between.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import struct
import time
from typing import Any

from fsdpcore.environment import Place
from fsdpcore.errors import ConfigError, RendezvousError
from fsdpcore.work import Deadline

Card = dict[str, Any]

_LENGTH = struct.Struct("<I")
_PROTOCOL = 1
_MAX_CARD = 1 << 20
_MAX_TABLE = 1 << 28
_RETRY_SECONDS = 0.05
# Rank 0 gives up at the deadline; the others leave it this long to tell them who was missing.
_GRACE_SECONDS = 2.0


def meet(place: Place, address: tuple[str, int], card: Card, timeout: float) -> list[Card]:
    """Exchange one card per rank. Blocks until all ranks have come.

    Args:
        place: who this process is.
        address: where rank 0 listens; unused on a rank 0 whose launcher opened the listener.
        card: JSON-able, at most 1 MiB.
        timeout: seconds.

    Returns:
        The cards of all ranks, in rank order.

    Raises:
        RendezvousError: ranks are missing at the deadline (named), the address cannot be used,
            or the ranks disagree about the job.
    """
    if place.rank:
        return _attend(place, address, card, timeout)
    if place.listener_fd is not None:
        # A duplicate: the launcher's descriptor stays open for a later meeting.
        listener = socket.socket(fileno=os.dup(place.listener_fd))
    else:
        listener = listen(*address)
    with listener:
        return _Host(place, listener, card, Deadline(timeout)).serve()


def listen(host: str, port: int = 0) -> socket.socket:
    """Open a listening socket; port 0 takes a free one.

    Raises:
        RendezvousError: the address cannot be listened at; the message names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"rank 0 cannot listen at {host}:{port}: {error}") from error
    return listener


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``, the host in brackets if it is an IPv6 address.

    Raises:
        ConfigError: it is not of that form.
    """
    host, _, port = address.rpartition(":")
    try:
        return host.strip("[]"), int(port)
    except ValueError:
        raise ConfigError(f"rendezvous address {address!r} is not HOST:PORT") from None


def _encode(content: Any) -> bytes:
    body = json.dumps(content).encode()
    return _LENGTH.pack(len(body)) + body


class _Guest:
    """A connection at rank 0, and what has arrived on it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank = -1
        self._data = bytearray()

    def receive(self) -> Any | None:
        """Read what is there; return the message once it is complete.

        Raises:
            ValueError, OSError: the connection ended or did not send a message of ours.
        """
        data = self.connection.recv(65536)
        if not data:
            raise ValueError("connection closed")
        self._data += data
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > _MAX_CARD:
            raise ValueError("message too long")
        if len(self._data) < _LENGTH.size + length:
            return None
        return json.loads(self._data[_LENGTH.size : _LENGTH.size + length])


class _Host:
    """Rank 0's side of one meeting."""

    def __init__(
        self, place: Place, listener: socket.socket, card: Card, deadline: Deadline
    ) -> None:
        self._place = place
        self._listener = listener
        self._deadline = deadline
        self._cards: dict[int, Card] = {0: card}
        self._guests: list[_Guest] = []

    def serve(self) -> list[Card]:
        try:
            with selectors.DefaultSelector() as selector:
                self._collect(selector)
            missing = sorted(set(range(self._place.world_size)) - set(self._cards))
            if missing:
                name = self._listener.getsockname()
                self._fail(
                    f"{_ranks(missing)} of {self._place.world_size} did not come to the "
                    f"rendezvous at {name[0]}:{name[1]} within {self._deadline.seconds:g} s"
                )
            table = [self._cards[rank] for rank in range(self._place.world_size)]
            self._answer({"table": table})
            return table
        finally:
            for guest in self._guests:
                guest.connection.close()

    def _collect(self, selector: selectors.BaseSelector) -> None:
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ)
        while len(self._cards) < self._place.world_size and self._deadline.remaining() > 0:
            for key, _ in selector.select(self._deadline.remaining()):
                if key.data is None:
                    with contextlib.suppress(OSError):  # gone again before it was accepted
                        connection, _ = self._listener.accept()
                        connection.setblocking(False)
                        guest = _Guest(connection)
                        self._guests.append(guest)
                        selector.register(connection, selectors.EVENT_READ, guest)
                else:
                    self._read(key.data, selector)

    def _read(self, guest: _Guest, selector: selectors.BaseSelector) -> None:
        try:
            message = guest.receive()
            if message is None:
                return
            known = isinstance(message, dict) and message.get("fsdpcore") == _PROTOCOL
            if not known or not hmac.compare_digest(str(message["token"]), self._place.token):
                raise ValueError("not a rank of this job")
        except (ValueError, KeyError, OSError):
            # A stranger, or a rank that died: nothing of it is believed. If it was a rank, it
            # will be missing at the deadline.
            selector.unregister(guest.connection)
            self._guests.remove(guest)
            guest.connection.close()
            self._cards.pop(guest.rank, None)
            return
        self._admit(guest, message)

    def _admit(self, guest: _Guest, message: Any) -> None:
        rank, size = message.get("rank"), message.get("world_size")
        if size != self._place.world_size:
            self._fail(
                f"rank {rank} was started for a job of {size} ranks, rank 0 for one of "
                f"{self._place.world_size}"
            )
        if not isinstance(rank, int) or not 0 <= rank < self._place.world_size:
            self._fail(f"a process came as rank {rank} of {size}, which does not exist")
        if rank in self._cards:
            self._fail(f"two processes came as rank {rank}; every rank must be started once")
        guest.rank = rank
        self._cards[rank] = message["card"]

    def _fail(self, reason: str) -> None:
        self._answer({"error": reason})
        raise RendezvousError(reason)

    def _answer(self, content: Any) -> None:
        data = _encode(content)
        for guest in self._guests:
            with contextlib.suppress(OSError):  # it will be found missing by those who need it
                guest.connection.settimeout(_GRACE_SECONDS)
                guest.connection.sendall(data)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _attend(place: Place, address: tuple[str, int], card: Card, timeout: float) -> list[Card]:
    """Every other rank's side: bring the card, wait for the table."""
    deadline = Deadline(timeout + _GRACE_SECONDS)
    where = f"the rendezvous at {address[0]}:{address[1]}"
    with _connect(address, Deadline(timeout), place.rank) as connection:
        message = {"fsdpcore": _PROTOCOL, "token": place.token, "rank": place.rank}
        message |= {"world_size": place.world_size, "card": card}
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
                "failed, or the job's token (FSDPCORE_TOKEN) differs"
            ) from error
    if "error" in answer:
        raise RendezvousError(str(answer["error"]))
    return list(answer["table"])


def _connect(address: tuple[str, int], deadline: Deadline, rank: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=max(deadline.remaining(), 0.01))
        except OSError as error:
            if deadline.remaining() == 0:
                raise RendezvousError(
                    f"rank {rank} found no rank 0 at the rendezvous {address[0]}:{address[1]} "
                    f"within {deadline.seconds:g} s: {error}"
                ) from error
            time.sleep(min(_RETRY_SECONDS, deadline.remaining()))


def _read_message(connection: socket.socket, deadline: Deadline) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size, deadline))
    if length > _MAX_TABLE:
        raise ValueError("the answer is too long")
    answer = json.loads(_read_exactly(connection, length, deadline))
    if not isinstance(answer, dict) or not {"error", "table"} & set(answer):
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
