"""``OuterUnit``: what an ``OuterStep`` keeps of a unit."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpcore.compress.packing import Packing
from fsdpcore.core.buffers import Array
from fsdpcore.core.work import Work
from fsdpcore.fsdp.units.unit import Unit


@dataclass
class OuterUnit:
    """This rank's shard, without padding, and what belongs to it.

    Attributes:
        unit: of the engine.
        at: it meets in calls whose number is this, modulo the number of steps between.
        params: as they were when the groups met last.
        state: of the optimizer.
        packing: how differences travel; None as they are.
        residuals: what quantising has left out of the differences, and of the part of their sum
            that this rank makes; none without error feedback.
        sent: the shard as it was when its difference began to travel; None without ``delay``.
        total: the sum of all groups' differences, once it is there.
        work: what has it come; None if it is there, or nothing is on its way.
    """

    unit: Unit
    at: int
    params: Array
    state: dict[str, Array]
    packing: Packing | None
    residuals: tuple[Array, ...]
    sent: Array | None
    total: Array | None
    work: Work | None = None

    @property
    def arrays(self) -> dict[str, Array]:
        """All of it by name; each is as large as the shard."""
        names = ("residual", "residual_of_sum")[: len(self.residuals)]
        residuals = dict(zip(names, self.residuals, strict=True))
        found = {"params": self.params, **self.state, **residuals}
        if self.sent is not None and self.total is not None:
            found |= {"sent": self.sent, "total": self.total}
        return found

    def arrived(self) -> Array:
        """Wait for the sum of all groups' differences."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        assert self.total is not None, "it was begun"
        return self.total

    def move(self, shard: Array) -> None:
        """Go on from ``params``, and from what has changed since the difference was sent."""
        if self.sent is None:
            shard[:] = self.params
            self.total = None
        else:
            self.sent -= self.params
            shard -= self.sent
