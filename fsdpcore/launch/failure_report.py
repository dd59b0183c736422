"""How a rank tells ``fsdpcore run`` why it fails: a line of JSON through an inherited pipe.

Exit codes do not say which rank failed by itself and which it took along, nor does the order in
which they end: the one that failed still has to tell the others while these are ending already.

Between ``fsdpcore run`` and the ranks of MPI is a process that closes what they would inherit. They
report through a pipe with a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fsdpcore.core.errors import PeerFailedError, RankFailedError, in_one_line

VARIABLE = "FSDPCORE_REPORT_FD"
FIFO_VARIABLE = "FSDPCORE_REPORT_FIFO"

# Room for a message that ends with what to do. A line must be written in one piece, so that it is
# no longer than PIPE_BUF either, which is 512 in some systems and 4096 on Linux.
_MAX_ERROR = 600
_MAX_READ = 1 << 20


class FailureReport(NamedTuple):
    """Why a rank failed; ``consequence``: because of another rank."""

    rank: int
    error: str
    consequence: bool


class FailureReports:
    """The launcher's end of the pipe. ``fd`` is the ranks' end, ``value`` goes to ``VARIABLE``."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe()
        # A script may fail in many launches and go on: it must never wait for this pipe.
        os.set_blocking(self._read, False)
        os.set_blocking(self.fd, False)
        self.value = f"{self.fd}:{os.fstat(self.fd).st_ino}"

    def read(self) -> dict[int, FailureReport]:
        """Return the last report of each rank, in the order of time."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._read, _MAX_READ)
        latest: dict[int, FailureReport] = {}
        for line in data.splitlines():
            with contextlib.suppress(ValueError, TypeError):  # something else wrote to the pipe
                report = FailureReport(*json.loads(line))
                latest.pop(report.rank, None)
                latest[report.rank] = report
        return latest

    def __enter__(self) -> FailureReports:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._read)
        os.close(self.fd)


class FifoFailureReports(FailureReports):
    """Reports of ranks that inherit nothing but the environment, on this host."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="fsdpcore-")
        self.path = str(Path(self._directory.name, "reports"))
        os.mkfifo(self.path, 0o600)
        self._read = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        # Held open, or the pipe would forget what is in it when the last rank has ended.
        self.fd = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        self.value = ""  # nothing to inherit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._directory.cleanup()


def report(rank: int, error: BaseException, environ: Mapping[str, str]) -> None:
    """Tell the launcher, if it asked for that, that this rank fails with ``error``."""
    descriptor, _, inode = environ.get(VARIABLE, "").partition(":")
    if not descriptor.isdecimal():
        return
    line = _encoded(rank, in_one_line(error), is_consequence(error))
    with contextlib.suppress(OSError):
        # A process that a rank has started has the variable, but not the pipe.
        status = os.fstat(int(descriptor))
        if stat.S_ISFIFO(status.st_mode) and str(status.st_ino) == inode:
            os.write(int(descriptor), line)


def _encoded(rank: int, error: str, consequence: bool) -> bytes:
    """A report as a line that a pipe takes in one piece."""
    width = _MAX_ERROR
    while True:
        line = (
            json.dumps(FailureReport(rank, _shortened(error, width), consequence)).encode() + b"\n"
        )
        if len(line) <= select.PIPE_BUF:
            return line
        width = width * 2 // 3  # a character may take twelve bytes


def _shortened(text: str, width: int) -> str:
    """``text``, or as much of it as fits; up to the end of a word, where words are not too long."""
    if len(text) <= width:
        return text
    words, _, _ = text[: width - 3].rpartition(" ")  # with the blank; " ..." is to fit, too
    return f"{words if 2 * len(words) > width else text[: width - 4]} ..."


def is_consequence(error: BaseException) -> bool:
    """Whether an error was raised because another rank failed, directly or on the way out.

    ``RankFailedError`` is no such error: it speaks for a whole job.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and not isinstance(link, RankFailedError):
        if isinstance(link, PeerFailedError):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
