"""Count the trips of a collective: the longest chain of messages that wait for each other.

A virtual clock on every rank: a message is there one tick after it was sent, and who waits for it
has the clock put forward to that. Nothing else takes time. So when a call is over, the clock that
is farthest shows how many trips it takes, whatever is exchanged and in which order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

from fsdpcore.transports.simulated.backend import SimBackend
from support.spmd import run_on

from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.work import Pending

Key = tuple[int, int, int]


class TickingSim(SimBackend):
    """Has a clock, which messages put forward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ticks = 0
        self.stamps: dict[Key, list[int]] = {}  # when messages to this rank were sent
        self.asked: Counter[Key] = Counter()
        self.receives: dict[Pending, tuple[Key, int]] = {}

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        peer = self._world[dst]
        assert isinstance(peer, TickingSim)
        key = (self.rank, envelope.channel, envelope.tag)
        peer.stamps.setdefault(key, []).append(self.ticks)
        return super().post_send(data, dst, envelope)

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        key = (src, envelope.channel, envelope.tag)
        receive = super().post_recv(out, src, envelope)
        self.receives[receive] = key, self.asked[key]
        self.asked[key] += 1
        return receive

    def took(self, receive: Pending) -> None:
        """Somebody has waited for a message."""
        key, number = self.receives.pop(receive, ((0, 0, 0), -1))
        if number >= 0:
            self.ticks = max(self.ticks, self.stamps[key][number] + 1)


_join = Pending.join


def _ticking_join(self: Pending, seconds: float) -> bool:
    over = _join(self, seconds)
    backend = getattr(self, "backend", None)
    if over and isinstance(backend, TickingSim):
        backend.took(self)
    return over


def trips(call: Callable[[Any], Any], world_size: int, *, hosts: int = 1) -> int:
    """Return how many trips the calls of a body take, among ranks that share no memory."""

    def body(backend: Any) -> int:
        call(backend)
        return int(backend.ticks)

    with mock.patch.object(Pending, "join", _ticking_join):
        return max(run_on(TickingSim, body, world_size=world_size, shm="off", hosts=hosts))
