"""What two commits are compared on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from fsdpcore.bench.cases import MEASURED

RAGGED = ("all_gather_v", "reduce_scatter_v", "all_to_all_v")
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
OPTIMIZERS = ("adam", "adamw", "lion", "sgd", "rmsprop", "adagrad")
MEMORIES = ("plain", "backend")
COLLECTIVES = ("barrier", *MEASURED, *RAGGED)
SMALL_UNITS = "step.small_units"
"""A step of 200 units of ten arrays of 4 KiB, in which nothing is computed."""
ENGINE = (*(f"step.{name}" for name in STRATEGIES), SMALL_UNITS, "save", "load")
UPDATES = tuple(f"optimizer.{name}" for name in OPTIMIZERS)
NAMES = (*COLLECTIVES, *ENGINE, *UPDATES)
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24)
"""Of collectives, in bytes, as ``fsdpcore bench`` counts them."""
LARGER = (1 << 16, 1 << 24)
"""Of everything else: bytes of float32 parameters."""


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        name: one of ``NAMES``.
        size: in bytes; 0 for a barrier.
        memory: where a collective's arrays are: "plain" or "backend"; empty for the rest.
    """

    name: str
    size: int
    memory: str = ""


@dataclass(frozen=True)
class Setting:
    """What one start of the ranks measures.

    Attributes:
        transport: scheme or URL.
        ranks: how many.
        cases: in order.
    """

    transport: str
    ranks: int
    cases: tuple[Case, ...]


def settings(
    transports: Sequence[str],
    ranks: Sequence[int],
    only: Sequence[str],
    sizes: Sequence[int],
    memories: Sequence[str],
) -> list[Setting]:
    """All that was asked for; ``only`` are names or patterns such as ``step.*``."""
    wanted = [name for name in NAMES if any(fnmatch(name, pattern) for pattern in only)]
    shared = tuple(_cases([name for name in wanted if name not in UPDATES], sizes, memories))
    found = [Setting(url, count, shared) for url in transports for count in ranks if shared]
    # An update knows nothing of other ranks.
    updates = tuple(Case(name, size) for name in wanted if name in UPDATES for size in LARGER)
    return [*found, *([Setting("sim", 1, updates)] if updates else [])]


def _cases(names: Sequence[str], sizes: Sequence[int], memories: Sequence[str]) -> Iterator[Case]:
    for name in names:
        if name == "barrier":
            yield Case(name, 0)
        elif name in COLLECTIVES:
            yield from (Case(name, size, memory) for size in sizes for memory in memories)
        elif name == SMALL_UNITS:
            yield Case(name, 200 * 10 * 4096)
        else:
            yield from (Case(name, size) for size in LARGER)
