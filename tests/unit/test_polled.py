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


class _Slow:
    """A lock that is a moment late to be free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.acquire, self.locked = self._lock.acquire, self._lock.locked

    def release(self) -> None:
        time.sleep(0.2)
        self._lock.release()


class _Turns(LeaderFollowers):
    def __init__(self) -> None:
        super().__init__()
        self._baton = _Slow()  # type: ignore[assignment]
        self.go = threading.Event()
        self.led: list[PolledMessage] = []

    def _lead(self, awaited: PolledMessage, end: float) -> None:
        self.led.append(awaited)
        if len(self.led) == 1:
            self.go.wait(end - time.monotonic())
        awaited.finish()


def test_the_first_follower_leads_when_the_leader_has_its_message() -> None:
    turns = _Turns()
    messages = [PolledMessage(turns), PolledMessage(turns)]
    threads = []
    for message in messages:
        threads.append(threading.Thread(target=turns.wait, args=(message, 5.0)))
        threads[-1].start()
        time.sleep(0.2)
    turns.go.set()
    for thread in threads:
        thread.join()
    assert turns.led == messages
