"""Where a thread is in its Python code, in one line."""

from __future__ import annotations

import sys
from pathlib import PurePath

from fsdpcore.core.collector import collector_paused

_SHOWN = 5  # calls
_WIDTH = 100  # characters of a call
_DEEPEST = 1000
# What is outside of it started the rank, and is the same for all.
_STARTED_BY = "fsdpcore.launch."


def where(thread: int) -> str:
    """Say in which calls a thread is, the innermost first.

    As in ``at data.py:12 in read, called from train.py:40 in main``. The last five calls outside of
    this package count, or of the package if there are no others. Neither values nor lines of the
    source are shown: reading them could hang as the thread does.

    Args:
        thread: its ``threading.get_ident()``.

    Returns:
        One line without control characters; empty if no such thread runs.
    """
    # A collection in the middle of this call lets other threads run while it holds a lock of the
    # interpreter that they may want: then nobody goes on.
    with collector_paused():
        frame = sys._current_frames().get(thread)
    outside: list[str] = []
    inside: list[str] = []
    for _ in range(_DEEPEST):
        if frame is None:
            break
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_STARTED_BY):
            break
        code, calls = frame.f_code, outside
        if module.partition(".")[0] == "fsdpcore":
            calls = inside
        if len(calls) < _SHOWN:
            file = "/".join(PurePath(code.co_filename).parts[-2:])
            calls.append(_printable(f"{file}:{frame.f_lineno} in {code.co_name}"))
        frame = frame.f_back
    shown = outside or inside
    return f"at {', called from '.join(shown[:2])}{_rest(shown[2:])}" if shown else ""


def _rest(calls: list[str]) -> str:
    return "".join(f", {call}" for call in calls)


def _printable(text: str) -> str:
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= _WIDTH else f"...{text[3 - _WIDTH :]}"
