"""``Backend``: ranks that can send arrays to each other, and ``SubBackend``, some of them.

Everything above this file (collectives, FSDP, checkpoints) works on any ``Backend``. What carries
its messages is a ``Transport``: the backend of the whole job, with what its author implements.
"""

from __future__ import annotations

import functools
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.comm.job import Job
from fsdpcore.comm.messages import GroupMessages
from fsdpcore.comm.order import CallOrder
from fsdpcore.comm.point_to_point import PointToPoint
from fsdpcore.core.buffers import Array, dtype_code
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.channels import channel_of
from fsdpcore.core.checks import as_allocatable, as_members
from fsdpcore.core.clock import Clock
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import (
    ArgumentError,
    ClosedError,
    in_one_line,
    in_words,
)
from fsdpcore.core.text import name_ranks, rank_list
from fsdpcore.diagnostics.status import Group

B = TypeVar("B", bound="Backend")


class Collectives(Protocol):
    """The collectives of one group: those that are methods of ``Backend``, and what they all keep.

    ``fsdpcore.collectives`` hands them down. What else one of these has is theirs.
    """

    def barrier(self, timeout: float | None) -> None:
        """See ``Backend.barrier``."""

    def split(self, color: int | None, key: int, timeout: float | None) -> SubBackend | None:
        """See ``Backend.split``."""

    def shared_window(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        """See ``Backend.shared_window``."""

    def close(self) -> None:
        """Let go of what the collectives keep with the group, which is being closed."""


_make_collectives: Callable[[Backend], Collectives]


def provide_collectives(make: Callable[[Backend], Collectives]) -> None:
    """Set what makes the collectives of every group; called once, by the package of them."""
    global _make_collectives
    _make_collectives = make


@functools.lru_cache(maxsize=1024)
def _in_common(numbers: tuple[int, ...]) -> tuple[int, ...]:
    """Return equal numbers as one tuple, for all ranks that are threads of this process.

    Each member of a group knows all of them: that would be a square of memory.
    """
    return numbers


class Backend(PointToPoint):
    """A group of ``world_size`` ranks, seen from the rank that is number ``rank`` of it.

    ``fc.launch`` and ``fc.init`` make that of the whole job, ``sub``, ``split``, ``host_group`` and
    ``fc.Mesh`` make groups of it, which are backends themselves. It is a context manager: the end
    of the block closes it, or aborts the job if an exception leaves the block. ::

        with fc.init("zmq") as backend:
            total = fc.all_reduce(np.ones(4, np.float32), backend)
            if backend.rank == 0:
                backend.send(total, 1)
            elif backend.rank == 1:
                backend.recv(total, 0)

    Attributes:
        rank: this rank's number in the group, from 0.
        world_size: how many ranks the group has.
        ranks: the members' numbers in the whole job, in the order of the group.
        hosts: the number of each member's host; equal for members that share one.

    A backend may be used from several threads, but the ranks must issue collectives of one group
    in the same order. Once an operation has failed with a ``CommunicationError``, the backend and
    all groups made from it stay broken: later calls raise the first cause again at once.
    """

    def __init__(self, group: Group, rank: int, hosts: Sequence[int]) -> None:
        self.rank = rank
        self.world_size = len(group.ranks)
        self.ranks = group.ranks
        self.hosts = tuple(hosts)
        # For the layers above. What tells the group from others; its channel identifies the group's
        # messages, equal on all members, unlike any other group's.
        self.group = group
        self.channel = group.channel
        # Which arrays its collectives move: those of the host.
        device = self.root.device
        self.moves: Device = device if device.on_host else HOST
        # Numbers the group's collectives, and runs them one after the other.
        self.order = CallOrder(self.root, group)
        self._messages = GroupMessages(self.root, group, rank, self.order)
        # Those that are methods here, and what all of them keep with the group.
        self.collectives = _make_collectives(self)
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._groups_lock = threading.Lock()
        self._host_group: Backend | None = None

    def __dir__(self) -> list[str]:
        # What is public. A transport has names beside these for its author, see ``Transport``.
        methods = [name for name in dir(Backend) if not name.startswith("_")]
        return [*methods, "hosts", "rank", "ranks", "world_size"]

    @property
    def device(self) -> Device:
        """Where arrays are best: the host, or this rank's GPU."""
        return self.root.device

    @property
    def clock(self) -> Clock:
        """The time of the job: ``now()`` in seconds, and ``sleep(seconds)``.

        The system's, but for ranks in virtual time: there a computation that takes a second is
        ``sleep(1)``.
        """
        return self.root.clock

    # What differs between a whole job and a group of it.

    @property
    @abstractmethod
    def root(self) -> Job:
        """The backend of the whole job: the transport, which carries the messages of all groups."""

    @property
    def capabilities(self) -> Capabilities:
        """What this transport can do."""
        return self.root.capabilities

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take where the call does not say."""
        return self.root.default_timeout

    # Groups and collectives.

    def barrier(self, timeout: float | None = None) -> None:
        """Block until every rank of the group has called it.

        It is the host's: what was enqueued on a GPU may not have ended, on this rank or another.
        ``device.synchronize()`` waits for that of this rank.

        Args:
            timeout: seconds; by default ``backend.timeout``.

        Raises:
            CommTimeoutError: a rank is missing after ``timeout`` seconds; the message names it.
            MismatchError: a rank called another collective.
            PeerFailedError: another rank failed or left.
        """
        self.collectives.barrier(timeout)

    def sub(self, ranks: Sequence[int], *, name: str = "") -> SubBackend:
        """Return the group of those members, numbered in the order given.

        Called by the members only, by all of them, with the same ``ranks``; no communication.
        Every call makes a new group whose messages never mix with those of another.

        Args:
            ranks: members by their number in this group; any subset, in any order.
            name: groups of equal members are told apart by the order in which they were made;
                those of different names need not be made in the same order on all members.

        Returns:
            A backend of its own; close it where many are made, closing the job's closes all.

        Raises:
            ArgumentError: a number twice, out of range, or this rank not among them.
            ClosedError: this group was closed.
        """
        members = _in_common(as_members(ranks, self.world_size, "sub()"))
        if self.order.closed or isinstance(self.root.failure, ClosedError):
            self.order.check_open()
        if self.rank not in members:
            raise ArgumentError(
                f"sub(): rank {self.rank} is not in {rank_list(members)}; only members make a group"
            )
        if not isinstance(name, str):
            raise ArgumentError(f"sub(): a name is a string, got {name!r}")
        with self._groups_lock:
            count = self._groups.get((name, members), 0)
            self._groups[name, members] = count + 1
        channel = channel_of(self.channel, members, count, name)
        ranks = _in_common(tuple(self.ranks[member] for member in members))
        made = SubBackend(self, members, Group(channel, ranks, count, name))
        self.root.recorder.add_group(made.order)
        return made

    def host_group(self) -> Backend:
        """Return the group of those members that are on this rank's host; the same every time.

        No communication; this group itself where all are on one host.
        """
        with self._groups_lock:
            found = self._host_group
        if found is None:
            here = self.hosts[self.rank]
            members = [rank for rank, host in enumerate(self.hosts) if host == here]
            alone = len(members) == self.world_size
            found = self if alone else self.sub(members, name="host")
            with self._groups_lock:
                found = self._host_group = self._host_group or found
        return found

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> SubBackend | None:
        """Divide this group: ranks that give the same ``color`` get a group together.

        A collective: every rank of this group calls it. As ``MPI_Comm_split``.

        Args:
            color: which group to be in; None for no group at all.
            key: the members are numbered by key and, where keys are equal, as in this group.
            timeout: seconds for the exchange of colors and keys.

        Returns:
            This rank's group, or None where its color is None.

        Raises:
            ArgumentError: a color or key that is not an integer of 64 bits. Nothing was sent.
            The errors of a collective (``CommTimeoutError``, ``MismatchError``, ...).
        """
        return self.collectives.split(color, key, timeout)

    # Memory.

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return an uninitialised array in the memory that this transport moves fastest.

        On a GPU that is any array of ``device``. On the host, where ranks share memory, it is
        memory that the others read in place: collectives whose input and ``out`` are such arrays,
        or views of them, copy less. It is used again when the last array on it has gone, and given
        back when the backend is closed; arrays stay usable after that. A process that is forked
        from this one writes to the same memory. No communication.

        Args:
            shape: an integer, or one for each axis.
            dtype: one that travels, see ``send``.

        Raises:
            ArgumentError: there is no such shape, or arrays of that dtype do not travel.
        """
        dtype_code(dtype)
        sizes = as_allocatable(shape, np.dtype(dtype), "the array of empty()")
        root = self.root
        shares = self.device.on_host and root.memory is not None and root.world_size > 1
        # Once a call has failed, others may still write to arrays that they were lent.
        if not shares or root.memory is None or root.failure is not None:
            return self.device.lined_up(sizes, dtype)
        made = root.memory.empty(math.prod(sizes) * np.dtype(dtype).itemsize)
        if made is None:
            return self.device.lined_up(sizes, dtype)
        return made.view(dtype).reshape(sizes)

    def shared_window(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return one array of zeros that all ranks of this group on a host see.

        All ranks call it, as a collective. Who writes and who reads when is theirs to agree on, for
        instance with ``barrier``. Collectives treat it as any array. The memory lives as long as
        any rank has an array on it.

        Args:
            shape: as of ``empty``, the same on all ranks.
            dtype: of any kind of number, the same on all ranks.

        Raises:
            ArgumentError: there is no such shape.
            UnsupportedError: the ranks do not share memory; on all ranks. Without a way to it at
                all, ``capabilities.shared_window`` is false.
            The errors of a collective.
        """
        return self.collectives.shared_window(shape, dtype)

    # Ending.

    @abstractmethod
    def close(self) -> None:
        """Let what was sent reach its receivers, then release everything. Safe to call twice.

        Later calls raise ``ClosedError``. Closing the job's backend closes all groups made from it;
        closing a group leaves the job's open. Peers that wait for this rank raise
        ``PeerFailedError``.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Break the whole job at once: every peer's calls raise ``PeerFailedError(reason)``.

        Does not wait for anybody, and does not close: that is still to be called.

        Args:
            reason: in words.
        """

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
            self.abort(in_words(error))
        self.close()

    def __repr__(self) -> str:
        root = self.root
        of = f" ({name_ranks(self.ranks)} of the job)" if isinstance(self, SubBackend) else ""
        if self.order.closed or isinstance(root.failure, ClosedError):
            state = ", closed"
        else:
            state = "" if root.failure is None else f", broken: {in_one_line(root.failure)}"
        return (
            f"<{type(self).__name__} {self.capabilities.transport} rank {self.rank} of "
            f"{self.world_size}{of}{state}>"
        )


class SubBackend(Backend):
    """Some ranks of another backend, as a backend of their own.

    ``Backend.sub`` and ``Backend.split`` make it.
    """

    def __init__(self, parent: Backend, members: Sequence[int], group: Group) -> None:
        self._root = parent.root
        hosts = tuple(parent.hosts[member] for member in members)
        super().__init__(group, members.index(parent.rank), _in_common(hosts))

    @property
    def root(self) -> Job:
        return self._root

    def close(self) -> None:
        """Let the group's asynchronous operations end. The job's backend stays open."""
        self.order.close()
        self.collectives.close()

    def abort(self, reason: str) -> None:
        self._root.abort(reason)
