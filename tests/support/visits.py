"""Which states of a message, and of a job, the schedules of a run have come through.

``counted`` counts those of ``sim``, or what another table says (``zmq_visits.py``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from fsdpcore.transports.simulated.backend import PostedReceive, PostedSend, SimBackend
from fsdpcore.transports.simulated.virtual import VirtualBackend

import fsdpcore as fc
from fsdpcore.comm.job import Job
from fsdpcore.core.errors import ClosedError, CommunicationError

Visit = tuple[str, str]

# A large message: its envelope travels, waits for a receive, its bytes travel. A small one brings
# them along, and its send has ended before that.
_MESSAGES = {
    "envelope travels": ("waits", "is received", "withdrawn", "sender fails", "receiver gone"),
    "envelope waits": ("is received", "withdrawn", "sender fails"),
    "bytes travel": ("come", "sender fails", "receiver fails"),
    "small one travels": ("waits", "is received", "receiver gone"),
    "receive waits": ("withdrawn", "fails", "alone"),
}
_ERRORS = {
    "times out": fc.CommTimeoutError,
    "peer failed": fc.PeerFailedError,
    "closes": ClosedError,
    "fails": CommunicationError,
}
_JOBS = {"whole job": (*_ERRORS, "hears"), "broken job": (*_ERRORS, "hears")}
ALL: frozenset[Visit] = frozenset(
    (state, event)
    for table in (_MESSAGES, _JOBS)
    for state, events in table.items()
    for event in events
)


@contextlib.contextmanager
def counted(watched: Sequence[tuple[Any, str, Any]] = ()) -> Iterator[Counter[Visit]]:
    """Count what happens to messages and jobs in virtual time, while the block runs.

    Args:
        watched: classes, methods, and what says which visits a call is: before it, or, by what it
            returns, behind it; by default those of ``sim``.
    """
    seen: Counter[Visit] = Counter()
    with contextlib.ExitStack() as stack:
        for owner, name, before in watched or _WATCHED:
            method = getattr(owner, name)

            def call(
                self: Any, *args: Any, before: Any = before, method: Any = method, **options: Any
            ) -> Any:
                told = before(self, *args)
                try:
                    return method(self, *args, **options)
                finally:
                    seen.update(told() if callable(told) else told)

            stack.enter_context(mock.patch.object(owner, name, call))
        yield seen


def _arrived(receiver: VirtualBackend, send: PostedSend) -> Any:
    sender: Any = send.backend
    if not send.finished and send not in sender._offered:
        return [("envelope travels", "withdrawn" if send.error is None else "sender fails")]
    state = "small one travels" if send.finished else "envelope travels"
    if receiver.gone:
        return [(state, "receiver gone")]
    return lambda: [(state, "waits" if send in receiver.inbox.table.messages() else "is received")]


def _posted(receiver: VirtualBackend, send: PostedSend, receive: PostedReceive) -> list[Visit]:
    waited = not send.finished and send not in send.backend._offered  # type: ignore[attr-defined]
    return [("envelope waits", "is received")] if waited else []


def _come(receiver: VirtualBackend, send: PostedSend, receive: PostedReceive) -> list[Visit]:
    if send.error is not None:
        return [("bytes travel", "sender fails")]
    return [("bytes travel", "receiver fails" if receive.finished else "come")]


def _withdrawn(sender: VirtualBackend, send: PostedSend) -> list[Visit]:
    return [("envelope travels" if send in sender._offered else "envelope waits", "withdrawn")]


def _fails(rank: VirtualBackend, error: CommunicationError) -> list[Visit]:
    found = [("receive waits", "fails") for _ in rank.inbox.table.receives()]
    if isinstance(error, ClosedError):
        return found
    found += [("envelope travels", "sender fails") for _ in rank._offered]
    for peer in rank._world:
        waiting = peer.inbox.table.messages()
        mine = [send for send in waiting if send.backend is rank and not send.finished]
        found += [("envelope waits", "sender fails") for _ in mine]
    return found


def _cancelled(receive: PostedReceive) -> list[Visit]:
    waits = any(each is receive for each in receive.backend.inbox.table.receives())
    return [("receive waits", "withdrawn")] if waits else []


def _alone(rank: SimBackend, peer: SimBackend) -> Any:
    failed = peer.failure
    return lambda: [("receive waits", "alone")] if peer.failure is not failed else []


def _failed(job: Job, error: CommunicationError, *_: Any) -> list[Visit]:
    state = "whole job" if job.failure is None else "broken job"
    return [(state, next(name for name, kind in _ERRORS.items() if isinstance(error, kind)))]


def _heard(job: Job, rank: int, error: CommunicationError) -> list[Visit]:
    return [("whole job" if job.failure is None else "broken job", "hears")]


_WATCHED: list[tuple[Any, str, Any]] = [
    (VirtualBackend, "_arrived", _arrived),
    (VirtualBackend, "_move", _posted),
    (VirtualBackend, "_has_come", _come),
    (VirtualBackend, "withdraw", _withdrawn),
    (VirtualBackend, "_fail_pending", _fails),
    (VirtualBackend, "_take_leave", _alone),
    (PostedReceive, "cancel", _cancelled),
    (Job, "_fail", _failed),
    (Job, "peer_reported", _heard),
]
