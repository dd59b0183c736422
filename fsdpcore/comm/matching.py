"""Which receive takes which message: first in, first out, per sender, channel and tag.

As in MPI: a receive from any rank, or with any tag, takes the oldest message that fits; a message
goes to the oldest receive that takes it, whatever that leaves open. So messages of one sender on
one channel do not overtake each other.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import Bytes, describe_signature, fits_room
from fsdpcore.core.errors import MismatchError
from fsdpcore.core.wildcard import ANY_NUMBER

Key = tuple[int, int, int]


class Receive(Protocol):
    """A receive, or a probe: what it asks for and, once a message has come, what that is.

    Attributes:
        key: the sender's rank, the channel and the tag; ``ANY_NUMBER`` for any rank or tag.
        envelope: channel, tag and signature, as asked for; then those of the message, unless they
            are the same.
        out: where its bytes go, no more of them than it has.
    """

    key: Key
    envelope: Envelope
    out: Bytes

    def finish(self, error: BaseException | None = None) -> None:
        """See ``Pending.finish``."""


class Message(Protocol):
    """A message that waits for its receive."""

    @property
    def key(self) -> Key:
        """The sender's rank, the channel and the tag."""

    @property
    def signature(self) -> bytes:
        """Dtype and shape."""


R = TypeVar("R", bound=Receive)
M = TypeVar("M", bound=Message)
T = TypeVar("T")
K = TypeVar("K")
# What waits, the oldest first, with its number among all that wait or have waited.
Queue = deque[tuple[int, T]]


class MatchTable(Generic[R, M]):
    """Receives that wait for a message, and messages that wait for a receive.

    Not thread-safe: a transport holds its own lock around every call.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._receives: dict[Key, Queue[R]] = {}
        self._messages: dict[Key, Queue[M]] = {}
        # Receives that leave the rank or the tag open, by channel; and probes, of whatever kind.
        self._open: dict[int, Queue[R]] = {}
        self._probes: list[R] = []

    def post(self, receive: R) -> M | None:
        """Return the oldest message that ``receive`` takes, or keep ``receive`` waiting."""
        key = receive.key
        message = _pop(self._messages, key)
        if message is not None:
            return message
        if ANY_NUMBER not in key:
            _append(self._receives, key, (next(self._numbers), receive))
            return None
        found = self._oldest(key)
        if found is None:
            _append(self._open, key[1], (next(self._numbers), receive))
            return None
        receive.key = found
        return _pop(self._messages, found)

    def arrive(self, message: M) -> R | None:
        """Return the oldest receive that takes ``message``, or keep ``message`` waiting.

        Probes that look for it finish if it waits.
        """
        key = message.key
        receive = self._pop_open(key) if key[1] in self._open else None
        if receive is None:
            receive = _pop(self._receives, key)
        if receive is None:
            _append(self._messages, key, (next(self._numbers), message))
            if self._probes:
                self._show(message)
        return receive

    def probe(self, probe: R) -> None:
        """Finish ``probe`` if a message waits that it asks for, or keep it until one does."""
        found = self._oldest(probe.key)
        if found is None:
            self._probes.append(probe)
        else:
            _show(probe, self._messages[found][0][1])

    def withdraw_receive(self, receive: R) -> bool:
        """Forget a waiting receive or probe; False if it was not waiting."""
        key = receive.key
        if receive in self._probes:
            self._probes.remove(receive)
            return True
        return _remove(self._receives, key, receive) or _remove(self._open, key[1], receive)

    def withdraw_message(self, message: M) -> bool:
        """Forget a waiting message; False if it was not waiting."""
        return _remove(self._messages, message.key, message)

    def receives(self) -> Iterator[R]:
        """All receives and probes that wait."""
        for queue in (*self._receives.values(), *self._open.values()):
            yield from (receive for _, receive in queue)
        yield from self._probes

    def messages(self) -> Iterator[M]:
        """All messages that wait."""
        for queue in self._messages.values():
            yield from (message for _, message in queue)

    @property
    def empty(self) -> bool:
        """Whether no message waits; may be asked without the lock that is held for all else."""
        return not self._messages

    def awaits(self, src: int) -> bool:
        """Whether a receive or probe waits for a message from ``src``, and nobody else."""
        return any(receive.key[0] == src for receive in self.receives())

    def open_channels(self) -> set[int]:
        """The channels on which a receive or probe waits for a message from any rank."""
        return {receive.key[1] for receive in self.receives() if receive.key[0] == ANY_NUMBER}

    def unexpected(self, src: int, channel: int) -> list[int]:
        """The tags of messages from ``src`` on ``channel`` that wait for a receive."""
        return [tag for sender, where, tag in self._messages if (sender, where) == (src, channel)]

    def clear(self) -> None:
        """Forget everything."""
        self._receives.clear()
        self._messages.clear()
        self._open.clear()
        self._probes.clear()

    def _oldest(self, wanted: Key) -> Key | None:
        """The key of the oldest message that ``wanted`` takes."""
        found = [(queue[0][0], key) for key, queue in self._messages.items() if takes(wanted, key)]
        return min(found)[1] if found else None

    def _pop_open(self, key: Key) -> R | None:
        """The oldest receive that takes a message if it leaves something open, and not another."""
        for number, receive in self._open[key[1]]:
            if takes(receive.key, key):
                exact = self._receives.get(key)
                if exact is not None and exact[0][0] < number:
                    return None
                _remove(self._open, key[1], receive)
                receive.key = key
                return receive
        return None

    def _show(self, message: M) -> None:
        """Finish the probes that look for a message."""
        seen = [probe for probe in self._probes if takes(probe.key, message.key)]
        for probe in seen:
            self._probes.remove(probe)
            _show(probe, message)


def takes(wanted: Key, key: Key) -> bool:
    """Whether who asks for ``wanted`` takes a message with ``key``."""
    return (
        wanted[1] == key[1]
        and wanted[0] in (key[0], ANY_NUMBER)
        and wanted[2] in (key[2], ANY_NUMBER)
    )


def _show(probe: Receive, message: Message) -> None:
    _, channel, tag = probe.key = message.key
    probe.envelope = Envelope(channel, tag, message.signature)
    probe.finish()


def _append(table: dict[K, Queue[T]], key: K, entry: tuple[int, T]) -> None:
    queue = table.get(key)
    if queue is None:
        table[key] = deque((entry,))
    else:
        queue.append(entry)


def _pop(table: dict[K, Queue[T]], key: K) -> T | None:
    queue = table.get(key)
    if queue is None:
        return None
    item = queue.popleft()[1]
    if not queue:
        del table[key]  # tags come and go; empty queues would pile up
    return item


def _remove(table: dict[K, Queue[T]], key: K, item: T) -> bool:
    queue = table.get(key, ())
    entry = next((entry for entry in queue if entry[1] is item), None)
    if entry is None:
        return False
    table[key].remove(entry)
    if not table[key]:
        del table[key]
    return True


def mismatch(
    src: int, sent: Envelope, sent_bytes: int, dst: int, wanted: Envelope, wanted_bytes: int
) -> MismatchError | None:
    """Compare a message with the receive that it was matched to; None if they fit."""
    if sent.signature == wanted.signature and sent_bytes == wanted_bytes:
        return None
    if sent.signature or wanted.signature:
        if fits_room(sent.signature, sent_bytes, wanted.signature, wanted_bytes):
            return None
        theirs, ours = describe_signature(sent.signature), describe_signature(wanted.signature)
    else:
        theirs, ours = f"{sent_bytes} bytes", f"{wanted_bytes} bytes"
    return MismatchError(
        f"rank {src} sent {theirs} where rank {dst} receives {ours} (tag {sent.tag})"
    )


def fit(
    receive: Receive, src: int, sent: Envelope, sent_bytes: int, dst: int
) -> MismatchError | None:
    """Compare as ``mismatch`` does; a receive with more room is cut to what comes.

    Where their signatures are equal and the sizes, this need not be called.
    """
    error = mismatch(src, sent, sent_bytes, dst, receive.envelope, receive.out.size)
    if error is None:
        receive.envelope = sent
        receive.out = receive.out[:sent_bytes]
    return error
