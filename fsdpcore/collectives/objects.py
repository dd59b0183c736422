"""Python objects between the ranks, as bytes: see ``core.objects``.

They are collectives and messages of arrays of bytes, so that order, deadlines, failures and groups
are those of all others. An object that fits into ``FIRST_BYTES`` is broadcast in one collective, a
larger one in two. The operations that join objects of different sizes are one ragged collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpcore.collectives import all_gather_v, broadcast, gather_v, scatter_v
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.message_status import MessageStatus
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.checks import as_instance, as_rank
from fsdpcore.core.device import HOST
from fsdpcore.core.errors import (
    ArgumentError,
    CommunicationError,
    MismatchError,
    ProtocolError,
    UnsupportedError,
)
from fsdpcore.core.objects import new_bytes, pack, read_header, unpack
from fsdpcore.core.wildcard import Wildcard
from fsdpcore.core.work import Deadline

FIRST_BYTES = 4096


class _Objects:
    """One call: what its objects are made of, and who is told of what is wrong."""

    def __init__(
        self,
        operation: str,
        backend: Backend,
        pickled: bool,
        timeout: float | None,
        label: str = "",
    ) -> None:
        as_instance(backend, Backend, "the backend", "a Backend", "it comes behind the object")
        as_instance(pickled, bool, f"{operation}: pickle", "True or False")
        as_instance(label, str, f"{operation}: a label", "a string")
        self.operation, self.backend, self.pickled = operation, backend, pickled
        why = backend.root.unauthenticated
        if pickled and why:
            raise UnsupportedError(
                f"{operation}: pickle=True: what is unpickled may run any code, and {why}"
            )
        # All ranks compare it.
        self.label = f"{operation}{', pickled' if pickled else ''}{label and f': {label}'}"
        limit = backend.timeout if timeout is None else timeout
        self.deadline = Deadline(limit, backend.root.clock)

    def pack(self, obj: object, where: str = "") -> Bytes:
        return pack(obj, f"{self.operation}{where}", pickled=self.pickled, empty=self.empty)

    def empty(self, size: int) -> Bytes:
        """Memory of the host for a frame; of a large one such as the transport moves fastest."""
        backend = self.backend
        large = size > FIRST_BYTES and backend.device is HOST
        return backend.empty(size, np.uint8) if large else new_bytes(size)

    def unpack(self, frame: Bytes, rank: int) -> Any:
        try:
            return unpack(frame, pickled=self.pickled)
        except ProtocolError as error:
            raise self.broken(error, rank) from None

    def room(self, size: int, rank: int) -> Bytes:
        """Memory for a frame that a rank has announced."""
        try:
            return self.empty(size)
        except MemoryError:
            wrong = f"it announces {size} bytes, for which there is no memory"
            raise self.broken(ProtocolError(wrong), rank) from None

    def frame_bytes(self, data: Bytes, rank: int) -> int:
        """The size of the frame that begins ``data``."""
        try:
            return read_header(data)[1]
        except ProtocolError as error:
            raise self.broken(error, rank) from None

    def unpack_all(self, joined: Bytes, own: object) -> list[Any]:
        """Return the objects of all ranks from their frames; ``own`` is this rank's."""
        found, at = [], 0
        for rank in range(self.backend.world_size):
            end = at + self.frame_bytes(joined[at:], rank)
            mine = rank == self.backend.rank
            found.append(own if mine else self.unpack(joined[at:end], rank))
            at = end
        if at != joined.size:
            wrong = f"{joined.size - at} bytes behind its object"
            raise self.broken(ProtocolError(wrong), self.backend.world_size - 1)
        return found

    def broken(self, error: ProtocolError, rank: int) -> CommunicationError:
        """Break the job because of what a rank of the group has sent."""
        said = f"{self.operation}: from rank {self.backend.ranks[rank]}: {error}"
        return self.backend.root.fail_with(ProtocolError(said))

    def mismatch(self, what: str) -> CommunicationError:
        """Break the job because the other side has called something else."""
        return self.backend.root.fail_with(MismatchError(f"{self.operation}: {what}"))


def broadcast_object(
    obj: Any,
    backend: Backend,
    *,
    root: int = 0,
    pickle: bool = False,
    timeout: float | None = None,
    label: str = "",
) -> Any:
    """Give all ranks the root's object; blocks until this rank has it.

    What can be sent: None, bool, int, float, str, bytes, NumPy's arrays and scalars of bool,
    numbers (with bfloat16 and float8), text and dates, and lists, tuples and dicts (with keys of
    str and int) of all these. What comes is equal, type for type and bit for bit; arrays are
    C-contiguous. Of arrays, their bytes are sent.

    It is no barrier: the root may go on before others have begun.

    Args:
        obj: of the root; that of the others is ignored.
        backend: the group. All its ranks call this, in the same order of collectives.
        root: the rank that sends its object; the same on all ranks.
        pickle: send anything that can be pickled; the same on all ranks. Whoever unpickles runs
            what the sender says: it is refused where others than ranks of the job could send.
        timeout: seconds for all of it; by default ``backend.timeout``.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        On the root ``obj`` itself; on the others an equal one, which is theirs.

    Raises:
        ArgumentError: there is something in ``obj`` that cannot be sent; says where. Or another
            argument is wrong. Nothing was sent, and the job can go on.
        UnsupportedError: ``pickle`` is refused, on all ranks; says why.
        MismatchError, CommTimeoutError, PeerFailedError: as ``broadcast``.
        ProtocolError: what came is no object.
        Exception: with ``pickle``, whatever unpickling raises. The job can go on.

    Example::

        config = fc.broadcast_object(read(path) if backend.rank == 0 else None, backend)
    """
    call = _Objects("broadcast_object", backend, pickle, timeout, label)
    root = as_rank(root, backend.world_size, "broadcast_object: root")
    first = np.zeros(FIRST_BYTES, np.uint8)
    frame = call.pack(obj) if backend.rank == root else None
    if frame is not None:
        first[: frame.size] = frame[:FIRST_BYTES]
    broadcast(first, backend, root=root, out=first, timeout=timeout, label=call.label)
    size = call.frame_bytes(first, root)
    whole = call.room(size, root) if frame is None else frame
    whole[:FIRST_BYTES] = first[:size]
    if size > FIRST_BYTES:
        rest, seconds = whole[FIRST_BYTES:], call.deadline.remaining()
        broadcast(rest, backend, root=root, out=rest, timeout=seconds, label=call.label)
    return obj if backend.rank == root else call.unpack(whole, root)


def gather_object(
    obj: Any,
    backend: Backend,
    *,
    root: int = 0,
    pickle: bool = False,
    timeout: float | None = None,
    label: str = "",
) -> list[Any] | None:
    """Give the root the objects of all ranks, of any kind and size; blocks until this is done.

    Args:
        obj: of this rank; of what can be sent, see ``broadcast_object``.
        backend: the group. All its ranks call this, in the same order of collectives.
        root: the rank that gets them; the same on all ranks.
        pickle, timeout, label: as of ``broadcast_object``.

    Returns:
        On the root the objects in rank order, its own as it is; None on the others.

    Raises:
        The errors of ``broadcast_object``.

    Example::

        rows = fc.gather_object({"host": name, "seconds": seconds}, backend)
    """
    call = _Objects("gather_object", backend, pickle, timeout, label)
    root = as_rank(root, backend.world_size, "gather_object: root")
    frame = call.pack(obj)
    joined = gather_v(frame, backend, root=root, timeout=timeout, label=call.label)
    return None if joined is None else call.unpack_all(joined, obj)


def all_gather_object(
    obj: Any,
    backend: Backend,
    *,
    pickle: bool = False,
    timeout: float | None = None,
    label: str = "",
) -> list[Any]:
    """Give every rank the objects of all, of any kind and size; blocks until this is done.

    Args:
        obj: of this rank; of what can be sent, see ``broadcast_object``.
        backend: the group. All its ranks call this, in the same order of collectives.
        pickle, timeout, label: as of ``broadcast_object``.

    Returns:
        The objects in rank order, this rank's as it is.

    Raises:
        The errors of ``broadcast_object``.

    Example::

        names = fc.all_gather_object(socket.gethostname(), backend)
    """
    call = _Objects("all_gather_object", backend, pickle, timeout, label)
    frame = call.pack(obj)
    joined = all_gather_v(frame, backend, timeout=timeout, label=call.label)
    return call.unpack_all(joined, obj)


def scatter_object(
    objs: Sequence[Any] | None,
    backend: Backend,
    *,
    root: int = 0,
    pickle: bool = False,
    timeout: float | None = None,
    label: str = "",
) -> Any:
    """Give each rank the object that the root has for it; blocks until this rank has it.

    It is no barrier: the root may go on before others have begun.

    Args:
        objs: of the root, a list or tuple with one for each rank, of what can be sent, see
            ``broadcast_object``. That of the others is ignored.
        backend: the group. All its ranks call this, in the same order of collectives.
        root: the rank that has them; the same on all ranks.
        pickle, timeout, label: as of ``broadcast_object``.

    Returns:
        The object for this rank; on the root as it is.

    Raises:
        The errors of ``broadcast_object``.

    Example::

        mine = fc.scatter_object(parts if backend.rank == 0 else None, backend)
    """
    call = _Objects("scatter_object", backend, pickle, timeout, label)
    root = as_rank(root, backend.world_size, "scatter_object: root")
    if backend.rank != root:
        frame = scatter_v(None, backend, root=root, timeout=timeout, label=call.label)
        return call.unpack(frame, root)
    if not isinstance(objs, (list, tuple)) or len(objs) != backend.world_size:
        what = f"{len(objs)} objects" if isinstance(objs, (list, tuple)) else type(objs).__name__
        raise ArgumentError(
            f"scatter_object: rank {root} is the root and has to pass a list of "
            f"{backend.world_size} objects, one for each rank; got {what}"
        )
    frames = [call.pack(obj, f": of rank {rank}") for rank, obj in enumerate(objs)]
    counts = [frame.size for frame in frames]
    joined = np.concatenate(frames, out=call.empty(sum(counts)))
    scatter_v(joined, backend, counts, root=root, timeout=timeout, label=call.label)
    return objs[root]


def send_object(
    obj: Any,
    backend: Backend,
    dst: int,
    *,
    tag: int = 0,
    pickle: bool = False,
    timeout: float | None = None,
) -> None:
    """Send an object to rank ``dst``, which has to call ``recv_object``; one message.

    Blocks until ``obj`` is on its way, as ``backend.send`` does with an array of its bytes.

    Args:
        obj: of what can be sent, see ``broadcast_object``.
        backend: the group.
        dst: a rank of it; this one, too.
        tag: as of ``backend.send``, whose messages these are.
        pickle: as of ``broadcast_object``, the same on both sides.
        timeout: seconds; by default ``backend.timeout``.

    Raises:
        ArgumentError: there is something in ``obj`` that cannot be sent; says where. Or another
            argument is wrong. Nothing was sent.
        UnsupportedError: ``pickle`` is refused; says why.
        CommTimeoutError, MismatchError, PeerFailedError: as ``backend.send``.

    Example::

        fc.send_object({"step": 3, "batch": batch}, backend, 1)
    """
    call = _Objects("send_object", backend, pickle, timeout)
    backend.send(call.pack(obj), dst, tag=tag, timeout=timeout)


def recv_object(
    backend: Backend,
    src: int | Wildcard,
    *,
    tag: int | Wildcard = 0,
    pickle: bool = False,
    timeout: float | None = None,
    status: MessageStatus | None = None,
) -> Any:
    """Receive what rank ``src`` sends by ``send_object``; blocks until it is there.

    Threads of a rank that receive from the same rank with the same tag have to take turns, as with
    ``backend.probe``.

    Args:
        backend: the group.
        src: a rank of it, or ``fc.ANY`` for whoever sends first.
        tag: as of ``send_object``, or ``fc.ANY`` for any.
        pickle: as of ``broadcast_object``, the same on both sides.
        timeout: seconds; by default ``backend.timeout``.
        status: filled in with what has come: from whom, with which tag, and how many bytes.

    Returns:
        The object.

    Raises:
        MismatchError: the message is none of ``send_object``, or ``pickle`` differs.
        ProtocolError: what came is no object.
        ArgumentError, UnsupportedError, CommTimeoutError, PeerFailedError: as ``backend.recv``,
            and ``send_object``.
        Exception: with ``pickle``, whatever unpickling raises. The job can go on.

    Example::

        message = fc.recv_object(backend, 0)
    """
    call = _Objects("recv_object", backend, pickle, timeout)
    found = backend.probe(src, tag=tag, timeout=timeout)
    frame: Bytes = np.empty(0, np.uint8)
    if found.dtype == np.uint8 and len(found.shape) == 1:
        frame = call.room(found.count, found.source)
        seconds = call.deadline.remaining()
        backend.recv(frame, found.source, tag=found.tag, timeout=seconds, status=status)
    sender = f"rank {backend.ranks[found.source]}"
    try:
        pickled, _ = read_header(frame)
    except ProtocolError:
        raise call.mismatch(
            f"{sender} has sent an array, {found.dtype} of shape {found.shape}; receive it with "
            "backend.recv, or send an object with send_object"
        ) from None
    if pickled is not pickle:
        raise call.mismatch(
            f"{sender} has sent an object with pickle={pickled}, and this rank receives with "
            f"pickle={pickle}; say the same on both"
        )
    return call.unpack(frame, found.source)
