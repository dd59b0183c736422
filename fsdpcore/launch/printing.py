"""How ranks print beside each other: in whole lines, and to no terminal where there is none."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

_OPEN_MPI = "OMPI_COMM_WORLD_RANK"


def print_lines() -> None:
    """Have this process write each line at once and in one piece.

    Otherwise ``PYTHONUNBUFFERED`` writes the words of a ``print`` one by one, and a pipe gets what
    fills a buffer, which ends anywhere in a line. Lines of other ranks would come in between.
    """
    for stream in _streams():
        stream.reconfigure(line_buffering=True, write_through=False)


@contextlib.contextmanager
def printed_lines() -> Iterator[None]:
    """The same for ranks that are threads, and for as long as they run."""
    before = [(stream, stream.line_buffering, stream.write_through) for stream in _streams()]
    print_lines()
    try:
        yield
    finally:
        for stream, by_line, at_once in before:
            if not stream.closed:
                stream.reconfigure(line_buffering=by_line, write_through=at_once)


def _streams() -> list[io.TextIOWrapper]:
    """Standard output and error, where they are Python's own."""
    both = (sys.stdout, sys.stderr)
    return [each for each in both if isinstance(each, io.TextIOWrapper) and not each.closed]


def replaced_streams() -> list[TextIO]:
    """``sys.stdout`` and ``sys.stderr``, if one of them is not Python's own; else none.

    A notebook, for example, shows beneath a cell what is written to a stream of its own. Processes
    cannot write to that, so somebody has to do it for them.
    """
    both = [sys.stdout, sys.stderr]
    if None in both or len(_streams()) == len(both):
        return []
    return both


def labelled(rank: int, stream: TextIO) -> Callable[[bytes], None]:
    """Make a function that writes a line of a rank to a stream, with the rank before it."""

    def write(line: bytes) -> None:
        text = f"[{rank}] {line.decode(errors='replace')}\n"
        try:
            stream.write(text)
        except UnicodeError:  # a stream of ASCII, for example
            stream.write(text.encode("ascii", "backslashreplace").decode())

    return write


def see_launcher(environ: Mapping[str, str]) -> None:
    """Have ``sys.stdout.isatty`` say whether a rank's launcher prints to a terminal.

    Open MPI's ranks print to a terminal that it makes, wherever it passes on what they print. In a
    file or a pipe, colours and progress bars are of no use.
    """
    if _OPEN_MPI in environ and sys.stdout is not None and sys.stdout.isatty():
        with contextlib.suppress(OSError):  # there is no /proc, or it is not ours to read
            if not os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty")):
                sys.stdout.isatty = lambda: False  # type: ignore[method-assign]
