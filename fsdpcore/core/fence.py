"""``fence``: what C11 calls ``atomic_thread_fence(memory_order_acq_rel)``; Python has none.

Flags, and the data that they stand for, are words that one rank writes and others read without a
lock. What they rely on is one rule (C11, 7.17.4, paragraph 2, and 5.1.2.4):

    A writer passes a fence and then stores a word. A reader loads what was stored, and then passes
    a fence. Then all that the writer did ahead of its fence happens before all that the reader
    does behind its own.

Two things follow. The reader sees what the writer had stored ahead of its fence. And what the
writer had loaded ahead of it was not stored by the reader behind its own. Without either of the two
fences nothing follows. Tests play the first of the two in a memory that shows old values.

What is assumed of Python is that it loads and stores an aligned word of 8 bytes at once.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable

# Processors that make loads and stores visible in the order of the program, but for a load that
# passes a store ahead of it: that is all that the rule needs.
_ORDERED = ("x86_64", "amd64")


def fence() -> None:
    """Keep what this thread loads and stores before the call ahead of what it does after it.

    A lock is taken and released twice. Nothing from ahead passes the first release, and nothing
    from behind passes the second taking, which comes after it.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


def fence_here() -> Callable[[], None] | None:
    """Return ``fence``, or None where the processor does without."""
    return None if platform.machine().lower() in _ORDERED else fence
