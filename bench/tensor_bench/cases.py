"""What is measured: the forward and backward pass of a transformer block on several ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gpt_model import Block, GPTConfig
from numpy.typing import NDArray

from fsdpcore.core.errors import ArgumentError

PEER = "dtensor"
PEERS = (PEER,)

Array = NDArray[Any]

# Of the largest value; the contestants add up in float32, in different orders.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A block of GPT-2, float32, and its input.

    Attributes:
        width, heads, hidden: of the block.
        batch, length: of the input, whole.
        sequence: whether norms and residuals are cut along the sequence.
    """

    width: int = 512
    heads: int = 8
    hidden: int = 2048
    batch: int = 4
    length: int = 128
    sequence: bool = False

    def check_ranks(self, ranks: int) -> None:
        """Check that heads, hidden features and sequence divide, as the peer wants it.

        Raises:
            ArgumentError: they do not.
        """
        for name in ("heads", "hidden", "length"):
            if getattr(self, name) % ranks:
                raise ArgumentError(
                    f"--{name} {getattr(self, name)} does not divide by {ranks} ranks, which "
                    "DTensor asks for"
                )

    @property
    def config(self) -> GPTConfig:
        """The sizes as the unsharded block takes them."""
        return GPTConfig(
            context=self.length,
            width=self.width,
            heads=self.heads,
            layers=1,
            hidden=self.hidden,
        )

    @cached_property
    def params(self) -> dict[str, Array]:
        """The values of the unsharded block, whose biases are not zero here."""
        rng = np.random.default_rng(1)
        return {
            name: value + 0.1 * rng.standard_normal(value.shape, dtype=np.float32)
            for name, value in Block(self.config).init(rng).items()
        }

    @cached_property
    def data(self) -> tuple[Array, Array]:
        """The input and the gradient of the output, whole."""
        x, dy = np.random.default_rng(2).standard_normal(
            (2, self.batch, self.length, self.width), dtype=np.float32
        )
        return x, dy

    def own(self, array: Array, rank: int, ranks: int) -> Array:
        """A rank's part of an input or output."""
        return np.array_split(array, ranks, axis=1)[rank] if self.sequence else array

    def wrong(self, y: Array, dx: Array, rank: int, ranks: int) -> int:
        """How many elements of a rank's output and input gradient the unsharded block denies."""
        block = Block(self.config)
        grads = {name: np.zeros_like(value) for name, value in self.params.items()}
        x, dy = self.data
        right, saved = block.forward(self.params, x)
        gradient = block.backward(self.params, saved, dy, grads)
        count = 0
        for got, whole in ((y, right), (dx, gradient)):
            limit = _TOLERANCE * float(np.abs(whole).max())
            count += int((~(np.abs(got - self.own(whole, rank, ranks)) <= limit)).sum())
        return count
