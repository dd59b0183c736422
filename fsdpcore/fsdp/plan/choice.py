"""Which strategies there are for a number of ranks, and which one to take in a given memory.

Pure arithmetic on plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import ml_dtypes

from fsdpcore.compress.compression import Compression
from fsdpcore.core.policy import Costs
from fsdpcore.fsdp.plan.make_plan import Sync, make_plan
from fsdpcore.fsdp.plan.plan import Plan
from fsdpcore.fsdp.plan.sizes import UnitSize, even_units
from fsdpcore.fsdp.sharding.placement import Placement
from fsdpcore.fsdp.sharding.strategy import STRATEGIES, Strategy
from fsdpcore.fsdp.units.precision import Precision

_GROUPS = 6  # sizes of groups to look at, at most
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Training:
    """A model of equal layers, and how it is trained, whatever the strategy.

    Attributes:
        params: number of parameters.
        layers: units that they are spread over.
        world_size: number of ranks.
        precision, optimizer_states, prefetch, microbatches, sync, costs, compression: as of
            ``make_plan``.
    """

    params: float
    layers: int
    world_size: int
    precision: Precision | None = None
    optimizer_states: int = 2
    prefetch: int = 1
    microbatches: int = 1
    sync: Sync = "each"
    costs: Costs | None = None
    compression: Compression | None = None

    @property
    def units(self) -> tuple[UnitSize, ...]:
        """The layers."""
        return even_units(self.params, self.layers)

    def plan(self, strategy: Strategy) -> Plan:
        """Plan a step; raises as ``make_plan`` does."""
        return make_plan(
            self.units,
            self.world_size,
            strategy=strategy,
            precision=self.precision,
            optimizer_states=self.optimizer_states,
            prefetch=self.prefetch,
            microbatches=self.microbatches,
            sync=self.sync,
            costs=self.costs,
            compression=self.compression,
        )

    def compressed(self, words: str | None) -> Training:
        """Return the same with what ``Compression.parse`` makes of some words, or with none."""
        compression = None if words is None else Compression.parse(words)
        return dataclasses.replace(self, compression=compression)


def candidates(world_size: int, wanted: Strategy) -> tuple[Strategy, ...]:
    """Return the strategies to compare for so many ranks, the wanted one among them.

    Groups of ``hybrid_shard`` have the wanted size, or several that divide the number of ranks.
    """
    group = wanted.shard_group_size
    found: list[Strategy] = []
    for name, kind in STRATEGIES.items():
        if kind.grouped:
            sizes = [group] if group else _divisors(world_size)
            found += [Strategy(name, shard_group_size=size) for size in sizes]
        else:
            found += [Strategy(name, False)] if kind.keep is None else []
            found.append(Strategy(name))
    found.sort(key=lambda strategy: _persistence(strategy.place(world_size)), reverse=True)
    unique = {in_words(strategy): strategy for strategy in (*found, wanted)}
    return tuple(unique.values())


def _persistence(placement: Placement) -> tuple[bool | float, ...]:
    """Order placements by how much a rank holds."""
    keeps = placement.keeps_for_backward
    return placement.whole_parameters, placement.whole_gradients, 1 / placement.shards, keeps


def _divisors(number: int) -> list[int]:
    """Divisors but 1 and the number itself; of many, some that are spread over all of them."""
    small = [n for n in range(2, math.isqrt(number) + 1) if number % n == 0]
    found = sorted({*small, *(number // n for n in small)})
    if len(found) <= _GROUPS:
        return found
    return [found[i * (len(found) - 1) // (_GROUPS - 1)] for i in range(_GROUPS)]


def in_words(strategy: Strategy) -> str:
    """Return a strategy as the command takes it."""
    words = [strategy.name]
    if strategy.reshard_after_forward is not True:
        words.append(f"--reshard-after-forward {str(strategy.reshard_after_forward).lower()}")
    if strategy.shard_group_size is not None:
        words.append(f"--shard-group-size {strategy.shard_group_size}")
    return " ".join(words)


def cheapest(plans: Iterable[Plan], memory: int) -> Plan | None:
    """Return the plan that sends least, then is fastest, then smallest, of those that fit."""
    fitting = [plan for plan in plans if plan.peak_bytes <= memory]
    return min(fitting, key=lambda p: (p.bytes_sent, p.seconds or 0.0, p.peak_bytes), default=None)


@dataclass(frozen=True)
class Change:
    """Something to do where no strategy fits.

    Attributes:
        words: what.
        peak_bytes: that a rank then holds.
    """

    words: str
    peak_bytes: int


def changes(training: Training, strategy: Strategy, memory: int) -> list[Change]:
    """Return what makes a strategy smaller, the smallest first.

    Args:
        training: that does not fit.
        strategy: the one that comes closest.
        memory: bytes that there are.
    """
    now = training.plan(strategy).peak_bytes
    found = [
        Change(words, changed.plan(strategy).peak_bytes) for words, changed in _smaller(training)
    ]
    found += _more_ranks(training, memory, "")
    if all(change.peak_bytes > memory for change in found):
        found += _together(training, memory)
    return sorted((c for c in found if c.peak_bytes < now), key=lambda change: change.peak_bytes)


def _smaller(training: Training) -> Iterator[tuple[str, Training]]:
    if training.prefetch:
        yield "--prefetch 0", dataclasses.replace(training, prefetch=0)
    if training.microbatches > 1 and training.sync == "last":
        yield "--sync each", dataclasses.replace(training, sync="each")
    if training.precision is None:
        precision = Precision(ml_dtypes.bfloat16)
        yield "--precision bf16", dataclasses.replace(training, precision=precision)
    if 4 * training.layers <= training.params:
        layers = 4 * training.layers
        yield (
            f"units of a quarter (--layers {layers})",
            dataclasses.replace(training, layers=layers),
        )


def _together(training: Training, memory: int) -> list[Change]:
    """All of what makes it smaller at once, and as many ranks as that needs."""
    words = []
    while (found := next(_smaller(training), None)) is not None:
        option, training = found
        if option.startswith("units"):
            break
        words.append(option)
    layers = min(64 * training.layers, int(training.params))
    training = dataclasses.replace(training, layers=layers)
    return _more_ranks(training, memory, " ".join([*words, f"--layers {layers}", ""]))


def _more_ranks(training: Training, memory: int, before: str) -> list[Change]:
    """The smallest number of ranks that is enough, in powers of two times what there is."""
    world_size = (1 if before else 2) * training.world_size
    while world_size <= _MOST_RANKS:
        more = dataclasses.replace(training, world_size=world_size)
        peak = more.plan(Strategy("full_shard")).peak_bytes
        if peak <= memory:
            return [Change(f"{before}--world {world_size}", peak)]
        world_size *= 2
    return []
