"""The groups of ranks that an engine communicates in."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from fsdpcore.comm.backend import Backend
from fsdpcore.core.device import Device
from fsdpcore.core.work import OrderedExecutor
from fsdpcore.fsdp.sharding.placement import Placement


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups; a group of one rank stands for no communication.

    With 8 ranks, of which 4 share a copy, and 2 of these gather for the backward pass, rank 5 has::

        whole           0 1 2 3 4 5 6 7
        shards                  4 5 6 7   share one copy of parameters, gradients, optimizer state
        replicas          1       5       hold the same shard
        regather_group          4 5       keep the parameters between them after the forward pass

    Attributes:
        placement: what it follows from.
        tensor: the ranks that have the other boxes of the same parameters; None for no others.
        everyone: all that train together: ``whole``, and for each of its ranks those of
            ``tensor``; rank ``tensor.rank * whole.world_size + whole.rank`` of it. ``whole`` itself
            without ``tensor``.
    """

    placement: Placement
    whole: Backend
    shards: Backend
    replicas: Backend
    regather_group: Backend
    everyone: Backend
    tensor: Backend | None
    _apart: dict[Backend, Backend] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        backend: Backend,
        placement: Placement,
        everyone: Backend,
        tensor: Backend | None,
    ) -> ProcessGroups:
        """Make the groups within ``backend``; does not communicate."""
        size, rank = backend.world_size, backend.rank
        first = rank - rank % placement.shards
        neighbour = rank - rank % placement.regather
        members = [
            range(first, first + placement.shards),
            range(rank % placement.shards, size, placement.shards),
            range(neighbour, neighbour + placement.regather),
        ]
        shards = _group(backend, members[0], "shards")
        replicas = _group(backend, members[1], "replicas")
        same = placement.regather == placement.shards
        return cls(
            placement,
            backend,
            shards,
            replicas,
            shards if same else _group(backend, members[2], "regather"),
            everyone,
            tensor,
        )

    @functools.cached_property
    def background(self) -> OrderedExecutor:
        """Runs what consists of several collectives, of different groups, one after the other."""
        root = self.whole.root
        return root.new_executor(f"fsdpcore-rank{root.rank}")

    @property
    def summing(self) -> tuple[Backend, Backend]:
        """The ranks that sum gradients first, and those that do so then; or twice the same."""
        whole = self.placement.whole_gradients
        return (self.whole, self.whole) if whole else (self.shards, self.replicas)

    @property
    def summing_in_background(self) -> tuple[Backend, Backend]:
        """The same for what ``background`` runs; see ``apart``."""
        first, then = self.summing
        return self.apart(first), self.apart(then)

    def apart(self, group: Backend) -> Backend:
        """Return the ranks of a group as one more group, for what ``background`` runs.

        Calls of two threads in one group have no order, which all ranks of the group must follow.
        There is one for each group, made when it is asked for first: so that has to be on the
        thread that calls the other collectives.
        """
        if group not in self._apart:
            self._apart[group] = group.sub(range(group.world_size), name="fsdp background")
        return self._apart[group]

    def close(self) -> None:
        """Close the groups, but not what they are groups of."""
        if "background" in self.__dict__:
            self.whole.root.end_executor(self.background)
        for group in self._apart.values():
            group.close()
        for group in (self.shards, self.replicas, self.regather_group, self.everyone):
            if group is not self.whole:
                group.close()

    def part(self, size: int, block: int) -> slice:
        """Return which of ``size`` elements, that all replicas hold, this one counts for all.

        In whole blocks.
        """
        blocks = -(-size // block)
        share = -(-blocks // self.replicas.world_size) * block
        return slice(share * self.replicas.rank, share * (self.replicas.rank + 1))

    @property
    def device(self) -> Device:
        """Where the engine's arrays are."""
        return self.whole.device

    @property
    def replica(self) -> int:
        """Number of the group of ranks that share this copy."""
        return self.replicas.rank

    @property
    def leads(self) -> bool:
        """Whether what all ranks of ``tensor`` have alike is counted, and given, by this one."""
        return self.tensor is None or self.tensor.rank == 0


def _group(backend: Backend, members: range, name: str) -> Backend:
    if len(members) == backend.world_size:
        return backend
    return backend.sub(members, name=f"fsdp {name}")
