"""``Probe``: what a new connection to a rank tells whose link has broken."""

from __future__ import annotations

import select
import socket

from fsdpcore.core.clock import WALL, Clock
from fsdpcore.core.work import Deadline

ENDED, STOPPED, SILENT, CUT = "ended", "stopped", "silent", "cut"
# Found by who has no descriptor left to look: nothing that could be told.
UNKNOWN = "unknown"


class Probe:
    """A new connection to a rank whose link has broken.

    Args:
        address: at which that rank listens.
        seconds: it has to answer.
        clock: of the job.
    """

    def __init__(self, address: tuple[str, int], seconds: float, clock: Clock = WALL) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._end = Deadline(seconds, clock)
        self._found = ""
        self._ended_once = False
        self._connect()

    def _connect(self) -> None:
        try:
            self._socket = socket.socket(
                socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
            )
        except OSError:  # no descriptor is left; perhaps one is soon
            return
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        try:
            self._socket.connect(self._address)
        except BlockingIOError:
            pass
        except OSError as error:
            self._refused(error)

    def look(self) -> str:
        """What it has found; empty as long as it has not."""
        if self._socket is None:
            self._connect()
        if self._socket is not None and not self._found and self._poll.poll(0):
            try:
                # Who lives says at once that it speaks ZeroMQ's protocol.
                if self._socket.recv(1):
                    self._found = CUT
                else:
                    self._ended()
            except BlockingIOError:
                pass
            except OSError as error:
                self._refused(error)
        if not self._found and not self._end.remaining():
            self._found = self._found_late()
        if self._found:
            self.close()
        return self._found

    def close(self) -> None:
        """Look no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _refused(self, error: OSError) -> None:
        if isinstance(error, ConnectionResetError):
            self._ended()
        else:
            self._found = ENDED if isinstance(error, ConnectionRefusedError) else SILENT

    def _ended(self) -> None:
        """Try again: a process that just ends does so once, something between the two each time."""
        self.close()
        if self._ended_once:
            self._found = CUT
        else:
            self._ended_once = True
            self._connect()

    def _found_late(self) -> str:
        if self._socket is None:
            return UNKNOWN
        try:
            self._socket.getpeername()
        except OSError:
            return SILENT
        return STOPPED
