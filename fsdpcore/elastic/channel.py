"""What an agent and the ranks of its host tell each other.

Every message is a dict of JSON with a ``kind``. Over a socket pair it is a line.

From the agent:

| kind | fields | the rank |
|---|---|---|
| generation | place, generation (``Generation.encode``) | leaves the one before, meets the others |
| change | reason, leaves | makes its next commit one at which all hand over; does it leave then? |
| finished | | has ended its program: others of its generation have |
| left | | was not taken along, as it had asked to leave; its program ends |
| stop | reason | ends with an ``ElasticError`` |

``place`` has ``rank``, ``world_size``, ``local_rank``, ``local_world_size``, ``meeting``, ``token``
and ``job``, another id for each generation. Rank 0 of processes has ``listener_fd``, too: the
descriptor, which it has inherited, of the socket that listens at ``meeting``.

From the rank:

| kind | fields | it |
|---|---|---|
| ready | | waits for a generation |
| joined | number | has met the others |
| broken | number, suspects (ranks), reason | has given up a generation |
| paused | number, commit, leaves | has handed over at a commit, in order, and is to leave or not |
| failed | reason | ends with an error of its own program |
| leave | reason | wants to leave at the next commit |
| finished | number | has ended its program, with all others |
"""

from __future__ import annotations

import json
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

from fsdpcore.launch.environment import ELASTIC

Message = dict[str, Any]

_READ_BYTES = 1 << 16


class Channel(Protocol):
    """A rank's end of the way to its agent."""

    def send(self, message: Message) -> None:
        """Tell the agent; never blocks for long. An agent that is gone is told nothing."""

    def receive(self, timeout: float | None) -> Message | None:
        """Wait for the next message; None if none came in time.

        Raises:
            EOFError: the agent is gone.
        """


class SocketChannel:
    """Either end of a channel between an agent and the process of a rank: lines over a socket.

    Any thread may send, while one receives. What does not fit into the socket, because the other
    end does not read, is kept, and goes out with the next call.

    Args:
        sock: connected; closed with the channel.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()
        self._unsent = b""
        self._unread = b""
        self._gone = False

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> SocketChannel | None:
        """The end of a rank's process; None if no agent has started it.

        What the process starts does not inherit it. Call this once.
        """
        text, _, inode = environ.get(ELASTIC, "").partition(":")
        try:
            status = os.fstat(int(text))
        except (ValueError, OSError):  # also in a process that a rank has started
            return None
        if not stat.S_ISSOCK(status.st_mode) or str(status.st_ino) != inode:
            return None
        os.set_inheritable(int(text), False)
        return cls(socket.socket(fileno=int(text)))

    def fileno(self) -> int:
        """The descriptor, which is readable when ``receive`` has something."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits until the other end reads."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send, now or later; never blocks. An end that is gone is told nothing."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._unsent += line
            self._flush()

    def flush(self) -> None:
        """Send what is kept, as far as it fits; never blocks."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and not self._gone:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return
        except OSError:
            self._gone = True
        if self._gone:
            self._unsent = b""

    def receive(self, timeout: float | None) -> Message | None:
        """Wait for the next message; see ``Channel``.

        Args:
            timeout: seconds; 0 to look only, None for no limit.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._unread:
            if not self._wait(None if end is None else end - time.monotonic()):
                return None
        line, _, self._unread = self._unread.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def _wait(self, seconds: float | None) -> bool:
        """Read what comes; False if nothing did within ``seconds``."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        ready = poller.poll(None if seconds is None else max(0.0, 1000 * seconds))
        if self._unsent:
            self.flush()
        if any(events & ~select.POLLOUT for _, events in ready):
            try:
                piece = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                piece = b""
            if not piece:
                raise EOFError("the other end of the channel is gone")
            self._unread += piece
        return bool(ready)

    def close(self) -> None:
        """Close this end; the other one is told by the end of what it reads."""
        self._socket.close()
