"""``sim``: the ranks are threads of this process.

A message is an entry in the receiver's match table. Whichever of the two threads comes second
copies the sender's array straight into the receiver's: one copy, nothing in between. A send of
up to ``eager_bytes`` is copied at once instead, so that it never waits for its receiver.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from fsdpcore.comm.config import TransportConfig
from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.matching import Key, MatchTable, fit
from fsdpcore.comm.transport import Transport
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import (
    ClosedError,
    CommunicationError,
    ConfigError,
    MissingDependencyError,
)
from fsdpcore.core.policy import Policy
from fsdpcore.core.wildcard import ANY_NUMBER
from fsdpcore.core.work import Pending
from fsdpcore.diagnostics.status import Status

from .faults import FaultInjector, Faults, InjectedCrash
from .memory import SimMemory, ThreadWorld
from .options import SimOptions


class PostedSend(Pending):
    """What a rank sends, in the inbox of its receiver."""

    __slots__ = ("backend", "data", "envelope", "inbox", "key")

    def __init__(self, backend: SimBackend, data: Bytes, envelope: Envelope, inbox: Inbox) -> None:
        super().__init__(backend.clock.lock)
        self.backend = backend
        self.data = data
        self.envelope = envelope
        self.key: Key = (backend.rank, envelope.channel, envelope.tag)
        self.inbox = inbox

    @property
    def signature(self) -> bytes:
        return self.envelope.signature

    def cancel(self) -> bool:
        return self.backend.withdraw(self) or self.backend.end_of(self)


class PostedReceive(Pending):
    """What a rank receives, or probes for."""

    __slots__ = ("backend", "envelope", "key", "out")

    def __init__(self, backend: SimBackend, out: Bytes, src: int, envelope: Envelope) -> None:
        super().__init__(backend.clock.lock)
        self.backend = backend
        self.out = out
        self.envelope = envelope
        self.key: Key = (src, envelope.channel, envelope.tag)

    def cancel(self) -> bool:
        inbox = self.backend.inbox
        with inbox.lock:
            withdrawn = inbox.table.withdraw_receive(self)
        return withdrawn or self.backend.end_of(self)


class Inbox:
    """What is on its way to one rank."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.table: MatchTable[PostedReceive, PostedSend] = MatchTable()


class SimBackend(Transport):
    """One rank of a simulated job; ``threads`` makes them all.

    Attributes:
        posts_take_time: by its clock, a rank takes some for each message and step in memory.
    """

    posts_take_time = False
    ranks_are_threads = True
    not_elastic = "they are threads of one process, which fc.elastic.launch() can add and end"
    unauthenticated = ""
    options: ClassVar[type[SimOptions]] = SimOptions
    transport_capabilities = Capabilities("sim", alpha=20e-6, beta=0.1e-9, gamma=0.1e-9)

    def __init__(
        self,
        rank: int,
        world: Sequence[SimBackend],
        world_size: int,
        timeout: float,
        options: SimOptions,
        policy: Policy | None = None,
    ) -> None:
        hosts: Sequence[int]
        if world:  # all ranks have one tuple in common
            hosts = world[0].hosts
        else:
            hosts = [other * options.hosts // world_size for other in range(world_size)]
        super().__init__(rank, world_size, timeout, hosts=hosts, policy=policy)
        self.inbox = Inbox()
        self.gone = ""  # how, once it is
        # To whom, and with which key, a message was lost: none that was sent later overtakes it.
        self._lost: set[tuple[int, Key]] = set()
        self.awaited: dict[int, None] = {}  # the ranks that have waited for a message from this one
        self._world = world
        self._eager_bytes = options.eager_bytes
        plan = options.faults or Faults(options.seed, options.max_delay)
        self._injector = FaultInjector(plan, rank, self.clock) if plan != Faults() else None
        self.job: ThreadWorld = world[0].job if world else ThreadWorld()
        if options.shm == "auto" and not plan.drop and not plan.crash:
            before = self._before_post if self._injector or self.posts_take_time else None
            self.memory = SimMemory(self.job, before, self.clock.lock)

    @classmethod
    def threads(cls, world_size: int, config: TransportConfig) -> list[Transport]:
        options = config.transport_options
        assert isinstance(options, SimOptions)
        if not 1 <= options.hosts <= world_size:
            raise ConfigError(
                f"sim: hosts={options.hosts} is not in 1..{world_size}, the number of ranks"
            )
        if options.clock == "virtual":
            if options.played == "one":
                return list(_virtual("lone").one(world_size, config))
            return list(_virtual("virtual").ranks(world_size, config))
        world: list[SimBackend] = []
        for rank in range(world_size):
            world.append(cls(rank, world, world_size, config.timeout, options, config.policy))
        return list(world)

    @classmethod
    def create_group(
        cls, world_size: int, *, timeout: float = 60.0, **options: Any
    ) -> list[SimBackend]:
        """Make the ranks of a job for threads of your own, one for each; does not block.

        They are those of ``fc.launch``, but nobody runs or ends them: a rank is a context manager,
        whose end closes it; an exception that leaves the block aborts the job. ::

            def work(backend):
                with backend:
                    return fc.all_reduce(backend.rank, backend)

            ranks = SimBackend.create_group(4)
            with ThreadPoolExecutor(len(ranks)) as pool:
                print(list(pool.map(work, ranks)))   # [6, 6, 6, 6]

        Args:
            world_size: how many ranks.
            timeout: seconds that an operation may take where the call does not say.
            **options: those of ``SimOptions`` that are not for virtual time.

        Returns:
            The backends, in rank order.

        Raises:
            ConfigError: there is no such option, or no such value.
        """
        size = as_int(world_size, "create_group: world_size", minimum=1, error=ConfigError)
        given = SimOptions.named(options, "create_group")
        if given.clock != "wall":
            raise ConfigError(
                "create_group: threads of your own have no virtual time; use launch() for that"
            )
        config = TransportConfig(timeout=timeout, transport_options=given)
        return [rank for rank in cls.threads(size, config) if isinstance(rank, cls)]

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        self._before_post()
        peer = self._world[dst]
        send = PostedSend(self, data, envelope, peer.inbox)
        if self._injector is not None and self._injector.drops(dst):
            send.finish()
            return send
        eager = data.size <= self._eager_bytes or dst == self.rank
        if eager:
            send.data = data.copy()
        self._carry(send, peer, eager)
        return send

    def _carry(self, send: PostedSend, peer: SimBackend, eager: bool) -> None:
        """Bring a message to its receiver; if ``eager``, its data is a copy."""
        with peer.inbox.lock:
            self._check_peer_alive(peer)
            receive = peer.inbox.table.arrive(send)
            if receive is None and eager:
                send.finish()
        if receive is not None:
            self._move(send, receive)

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        self._before_receive()
        receive = PostedReceive(self, out, src, envelope)
        with self.inbox.lock:
            send = self.inbox.table.post(receive)
            if send is None:
                self._wait_for_senders(receive)
        if send is not None:
            self._move(send, receive)
        return receive

    def post_probe(self, src: int, envelope: Envelope) -> Pending:
        self._before_post()
        probe = PostedReceive(self, _NO_BYTES, src, envelope)
        with self.inbox.lock:
            self.inbox.table.probe(probe)
            if not probe.finished:
                self._wait_for_senders(probe)
        return probe

    def withdraw(self, send: PostedSend) -> bool:
        """Take back what no receive has taken; False if one has."""
        with send.inbox.lock:
            return send.inbox.table.withdraw_message(send)

    def end_of(self, item: PostedSend | PostedReceive) -> bool:
        """Whether what can be withdrawn no more has ended; waits for an end that is near."""
        return item.settle(60)  # a peer is copying

    def _move(self, send: PostedSend, receive: PostedReceive) -> None:
        """Copy a matched message, on the thread of whichever side came second."""
        if not refused(send, receive):
            np.copyto(receive.out, send.data)
            send.finish()
            receive.finish()

    def _wait_for_senders(self, receive: PostedReceive) -> None:
        """Withdraw a receive, and raise, if nobody is there to send what it waits for."""
        src, channel, _ = receive.key
        # Ahead of the look at who is gone: see ``_vanish``.
        awaited = self.job.open if src == ANY_NUMBER else self._world[src].awaited
        awaited[self.rank] = None
        try:
            if src != ANY_NUMBER:
                self._check_peer_alive(self._world[src])
            elif (error := self.lonely([channel])) is not None:
                raise error
        except CommunicationError:
            self.inbox.table.withdraw_receive(receive)
            raise

    def _before_post(self, nbytes: int = 0) -> None:
        """Do what comes ahead of a message, or a step in memory behind which so much was moved."""
        if self._injector is not None and self._injector.before_post():
            self.fail(InjectedCrash(f"rank {self.rank} was made to die"))
            self._vanish("has died without a word")
        self.check_usable()

    def _before_receive(self) -> None:
        self._before_post()

    def _check_peer_alive(self, peer: SimBackend) -> None:
        """Raise if this rank is broken or ``peer`` has left; under the receiver's lock."""
        self.check_usable()
        if how := self._how_gone(peer):
            raise self.missed(peer.rank, how)

    def _how_gone(self, peer: SimBackend) -> str:
        """In which way a rank has left, as far as this one can know; empty if it has not."""
        return peer.gone

    def _fail_pending(self, error: CommunicationError) -> None:
        """Finish what this rank posted: its receives here, its sends in the others' inboxes.

        What was sent and is not taken yet stays: buffered messages unless one before them is lost,
        the others where the error is only that this rank closed.
        """
        with self.inbox.lock:
            for receive in list(self.inbox.table.receives()):
                self.inbox.table.withdraw_receive(receive)
                receive.finish(error)
        if isinstance(error, ClosedError):
            return
        for peer in self._world:
            with peer.inbox.lock:
                if peer.inbox.table.empty:
                    continue
                for send in list(peer.inbox.table.messages()):  # of each key the oldest first
                    lost = (peer.rank, send.key) in self._lost
                    if send.backend is self and (lost or not send.finished):
                        self._lost.add((peer.rank, send.key))
                        peer.inbox.table.withdraw_message(send)
                        if not send.finished:
                            send.finish(error)

    def departed(self, rank: int) -> bool:
        return bool(self._how_gone(self._world[rank]))

    def has_returned(self, rank: int) -> bool:
        return self._world[rank].recorder.returned

    def _tell(self, error: CommunicationError) -> None:
        if isinstance(self._failure, InjectedCrash):
            return
        with self.job.telling:
            for peer in self._world:
                if peer is not self:
                    peer.peer_reported(self.rank, error)

    def _query(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float
    ) -> dict[int, Status]:
        return {
            rank: self._world[rank].recorder.status(channel, sequence)
            for rank in ranks
            if not isinstance(self._world[rank]._failure, InjectedCrash)
        }

    def unexpected(self, src: int, channel: int) -> list[int]:
        with self.inbox.lock:
            return self.inbox.table.unexpected(src, channel)

    def _release(self, flush: bool) -> None:
        """Nothing to free; peers that wait for this rank learn that it has left."""
        self._vanish("has left the job")

    def _vanish(self, how: str) -> None:
        """Let the receives and large sends of peers that wait for this rank fail."""
        with self.job.telling:  # who was told first, and leaves, is not the cause for the others
            self.gone = self.gone or how
        for rank in sorted({*self.awaited, *self.job.open}):
            self._take_leave(self._world[rank])
        with self.inbox.lock:
            senders = {send.backend for send in self.inbox.table.messages() if not send.finished}
        for sender in senders:
            sender.fail(sender.missed(self.rank, self.gone), tell=True)

    def _take_leave(self, peer: SimBackend) -> None:
        """Let a peer's receives fail that wait for this rank, once it can know that it is gone."""
        if not peer._how_gone(self):
            return
        died = isinstance(self._failure, InjectedCrash)
        with peer.inbox.lock:
            table = peer.inbox.table
            waits = table.awaits(self.rank) or (died and table.open_channels())
            lonely = peer.lonely(table.open_channels())
        if waits:
            peer.fail(peer.missed(self.rank, self.gone), tell=True)
        elif lonely is not None:
            peer.fail(lonely, tell=True)


def refused(send: PostedSend, receive: PostedReceive) -> bool:
    """Whether matched messages do not fit, which ends the job of both ranks."""
    sent, wanted = send.envelope, receive.envelope
    if sent.signature == wanted.signature and send.data.size == receive.out.size:
        return False
    error = fit(receive, send.key[0], sent, send.data.size, receive.backend.rank)
    if error is None:
        return False
    send.finish(error)
    receive.finish(error)
    send.backend.fail(error)
    receive.backend.fail(error, tell=True)
    return True


def _virtual(name: str) -> ModuleType:
    """A module of ranks in virtual time; imported for them only, as is what it needs."""
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != "greenlet":
            raise
        install = "pip install 'fsdpcore[simulate]'"
        raise MissingDependencyError(
            f"sim: clock=virtual needs greenlet; get it with: {install}", install
        ) from error


_NO_BYTES: Bytes = np.empty(0, np.uint8)
