"""Transports that are wrong on purpose, each in one way, to see that the suite notices."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from fsdpcore.transports.simulated.backend import SimBackend

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.matching import Key, MatchTable, takes
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.errors import CommunicationError
from fsdpcore.core.work import Pending


class _Changed(Pending):
    """Another ``Pending`` with some of its methods overridden by a subclass."""

    def __init__(self, inner: Pending) -> None:
        self._inner = inner

    def __getattribute__(self, name: str) -> Any:
        if name in ("_inner", "__class__") or name in type(self).__dict__:
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "_inner"), name)


def _finished() -> Pending:
    pending = Pending()
    pending.finish()
    return pending


class DropsLastByte(SimBackend):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        data = data.copy()
        data[-1:] ^= 0xFF
        return super().post_send(data, dst, envelope)


class CorruptsLongMessages(SimBackend):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        data = data.copy()
        if data.size > 100_000:
            data[70_000] ^= 1
        return super().post_send(data, dst, envelope)


class ReversesBytes(SimBackend):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        return super().post_send(data[::-1].copy(), dst, envelope)


class SwapsMessages(SimBackend):
    """The second message of every two comes first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: dict[tuple[int, int, int], Bytes] = {}

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        key = (dst, envelope.channel, envelope.tag)
        if not envelope.signature:
            return super().post_send(data, dst, envelope)
        first = self._held.pop(key, None)
        if first is None:
            self._held[key] = data.copy()
            return _finished()
        super().post_send(data.copy(), dst, envelope)
        return super().post_send(first, dst, envelope)


class ConfusesTags(SimBackend):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        return super().post_send(data, dst, envelope._replace(tag=0))

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        return super().post_recv(out, src, envelope._replace(tag=0))


class MixesGroups(SimBackend):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        return super().post_send(data, dst, envelope._replace(channel=envelope.channel & 1))

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        return super().post_recv(out, src, envelope._replace(channel=envelope.channel & 1))


class MixesMessagesAndCollectives(SimBackend):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        return super().post_send(data, dst, self._mixed(envelope))

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        return super().post_recv(out, src, self._mixed(envelope))

    @staticmethod
    def _mixed(envelope: Envelope) -> Envelope:
        # What tells them apart is the channel, and as their tag the mark of a collective's.
        return envelope._replace(channel=envelope.channel | 1, tag=0)


class ChecksNoSignatures(SimBackend):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        return super().post_send(data, dst, envelope._replace(signature=b""))

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        return super().post_recv(out, src, envelope._replace(signature=b""))


class SharesTheSendersArray(SimBackend):
    """A send is over before anybody has copied anything."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._eager_bytes = -1

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        super().post_send(data, dst, envelope)
        return _finished()


class _Counting(SimBackend):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sent = 0
        self._count_lock = threading.Lock()

    def count(self) -> int:
        with self._count_lock:
            self._sent += 1
            return self._sent


class LosesEveryFifth(_Counting):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        if self.count() % 5 == 0:
            return _finished()
        return super().post_send(data, dst, envelope)


class RepeatsEverySeventh(_Counting):
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        if self.count() % 7 == 0:
            super().post_send(data.copy(), dst, envelope)
        return super().post_send(data, dst, envelope)


class ReceivesTooEarly(SimBackend):
    """A receive is over before its message is there."""

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        super().post_recv(out, src, envelope)
        return _finished()


class _Patient(_Changed):
    def settle(self, seconds: float) -> bool:
        return self._inner.settle(1000 * seconds)

    def join(self, seconds: float) -> bool:
        return self._inner.join(1000 * seconds)


class IgnoresTimeouts(SimBackend):
    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        return _Patient(super().post_recv(out, src, envelope))


class _Stubborn(_Changed):
    def cancel(self) -> bool:
        return True


class ReceivesAfterTimeout(SimBackend):
    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        return _Stubborn(super().post_recv(out, src, envelope))


class ForgetsThatItIsBroken(SimBackend):
    def check_usable(self) -> None: ...


class _NewestFirst(MatchTable[Any, Any]):
    def _oldest(self, wanted: Key) -> Key | None:
        found = [key for key in self._messages if takes(wanted, key)]
        return max(found, key=lambda key: self._messages[key][0][0], default=None)


class LetsMessagesOvertake(SimBackend):
    """A receive that leaves the tag open takes what was sent last."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.inbox.table = _NewestFirst()


class WritesBehindTheEnd(SimBackend):
    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        out[-1:] ^= 0xFF
        return super().post_recv(out, src, envelope)


class WaitsForNobody(SimBackend):
    """Whoever waits for any rank is not told that all have left."""

    def lonely(self, channels: Iterable[int]) -> None:
        return None


class LeavesWithoutAWord(SimBackend):
    def _release(self, flush: bool) -> None: ...

    def _check_peer_alive(self, peer: SimBackend) -> None:
        self.check_usable()


class AbortsAlone(SimBackend):
    def _tell(self, error: CommunicationError) -> None: ...


class HidesTheReason(SimBackend):
    def _tell(self, error: CommunicationError) -> None:
        super()._tell(CommunicationError("something went wrong"))


class BlamesTheWrongRank(SimBackend):
    def peer_reported(self, rank: int, error: CommunicationError) -> None:
        super().peer_reported((rank + 1) % self.world_size, error)


class KnowsNothingOfOthers(SimBackend):
    def _query(self, ranks: Any, channel: int, sequence: int, seconds: float) -> dict[int, Any]:
        return {}
