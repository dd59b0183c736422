"""How the data connections between ranks come about: a port for all higher ranks, one call each.

Who calls shows who it is, and that it knows the job's token; who is called answers with the same.
The proofs are digests for one direction between two ranks. Whoever shows anything else is shut
out, and whoever shows nothing gets no more than a place in a short queue.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import selectors
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

from fsdpcore.core.errors import RendezvousError
from fsdpcore.core.work import Deadline

# magic, rank, proof
_GREETING = struct.Struct("<8sQ32s")
_MAGIC = b"fsdpcore"
# Connections that have not shown who they are: more are only strangers', and cost descriptors.
_MAX_UNKNOWN = 64

Address = tuple[str, int]


def greeting(token: str, src: int, dst: int) -> bytes:
    """What rank ``src`` shows to rank ``dst``, and only a rank of this job can know."""
    message = f"fsdpcore data: rank {src} to rank {dst}".encode()
    digest = hmac.new(token.encode(), message, hashlib.sha256).digest()
    return _GREETING.pack(_MAGIC, src, digest)


class _Handshake:
    """A connection whose other end has not shown who it is."""

    def __init__(self, sock: socket.socket, rank: int | None) -> None:
        self.sock = sock
        self.rank = rank  # that was called; None for who calls here
        self.shown = b""


class Acceptor:
    """Makes the data connections of a rank; ``answer`` is called when ``fileno`` has input.

    Args:
        rank: of this process.
        token: of the job.
        arrived: called with the rank of each peer and the socket to it, which it then owns.
    """

    def __init__(
        self, rank: int, token: str, arrived: Callable[[int, socket.socket], None]
    ) -> None:
        self._rank = rank
        self._token = token
        self._arrived = arrived
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._expected: set[int] = set()
        self._handshakes: list[_Handshake] = []

    def fileno(self) -> int:
        """The descriptor to poll for input."""
        return int(self._selector.fileno())

    def listen(self, host: str, ranks: Iterable[int]) -> Address:
        """Open a port for ``ranks``; return where it is.

        Raises:
            RendezvousError: ``host`` is no address of this machine.
        """
        self._expected = set(ranks)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = listener = socket.socket(family)
        try:
            listener.bind((host, 0))
        except OSError as error:
            raise RendezvousError(f"rank {self._rank} cannot listen at {host}: {error}") from error
        listener.listen(len(self._expected) + _MAX_UNKNOWN)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return host, listener.getsockname()[1]

    def call(self, rank: int, address: Any, deadline: Deadline) -> None:
        """Connect to the port of a lower rank.

        Raises:
            RendezvousError: there is no such address, or nobody answers.
        """
        try:
            sock = socket.create_connection(tuple(address), max(deadline.remaining(), 0.001))
        except (OSError, TypeError, ValueError, OverflowError) as error:
            raise RendezvousError(
                f"rank {self._rank} cannot connect to rank {rank} at {address!r}: {error}"
            ) from error
        self._receive(_Handshake(sock, rank))
        with contextlib.suppress(OSError):  # what is wrong shows when the answer is read
            sock.send(greeting(self._token, self._rank, rank))

    def answer(self) -> None:
        """Take in whoever has come, and read what they show."""
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._look_at(key.data)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._receive(_Handshake(self._listener.accept()[0], None))
        callers = [handshake for handshake in self._handshakes if handshake.rank is None]
        if len(callers) > _MAX_UNKNOWN:
            self._forget(callers[0]).close()

    def _receive(self, handshake: _Handshake) -> None:
        handshake.sock.setblocking(False)
        self._handshakes.append(handshake)
        self._selector.register(handshake.sock, selectors.EVENT_READ, handshake)

    def _look_at(self, handshake: _Handshake) -> None:
        try:
            got = handshake.sock.recv(_GREETING.size - len(handshake.shown))
        except BlockingIOError:
            return
        except OSError:
            got = b""
        handshake.shown += got
        if got and len(handshake.shown) < _GREETING.size:
            return
        sock, rank = self._forget(handshake), self._who_is(handshake)
        if rank is None:
            sock.close()
            return
        if handshake.rank is None:
            self._expected.discard(rank)
            with contextlib.suppress(OSError):
                sock.send(greeting(self._token, self._rank, rank))
        self._arrived(rank, sock)

    def _who_is(self, handshake: _Handshake) -> int | None:
        """The rank that a guest has proved to be, if it was expected."""
        if len(handshake.shown) < _GREETING.size:
            return None
        rank = int(_GREETING.unpack(handshake.shown)[1])
        right = hmac.compare_digest(handshake.shown, greeting(self._token, rank, self._rank))
        expected = rank in self._expected if handshake.rank is None else rank == handshake.rank
        return rank if right and expected else None

    def _forget(self, handshake: _Handshake) -> socket.socket:
        self._selector.unregister(handshake.sock)
        self._handshakes.remove(handshake)
        return handshake.sock

    def close(self) -> None:
        """Close the port, and what strangers have left open."""
        for handshake in self._handshakes.copy():
            self._forget(handshake).close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
