"""Which NCCL communicator belongs to which group."""

from __future__ import annotations

from fsdpcore.backend import Backend
from fsdpcore.collectives.link import Link

from .nccl_comm import Communicator, Communicators


class GroupCommunicators:
    """The communicators of one rank's groups, by the channel of the group's calls on the GPU.

    That of all ranks is made when they join, those of ``Backend.split`` by dividing it. Any other
    group's is made by its first call.
    """

    def __init__(self, communicators: Communicators) -> None:
        self._communicators = communicators
        self._found: dict[int, Communicator] = {}
        # Those that all ranks of the group have made at the same point of the program.
        self._common: set[int] = set()

    def add(self, channel: int, communicator: Communicator) -> None:
        """Note one that all ranks of the group have made at the same point of the program."""
        self._found[channel] = communicator
        self._common.add(channel)

    def find(self, channel: int) -> Communicator | None:
        """The communicator of a group, if it has one yet."""
        return self._found.get(channel)

    def of(self, group: Backend, link: Link) -> Communicator:
        """The communicator of a group, whose ranks all ask for it in the same call."""
        if group.channel not in self._found:
            self._found[group.channel] = self._communicators.meet(link)
        return self._found[group.channel]

    def can_split(self, group: Backend) -> bool:
        """Whether a group's communicator can be divided: all ranks know that all have it."""
        return group.on_device.channel in self._common

    def split(self, group: Backend, made: Backend | None, seconds: float) -> None:
        """Divide the communicator of a group, all whose calls have ended, as it was divided itself.

        Args:
            group: one that ``can_split``, on all its ranks.
            made: the part that this rank is in.
            seconds: how long that may take.

        Raises:
            CommunicationError: the others have not come, or NCCL refuses.
        """
        color, key = -1, 0
        if made is not None and made.world_size > 1:
            color, key = min(group.ranks.index(rank) for rank in made.ranks), made.rank
        parent = self._found[group.on_device.channel]
        part = self._communicators.split(parent, color, key, seconds)
        if part is not None and made is not None:
            self.add(made.on_device.channel, part)
