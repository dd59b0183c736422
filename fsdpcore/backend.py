"""``Backend``: ranks that can send arrays to each other, and ``SubBackend``, some of them.

Everything above this file (collectives, FSDP, checkpoints) works on any ``Backend``; a transport
derives from ``fsdpcore.transport.Transport`` and implements two non-blocking calls, ``post_send``
and ``post_recv``.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fsdpcore.buffers import (
    Array,
    Bytes,
    byte_view,
    check_out,
    dtype_code,
    input_array,
    pack_signature,
)
from fsdpcore.errors import (
    ArgumentError,
    ClosedError,
    CommTimeoutError,
    CommunicationError,
    UnsupportedError,
)
from fsdpcore.work import Deadline, OrderedExecutor, Pending, Work

if TYPE_CHECKING:
    from fsdpcore.collectives.algorithms import Algorithm
    from fsdpcore.transport import Transport

MAX_TAG = 2**31 - 1

B = TypeVar("B", bound="Backend")


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do, the same on all ranks.

    ``alpha`` (seconds per message), ``beta`` (seconds per byte moved) and ``gamma`` (seconds per
    byte reduced) feed the choice of algorithms; they need to be right in proportion only.
    """

    transport: str
    alpha: float
    beta: float
    gamma: float
    shared_window: bool = False


class Envelope(NamedTuple):
    """What a message is matched by (``channel``, ``tag``) and checked against (``signature``).

    Messages of one sender with equal channel and tag are received in the order they were sent.
    """

    channel: int
    tag: int
    signature: bytes = b""


class Backend(ABC):
    """A group of ``world_size`` ranks, seen from the rank that is number ``rank`` of it.

    Attributes:
        rank: this rank's number in the group, from 0.
        world_size: how many ranks the group has.
        ranks: the members' numbers in the whole job, in the order of the group.
        hosts: the number of each member's host; equal for members that share one.
        channel: identifies the group's messages; equal on all members, unlike any other group's.

    A backend may be used from several threads, but the ranks must issue collectives of one group
    in the same order. Once an operation has failed with a ``CommunicationError``, the backend and
    all groups made from it stay broken: later calls raise the first cause again at once.
    """

    def __init__(self, ranks: Sequence[int], rank: int, channel: int, hosts: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.hosts = tuple(hosts)
        self.rank = rank
        self.world_size = len(self.ranks)
        self.channel = channel
        self._groups: dict[tuple[int, ...], int] = {}
        self._issue_lock = threading.Lock()
        self._sequence = 0
        self._executor: OrderedExecutor | None = None

    @functools.cached_property
    def own_algorithms(self) -> Mapping[str, Mapping[str, Algorithm]]:
        """What the transport offers for this group's collectives beyond the general algorithms."""
        return self.root.algorithms(self)

    # What differs between a whole job and a group of it.

    @property
    @abstractmethod
    def root(self) -> Transport:
        """The transport that carries this backend's messages; itself, for a whole job."""

    @abstractmethod
    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        """Start sending ``data`` (flat, contiguous) to ``dst``; never blocks on the peer.

        ``data`` belongs to the transport until the returned ``Pending`` has finished.

        Raises:
            CommunicationError: the backend is broken or closed.
        """

    @abstractmethod
    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        """Ask for the next message from ``src`` that matches ``envelope``; never blocks.

        ``out`` belongs to the transport until the returned ``Pending`` has finished; that fails
        with ``MismatchError`` if the message has another size or signature.

        Raises:
            CommunicationError: the backend is broken or closed.
        """

    @property
    def capabilities(self) -> Capabilities:
        """What this transport can do."""
        return self.root.transport_capabilities

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take where the call does not say."""
        return self.root.default_timeout

    # Point to point.

    def send(
        self, array: ArrayLike, dst: int, *, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send ``array`` to rank ``dst``, which must ``recv`` with the same shape, dtype and tag.

        Blocks until ``array`` may be changed again. Small messages are buffered; for large ones
        that means until the receiver has them, so two ranks that send to each other at the same
        time should use ``isend``.

        Raises:
            ArgumentError: no such rank, this rank itself, a dtype that cannot travel.
            CommTimeoutError: not done after ``timeout`` seconds (default: ``backend.timeout``).
            MismatchError: the receiver expects another shape or dtype.
            PeerFailedError: another rank failed or left.
        """
        limit = self._limit(timeout)
        self._isend(array, dst, tag).finish(limit)

    def recv(self, out: Array, src: int, *, tag: int = 0, timeout: float | None = None) -> Array:
        """Receive into ``out`` what rank ``src`` sends with ``tag``, and return ``out``.

        Blocks until the data is there. After a timeout nothing is written to ``out`` any more,
        and the message can still be received by a later call if it had not begun to arrive.

        Raises:
            The same errors as ``send``.
        """
        limit = self._limit(timeout)
        self._irecv(out, src, tag).finish(limit)
        return out

    def isend(self, array: ArrayLike, dst: int, *, tag: int = 0) -> Work:
        """Start to send ``array``, which must not change before the returned work is done."""
        return self._isend(array, dst, tag)

    def irecv(self, out: Array, src: int, *, tag: int = 0) -> Work:
        """Start to receive into ``out``, to be read once the returned work has been waited for."""
        return self._irecv(out, src, tag)

    def _isend(self, array: ArrayLike, dst: int, tag: int) -> MessageWork:
        source = input_array(array)
        self._check_peer(dst, "send to")
        envelope = Envelope(
            self.channel, _check_tag(tag), pack_signature(source.dtype, source.shape)
        )
        text = f"send of {source.dtype} {source.shape} to rank {dst} (tag {tag})"
        pending = self._post(self.post_send, byte_view(source), dst, envelope)
        return MessageWork(self, pending, text, dst, None)

    def _irecv(self, out: Array, src: int, tag: int) -> MessageWork:
        check_out(out, np.shape(out), getattr(out, "dtype", np.dtype(object)))
        dtype_code(out.dtype)
        self._check_peer(src, "receive from")
        staging = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        envelope = Envelope(self.channel, _check_tag(tag), pack_signature(out.dtype, out.shape))
        text = f"recv of {out.dtype} {out.shape} from rank {src} (tag {tag})"
        pending = self._post(self.post_recv, byte_view(staging), src, envelope)

        def deliver() -> Array:
            if staging is not out:
                np.copyto(out, staging)
            return out

        return MessageWork(self, pending, text, src, deliver)

    def _post(
        self,
        post: Callable[[Bytes, int, Envelope], Pending],
        data: Bytes,
        peer: int,
        envelope: Envelope,
    ) -> Pending:
        self._check_open()
        try:
            return post(data, peer, envelope)
        except CommunicationError as error:
            self.root.fail(error, tell=True)
            raise

    def _check_open(self) -> None:
        self.root.check_usable()

    def _limit(self, timeout: float | None) -> float:
        return Deadline(self.timeout if timeout is None else timeout).seconds

    def _check_peer(self, peer: int, verb: str) -> None:
        check_rank(peer, self.world_size, f"rank {self.rank} cannot {verb}")
        if peer == self.rank:
            raise ArgumentError(
                f"rank {self.rank} cannot {verb} itself; copy the array, or name another rank"
            )

    # Groups and collectives.

    def barrier(self, timeout: float | None = None) -> None:
        """Block until every rank of the group has called it.

        Raises:
            CommTimeoutError: a rank is missing after ``timeout`` seconds; the message names it.
            MismatchError: a rank called another collective.
            PeerFailedError: another rank failed or left.
        """
        from fsdpcore.collectives import barrier  # collectives are built on this module

        barrier(self, timeout=timeout)

    def sub(self, ranks: Sequence[int]) -> SubBackend:
        """Return the group of those members, numbered in the order given.

        Called by the members only, by all of them, with the same ``ranks``; no communication.
        Every call makes a new group whose messages never mix with those of another.

        Args:
            ranks: members by their number in this group; any subset, in any order.

        Raises:
            ArgumentError: a number twice, out of range, or this rank not among them.
        """
        members = tuple(check_rank(r, self.world_size, "sub(): no such member") for r in ranks)
        if len(set(members)) != len(members):
            raise ArgumentError(f"sub(): a rank is named twice in {list(members)}")
        if self.rank not in members:
            raise ArgumentError(
                f"sub(): rank {self.rank} is not in {list(members)}; only members make a group"
            )
        count = self._groups.get(members, 0)
        self._groups[members] = count + 1
        return SubBackend(self, members, _channel_of(self.channel, members, count))

    def issue(self, text: str, task: Callable[[int], Any], *, async_op: bool) -> Any:
        """Run ``task(sequence)`` as this group's next collective, in the order of the calls.

        Returns:
            What ``task`` returns or, with ``async_op``, a ``Work`` for it.
        """
        with self._issue_lock:
            self._check_open()
            self._sequence = sequence = self._sequence + 1
            if not async_op and (self._executor is None or self._executor.idle):
                return task(sequence)
            if self._executor is None:
                self._executor = self.root.new_executor(f"fsdpcore-rank{self.root.rank}")
            work = self._executor.submit(lambda: task(sequence), text)
        return work if async_op else work.wait()

    # Memory.

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return an uninitialised array in the memory that this transport moves fastest."""
        dtype_code(dtype)
        return np.empty(shape, dtype)

    def shared_window(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return one array that all co-located ranks see.

        Raises:
            UnsupportedError: ``capabilities.shared_window`` is false.
        """
        raise UnsupportedError(
            f"transport {self.capabilities.transport!r} has no shared windows "
            "(capabilities.shared_window is False); use empty() and a collective"
        )

    # Ending.

    @abstractmethod
    def close(self) -> None:
        """Let what was sent reach its receivers, then release everything. Safe to call twice."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Break the whole job at once: every peer's calls raise ``PeerFailedError(reason)``."""

    def __enter__(self: B) -> B:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # sys.exit() without a code is a way to end well.
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            try:
                self.abort(f"{type(error).__name__}: {error}")
            except Exception:  # an exception that cannot say what it is must not keep peers waiting
                self.abort(type(error).__name__)
        self.close()

    def __repr__(self) -> str:
        name = self.capabilities.transport
        return f"<{type(self).__name__} {name} rank {self.rank} of {self.world_size}>"


class SubBackend(Backend):
    """Some ranks of another backend, as a backend of their own; made by ``Backend.sub``."""

    def __init__(self, parent: Backend, members: Sequence[int], channel: int) -> None:
        super().__init__(
            [parent.ranks[member] for member in members],
            members.index(parent.rank),
            channel,
            [parent.hosts[member] for member in members],
        )
        self._root = parent.root
        self._closed = False

    @property
    def root(self) -> Transport:
        return self._root

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        return self._root.post_send(data, self.ranks[dst], envelope)

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        return self._root.post_recv(out, self.ranks[src], envelope)

    def close(self) -> None:
        """Let the group's asynchronous operations end. The job's backend stays open."""
        self._closed = True
        if self._executor is not None:
            self._root.end_executor(self._executor)

    def _check_open(self) -> None:
        self._root.check_usable()
        if self._closed:
            raise ClosedError(
                f"rank {self.rank} has closed this group (ranks {list(self.ranks)}); "
                "make a new one with sub()"
            )

    def abort(self, reason: str) -> None:
        self._root.abort(reason)


class MessageWork(Work):
    """A point-to-point message in flight."""

    def __init__(
        self,
        backend: Backend,
        pending: Pending,
        text: str,
        peer: int,
        deliver: Callable[[], Array] | None,
    ) -> None:
        self._backend = backend
        self._pending = pending
        self._text = text
        self._peer = peer
        self._deliver = deliver
        self._value: Array | None = None

    def done(self) -> bool:
        return self._pending.finished

    def wait(self, timeout: float | None = None) -> Any:
        limit = self._backend.timeout if timeout is None else timeout
        if not self._pending.join(Deadline(limit).remaining()):
            raise self._timed_out(limit)
        if self._deliver is not None:  # once: the caller may have changed the array since
            self._value = self._deliver()
            self._deliver = None
        return self._value

    def finish(self, timeout: float) -> None:
        """Wait; when the time is over, withdraw the message before raising."""
        try:
            self.wait(timeout)
        except BaseException as error:
            withdrawn = self._pending.cancel()
            if not isinstance(error, CommTimeoutError):
                raise
            if self._pending.finished:  # just now: it must not get lost
                self.wait()
                return
            if not withdrawn:
                self._backend.root.fail(error)
            raise

    def _timed_out(self, limit: float) -> CommTimeoutError:
        backend = self._backend
        report = backend.root.last_operations([backend.ranks[self._peer]])
        return CommTimeoutError(
            f"{self._text} on rank {backend.rank} of {backend.world_size} timed out after "
            f"{limit:g} s{report}"
        )


def check_rank(value: object, world_size: int, what: str) -> int:
    """Return ``value`` as a rank of a group of ``world_size``.

    Raises:
        ArgumentError: it is not an integer, or out of range.
    """
    try:
        rank = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{what}: a rank is an integer, got {value!r}") from None
    if not 0 <= rank < world_size:
        raise ArgumentError(f"{what}: rank {rank} is not in 0..{world_size - 1}")
    return rank


def _check_tag(tag: object) -> int:
    try:
        number = operator.index(tag)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"a tag is an integer, got {tag!r}") from None
    if not 0 <= number <= MAX_TAG:
        raise ArgumentError(f"tag {number} is not in 0..{MAX_TAG}")
    return number


def _channel_of(parent: int, members: tuple[int, ...], count: int) -> int:
    """Name a group by how it was made, so that its members agree without communication.

    Always even; a group's collectives use the odd number that follows, apart from user messages.
    """
    seed = struct.pack(f"<QQ{len(members)}Q", parent, count, *members)
    digest = hashlib.blake2b(seed, digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~1
