"""``Link``: what an algorithm sees of one collective call on one rank."""

from __future__ import annotations

from fsdpcore.backend import Backend, Envelope
from fsdpcore.buffers import Array, byte_view
from fsdpcore.errors import CommTimeoutError
from fsdpcore.work import Deadline, Pending


class Link:
    """Sends and receives flat contiguous arrays among the ranks of one group, for one call.

    Both sides of every message know its size from the algorithm, so an empty array is not sent at
    all. All messages of a group's collectives travel on one channel, in order.

    Attributes:
        rank, size: this rank and the number of ranks, in the group.
        sequence: the number of the collective, from 1, in the group.
        name: the collective in words, for errors.
    """

    def __init__(self, backend: Backend, name: str, sequence: int, timeout: float) -> None:
        self._backend = backend
        self.rank = backend.rank
        self.size = backend.world_size
        self.name = f"{name} #{sequence}"
        self.sequence = sequence
        self._deadline = Deadline(timeout)
        self._envelope = Envelope(backend.channel | 1, 0)
        self._posted: list[Pending] = []

    def global_rank(self, rank: int) -> int:
        """The number that a rank of the group has in the whole job."""
        return self._backend.ranks[rank]

    def isend(self, array: Array, dst: int) -> Pending:
        """Start sending ``array``, which must not change until the result was waited for."""
        if array.size == 0:
            return _NOTHING
        return self._keep(self._backend.post_send(byte_view(array), dst, self._envelope))

    def irecv(self, out: Array, src: int) -> Pending:
        """Start receiving into ``out``."""
        if out.size == 0:
            return _NOTHING
        return self._keep(self._backend.post_recv(byte_view(out), src, self._envelope))

    def send(self, array: Array, dst: int) -> None:
        """Send ``array`` and wait until it may change."""
        self.wait(self.isend(array, dst))

    def recv(self, out: Array, src: int) -> None:
        """Receive into ``out`` and wait for it."""
        self.wait(self.irecv(out, src))

    def exchange(self, array: Array, dst: int, out: Array, src: int) -> None:
        """Send and receive at the same time, and wait for both."""
        receiving = self.irecv(out, src)
        sending = self.isend(array, dst)
        self.wait(receiving, sending)

    def wait(self, *pending: Pending) -> None:
        """Wait for messages.

        Raises:
            CommTimeoutError: the call's deadline has passed; names the ranks that are missing.
        """
        for item in pending:
            if not item.join(self._deadline.remaining()):
                raise self._timed_out()
        # A finished message still refers to its array; a long ring would keep all of them.
        self._posted = [item for item in self._posted if not item.finished]

    def wait_all(self) -> None:
        """Wait for every message started so far."""
        self.wait(*self._posted)
        self._posted.clear()

    def release(self) -> None:
        """Give up on what was not waited for, so that no buffer is written to any more."""
        for item in self._posted:
            if not item.finished:
                item.cancel()
        self._posted.clear()

    def _keep(self, pending: Pending) -> Pending:
        self._posted.append(pending)
        return pending

    def _timed_out(self) -> CommTimeoutError:
        backend = self._backend
        report = backend.root.missing_from(backend.ranks, backend.channel, self.sequence)
        return CommTimeoutError(
            f"{self.name} on ranks {_shorten(backend.ranks)} timed out after "
            f"{self._deadline.seconds:g} s on rank {backend.root.rank}{report}"
        )


def _shorten(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 8 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}..{ranks[-1]}"
    return str(list(ranks))


_NOTHING = Pending()
_NOTHING.finish()
