"""What is measured: the exchange of one step, or a whole training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from gpt_model import GPTConfig
from numpy.typing import NDArray

from fsdpcore.core.errors import ArgumentError

PEER = "fsdp2"
WITHOUT = "no-prefetch"  # ours, with nothing in the background
# Ours with arrays in files on a disk: the options of ``fc.Offload``.
OFFLOADS: dict[str, dict[str, Any]] = {
    "offload": {"what": "all"},
    "offload-params": {"what": "parameters"},
    "offload-ahead-0": {"what": "all", "ahead": 0},
    "offload-cached": {"what": "all", "evict": False},
}
VIRTUAL = "virtual-ranks"  # ours, with eight of them
VIRTUAL_RANKS = 8
VARIANTS = (WITHOUT, VIRTUAL, *OFFLOADS)
PEERS = (PEER, *VARIANTS)
ALONE = "compute only"

# Of the peer: what its users get; one unit gathered ahead in both directions; begun without
# waiting for it; and a C library that keeps freed memory, as ours has it in the training.
SETTINGS = ("default", "prefetch", "prefetch, async", "prefetch, async, malloc")

Array = NDArray[Any]

# Small integers, which sums and means of float32 hold exactly; prime, so that no two rows or
# shards are alike.
_PERIOD = 8191


@dataclass(frozen=True)
class Exchange:
    """The communication of a forward and a backward pass, and nothing else.

    Attributes:
        units: how many, each with one float32 parameter of ``rows`` x ``columns``.
        rows, columns: see there.
        prefetch: units that our engine gathers ahead; None for as many as it chooses.
        setting: of the peer, one of ``SETTINGS``.
    """

    units: int = 26
    rows: int = 1024
    columns: int = 1024
    prefetch: int | None = None
    setting: str = ""

    def __post_init__(self) -> None:
        for name in ("units", "rows", "columns"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"--{name} must be at least 1, got {getattr(self, name)}")
        _check_prefetch(self.prefetch)

    @property
    def bytes(self) -> int:
        """Of all parameters."""
        return 4 * self.units * self.rows * self.columns

    def weights(self, unit: int, start: int, stop: int) -> Array:
        """Elements ``[start, stop)`` of the flattened parameter of a unit."""
        return ((np.arange(start, stop) + 17 * unit) % _PERIOD).astype(np.float32)

    def gradients(self, unit: int, rank: int, start: int, stop: int) -> Array:
        """What a rank contributes to elements ``[start, stop)`` of a gradient."""
        return self.weights(unit, start, stop) * np.float32(rank + 1)

    def mean_gradients(self, unit: int, ranks: int, start: int, stop: int) -> Array:
        """The mean of that over the ranks."""
        return self.weights(unit, start, stop) * np.float32((ranks + 1) / 2)


@dataclass(frozen=True)
class Training:
    """A step of the GPT of ``examples``: forward, loss, backward, clipping, AdamW.

    Attributes:
        layers, width, heads, context: of the model, float32, on bytes.
        batch: sequences of all ranks together; random bytes, the same ones in every step.
        prefetch, setting: as in ``Exchange``.
        strategy, group: of our engine, and how many ranks share a copy, for those that ask.
        virtual_ranks: of our engine; 0 without.
        compress: how parameters and gradients of our engine travel; see ``fc.Compression.parse``.
        every: steps between outer steps of ranks that are a group each; 0 without. Those compress.
    """

    layers: int = 3
    width: int = 96
    heads: int = 2
    context: int = 128
    batch: int = 32
    prefetch: int | None = None
    setting: str = ""
    strategy: str = "full_shard"
    group: int = 0
    virtual_ranks: int = 0
    compress: str = ""
    every: int = 0

    lr = 1e-3
    betas = (0.9, 0.95)
    weight_decay = 0.1
    clip = 1.0

    def __post_init__(self) -> None:
        self.model  # noqa: B018 (it checks the sizes)
        _check_prefetch(self.prefetch)

    @property
    def model(self) -> GPTConfig:
        """The sizes of the model."""
        return GPTConfig(
            context=self.context, width=self.width, heads=self.heads, layers=self.layers
        )

    def rows(self, rank: int, ranks: int) -> tuple[Array, Array]:
        """A rank's input and targets, integers (its sequences, context); equally many for each."""
        tokens = np.random.default_rng(7).integers(0, 256, (self.batch, self.context + 1))
        share = self.batch // ranks
        mine = tokens[rank * share : (rank + 1) * share]
        return mine[:, :-1], mine[:, 1:]

    def check_ranks(self, ranks: int) -> None:
        """Check that each rank gets equally many sequences, so that means of means are means.

        Raises:
            ArgumentError: it does not.
        """
        if self.batch < ranks or self.batch % ranks:
            raise ArgumentError(
                f"--batch {self.batch} does not split evenly over {ranks} ranks; "
                f"choose a multiple of {ranks}"
            )


def _check_prefetch(prefetch: int | None) -> None:
    if prefetch is not None and prefetch < 0:
        raise ArgumentError(f"--prefetch must not be negative, got {prefetch}")


Case = Exchange | Training
_KINDS: dict[str, type[Exchange] | type[Training]] = {"exchange": Exchange, "training": Training}


def to_order(case: Case) -> dict[str, Any]:
    """As a rank gets it, in JSON."""
    (kind,) = [name for name, known in _KINDS.items() if type(case) is known]
    return {"kind": kind, **asdict(case)}


def from_order(order: Mapping[str, Any]) -> Case:
    """The inverse of ``to_order``."""
    details = dict(order)
    return _KINDS[details.pop("kind")](**details)
