"""Python's collector of garbage, kept away from where it would do harm."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """How many pauses are under way, in all threads, and what they will restore."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_on:
                gc.enable()


# The collector is the process's, and so is this.
_pause = _Pause()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector off until the exit; it stays off if it was off before.

    It looks at all objects again and again while their number grows, which takes more time than to
    make them, where millions are made that stay. Pauses may be nested, and those of several threads
    may overlap.
    """
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()
