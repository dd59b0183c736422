"""``HostContext``: the ranks of a group on one host, within a collective of the whole group.

Where a group spans several hosts, the ranks of each have a context of their own, on a channel of
their own and, where they can, with a region of their own. It takes part in the group's collectives
only: it has their sequence numbers and deadlines, and its errors are theirs. Whether the ranks of
a host share memory makes no difference to the other hosts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from fsdpcore.collectives.algorithms import direct, doubling
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.shared.establish import establish as establish_region
from fsdpcore.collectives.shared.interpreter import move
from fsdpcore.collectives.spec import Layout, Operation
from fsdpcore.comm.backend import Backend, SubBackend
from fsdpcore.comm.envelope import Envelope
from fsdpcore.core.buffers import Array
from fsdpcore.core.channels import channel_of
from fsdpcore.core.reductions import Reduction
from fsdpcore.diagnostics.status import Group


class Carrier(NamedTuple):
    """Collectives within a host; with the arguments of those in ``direct`` and ``shared``.

    Attributes:
        broadcast: None where they send messages: then the pieces that cross between hosts are
            sent on as they are.
    """

    reduce_scatter: Callable[[CollectiveContext, Array, Array, Sequence[int], Reduction], None]
    all_gather: Callable[[CollectiveContext, Array, Array, Sequence[int]], None]
    broadcast: Callable[[CollectiveContext, Array, int], None] | None

    @property
    def sends(self) -> bool:
        """Whether they send messages."""
        return self.broadcast is None


MESSAGES = Carrier(direct.reduce_scatter, direct.all_gather, None)


class HostContext(CollectiveContext):
    """Made by ``establish``.

    Attributes:
        carrier: how the ranks move data.
    """

    def __init__(self, whole: CollectiveContext, backend: Backend, memory: Carrier) -> None:
        """Make the context.

        Args:
            whole, backend: the group.
            memory: the collectives for contexts with a region.
        """
        here = backend.hosts[backend.rank]
        members = [rank for rank, host in enumerate(backend.hosts) if host == here]
        # Not from ``sub``: the group may be closed already, while its last collectives run.
        channel = channel_of(backend.channel, tuple(members), 0, "\0levels")
        ranks = tuple(backend.ranks[member] for member in members)
        self._group = SubBackend(backend, members, Group(channel, ranks))
        super().__init__(self._group)
        self._whole, self._memory = whole, memory
        self.carrier = MESSAGES

    def follow(self) -> None:
        """Take part in what the whole group is doing."""
        whole = self._whole
        self.spec, self.sequence, self.entry = whole.spec, whole.sequence, whole.entry
        self.background, self.end = whole.background, whole.end
        self._look_at = whole._look_at
        self._envelope = Envelope(self._channel, whole._envelope.tag)

    def establish(self) -> None:
        """Let the ranks of this host find out whether they share memory."""
        self.follow()
        try:
            region = establish_region(self, self._group)
        finally:
            self.release()
        if region is not None and region.moves:
            self.share(region)
            self.carrier = self._memory

    def look(self, awaited: Sequence[int]) -> None:
        self._whole.look(awaited)
        self._look_at = self._whole._look_at

    def disagree(self) -> NoReturn:
        self._whole.disagree()


def _in_memory(operations: Mapping[str, Operation]) -> Carrier:
    """The collectives of ranks that share memory."""
    names = "reduce_scatter", "all_gather", "broadcast"
    scatter, gather, spread = (operations[name].movement for name in names)
    return Carrier(
        lambda context, source, own, bounds, reduction: move(
            context, scatter, Layout(-1, reduction, bounds), source, own
        ),
        lambda context, own, out, bounds: move(context, gather, Layout(-1, None, bounds), own, out),
        lambda context, data, root: move(context, spread, Layout(root), data, data),
    )


def establish(
    context: CollectiveContext, backend: Backend, operations: Mapping[str, Operation]
) -> bool:
    """Give the context of a group on several hosts, in its first collective, the one of this host.

    Args:
        context, backend: of the group.
        operations: all collectives, by name.

    Returns:
        Whether on every host the ranks share memory; the same on all ranks.

    Raises:
        ConfigError: some do not, though the transport was told that they have to.
    """
    hosts = backend.hosts
    if len(set(hosts)) == 1:
        return False
    context.inside = inside = HostContext(context, backend, _in_memory(operations))
    if backend.root.memory is None or len(set(hosts)) == context.size:
        return False
    inside.establish()
    shares = np.array([inside.region is not None or inside.size == 1])
    votes = np.zeros(context.size, np.bool_)
    doubling.all_gather(context, shares, votes, range(context.size + 1))
    return bool(votes.all())


@contextlib.contextmanager
def within_host(context: CollectiveContext) -> Iterator[tuple[CollectiveContext, Carrier]]:
    """The context of the ranks on this host, and what to use on it, during a collective."""
    inside = context.inside
    if inside is None:  # all ranks are on one host
        yield context, MESSAGES
        return
    assert isinstance(inside, HostContext)
    inside.follow()
    try:
        yield inside, inside.carrier
    finally:
        inside.release()
