"""Where each parameter of a unit lies in its flat buffer, and which part of it each rank holds.

Pure arithmetic: no arrays, no communication. All offsets and sizes are in elements::

    parameter   a a a a a a b c c c . .        a: (2, 3)   b: ()   c: (3,)   . padding
    rank        0 0 0 0 1 1 1 1 2 2 2 2        world_size 3, shard_size 4

Parameters lie tightly one behind the other in declaration order, C order inside each, and padding
only at the end. So a shard boundary may fall anywhere in a parameter, and any shape can be
sharded over any number of ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.checks import as_dtype, as_int, as_name, as_shape
from fsdpcore.core.errors import ArgumentError


@dataclass(frozen=True)
class ParamRange:
    """One parameter's range ``[offset, stop)`` of the unit's flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of elements: 1 for a 0-d parameter, 0 if any extent is 0."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """First element of the flat buffer behind this parameter."""
        return self.offset + self.size


@dataclass(frozen=True)
class Piece:
    """A range of one parameter that lies in one rank's shard.

    Elements ``[param_start, param_stop)`` of the flattened (C order) parameter lie at
    ``[shard_start, shard_stop)`` of the shard. Never empty.
    """

    name: str
    param_start: int
    param_stop: int
    shard_start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.param_stop - self.param_start

    @property
    def shard_stop(self) -> int:
        """First element of the shard behind this piece."""
        return self.shard_start + self.size


@dataclass(frozen=True)
class FlatLayout:
    """The flat, padded buffer of one unit, cut into ``world_size`` shards of equal size.

    Shards begin at multiples of ``block``.

    Use ``FlatLayout.build``. The constructor takes ready-made ranges, and raises ArgumentError if
    they leave gaps, overlap, repeat a name, or if ``world_size`` is below 1.
    """

    params: tuple[ParamRange, ...]
    dtype: np.dtype[Any]
    world_size: int
    block: int = 1

    def __post_init__(self) -> None:
        for field in ("world_size", "block"):
            object.__setattr__(self, field, as_int(getattr(self, field), field, minimum=1))
        expected = 0
        names: set[str] = set()
        for param in self.params:
            if param.offset != expected:
                raise ArgumentError(
                    f"parameter {param.name!r} starts at element {param.offset} of the flat "
                    f"buffer, but the one before it ends at {expected}; parameters must lie "
                    "tightly one behind the other"
                )
            if param.name in names:
                raise ArgumentError(f"two parameters are named {param.name!r}; names must differ")
            names.add(param.name)
            expected = param.stop

    @classmethod
    def build(
        cls,
        shapes: Mapping[str, int | Sequence[int]],
        dtype: DTypeLike,
        world_size: int,
        block: int = 1,
    ) -> FlatLayout:
        """Lay out parameters of these ``shapes``, in the mapping's order, for ``world_size`` ranks.

        0-d and empty parameters are allowed, and so is an empty mapping. Raises ArgumentError for
        a name that is not a non-empty string, a bad shape, a dtype that is not numeric, or a
        ``world_size`` below 1.
        """
        params: list[ParamRange] = []
        offset = 0
        for name, shape in shapes.items():
            as_name(name, "a parameter's name")
            param = ParamRange(name, as_shape(shape, f"parameter {name!r}"), offset)
            params.append(param)
            offset = param.stop
        return cls(tuple(params), as_dtype(dtype, "the flat buffer"), world_size, block)

    @functools.cached_property
    def size(self) -> int:
        """Elements of all parameters together, without padding."""
        return self.params[-1].stop if self.params else 0

    @property
    def shard_size(self) -> int:
        """Elements of each rank's shard, padding included: ``ceil(size / world_size)``.

        In whole blocks, so that the next one begins with one; the only one has no padding.
        """
        if self.world_size == 1:
            return self.size
        blocks = -(-self.size // self.block)
        return -(-blocks // self.world_size) * self.block

    @property
    def padded_size(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.shard_size * self.world_size

    @property
    def padding(self) -> int:
        """Elements of padding at the end of the flat buffer.

        May exceed ``shard_size``: with fewer elements than ranks the last ranks hold nothing else.
        """
        return self.padded_size - self.size

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of the rank's shard in the padded flat buffer.

        Raises ArgumentError if ``rank`` is not in ``range(world_size)``.
        """
        rank = as_int(rank, "rank")
        if not 0 <= rank < self.world_size:
            raise ArgumentError(
                f"rank {rank} is outside this layout, which has ranks 0 to {self.world_size - 1}"
            )
        return rank * self.shard_size, (rank + 1) * self.shard_size

    def valid_size(self, rank: int) -> int:
        """Return how many elements at the start of the rank's shard are not padding; may be 0.

        Raises ArgumentError if ``rank`` is not in ``range(world_size)``.
        """
        start, stop = self.shard_bounds(rank)
        return max(0, min(stop, self.size) - start)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the parameter ranges in the rank's shard, in the order in which they lie there.

        They cover ``[0, valid_size(rank))`` of the shard without a gap; empty parameters and
        padding give no piece. Raises ArgumentError if ``rank`` is not in ``range(world_size)``.
        """
        shard_start, shard_stop = self.shard_bounds(rank)
        pieces: list[Piece] = []
        for param in self.params:
            start = max(param.offset, shard_start)
            stop = min(param.stop, shard_stop)
            if start < stop:
                piece = Piece(
                    param.name, start - param.offset, stop - param.offset, start - shard_start
                )
                pieces.append(piece)
        return tuple(pieces)
