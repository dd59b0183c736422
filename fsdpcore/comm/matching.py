"""Which receive takes which message: first in, first out, per sender, channel and tag."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import describe_signature
from fsdpcore.core.errors import MismatchError

Key = tuple[int, int, int]


class Keyed(Protocol):
    """Something that is matched by (sender, channel, tag)."""

    @property
    def key(self) -> Key:
        """The sender's rank, the channel and the tag."""


Receive = TypeVar("Receive", bound=Keyed)
Message = TypeVar("Message", bound=Keyed)


class MatchTable(Generic[Receive, Message]):
    """Receives that wait for a message, and messages that wait for a receive.

    Not thread-safe: a transport holds its own lock around every call.
    """

    def __init__(self) -> None:
        self._receives: dict[Key, deque[Receive]] = {}
        self._messages: dict[Key, deque[Message]] = {}

    def post(self, receive: Receive) -> Message | None:
        """Return the oldest message that ``receive`` takes, or keep ``receive`` waiting."""
        message = _pop(self._messages, receive.key)
        if message is None:
            self._receives.setdefault(receive.key, deque()).append(receive)
        return message

    def arrive(self, message: Message) -> Receive | None:
        """Return the oldest receive that takes ``message``, or keep ``message`` waiting."""
        receive = _pop(self._receives, message.key)
        if receive is None:
            self._messages.setdefault(message.key, deque()).append(message)
        return receive

    def withdraw_receive(self, receive: Receive) -> bool:
        """Forget a waiting receive; False if it was not waiting."""
        return _remove(self._receives, receive)

    def withdraw_message(self, message: Message) -> bool:
        """Forget a waiting message; False if it was not waiting."""
        return _remove(self._messages, message)

    def receives(self) -> Iterator[Receive]:
        """All receives that wait."""
        for queue in self._receives.values():
            yield from queue

    def messages(self) -> Iterator[Message]:
        """All messages that wait."""
        for queue in self._messages.values():
            yield from queue

    def awaits(self, src: int) -> bool:
        """Whether a receive waits for a message from ``src``."""
        return any(sender == src for sender, _, _ in self._receives)

    def unexpected(self, src: int, channel: int) -> list[int]:
        """The tags of messages from ``src`` on ``channel`` that wait for a receive."""
        return [tag for sender, where, tag in self._messages if (sender, where) == (src, channel)]

    def clear(self) -> None:
        """Forget everything."""
        self._receives.clear()
        self._messages.clear()


T = TypeVar("T", bound=Keyed)


def _pop(table: dict[Key, deque[T]], key: Key) -> T | None:
    queue = table.get(key)
    if not queue:
        return None
    item = queue.popleft()
    if not queue:
        del table[key]  # tags come and go; empty queues would pile up
    return item


def _remove(table: dict[Key, deque[T]], item: T) -> bool:
    queue = table.get(item.key)
    if queue is None or item not in queue:
        return False
    queue.remove(item)
    if not queue:
        del table[item.key]
    return True


def mismatch(
    src: int, sent: Envelope, sent_bytes: int, dst: int, wanted: Envelope, wanted_bytes: int
) -> MismatchError | None:
    """Compare a message with the receive that it was matched to; None if they fit."""
    if sent.signature == wanted.signature and sent_bytes == wanted_bytes:
        return None
    if sent.signature or wanted.signature:
        theirs, ours = describe_signature(sent.signature), describe_signature(wanted.signature)
    else:
        theirs, ours = f"{sent_bytes} bytes", f"{wanted_bytes} bytes"
    return MismatchError(
        f"rank {src} sent {theirs} where rank {dst} receives {ours} (tag {wanted.tag})"
    )
