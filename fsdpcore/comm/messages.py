"""``GroupMessages``: how a rank of a group starts messages to and from the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.job import Job
from fsdpcore.comm.matching import Receive
from fsdpcore.comm.message_status import MessageStatus
from fsdpcore.comm.message_work import MessageWork
from fsdpcore.comm.order import CallOrder
from fsdpcore.core.buffers import (
    Array,
    byte_view,
    dtype_code,
    pack_room,
    pack_signature,
    unpack_signature,
)
from fsdpcore.core.checks import as_rank, as_tag
from fsdpcore.core.device import HOST
from fsdpcore.core.errors import CommunicationError, FsdpcoreError, in_words
from fsdpcore.core.wildcard import ANY, ANY_NUMBER, Wildcard
from fsdpcore.core.work import Deadline, Pending
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

    def deadline(self, timeout: float | None) -> Deadline:
        """When what begins now must have ended: after ``timeout`` seconds, or the job's."""
        job = self._job
        return Deadline(job.default_timeout if timeout is None else timeout, job.clock)

    def isend(self, array: ArrayLike, dst: int, tag: int) -> MessageWork:
        """Start to send ``array``; see ``Backend.isend``."""
        source = HOST.operand(self._on_host(array))
        as_rank(dst, len(self._group.ranks), f"rank {self._rank} cannot send to")
        dtype, shape, to = source.dtype, source.shape, self._group.ranks[dst]
        envelope = Envelope(self._group.channel, as_tag(tag), pack_signature(dtype, shape))
        message = MessageRecord("send", dtype, shape, source.nbytes, to, tag)
        post = self._job.post_send
        return self._post(message, dst, None, post, byte_view(source), to, envelope)

    def irecv(
        self, out: Array, src: int | Wildcard, tag: int | Wildcard, status: MessageStatus | None
    ) -> MessageWork:
        """Start to receive into ``out``; see ``Backend.irecv``."""
        device = self._job.device if self._job.device.claims(out) else HOST
        shape = tuple(getattr(out, "shape", ()))
        device.check_out(out, shape, getattr(out, "dtype", np.dtype(object)))
        dtype_code(out.dtype)
        peer, sender, number = self._sender(src, tag, "receive from")
        direct = device.on_host and out.flags.c_contiguous
        staging = out if direct else np.empty(out.shape, out.dtype)
        dtype, roomy = out.dtype, status is not None and len(shape) == 1
        signature = pack_room(dtype, *shape) if roomy else pack_signature(dtype, shape)
        envelope = Envelope(self._group.channel, number, signature)
        message = MessageRecord("recv", dtype, shape, out.nbytes, sender, number)

        def deliver(pending: Pending) -> Array:
            part: Any = ...
            if status is not None:
                self._describe(pending, status)
                part = slice(status.count) if roomy else ...
            if staging is not out:
                device.write(out[part], staging[part])
            return out

        post = self._job.post_recv
        return self._post(message, peer, deliver, post, byte_view(staging), sender, envelope)

    def probe(self, src: int | Wildcard, tag: int | Wildcard) -> MessageWork:
        """Start to look for a message; see ``Backend.probe``."""
        peer, sender, number = self._sender(src, tag, "look for a message from")
        message = MessageRecord("probe", None, (), 0, sender, number)
        envelope = Envelope(self._group.channel, number)

        def deliver(pending: Pending) -> MessageStatus:
            return self._describe(pending, MessageStatus())

        return self._post(message, peer, deliver, self._job.post_probe, sender, envelope)

    def iprobe(self, src: int | Wildcard, tag: int | Wildcard) -> MessageStatus | None:
        """Look for a message that is there; see ``Backend.iprobe``. It is not recorded."""
        _, sender, number = self._sender(src, tag, "look for a message from")
        self._order.check_open()
        self._job.progress()
        try:
            probe = self._job.post_probe(sender, Envelope(self._group.channel, number))
        except CommunicationError as error:
            raise self._job.fail_with(error) from None
        probe.cancel()
        if not probe.finished:
            return None
        probe.join(0)
        return self._describe(probe, MessageStatus())

    def _post(
        self,
        message: MessageRecord,
        peer: int,
        deliver: Callable[[Pending], Any] | None,
        post: Callable[..., Pending],
        *args: Any,
    ) -> MessageWork:
        """Record a message, and start it by ``post(*args)``."""
        self._order.check_open()
        recorder = self._job.recorder
        entry = recorder.message(self._group, message)
        try:
            pending = post(*args)
            return MessageWork(self._job, self._group, pending, entry, peer, deliver)
        except FsdpcoreError as error:
            recorder.fail(entry, error)
            if isinstance(error, CommunicationError):
                raise self._job.fail_with(error) from None
            raise
        except BaseException as error:  # Ctrl-C: it may be under way, or not
            try:
                self._interrupted(error)
            except BaseException:  # and again
                self._interrupted(error)
                raise
            recorder.fail(entry, error)
            raise

    def _interrupted(self, error: BaseException) -> None:
        why = f"rank {self._job.rank} was interrupted when it began a message: {in_words(error)}"
        self._job.fail(CommunicationError(why), tell=True)

    def _sender(self, src: int | Wildcard, tag: int | Wildcard, verb: str) -> tuple[int, int, int]:
        """From whom a message may be: as a number of the group, of the job; and with what tag."""
        number = ANY_NUMBER if tag is ANY else as_tag(tag)
        if src is ANY:
            return ANY_NUMBER, ANY_NUMBER, number
        peer = as_rank(src, len(self._group.ranks), f"rank {self._rank} cannot {verb}")
        return peer, self._group.ranks[peer], number

    def _describe(self, pending: Pending, status: MessageStatus) -> MessageStatus:
        """Say in ``status`` what a receive has taken, or a probe has found."""
        receive = cast("Receive", pending)
        sender, _, status.tag = receive.key
        status.source = self._group.ranks.index(sender)
        status.dtype, status.shape = unpack_signature(receive.envelope.signature)
        return status

    def _on_host(self, array: ArrayLike) -> ArrayLike:
        """Return the values of an array of the device as one of the host, others as they are.

        Messages have tags and may be received in any order, which a GPU's way of sending has not.
        """
        if self._job.device.on_host:
            return array
        return self._job.device.to_host(self._job.device.given(array, "array"))
