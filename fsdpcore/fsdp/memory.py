"""What the engine holds between steps, measured on its arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fsdpcore.fsdp.unit import Unit


@dataclass(frozen=True)
class HeldMemory:
    """Bytes on one rank.

    Attributes:
        parameters, gradients, optimizer: of this rank's shards, padding included. Gradients are
            counted at the size that they have from the backward pass to the update.
        padding: how much of that is padding, on this rank.
        buffers: gathered parameters and full gradients, 0 between steps.
        unsharded: what one rank alone would hold: parameters, gradients, optimizer state.
    """

    parameters: int
    gradients: int
    optimizer: int
    padding: int
    buffers: int
    unsharded: int

    @property
    def total(self) -> int:
        """Everything that this rank holds."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def measure(units: Iterable[Unit], buffers: int) -> HeldMemory:
    """Add up the arrays of ``units``; ``buffers`` is what is gathered now."""
    parameters = gradients = optimizer = padding = unsharded = 0
    for unit in units:
        item = unit.dtype.itemsize
        states = len(unit.optimizer_state)
        parameters += unit.shard.nbytes
        gradients += unit.shard.nbytes if unit.grad_shard is None else unit.grad_shard.nbytes
        optimizer += sum(array.nbytes for array in unit.optimizer_state.values())
        padding += 2 * (unit.shard.size - unit.valid_size) * item
        unsharded += unit.layout.size * item * (2 + states)
    return HeldMemory(parameters, gradients, optimizer, padding, buffers, unsharded)
