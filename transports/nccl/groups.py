"""Which NCCL communicator belongs to which group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fsdpcore.collectives.algorithms import bruck
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.on_device import device_twin
from fsdpcore.collectives.operations.all_gather import all_gather
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, bounds_of
from fsdpcore.core.work import Deadline

from .communicators import Communicator, Communicators

# Of communicators that are free, how many the ranks of a new group look at.
_OFFERED = 4


class GroupCommunicators:
    """The communicators of one rank's groups, by the channel of the group's calls on the GPU.

    That of all ranks is made when they join, those of ``Backend.split`` by dividing it. Any other
    group gets one with its first call: a new one, or one of the same ranks whose group all of them
    have closed. None is ended before the job: NCCL waits for other ranks then, and for whatever
    the GPU does.
    """

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self._found: dict[int, Communicator] = {}
        # Those that all ranks of the group have made at the same point of the program.
        self._common: set[int] = set()
        # By the group's ranks and, for all of them the same, the channel that it was made for.
        self._made_for: dict[Communicator, int] = {}
        self._free: dict[tuple[int, ...], dict[int, Communicator]] = {}

    def add(self, channel: int, communicator: Communicator) -> None:
        """Note one that all ranks of the group have made at the same point of the program."""
        self._found[channel] = communicator
        self._made_for[communicator] = channel
        self._common.add(channel)

    def find(self, channel: int) -> Communicator | None:
        """The communicator of a group, if it has one yet."""
        return self._found.get(channel)

    def of(self, group: Backend, context: CollectiveContext) -> Communicator:
        """The communicator of a group, whose ranks all ask for it in the same call."""
        found = self._found.get(group.channel) or self._again(group, context)
        if found is None:
            found = self._communicators.meet(context)
            self._made_for[found] = group.channel
        self._found[group.channel] = found
        return found

    def _again(self, group: Backend, context: CollectiveContext) -> Communicator | None:
        """Return one that is free on all ranks of a group, if there is one; all ranks call this."""

        def gather(mine: Array) -> Array:
            every = np.empty(context.size * _OFFERED, np.uint64)
            bruck.all_gather(context, mine, every, bounds_of([_OFFERED] * context.size))
            return every

        return self._free_everywhere(group, gather)

    def _free_everywhere(
        self, group: Backend, gather: Callable[[Array], Array]
    ) -> Communicator | None:
        """Return what ``_again`` does; ``gather`` joins an array of each of the group's ranks."""
        free = self._free.get(group.ranks, {})
        mine = np.zeros(_OFFERED, np.uint64)
        offered = sorted(free)[:_OFFERED]
        mine[: len(offered)] = offered
        common = set(offered)
        for row in gather(mine).reshape(-1, _OFFERED).tolist():
            common.intersection_update(row)
        return free.pop(min(common)) if common else None

    def release(self, group: Backend) -> None:
        """Let another group of the same ranks have what a group has, whose calls have ended."""
        found = self._found.pop(group.channel, None)
        self._common.discard(group.channel)
        if found is not None:
            self._free.setdefault(group.ranks, {})[self._made_for[found]] = found

    def can_split(self, group: Backend) -> bool:
        """Whether a group's communicator can be divided: all ranks know that all have it."""
        return device_twin(group).channel in self._common

    def split(self, group: Backend, made: Backend | None, seconds: float) -> None:
        """Divide the communicator of a group, all whose calls have ended, as it was divided itself.

        Where all ranks of a part have closed another group of the same ranks, it gets what that
        one had. Then they divide nothing, but take part, as the ranks of no part do.

        Args:
            group: one that ``can_split``, on all its ranks.
            made: the part that this rank is in.
            seconds: how long that may take.

        Raises:
            CommunicationError: the others have not come, or NCCL refuses.
        """
        deadline, color, key, again = Deadline(seconds), -1, 0, None
        if made is not None and made.world_size > 1:
            with made.sub(range(made.world_size), name="nccl") as talk:
                again = self._free_everywhere(
                    made, lambda mine: all_gather(mine, talk, timeout=deadline.remaining())
                )
            if again is None:
                color, key = min(group.ranks.index(rank) for rank in made.ranks), made.rank
        parent = self._found[device_twin(group).channel]
        part = self._communicators.split(parent, color, key, deadline.remaining()) or again
        if part is not None and made is not None:
            self.add(device_twin(made).channel, part)
