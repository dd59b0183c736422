"""What the engine holds between steps, measured on its arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdpcore.fsdp.offload.offload import ArrayKind
from fsdpcore.fsdp.units.sharded_unit import ShardedUnit


@dataclass(frozen=True)
class HeldMemory:
    """Bytes on one rank; without what a group keeps for its messages, 64 MiB at most.

    Attributes:
        parameters, gradients, optimizer: of this rank's shards, padding included. Gradients are
            counted at the size that they have from the backward pass to the update. A shard in a
            window is counted by the rank that writes it, so that the ranks' sum is what there is.
        padding: how much of that is padding, on this rank.
        buffers: gathered parameters and full gradients, 0 between steps. What is in a window is
            gathered for nothing.
        spare: buffers that are kept for the next gathering; at most as large as ``buffers`` has
            ever been.
        window: all of the host's window, 0 where there is none; it exists once for all ranks.
            Every rank maps it, so that tools count it for each of them.
        unsharded: what one rank alone would hold: parameters, gradients, optimizer state.
        pinned: how much of the total is in the memory of the host, while a GPU computes.
    """

    parameters: int
    gradients: int
    optimizer: int
    padding: int
    buffers: int
    spare: int
    window: int
    unsharded: int
    pinned: int = 0

    @property
    def total(self) -> int:
        """Everything that this rank holds, and of a window its own part."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.spare

    @property
    def on_device(self) -> int:
        """What of the total is where the engine computes."""
        return self.total - self.pinned


def measure(units: Iterable[ShardedUnit], buffers: int, spare: int, window: int) -> HeldMemory:
    """Add up the arrays of ``units``; the other arguments are those of ``HeldMemory``."""
    parameters = gradients = optimizer = padding = unsharded = pinned = 0
    for unit in units:
        master, grad = unit.dtypes.master.itemsize, unit.dtypes.grad.itemsize
        update = unit.updater
        states = 0 if update is None else len(update.state)
        own = sum(part.nbytes for part in unit.flat_parameters)
        reduced = unit.gradients.nbytes if unit.trainable else 0
        state = 0 if update is None else update.nbytes
        parameters, gradients, optimizer = parameters + own, gradients + reduced, optimizer + state
        for kind, nbytes in (
            (ArrayKind.OWN, own),
            (ArrayKind.GRADIENT, reduced),
            (ArrayKind.STATE, state),
        ):
            pinned += nbytes if kind in unit.store.away else 0
        padding += sum(part.padding for part in unit.flat_parameters)
        padding += unit.gradients.padding
        rounded = unit.dtypes.param.itemsize if unit.dtypes.mixed else 0
        unsharded += unit.layout.size * (master * (1 + states) + grad + rounded)
        unsharded += 0 if update is None else update.whole_size * master
        unsharded += sum(p.layout.size * p.layout.dtype.itemsize for p in unit.flat_parameters[1:])
    held = (parameters, gradients, optimizer, padding, buffers, spare, window)
    return HeldMemory(*held, unsharded, pinned)
