"""``sim://?clock=virtual``: ranks in virtual time, whose messages go over the model of a network.

A small message travels with its envelope. Of a larger one the envelope goes ahead; when a receive
takes it, the sender hears of that and sends the bytes, as over a real wire.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.collectives.shared import algorithm as shared
from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import ClosedError, CommunicationError, RankStopped
from fsdpcore.core.policy import Costs, Tuning
from fsdpcore.simulation.abstract import AbstractDevice
from fsdpcore.simulation.fibers import VirtualClock
from fsdpcore.simulation.network_file import named

from .backend import PostedReceive, PostedSend, SimBackend, refused
from .options import SimOptions
from .wire import Wire

if TYPE_CHECKING:
    from fsdpcore.comm.config import TransportConfig

# What the processor takes for a message where no network says it.
_POST_SECONDS = 1e-6
# Calls of a rank after its job has failed.
_MOST_REFUSED = 10_000


class VirtualBackend(SimBackend):
    """One rank of a job in virtual time; ``ranks`` makes them all."""

    clock: VirtualClock
    posts_take_time = True

    def __init__(
        self,
        rank: int,
        world: Sequence[SimBackend],
        world_size: int,
        config: TransportConfig,
        wire: Wire,
    ) -> None:
        self.clock = wire.clock
        self._wire = wire
        # Sends of this rank whose envelopes travel, and those whose bytes do; receives that have
        # met their messages, and whether all bytes of these have come.
        self._offered: dict[PostedSend, None] = {}
        self._sending: dict[PostedSend, None] = {}
        self._receiving: dict[PostedReceive, bool] = {}
        self._refused = 0  # calls since the job has failed
        # This rank's processor does one thing after the other. It is through with the last message
        # that it took in at the first of these times, with the last call of the rank at the second.
        self._taken_in = self._called = 0.0
        self._posting = 0  # calls that it is busy with; they go before what has come
        self._taking = False
        self._coming: deque[PostedReceive] = deque()
        network, options = wire.network, config.transport_options
        if options.arrays == "abstract":
            self.device = AbstractDevice()
        policy = config.policy
        if network is not None:  # algorithms are chosen by its costs, not by those of threads
            policy = dataclasses.replace(policy, tuning=_tuning(wire), link=wire.costs)
        super().__init__(rank, world, world_size, config.timeout, options, policy)
        if network is not None:
            if not network.memory:
                self.memory = None  # all that moves is a message
            self.hosts = wire.hosts
            self._eager_bytes = network.eager
            if network.reduce < math.inf and not self.clock.computing:
                self.reduce_rate = network.reduce
            self.transport_capabilities = Capabilities("sim", **dataclasses.asdict(wire.costs))

    def check_usable(self) -> None:
        if self._failure is not None:
            self._refused += 1
            if self._refused > _MOST_REFUSED:  # nothing else could go on while it tries again
                raise RankStopped(f"rank {self.rank} went on after its job had failed")
        super().check_usable()

    def _before_post(self, nbytes: int = 0) -> None:
        network, drawn = self._wire.network, self.clock.random
        if network is not None:
            moving = nbytes / network.memory if nbytes and not self.clock.computing else 0.0
            self._process(network.message + moving)
        else:  # never nothing, or who looks for messages in a loop would for ever
            self.clock.sleep(
                _POST_SECONDS if drawn is None else drawn.uniform(0, 2 * _POST_SECONDS)
            )
        super()._before_post(nbytes)

    def _process(self, seconds: float) -> None:
        """Have the processor see to a call, once it is through with what it does now."""
        clock = self.clock
        self._posting += 1
        try:
            # The time of a clock that measures goes on from call to call.
            while (wait := max(self._taken_in, self._called) - clock.now()) > 0:
                clock.sleep(wait)
            self._called = self._wire.processed(self.rank, seconds)
            clock.sleep(max(0.0, self._called - clock.now()))
            self._called = clock.now()  # which rounding may have put behind it
        finally:
            self._posting -= 1
            self._take_next()

    def _before_receive(self) -> None:
        if self._wire.network is None:
            self._before_post()
        else:  # what has come takes time, not to wait for it
            self._called = max(self._called, self.clock.now())
            super()._before_post()

    def _carry(self, send: PostedSend, peer: SimBackend, eager: bool) -> None:
        assert isinstance(peer, VirtualBackend)
        self._check_peer_alive(peer)
        if eager:
            send.finish()
        else:
            self._offered[send] = None
        if peer is self:
            peer._arrived(send)
        else:
            nbytes = send.data.size if eager else 0
            self._wire.send(self.rank, peer.rank, nbytes, lambda: peer._arrived(send))
            if ahead := self._ahead(send.data.size) - nbytes:
                self._wire.move(self.rank, peer.rank, ahead, lambda: None)

    def _ahead(self, nbytes: int) -> int:
        """How many bytes of a message leave before its receiver has asked for them.

        The last byte of a large message always waits for that. So the message is there once it is.
        """
        network = self._wire.network
        if network is None or nbytes <= self._eager_bytes:
            return nbytes
        return min(network.ahead, nbytes - 1)

    def _arrived(self, send: PostedSend) -> None:
        """Take the envelope of a message, and its bytes if it is a small one."""
        sender = send.backend
        assert isinstance(sender, VirtualBackend)
        # It may have been withdrawn on its way.
        lost = (self.rank, send.key) in sender._lost
        if (send.finished or send in sender._offered) and not lost:
            if not self.gone:
                sender._offered.pop(send, None)
                receive = self.inbox.table.arrive(send)
                if receive is not None:
                    self._move(send, receive)
            elif not send.finished:
                sender.fail(sender.missed(self.rank, self.gone), tell=True)
        if sender.gone and not self._wire.under_way(sender.rank, self.rank):
            sender._take_leave(self)

    def withdraw(self, send: PostedSend) -> bool:
        if send in self._offered:
            del self._offered[send]
            return True
        return super().withdraw(send)

    def end_of(self, item: PostedSend | PostedReceive) -> bool:
        if isinstance(item, PostedSend):
            moving = item in self._sending
        else:
            moving = self._receiving.get(item) is False
        return item.finished if moving else super().end_of(item)

    def _move(self, send: PostedSend, receive: PostedReceive) -> None:
        sender, wire = send.backend, self._wire
        assert isinstance(sender, VirtualBackend)
        if refused(send, receive):
            return
        if send.finished:
            np.copyto(receive.out, send.data)
            self._take_in(receive)
            return
        sender._sending[send], self._receiving[receive] = None, False
        # The sender hears that its bytes are waited for, and sends those that it has not sent yet.
        rest = send.data.size - sender._ahead(send.data.size)
        wire.answer(
            self.rank,
            sender.rank,
            lambda: wire.move(sender.rank, self.rank, rest, lambda: self._has_come(send, receive)),
        )

    def _has_come(self, send: PostedSend, receive: PostedReceive) -> None:
        """Take the bytes of a large message, unless the job of a rank has ended meanwhile."""
        sender = send.backend
        assert isinstance(sender, VirtualBackend)
        if send.error is None and not receive.finished:
            np.copyto(receive.out, send.data)
            self._take_in(receive)
        sender._sending.pop(send, None)
        send.finish()

    def _take_in(self, receive: PostedReceive) -> None:
        """Finish a receive once the processor has taken its message in, one after the other."""
        if self._wire.network is None:
            self._finish(receive)
            return
        self._receiving[receive] = True
        self._coming.append(receive)
        self._take_next()

    def _take_next(self) -> None:
        """Take in the first message that has come, if the processor does nothing else."""
        network = self._wire.network
        if network is None or not self._coming or self._posting or self._taking:
            return
        self._taking = True
        receive, idle = self._coming.popleft(), max(self._taken_in, self._called) < self.clock.now()
        self._taken_in = self._wire.processed(self.rank, network.message + network.wake * idle)

        def taken_in() -> None:
            self._taking, self._taken_in = False, self.clock.now()  # as in ``_process``
            self._finish(receive)
            self._take_next()

        self.clock.at(self._taken_in, taken_in)

    def _finish(self, receive: PostedReceive) -> None:
        if not receive.finished:
            self._receiving.pop(receive, None)
            receive.finish()

    def _fail_pending(self, error: CommunicationError) -> None:
        super()._fail_pending(error)
        receives, self._receiving = self._receiving, {}
        for receive in receives:
            receive.finish(error)
        if not isinstance(error, ClosedError):
            sends = [*self._offered, *self._sending]
            self._offered, self._sending = {}, {}
            for send in sends:
                send.finish(error)

    def _how_gone(self, peer: SimBackend) -> str:
        # What it had sent comes first.
        return "" if self._wire.under_way(peer.rank, self.rank) else peer.gone


def ranks(
    world_size: int, config: TransportConfig, wire: Wire | None = None
) -> list[VirtualBackend]:
    """Make the backends of all ranks of a job, on a wire of their own if none is given."""
    wire = wire or wire_of(world_size, config)
    world: list[VirtualBackend] = []
    for rank in range(world_size):
        world.append(VirtualBackend(rank, world, world_size, config, wire))
    return world


def wire_of(world_size: int, config: TransportConfig) -> Wire:
    """Make what the messages of a job travel over, and its clock."""
    options = config.transport_options
    assert isinstance(options, SimOptions)
    network = named(options.network) if options.network else None
    speed = 1.0 if network is None else network.speed
    computing = 1 / speed if options.compute == "measured" else 0.0
    return Wire(VirtualClock(options.seed, computing), network, world_size)


def _tuning(wire: Wire) -> Tuning:
    """What messages and bytes cost where all ranks are on one host."""
    network = wire.network
    assert network is not None
    if not network.memory:
        return Tuning(wire.costs)
    inside = Costs(network.message, 1 / network.memory, 1 / network.reduce)
    return Tuning(inside, {shared.NAME: inside})
