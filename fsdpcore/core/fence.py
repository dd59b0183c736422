"""``fence``: what C11 calls ``atomic_thread_fence(memory_order_seq_cst)``; Python has none.

Flags and the data behind them are words that one rank writes and others read, without a lock. What
a handshake relies on is what C11 says of them (5.1.2.4, 7.17.3, 7.17.4), where all accesses are
relaxed:

1. Of one word nobody sees an older value after a newer one.
2. The fences of all ranks have one order. What a rank has stored or seen ahead of a fence, every
   rank sees behind those of its own fences that come later.
3. If a rank has seen what another one has stored behind a fence, its own next fence comes later.
4. What a rank has loaded ahead of a fence was not stored behind a fence that comes later.

So a rank that has data to show writes it, passes a fence, and writes a flag. Another one sees the
flag and passes a fence. That comes later (3), so behind it the data is seen (2). Without either of
the two fences it may not be. Tests play all this with a memory that shows old values as often as
these rules let it.

What is assumed of Python is that it writes an aligned word of 8 bytes at once.
"""

from __future__ import annotations

import threading


def fence() -> None:
    """Let no store or load of this thread pass.

    A lock is taken and released twice. No access from ahead passes the first release, and none from
    behind passes the second taking. On ARM and RISC-V these two do not pass each other either; on
    x86 each of them is a full barrier.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()
