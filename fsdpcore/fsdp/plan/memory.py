"""What the engine holds, by what it is for."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpcore.fsdp.plan.sizes import Persistent
from fsdpcore.fsdp.units.buffer_pool import BufferPool
from fsdpcore.fsdp.units.model import ShardedModel


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
        quantising: of an engine with ``compression``: packed bytes of the largest unit, and what
            was left out of gradients where there is error feedback.
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
    quantising: int = 0

    @property
    def total(self) -> int:
        """Everything that this rank holds, and of a window its own part."""
        return self.states + self.buffers + self.spare

    @property
    def states(self) -> int:
        """What is held all the time, also between steps."""
        return self.parameters + self.gradients + self.optimizer + self.quantising

    @property
    def on_device(self) -> int:
        """What of the total is where the engine computes."""
        return self.total - self.pinned


def measure(model: ShardedModel, pool: BufferPool, window: int) -> HeldMemory:
    """Add up the arrays that an engine has made; padding is what was planned of them.

    Args:
        model: of the engine.
        pool: of its buffers.
        window: bytes of the host's window, 0 where there is none.
    """
    held = [(unit.store, *each) for unit in model.units for each in unit.held.items()]
    sums = Persistent.by_kind((kind, nbytes) for _, kind, nbytes in held)
    return HeldMemory(
        parameters=sums.parameters,
        gradients=sums.gradients,
        optimizer=sums.optimizer,
        padding=sum(each.padding for unit in model.units for each in unit.store.persistent),
        buffers=pool.live_bytes,
        spare=pool.spare_bytes,
        window=window,
        unsharded=model.unsharded,
        pinned=sum(nbytes for store, kind, nbytes in held if kind in store.away),
        quantising=_quantising(model),
    )


def _quantising(model: ShardedModel) -> int:
    if model.wire is None:
        return 0
    gatherings = (unit.trained_parameter.storage.quantised for unit in model.units)
    reductions = (unit.gradients.quantised for unit in model.units)
    kept = sum(each.nbytes for each in gatherings if each is not None)
    residual = sum(each.residual.nbytes for each in reductions if each is not None)
    return model.wire.nbytes + kept + residual
