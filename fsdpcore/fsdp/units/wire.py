"""What of an engine travels quantised: its parameters when they are gathered, and its gradients.

Each goes on in the order in which it was begun. On the host that is on a thread of
``ProcessGroups.background`` and in groups of its own: there a collective is only a part of the
work. On a GPU all of it is enqueued in the background of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives import all_gather, all_reduce, reduce_scatter
from fsdpcore.collectives.on_device import in_background
from fsdpcore.compress.compression import Compression, matching
from fsdpcore.compress.exchange import Exchange
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.work import Work
from fsdpcore.fsdp.sharding.process_groups import ProcessGroups, Use
from fsdpcore.fsdp.sharding.travel import Travel
from fsdpcore.fsdp.units.options import EngineOptions
from fsdpcore.fsdp.units.views import Places

_FLOAT32 = np.dtype(np.float32)


class Wire:
    """The groups of an engine with ``compression``, and who works for them.

    Args:
        compression: as given.
        groups: of the engine.
        algorithm: of its collectives.

    Attributes:
        travel: what is quantised.
        algorithm: as given.
        gathering: of parameters; None if they travel as they are.
        first, second: the ranks that sum gradients first, and those that do so then.
        summing, spreading: the same, for what is quantised; None for what travels as it is.
    """

    def __init__(self, compression: Compression, groups: ProcessGroups, algorithm: str) -> None:
        self.travel = Travel.of(compression, groups.placement, groups.whole.hosts)
        self.algorithm = algorithm
        self._groups = groups
        travel = self.travel
        gathers, reduces = compression.gathers, compression.reduces
        self.gathering: Exchange | None = None
        if gathers is not None and travel.gathers:
            self.gathering = Exchange(
                groups.background_group(groups.shards, "parameters"), gathers, algorithm
            )
        self.summing: Exchange | None = None
        self.spreading: Exchange | None = None
        self.first, self.second = groups.summing_in_background if travel.reduces else groups.summing
        if reduces is not None:
            if travel.sums:
                self.summing = Exchange(self.first, reduces, algorithm)
            if travel.spreads:
                self.spreading = Exchange(self.second, reduces, algorithm)

    @property
    def nbytes(self) -> int:
        """Of the memory for what is packed."""
        exchanges = (self.gathering, self.summing, self.spreading)
        return sum(each.nbytes for each in exchanges if each is not None)

    def zeros(self, size: int) -> Array:
        """Return zeros of float32 where the engine's arrays are."""
        return self._groups.device.zeros(size, np.float32)

    def run(self, use: Use, task: Callable[[], None], label: str, *, async_op: bool) -> Work | None:
        """Have a task done behind those of the same use that were begun before."""
        groups = self._groups
        if groups.device.on_host:
            thread = groups.background(use)
            if async_op:
                return thread.submit(task, label)
            thread.run(task, label)
            return None
        work = in_background(groups.whole, label, task)
        if async_op:
            return work
        work.wait()
        return None


class QuantisedGather:
    """How the trained parameters of a unit are gathered; see ``Exchange.all_gather``.

    Attributes:
        sends: bytes that this rank sends.
        fresh: the next gathering unpacks what the last one got; nobody has written shards since.
    """

    def __init__(self, places: Places, wire: Wire, exchange: Exchange) -> None:
        self._wire, self._exchange = wire, exchange
        exact = wire.travel.compression.exact_spans(places.unit, places.layout.params)
        self._packing = wire.travel.gathering(places.layout, exact)
        self.sends = self._packing.gather_sends(exchange.group.rank)
        self.fresh = False
        self._keeps = wire.travel.keeps
        self._kept: NDArray[np.uint8] | None = None

    @property
    def nbytes(self) -> int:
        """Of the memory for what is kept."""
        return 0 if self._kept is None else self._kept.nbytes

    def start(self, own: Array, flat: Array, label: str, *, async_op: bool) -> Work | None:
        """Gather into ``flat``; see ``ParameterStorage.gather``."""
        fresh, self.fresh = self.fresh, self._keeps
        if self._keeps and self._kept is None:
            size = sum(self._packing.counts)
            self._kept = self._exchange.group.empty((size,), np.uint8)
        kept = self._kept

        def gather() -> None:
            if fresh and kept is not None:
                self._exchange.unpack(kept, self._packing, flat)
            else:
                self._gather(own, flat, label, kept)

        return self._wire.run("parameters", gather, label, async_op=async_op)

    def _gather(self, own: Array, flat: Array, label: str, kept: NDArray[np.uint8] | None) -> None:
        try:
            self._exchange.all_gather(own, self._packing, flat, label, received=kept)
        except BaseException:  # not all of it has come
            self.fresh = False
            raise

    def follow(
        self, own: Array, flat: Array, label: str, *, async_op: bool, first: bool
    ) -> Work | None:
        """Have ``flat`` follow the shards of all ranks, by quantised differences.

        Args:
            own: this rank's shard.
            flat: what all ranks have of all shards.
            label: of the collective.
            async_op: do not wait.
            first: they do not have it yet: each has what is its own.
        """
        group = self._exchange.group

        def gather() -> None:
            if first:
                start = own.size * group.rank
                mine = flat[start : start + own.size]
                options: dict[str, Any] = {"algorithm": self._wire.algorithm}
                all_gather(mine, group, out=flat, label=f"{label}, as it is", **options)
            self._exchange.all_gather(own, self._packing, flat, label, differences=True)

        return self._wire.run("parameters", gather, label, async_op=async_op)


class QuantisedReduction:
    """How the gradients of a unit are summed, where some of that is quantised.

    Args:
        places: where the parameters lie.
        wire: of the engine.
        rank: of all ranks.

    Attributes:
        sends: bytes that this rank sends.
        residual: what quantising has left out so far, flat; of no elements without error feedback.
        residual_sizes: of all ranks.
        rank: as given.
    """

    def __init__(self, places: Places, wire: Wire, rank: int) -> None:
        self._wire, self.rank = wire, rank
        layout, travel = places.layout, wire.travel
        exact = travel.compression.exact_spans(places.unit, layout.params)
        self.sends = sum(each.sent for each in travel.reductions(layout, exact, rank))
        self._ranks = travel.placement.world_size
        self._whole = travel.placement.whole_gradients
        self._twice = travel.placement.reduces_twice
        if wire.summing is not None:
            self._summing = travel.summing(layout, exact)
        if wire.spreading is not None:
            self._spreading = travel.spreading(layout, exact, rank % travel.placement.shards)
        sizes = [travel.residual_sizes(layout, each) for each in range(travel.placement.world_size)]
        self.residual_sizes = [sum(each) for each in sizes]
        self.residual = wire.zeros(self.residual_sizes[rank])
        ends = np.cumsum(sizes[rank])
        self._residuals = [
            self.residual[end - size : end] for end, size in zip(ends, sizes[rank], strict=True)
        ]

    def start(
        self, flat: Array, own: Array, divisor: float | None, label: str, *, async_op: bool
    ) -> Work | None:
        """Sum over all ranks; see ``UnitGradients``.

        Args:
            flat: the full gradients of this rank, which may be overwritten.
            own: what this rank keeps of the sum.
            divisor: of the sum; None for the number of ranks.
            label: of the collectives.
            async_op: do not wait.
        """
        # What is left out of gradients that are divided by more counts for less later.
        factor = 1.0 if divisor is None else divisor / self._ranks

        def reduce() -> None:
            self.scale(factor)
            self._sum(flat, own, label)
            if self._twice:
                self._sum_over_replicas(own, f"{label}, over replicas")
            self.scale(1.0 / factor)

        return self._wire.run("gradients", reduce, label, async_op=async_op)

    def scale(self, factor: float) -> None:
        """Multiply what has been left out so far; by 0 where it was left out of nothing."""
        if factor == 0:
            self.residual[...] = 0
        elif factor != 1:
            with np.errstate(over="ignore"):  # inf is found, as that of gradients is
                self.residual *= np.float32(factor)

    def _sum(self, flat: Array, own: Array, label: str) -> None:
        wire = self._wire
        options: dict[str, Any] = {"algorithm": wire.algorithm, "label": label}
        of_flat, of_sum = self._residuals[:2] if self.residual.size else (None, None)
        if wire.summing is None:
            assert not self._whole
            reduce_scatter(flat, wire.first, out=own, **options)
        elif self._whole:
            wire.summing.all_reduce(flat, self._summing, own, (of_flat, of_sum), label)
        else:
            wire.summing.reduce_scatter(flat, self._summing, own, of_flat, label)

    def _sum_over_replicas(self, own: Array, label: str) -> None:
        wire = self._wire
        options: dict[str, Any] = {"algorithm": wire.algorithm, "label": label}
        if wire.spreading is None:
            all_reduce(own, wire.second, out=own, **options)
            return
        of_shard, of_sum = self._residuals[2:] if self.residual.size else (None, None)
        wire.spreading.all_reduce(own, self._spreading, own, (of_shard, of_sum), label)


def check_composes(compression: Compression, options: EngineOptions, tensor: object) -> None:
    """Raise ArgumentError for options that do not go together with compression, with the reason."""
    refused = {
        "virtual_ranks": (
            options.virtual_ranks is not None,
            "which promise the same bits on any number of ranks: what is quantised depends on "
            "which rank sums up which leaves",
        ),
        "tensor": (
            tensor is not None,
            "whose ranks have copies of some parameters: quantised in different blocks, beside "
            "different boxes, the copies would drift apart",
        ),
        "loss_scale": (
            compression.error_feedback and options.precision.scaling is not None,
            "with error_feedback: what is left out of gradients of one scale would be added to "
            "those of another",
        ),
        "offload": (
            options.offload is not None,
            "whose files are written by what is gathered and reduced, which is quantised",
        ),
    }
    for name, (given, why) in refused.items():
        if given:
            raise ArgumentError(f"compression does not go together with {name}, {why}")


def check_units(compression: Compression, units: Sequence[Any]) -> None:
    """Raise ArgumentError where parameters or gradients are such as cannot be quantised.

    Args:
        compression: as given.
        units: of the engine, laid out.
    """
    for unit in units:
        dtypes = unit.dtypes
        if unit.trainable and not dtypes.param == dtypes.grad == _FLOAT32:
            raise ArgumentError(
                f"compression is for float32, but unit {unit.name!r} is computed in "
                f"{dtypes.param} and reduced in {dtypes.grad}; give float32 parameters, and no "
                "precision"
            )
    check_patterns(compression, units)


def check_patterns(compression: Compression, units: Iterable[Any]) -> None:
    """Raise ArgumentError for a pattern of ``exact`` that no trained parameter has."""
    patterns = dict.fromkeys(compression.exact or (), 0)
    for unit in units:
        for pattern in patterns:
            patterns[pattern] += matching(pattern, unit.name, unit.layout.params)
    for pattern, count in patterns.items():
        if not count:
            raise ArgumentError(
                f"exact={pattern!r} of Compression matches no trained parameter; they are named "
                "'unit.param'"
            )
