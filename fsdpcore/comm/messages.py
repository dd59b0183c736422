"""``GroupMessages``: how a rank of a group starts messages to and from the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.job import Job
from fsdpcore.comm.message_work import MessageWork
from fsdpcore.comm.order import CallOrder
from fsdpcore.core.buffers import Array, Bytes, byte_view, dtype_code, input_array, pack_signature
from fsdpcore.core.checks import as_rank, as_tag
from fsdpcore.core.device import HOST
from fsdpcore.core.errors import ArgumentError, CommunicationError
from fsdpcore.core.work import Pending
from fsdpcore.diagnostics.entries import MessageRecord
from fsdpcore.diagnostics.status import Group


class GroupMessages:
    """The messages of one group, seen from one rank: checked, recorded, handed to the transport.

    Args:
        job, group: whose messages these are.
        rank: this rank's number in the group.
        order: knows whether the group is open.
    """

    def __init__(self, job: Job, group: Group, rank: int, order: CallOrder) -> None:
        self._job, self._group, self._rank, self._order = job, group, rank, order

    def isend(self, array: ArrayLike, dst: int, tag: int) -> MessageWork:
        """Start to send ``array``; see ``Backend.isend``."""
        source = input_array(self._on_host(array))
        self._check_peer(dst, "send to")
        dtype, shape, to = source.dtype, source.shape, self._group.ranks[dst]
        envelope = Envelope(self._group.channel, as_tag(tag), pack_signature(dtype, shape))
        message = MessageRecord("send", dtype, shape, source.nbytes, to, tag)
        return self._post(self._job.post_send, byte_view(source), dst, envelope, message, None)

    def irecv(self, out: Array, src: int, tag: int) -> MessageWork:
        """Start to receive into ``out``; see ``Backend.irecv``."""
        device = self._job.device if self._job.device.claims(out) else HOST
        shape = tuple(getattr(out, "shape", ()))
        device.check_out(out, shape, getattr(out, "dtype", np.dtype(object)))
        dtype_code(out.dtype)
        self._check_peer(src, "receive from")
        direct = device.on_host and out.flags.c_contiguous
        staging = out if direct else np.empty(out.shape, out.dtype)
        dtype, sender = out.dtype, self._group.ranks[src]
        envelope = Envelope(self._group.channel, as_tag(tag), pack_signature(dtype, shape))
        message = MessageRecord("recv", dtype, shape, out.nbytes, sender, tag)

        def deliver() -> Array:
            if staging is not out:
                device.write(out, staging)
            return out

        return self._post(self._job.post_recv, byte_view(staging), src, envelope, message, deliver)

    def _post(
        self,
        post: Callable[[Bytes, int, Envelope], Pending],
        data: Bytes,
        peer: int,
        envelope: Envelope,
        message: MessageRecord,
        deliver: Callable[[], Array] | None,
    ) -> MessageWork:
        self._order.check_open()
        recorder = self._job.recorder
        entry = recorder.message(self._group, message)
        try:
            pending = post(data, self._group.ranks[peer], envelope)
        except BaseException as error:
            recorder.fail(entry, error)
            if isinstance(error, CommunicationError):
                self._job.fail(error, tell=True)
            raise
        return MessageWork(self._job, self._group, pending, entry, peer, deliver)

    def _on_host(self, array: ArrayLike) -> ArrayLike:
        """Return the values of an array of the device as one of the host, others as they are.

        Messages have tags and may be received in any order, which a GPU's way of sending has not.
        """
        if self._job.device.on_host:
            return array
        return self._job.device.to_host(self._job.device.given(array, "array"))

    def _check_peer(self, peer: int, verb: str) -> None:
        as_rank(peer, len(self._group.ranks), f"rank {self._rank} cannot {verb}")
        if peer == self._rank:
            raise ArgumentError(
                f"rank {self._rank} cannot {verb} itself; copy the array, or name another rank"
            )
