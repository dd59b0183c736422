"""What ranks print, line by line: with a prefix, in files, or passed on to another host.

Ranks that print to a terminal themselves need none of this. Where their lines are to be told
apart, they print into pipes, which one thread of the launcher reads.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import selectors
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from fsdpcore.core.errors import ConfigError, in_words

_LOG = logging.getLogger("fsdpcore")

# What is read at once, and of a rank's line passed on at once.
_MAX_LINE = 1 << 16
# How much of the end of a rank's standard error is remembered.
_TAIL_LINES = 100
_TAIL_WIDTH = 1 << 12
# What ended processes have written is in the pipes. Whoever still holds an end is heard until it is
# silent for a moment, but not for ever.
_DRAIN_SECONDS = 0.1
_LAST_SECONDS = 1.0

# A carriage return ends a line, too: progress bars know no other end.
_LINE_END = re.compile(rb"\r?\n|\r(?=[^\n])")


class RankOutput(ABC):
    """Where the lines of ranks go."""

    @abstractmethod
    def write(self, rank: int, error: bool, line: bytes) -> None:
        """Take a line of a rank, without its end; ``error``: of its standard error."""

    def write_host(self, host: str, line: bytes) -> None:
        """Take a line that no rank wrote, but whoever starts them on ``host``."""
        _print(sys.stderr.buffer, f"[{host}] ".encode() + line)

    @abstractmethod
    def finish(self, culprit: int | None) -> None:
        """Show at last what the rank said that has failed; call this once, when all have ended."""


def _says_why(rank: int, line: bytes) -> bool:
    """Whether a rank's line is the one before its traceback (see ``rank.ExceptHook``)."""
    return line.startswith(b"rank %d failed:" % rank)


class PrefixedOutput(RankOutput):
    """Prints lines with the rank before them, as in ``[3] ``.

    Why a rank failed is shown when all have ended, so that it is not far above what the others
    say of it.

    Args:
        label: what to write of a rank; None for no prefix.
    """

    def __init__(self, label: Callable[[int], str] | None = str) -> None:
        self._label = label
        self._held: dict[int, list[bytes]] = {}

    def write(self, rank: int, error: bool, line: bytes) -> None:
        if error and (rank in self._held or _says_why(rank, line)):
            self._held.setdefault(rank, []).append(line)
        else:
            stream = sys.stderr if error else sys.stdout
            _print(stream.buffer, self._prefix(rank) + line)

    def finish(self, culprit: int | None) -> None:
        for rank in sorted(self._held, key=lambda rank: rank == culprit):
            for line in self._held[rank]:
                _print(sys.stderr.buffer, self._prefix(rank) + line)

    def _prefix(self, rank: int) -> bytes:
        return b"" if self._label is None else f"[{self._label(rank)}] ".encode()


class LoggedOutput(RankOutput):
    """Writes what a rank prints to ``rank_K.log`` in a folder, which it makes.

    At the end it shows the last lines of the rank that failed.

    Args:
        directory: the folder.
        name: of a rank's file, without ``.log``.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, directory: Path, name: Callable[[int], str] = "rank_{}".format) -> None:
        self._directory, self._name = directory, name
        self._files: dict[int, BinaryIO] = {}
        self._tails: dict[int, deque[bytes]] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {directory}: cannot be made: {error}") from error

    def write(self, rank: int, error: bool, line: bytes) -> None:
        if rank not in self._files:
            path = self._directory / f"{self._name(rank)}.log"
            self._files[rank] = open(path, "wb")  # noqa: SIM115 (closed by finish)
            self._tails[rank] = deque(maxlen=_TAIL_LINES)
        _print(self._files[rank], line)
        if error:
            if _says_why(rank, line):
                self._tails[rank].clear()
            self._tails[rank].append(line[:_TAIL_WIDTH])

    def finish(self, culprit: int | None) -> None:
        for file in self._files.values():
            file.close()
        if culprit is not None:
            for line in self._tails.get(culprit, ()):
                _print(sys.stderr.buffer, line)


def _print(stream: BinaryIO, line: bytes) -> None:
    stream.write(line + b"\n")
    stream.flush()


class OutputPipes:
    """Pipes, and the thread that reads them; at the end, all that was written has been handled."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="fsdpcore-output", daemon=True)

    @contextlib.contextmanager
    def ending_in(
        self, *handlers: Callable[[bytes], None], longest: int = _MAX_LINE
    ) -> Iterator[list[int]]:
        """Open a pipe for each handler, which is called with each line, on the thread.

        Args:
            handlers: what takes the lines.
            longest: a line that gets longer than this is passed on in parts.

        Yields:
            The ends to write to, for a process that is started in this block.
        """
        ends = []
        for handler in handlers:
            ours, theirs = os.pipe()
            os.set_blocking(ours, False)
            self._selector.register(ours, selectors.EVENT_READ, _Lines(ours, handler, longest))
            ends.append(theirs)
        os.write(self._waker, b"+")  # the thread looks at the new ones, too
        try:
            yield ends
        finally:
            for end in ends:
                os.close(end)

    def _run(self) -> None:
        end = math.inf
        while time.monotonic() < end:
            ready = self._selector.select(None if end == math.inf else _DRAIN_SECONDS)
            for key, _ in ready:
                if key.data is None:
                    if b"." in os.read(self._wake, 4096):
                        end = time.monotonic() + _LAST_SECONDS
                elif not key.data.read():
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            if end < math.inf and (not ready or len(self._selector.get_map()) == 1):
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.finish()
            os.close(key.fd)

    def __enter__(self) -> OutputPipes:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.write(self._waker, b".")
        self._thread.join()
        self._selector.close()
        os.close(self._waker)


def _drop(line: bytes) -> None:
    """Have nobody see a line."""


class _Lines:
    """A pipe's reading end, cut into lines."""

    def __init__(self, fd: int, handler: Callable[[bytes], None], longest: int) -> None:
        self._fd = fd
        self._handler = handler
        self._longest = longest
        self._rest = b""

    def read(self) -> bool:
        """Handle what has come; return False at the end, or if nobody can be told any more."""
        try:
            data = os.read(self._fd, _MAX_LINE)
        except BlockingIOError:
            return True
        if not data:
            self.finish()
            return False
        data, start = self._rest + data, 0
        try:
            for end in _LINE_END.finditer(data):
                # A progress bar begins with the return; that is no empty line.
                if end.start() > start or end[0] != b"\r":
                    self._handler(data[start : end.start()])
                start = end.end()
            self._rest = data[start:]
            if len(self._rest) > self._longest:
                self._flush()
        except OSError:  # whoever writes notices that the pipe is closed
            return False
        except Exception as error:
            # Who takes the lines cannot; they are still to be read, or ranks would wait to write.
            _LOG.error("what ranks print is lost from here on: %s", in_words(error))
            self._handler, self._rest = _drop, b""
        return True

    def finish(self) -> None:
        """Handle a last line that has no end."""
        with contextlib.suppress(OSError):
            self._flush()

    def _flush(self) -> None:
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        if rest:
            self._handler(rest)
