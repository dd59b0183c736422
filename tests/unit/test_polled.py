"""Threads that wait for messages: one of them polls, and another one takes over."""

from __future__ import annotations

import threading
import time

from fsdpcore.comm.polled import LeaderFollowers, PolledMessage


class _Polling(LeaderFollowers):
    """Lets messages finish when two threads follow: first one of theirs, then the leader's own."""

    def __init__(self) -> None:
        super().__init__()
        self.led: list[PolledMessage] = []
        self.early: list[PolledMessage] = []

    def _lead(self, awaited: PolledMessage, end: float) -> None:
        self.led.append(awaited)
        while len(self.led) == 1 and len(self._followers) < 2:
            time.sleep(0.001)
        for message in (*self.early, awaited):
            if not message.finished:
                message.finish()


def test_who_still_waits_takes_over_from_the_leader() -> None:
    for _ in range(20):
        poller = _Polling()
        first, done, last = (PolledMessage(poller) for _ in range(3))
        poller.early = [done]
        threads = [threading.Thread(target=m.settle, args=(20.0,)) for m in (first, done, last)]
        begin = time.monotonic()
        threads[0].start()
        while not poller.led:
            time.sleep(0.001)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        assert last.finished
        assert poller.led[-1] is last
        assert time.monotonic() - begin < 10
