"""``zmq``: the ranks are processes, which tell each other everything over ZeroMQ.

Each has two sockets, whatever the number of ranks (``links.py``). Between ranks of one host, the
bytes of large messages go through memory (``memory.py``). Sends start on the caller's thread;
whoever waits looks after what comes; while nobody does, a thread of each rank does, so data moves
while Python computes.

A rank that dies is noticed by its links, whether or not anybody needs it (``watch.py``). One that
fails or leaves says so first. What travels between hosts is encrypted (``keys.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import zmq

from fsdpcore.comm.envelope import Envelope
from fsdpcore.comm.transport import Transport
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import ClosedError, CommunicationError, in_words
from fsdpcore.core.policy import Policy
from fsdpcore.core.wildcard import ANY_NUMBER
from fsdpcore.core.work import Deadline, Pending
from fsdpcore.diagnostics.status import Status

from ..memory.shared import memory_sharing
from . import joining
from .agents import ZmqAgentLinks
from .channel import PeerChannel
from .control import Control
from .joining import Joined
from .keys import JobKeys
from .link_speed import measure
from .links import IO_THREADS, Links
from .messages import SENT, ConnectionState, IncomingMessage
from .options import ZmqOptions
from .outlet import Flow, Outlet
from .peer import Peer
from .poller import Poller
from .watch import Watch

if TYPE_CHECKING:
    from fsdpcore.comm.agents import AgentLinks
    from fsdpcore.comm.config import TransportConfig
    from fsdpcore.comm.place import RankPlace

# How long a rank that closes, and one that failed, waits for the others to have read all it said.
_CLOSING_SECONDS, _FAILED_SECONDS = 5.0, 0.5
# What may be under way on a link within a host; and, as long as nothing else is known, between two,
# where segments are smaller.
_WINDOW = 4 << 20
_FAR_SEGMENT = 64 << 10


class ZmqBackend(Transport):
    """One rank; made by ``join``."""

    takes_address = True
    not_elastic = ""
    unauthenticated = ""  # of a rank that is alone
    options: ClassVar[type[ZmqOptions]] = ZmqOptions
    transport_capabilities = Capabilities("zmq", alpha=60e-6, beta=0.5e-9, gamma=0.1e-9)

    def __init__(
        self, place: RankPlace, timeout: float, options: ZmqOptions, policy: Policy | None = None
    ) -> None:
        super().__init__(place.rank, place.world_size, timeout, policy=policy)
        self.memory = memory = memory_sharing(options.shm)
        self._options = options
        self.state = ConnectionState(
            place.rank, options.eager_bytes, memory, functools.partial(self.fail, tell=True)
        )
        self.control = Control(self, self.state, self._make_peer)
        self.lock, self.table = self.state.lock, self.state.table
        name = f"fsdpcore-zmq-rank{place.rank}"
        self.poller = self.state.poller = Poller(self.lock, self._tick, self._stop_polling, name)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._joined = False
        # What a rank sends to itself waits in its table of messages, and is seen by no socket.
        nowhere = Outlet(lambda header, payload, copy=True: None, Flow(0, 0))
        self._own_channel = PeerChannel(self.state, self.rank, nowhere)
        self._far_flow = Flow(min(_FAR_SEGMENT, options.segment_bytes), _WINDOW, _WINDOW)

    # Joining.

    @classmethod
    def versions(cls) -> str:
        return f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"

    @classmethod
    def check_meeting(cls, address: tuple[str, int], token: str, config: TransportConfig) -> None:
        joining.check_meeting(address, token, config.transport_options)

    @classmethod
    def link_agents(
        cls, address: tuple[str, int], token: str, config: TransportConfig
    ) -> AgentLinks:
        if cls.not_elastic:
            return super().link_agents(address, token, config)
        joining.check_meeting(address, token, config.transport_options)
        return ZmqAgentLinks(address, token)

    @classmethod
    def join(cls, place: RankPlace, config: TransportConfig) -> Transport:
        options = config.transport_options
        assert isinstance(options, ZmqOptions)
        backend = cls(place, config.timeout, options, config.policy)
        try:
            if place.world_size > 1:
                scheme = cls.transport_capabilities.transport
                address = joining.meeting_point(place, config, scheme)
                deadline = Deadline(config.rendezvous_timeout, cls.clock, place.given_up)
                backend._connect(place, address, deadline)
                backend._measure(deadline)
        except BaseException as error:
            why = f"rank {place.rank} did not join: {in_words(error)}"
            backend.fail(CommunicationError(why), tell=True)
            backend._release(flush=False)
            raise
        return backend

    def _connect(self, place: RankPlace, address: tuple[str, int], deadline: Deadline) -> None:
        """Meet the other ranks, let them connect, and connect to those that watch this one."""
        _keep_freed_memory()
        options, keys = self._options, JobKeys(place.token, place.job)
        joined = joining.meet(self._context, place, keys, address, options, deadline)
        self.hosts = joined.hosts
        self.unauthenticated = joined.unauthenticated
        with self.lock:
            with joined.listener:  # which is ZeroMQ's once it listens
                self._open(keys, joined)
            for rank in self.control.watch.neighbours:
                self.control.open(rank)
        self._joined = True
        self.poller.start()

    def _measure(self, deadline: Deadline) -> None:
        """Go by what the links between hosts carry, if there are several hosts."""
        if len(set(self.hosts)) == 1:
            return
        speed = measure(self, deadline, self._options.heartbeat)
        self.policy = dataclasses.replace(self.policy, link=speed.costs(self.capabilities))
        with self.lock:
            self._far_flow = speed.flow(self._options.segment_bytes)
            self.control.watch.expect(speed.round_trip)
            for peer in self.control.peers.values():
                if self.hosts[peer.rank] != self.hosts[self.rank]:
                    peer.channel.use(self._far_flow)

    def _open(self, keys: JobKeys, joined: Joined) -> None:
        control = self.control
        control.links = links = Links(
            self._context,
            self.rank,
            self.world_size,
            keys,
            encrypted=joined.encrypted,
            heartbeat=self._options.heartbeat,
            lost=control.lost,
        )
        control.watch = Watch(
            self.rank,
            joined.hosts,
            joined.addresses,
            self._options.heartbeat,
            control,
            self.clock,
        )
        links.introduce(joined.nonce, joined.addresses)
        links.listen(joined.listener, joined.own, joined.sources)
        for descriptor, handler in links.watched(control.serve, control.look):
            self.poller.add(descriptor, handler)

    def _make_peer(self, rank: int) -> Peer:
        memory, links = self.state.memory, self.control.links
        near = self.hosts[rank] == self.hosts[self.rank]
        flow = Flow(self._options.segment_bytes, _WINDOW) if near else self._far_flow
        outlet = Outlet(functools.partial(links.send, rank), flow)
        shared = memory if near and memory.available else None
        return Peer(rank, PeerChannel(self.state, rank, outlet, shared))

    def _tick(self) -> float | None:
        return self.control.tick() if self._joined else None

    def _stop_polling(self, error: BaseException) -> None:
        why = f"the thread of rank {self.rank} that looks after its links ended: {in_words(error)}"
        self.fail(CommunicationError(why), tell=True)

    # Messages.

    def post_send(self, data: Bytes, dst: int, envelope: Envelope) -> Pending:
        with self.lock:
            self.check_usable()
            if dst == self.rank:
                return self._send_to_self(data, envelope)
            peer = self.control.peer(dst)
            if peer.closed_or_failed or self.control.leaving:
                self._refuse(peer)
            try:
                return peer.channel.send(data, envelope)
            except BaseException as error:
                self.control.interrupted(error)
                raise

    def post_recv(self, out: Bytes, src: int, envelope: Envelope) -> Pending:
        with self.lock:
            incoming = self._receive(out, src, envelope)
            try:
                arrival = self.table.post(incoming)
                if arrival is not None:
                    arrival.peer_channel.match(arrival, incoming)
                else:
                    self._check_senders(incoming, src, envelope)
            except BaseException as error:
                self.control.interrupted(error)
                raise
        return incoming

    def post_probe(self, src: int, envelope: Envelope) -> Pending:
        with self.lock:
            probe = self._receive(_NO_BYTES, src, envelope)
            self.table.probe(probe)
            if not probe.finished:
                self._check_senders(probe, src, envelope)
        return probe

    def _receive(self, out: Bytes, src: int, envelope: Envelope) -> IncomingMessage:
        """Make a receive, once the last words of who sends are read."""
        self.check_usable()
        if src != ANY_NUMBER and src != self.rank:
            peer = self.control.peer(src)
            if peer.closed_or_failed or peer.link_broken:
                self.control.serve()
                self.check_usable()
        return IncomingMessage(self.state, out, src, envelope)

    def _check_senders(self, incoming: IncomingMessage, src: int, envelope: Envelope) -> None:
        """Withdraw a receive, and raise, if nobody is there to send what it waits for."""
        if src == ANY_NUMBER:
            error = self.lonely([envelope.channel])
            if error is not None:
                self.table.withdraw_receive(incoming)
                raise error
            self.control.await_from_any(envelope.channel)
        elif self.departed(src):
            self.table.withdraw_receive(incoming)
            self._refuse(self.control.peer(src))
        else:
            self.control.await_from(src)

    def _send_to_self(self, data: Bytes, envelope: Envelope) -> Pending:
        try:
            self._own_channel.send_to_self(data, envelope)
        except BaseException as error:
            self.control.interrupted(error)
            raise
        return SENT

    def progress(self) -> None:
        with self.lock:
            self.control.serve()

    def _refuse(self, peer: Peer) -> None:
        """Raise because of a message to or from a rank that has left, or by one that leaves."""
        if self.control.leaving:
            raise ClosedError(f"the backend of rank {self.rank} is being closed")
        self.control.miss(peer)
        self.check_usable()

    def unexpected(self, src: int, channel: int) -> list[int]:
        with self.lock:
            return self.table.unexpected(src, channel)

    # What the ranks tell each other.

    def departed(self, rank: int) -> bool:
        peer = self.control.peers.get(rank)
        return peer is not None and peer.closed_or_failed

    def has_returned(self, rank: int) -> bool:
        return rank in self.control.watch.returned

    def _tell(self, error: CommunicationError) -> None:
        with self.lock:
            self.control.say_failed(error)

    def _query(
        self, ranks: Iterable[int], channel: int, sequence: int, seconds: float
    ) -> dict[int, Status]:
        with self.lock:
            return self.control.query(ranks, channel, sequence, seconds)

    # Ending.

    def _fail_pending(self, error: CommunicationError) -> None:
        with self.lock:
            waits: list[Pending] = list(self.table.receives())
            for peer in self.control.peers.values():
                waits += peer.channel.waits()
                peer.channel.drop_all()
            self.table.clear()
            for pending in waits:
                pending.finish(error)
            self.poller.changed()

    def close(self) -> None:
        if self.forked:
            return
        self._close_executors()  # what they still run needs the connections
        with self.lock:
            if self._joined and self._failure is None and not self.control.leaving:
                # Said first, so that nobody waits for a receive that will never be posted, while
                # this rank waits until what it has sent is taken.
                self.control.say_bye()
                self.poller.until(lambda: self._failure or self._idle(), self.default_timeout)
        super().close()

    def _idle(self) -> bool:
        return all(peer.idle for peer in self.control.peers.values())

    def _release(self, flush: bool) -> None:
        seconds = _CLOSING_SECONDS if flush else _FAILED_SECONDS
        with self.lock:
            if self.control.released:
                return
            if self._failure is not None and not isinstance(self._failure, ClosedError):
                self.control.say_failed(self._failure)
            elif self._joined and not self.control.leaving:
                self.control.say_bye()
            # Not left to ZeroMQ's LINGER, which for a peer that is gone waits until it is over.
            peers = self.control.peers
            self.poller.until(lambda: all(p.has_read_all for p in peers.values()), seconds)
            self.control.released = True
            if self._joined:
                self.control.watch.close()
        self.poller.stop()
        if self._joined:
            self.control.links.close(0)
        # Very rarely libzmq never comes back from this, though all sockets are closed: seen after
        # failures, on a loaded machine. What is left then are its own idle threads.
        ending = self.clock.start(lambda: self._context.destroy(0), "fsdpcore-zmq-end")
        ending.join(seconds)


_NO_BYTES: Bytes = np.empty(0, np.uint8)


def _keep_freed_memory() -> None:
    """Have the C library keep the memory of segments that were read for those that come.

    glibc gives memory back to the system once more of it is idle than twice the largest block that
    was ever freed: see mallopt(3), M_TRIM_THRESHOLD. Then every page of the next segments is made
    anew, two fifths of the time of a 16 MiB broadcast with ``shm=off``. So free a window at once.
    """
    np.empty(_WINDOW, np.uint8)
