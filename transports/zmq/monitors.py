"""What ZeroMQ tells of a socket's connections: that they are made, and that they break."""

from __future__ import annotations

import struct

import zmq

Socket = zmq.Socket[bytes]

_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)
_EVENT = struct.Struct("=Hi")  # what happened, and the descriptor that it happened to
_ACCEPTED, _BROKEN = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)


def events(monitor: Socket) -> list[tuple[int, int, str]]:
    """Return what a monitor tells: event, descriptor and endpoint of each; never blocks."""
    found = []
    while int(monitor.getsockopt(_EVENTS)) & _POLLIN:
        record, endpoint = monitor.recv_multipart(_NOBLOCK)
        event, value = _EVENT.unpack(record)
        found.append((event, value, endpoint.decode()))
    return found


class InboundConnections:
    """The connections to a socket that listens, and which rank is at the other end of each.

    Attributes:
        monitor: of the socket.
        ranks: by the descriptors of their connections. Strangers come and go, too: only who has
            sent a frame is known.
    """

    def __init__(self, sock: Socket) -> None:
        self.monitor: Socket = sock.get_monitor_socket(_ACCEPTED | _BROKEN)
        self.ranks: dict[int, int] = {}
        self._closed: set[int] = set()

    def know(self, frame: zmq.Frame, rank: int) -> None:
        """Note from whom a connection is on which a frame has come."""
        self.ranks[int(frame.get(zmq.SRCFD))] = rank

    def broken(self) -> list[int]:
        """The ranks whose connections have broken since the last call; never blocks."""
        found = []
        # In order: the descriptor of a connection that has broken is the next one's.
        for event, descriptor, _ in events(self.monitor):
            if event & _ACCEPTED:
                self._closed.discard(descriptor)
            elif descriptor in self.ranks:
                found.append(self.ranks.pop(descriptor))
            else:
                self._closed.add(descriptor)
        # A frame may be read after its connection was seen to break.
        for descriptor in self._closed & set(self.ranks):
            self._closed.remove(descriptor)
            found.append(self.ranks.pop(descriptor))
        return found
