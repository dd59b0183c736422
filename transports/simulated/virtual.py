"""``sim://?clock=virtual``: ranks in virtual time, whose messages go over the model of a network.

A small message travels with its envelope. Of a larger one the envelope goes ahead; when a receive
takes it, the sender hears of that and sends the bytes, as over a real wire.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fsdpcore.core.capabilities import Capabilities
from fsdpcore.core.errors import ClosedError, CommunicationError
from fsdpcore.core.policy import Costs, Policy, Tuning
from fsdpcore.simulation.fibers import VirtualClock
from fsdpcore.simulation.network import DEFAULT, Network

from .backend import PostedReceive, PostedSend, SimBackend, SimOptions, refused
from .memory import SimMemory
from .wire import Wire

if TYPE_CHECKING:
    from fsdpcore.comm.config import TransportConfig

# What the processor takes for a message where no network says it.
_POST_SECONDS = 1e-6


class VirtualBackend(SimBackend):
    """One rank of a job in virtual time; ``in_virtual_time`` makes them all."""

    clock: VirtualClock

    def __init__(
        self,
        rank: int,
        world: list[SimBackend],
        world_size: int,
        config: TransportConfig,
        options: SimOptions,
        clock: VirtualClock,
        wire: Wire,
    ) -> None:
        self.clock = clock
        self._wire = wire
        # Sends of this rank whose envelopes travel, and what it sends and receives that does.
        self._offered: dict[PostedSend, None] = {}
        self._sending: dict[PostedSend, None] = {}
        self._receiving: dict[PostedReceive, None] = {}
        network = wire.network
        policy = config.policy if network is None else _policy(config.policy, network, world_size)
        super().__init__(rank, world, world_size, config.timeout, options, policy)
        if network is None:
            if self.memory is not None:
                self.memory = SimMemory(self.job, self._before_post, clock.lock)
        else:  # which all messages are to go over
            self.memory = None
            self.hosts = world[0].hosts if world else tuple(network.hosts(world_size))
            self._eager_bytes = network.eager
            self.transport_capabilities = Capabilities(
                "sim", **dataclasses.asdict(_costs(network, world_size))
            )

    def _before_post(self) -> None:
        network, drawn = self._wire.network, self.clock.random
        if network is not None:
            self.clock.sleep(network.message)
        else:  # never nothing, or who looks for messages in a loop would for ever
            self.clock.sleep(
                _POST_SECONDS if drawn is None else drawn.uniform(0, 2 * _POST_SECONDS)
            )
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

    def _arrived(self, send: PostedSend) -> None:
        """Take the envelope of a message, and its bytes if it is a small one."""
        sender = send.backend
        assert isinstance(sender, VirtualBackend)
        if send.finished or send in sender._offered:  # or it was withdrawn on its way
            if not self.gone:
                sender._offered.pop(send, None)
                receive = self.inbox.table.arrive(send)
                if receive is not None:
                    self._move(send, receive)
            elif not send.finished:
                sender.fail(self._parting(), tell=True)
        if sender.gone and not self._wire.under_way(sender.rank, self.rank):
            sender._take_leave(self)

    def withdraw(self, send: PostedSend) -> bool:
        if send in self._offered:
            del self._offered[send]
            return True
        return super().withdraw(send)

    def _move(self, send: PostedSend, receive: PostedReceive) -> None:
        sender, wire = send.backend, self._wire
        assert isinstance(sender, VirtualBackend)
        if refused(send, receive):
            return
        if send.finished:
            np.copyto(receive.out, send.data)
            receive.finish()
            return
        sender._sending[send] = self._receiving[receive] = None
        # The sender hears that its bytes are waited for, and sends them.
        wire.answer(
            self.rank,
            sender.rank,
            lambda: wire.move(
                sender.rank, self.rank, send.data.size, lambda: self._has_come(send, receive)
            ),
        )

    def _has_come(self, send: PostedSend, receive: PostedReceive) -> None:
        """Take the bytes of a large message, unless the job of a rank has ended meanwhile."""
        sender = send.backend
        assert isinstance(sender, VirtualBackend)
        if send.error is None and not receive.finished:
            np.copyto(receive.out, send.data)
            self._receiving.pop(receive)
            receive.finish()
        sender._sending.pop(send, None)
        send.finish()

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


def in_virtual_time(
    world_size: int, config: TransportConfig, options: SimOptions
) -> list[VirtualBackend]:
    """Make the backends of all ranks; ``options`` are those of ``config``."""
    clock = VirtualClock(options.seed)
    network = _network(options.network)
    if network is not None:
        network.check_room(world_size)
    wire = Wire(clock, network, world_size)
    world: list[SimBackend] = []
    for rank in range(world_size):
        world.append(VirtualBackend(rank, world, world_size, config, options, clock, wire))
    return [rank for rank in world if isinstance(rank, VirtualBackend)]


def _network(name: str) -> Network | None:
    if not name:
        return None
    return DEFAULT if name == "default" else Network.read(Path(name))


def _costs(network: Network, world_size: int) -> Costs:
    """What a message costs over the slowest links that there are between ranks."""
    below = (1, *network.spans)  # ranks under each member that a level connects
    used = [
        level
        for level, span in zip(network.levels, below, strict=False)
        if span is not None and span < world_size
    ]
    highest = used[-1] if used else network.levels[0]
    return Costs(network.message, 1 / highest.rate, 1 / network.reduce, highest.latency)


def _policy(policy: Policy, network: Network, world_size: int) -> Policy:
    """Choose algorithms by the costs of a network, not by those that threads have."""
    costs = _costs(network, world_size)
    return dataclasses.replace(policy, tuning=Tuning(costs), link=costs)
