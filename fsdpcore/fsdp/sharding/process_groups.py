"""The groups of ranks that an engine communicates in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdpcore.comm.backend import Backend
from fsdpcore.core.device import Device
from fsdpcore.fsdp.sharding.background import Background
from fsdpcore.fsdp.sharding.placement import Placement

Use = Literal["parameters", "gradients"]


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
    _background_groups: dict[tuple[Use, Backend], Backend] = field(
        default_factory=dict, compare=False, repr=False
    )
    _threads: dict[Use, Background] = field(default_factory=dict, compare=False, repr=False)

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

    def background(self, use: Use) -> Background:
        """Return the thread for what is more than a collective, one after the other.

        Parameters and gradients have one each: what one of them packs and unpacks goes on while
        the other one moves. All ranks have the same order of collectives in each group: the thread
        that trains submits in the order of the program, tasks of one use run in the order in which
        they were submitted, and nothing else calls collectives of the groups of that use.
        """
        if use not in self._threads:
            root = self.whole.root
            self._threads[use] = Background(root, f"fsdpcore-rank{root.rank}-{use}")
        return self._threads[use]

    @property
    def summing(self) -> tuple[Backend, Backend]:
        """The ranks that sum gradients first, and those that do so then; or twice the same."""
        whole = self.placement.whole_gradients
        return (self.whole, self.whole) if whole else (self.shards, self.replicas)

    @property
    def summing_in_background(self) -> tuple[Backend, Backend]:
        """The same for what ``background`` runs; see ``background_group``."""
        first, then = self.summing
        return self.background_group(first, "gradients"), self.background_group(then, "gradients")

    def background_group(self, group: Backend, use: Use) -> Backend:
        """Return the ranks of a group as one more group, for what ``background`` runs.

        Calls of two threads in one group have no order, which all ranks of the group must follow.
        There is one for each group, made when it is asked for first: so that has to be on the
        thread that calls the other collectives. On a GPU, where that thread enqueues all of them,
        it is the group itself.
        """
        if not self.device.on_host:
            return group
        if (use, group) not in self._background_groups:
            name = f"fsdp {use} in the background"
            self._background_groups[use, group] = group.sub(range(group.world_size), name=name)
        return self._background_groups[use, group]

    def close(self) -> None:
        """Close the groups, but not what they are groups of."""
        for thread in self._threads.values():
            thread.close()
        for group in self._background_groups.values():
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
