"""``PointToPoint``: the messages between two ranks, as methods of every backend."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.comm.message_status import MessageStatus
from fsdpcore.comm.message_work import finish
from fsdpcore.comm.messages import GroupMessages
from fsdpcore.core.buffers import Array
from fsdpcore.core.wildcard import Wildcard
from fsdpcore.core.work import Work


class PointToPoint(ABC):
    """What a rank of a group sends to and receives from the others, one by one.

    Messages are matched as in MPI. A receive takes the oldest message that it fits; a message goes
    to the oldest receive that fits it. So messages of one sender in one group do not overtake each
    other: a receive of any tag takes what was sent first. Those of different senders come in any
    order.

    What a rank sends to itself is copied at once, so that neither ``send`` nor ``isend`` waits for
    the receive. It can be received later, or by a receive that was started before.
    """

    _messages: GroupMessages

    @property
    @abstractmethod
    def timeout(self) -> float:
        """Seconds that an operation may take where the call does not say."""

    def send(
        self, array: ArrayLike, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send ``array`` to rank ``dst``, which must ``recv`` with the same shape, dtype and tag.

        Blocks until ``array`` may be changed again. Small messages are buffered; for large ones
        that means until the receiver has them, so two ranks that send to each other at the same
        time should use ``sendrecv`` or ``isend``.

        Args:
            array: of any shape; bool, integers, floating point up to 64 bits, complex.
            dst: a rank of this group.
            tag: tells messages of the same two ranks apart, 0 to 2**31 - 1; those of one tag
                arrive in order.
            timeout: seconds; by default ``backend.timeout``.

        Raises:
            ArgumentError: no such rank, a dtype that cannot travel.
            CommTimeoutError: not done after ``timeout`` seconds (default: ``backend.timeout``).
            MismatchError: the receiver expects another shape or dtype.
            PeerFailedError: another rank failed or left.
        """
        deadline = self._messages.deadline(timeout)
        finish([lambda: self._messages.isend(array, dst, tag)], deadline)

    def recv(
        self,
        out: Array,
        src: int | Wildcard,
        *,
        tag: int | Wildcard = 0,
        timeout: float | None = None,
        status: MessageStatus | None = None,
    ) -> Array:
        """Receive into ``out`` what rank ``src`` sends with ``tag``, and return ``out``.

        Blocks until the data is there. After a timeout nothing is written to ``out`` any more,
        and the message can still be received by a later call if it had not begun to arrive. ::

            room, status = np.empty(1000), fc.MessageStatus()
            backend.recv(room, fc.ANY, tag=fc.ANY, status=status)
            print(f"rank {status.source} sent", room[: status.count].reshape(status.shape))

        Args:
            out: a writable array of the shape and dtype that are sent; need not be contiguous.
                With ``status``, one of a single axis may have more elements than are sent, of
                whatever shape: they come to its beginning, the others stay as they are.
            src: a rank of this group, or ``fc.ANY`` for whoever sends first.
            tag: as of ``send``, or ``fc.ANY`` for any.
            timeout: seconds; by default ``backend.timeout``.
            status: filled in with what has come.

        Raises:
            ArgumentError, CommTimeoutError, MismatchError: as ``send``.
            PeerFailedError: another rank failed; the one that is waited for left, or with
                ``fc.ANY`` all others of the group.
        """
        deadline = self._messages.deadline(timeout)
        finish([lambda: self._messages.irecv(out, src, tag, status)], deadline)
        return out

    def isend(self, array: ArrayLike, dst: int, *, tag: int = 0) -> Work:
        """Start to send ``array``, which must not change before the returned work is done.

        Args:
            array, dst, tag: as of ``send``.

        Returns:
            A ``Work``, whose ``wait`` raises what ``send`` would; see ``fc.wait_all`` and
            ``fc.wait_any`` for several.

        Raises:
            ArgumentError: as ``send``, at once.
        """
        return self._messages.isend(array, dst, tag)

    def irecv(
        self,
        out: Array,
        src: int | Wildcard,
        *,
        tag: int | Wildcard = 0,
        status: MessageStatus | None = None,
    ) -> Work:
        """Start to receive into ``out``, to be read once the returned work has been waited for.

        Args:
            out, src, tag: as of ``recv``.
            status: filled in when the work is waited for.

        Returns:
            A ``Work``: ``wait`` returns ``out``, and raises what ``recv`` would.

        Raises:
            ArgumentError: as ``recv``, at once.
        """
        return self._messages.irecv(out, src, tag, status)

    def sendrecv(
        self,
        array: ArrayLike,
        dst: int,
        out: Array,
        src: int | Wildcard,
        *,
        tag: int = 0,
        recv_tag: int | Wildcard | None = None,
        timeout: float | None = None,
        status: MessageStatus | None = None,
    ) -> Array:
        """Send ``array`` to rank ``dst`` while receiving into ``out`` from ``src``; return ``out``.

        Blocks until both are done. No rank waits for another one to receive first, so all ranks may
        call it at once, in a ring say::

            left, right = (rank - 1) % p, (rank + 1) % p
            backend.sendrecv(own, right, theirs, left)

        Args:
            array, dst, tag: as of ``send``. ``array`` may overlap with ``out``: it is copied then.
            out, src, status: as of ``recv``.
            recv_tag: the tag of what is received; by default ``tag``.
            timeout: seconds for both; by default ``backend.timeout``.

        Raises:
            The errors of ``send`` and ``recv``.
        """
        deadline = self._messages.deadline(timeout)
        if isinstance(array, np.ndarray) and isinstance(out, np.ndarray):
            array = array.copy() if np.may_share_memory(array, out) else array
        from_tag = tag if recv_tag is None else recv_tag
        finish(
            [
                lambda: self._messages.irecv(out, src, from_tag, status),
                lambda: self._messages.isend(array, dst, tag),
            ],
            deadline,
        )
        return out

    def probe(
        self, src: int | Wildcard, *, tag: int | Wildcard = 0, timeout: float | None = None
    ) -> MessageStatus:
        """Wait for a message, and say what it is without receiving it.

        ::

            status = backend.probe(fc.ANY, tag=fc.ANY)
            array = np.empty(status.shape, status.dtype)
            backend.recv(array, status.source, tag=status.tag)

        The next receive from that rank with that tag takes it. Another thread's may, too: threads
        that probe for the same messages have to take turns.

        Args:
            src, tag, timeout: as of ``recv``.

        Raises:
            The errors of ``recv``, but for ``MismatchError``.
        """
        deadline = self._messages.deadline(timeout)
        status: MessageStatus = finish([lambda: self._messages.probe(src, tag)], deadline)
        return status

    def iprobe(self, src: int | Wildcard, *, tag: int | Wildcard = 0) -> MessageStatus | None:
        """Say what ``probe`` would if a message is there, and None otherwise; never blocks.

        A message that has been sent may still be on its way.

        Args:
            src, tag: as of ``recv``.

        Raises:
            The errors of ``recv``, but for ``MismatchError`` and ``CommTimeoutError``.
        """
        return self._messages.iprobe(src, tag)
