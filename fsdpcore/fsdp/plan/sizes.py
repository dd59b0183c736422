"""The sizes that a plan is made of: units, their flat buffers, and what a rank holds of them.

Pure arithmetic: nothing is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.checks import as_dtype, as_finite, as_int, as_name
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.layout import FlatLayout
from fsdpcore.fsdp.offload.arrays import ArrayKind, PersistentArray
from fsdpcore.fsdp.sharding.placement import Placement
from fsdpcore.fsdp.sharding.virtual_ranks import LEAF_BLOCK
from fsdpcore.fsdp.units.persistent import persistent_arrays
from fsdpcore.fsdp.units.precision import Dtypes, Precision


@dataclass(frozen=True)
class UnitSize:
    """What a plan has to know of a unit.

    Args:
        name: of the unit.
        size: elements of the parameters that are trained, without padding; may be 0.
        dtype: of these parameters: of the shard that the optimizer updates.
        frozen: elements of the parameters that are not trained, of the same dtype; or, for other
            dtypes, ``((elements, dtype), ...)``, one for each.
        ties: for each parameter that is another one: the name of the unit that owns that, its name
            there, and the elements of its gradient, which are 0 if it is frozen.
        exact: which of the trained elements travel as they are where others are quantised: pairs of
            the first one, and the one behind the last; in order.

    Raises:
        ArgumentError: a size below 0, or a dtype that is none.

    Example::

        fc.make_plan([fc.UnitSize("layer", 1_000_000)], world_size=8)
    """

    name: str
    size: int
    dtype: DTypeLike = np.float32
    frozen: int | tuple[tuple[int, DTypeLike], ...] = 0
    ties: tuple[tuple[str, str, int], ...] = ()
    exact: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        as_name(self.name, "a unit's name")
        what = f"of unit {self.name!r}"
        object.__setattr__(self, "size", as_int(self.size, f"the size {what}", minimum=0))
        object.__setattr__(self, "dtype", as_dtype(self.dtype, f"the dtype {what}"))
        words = f"the frozen size {what}"
        frozen: int | tuple[tuple[int, DTypeLike], ...]
        if isinstance(self.frozen, tuple):
            frozen = tuple(
                (as_int(size, words, minimum=0), as_dtype(dtype, f"the frozen dtype {what}"))
                for size, dtype in self.frozen
            )
        else:
            frozen = as_int(self.frozen, words, minimum=0)
        object.__setattr__(self, "frozen", frozen)
        words = f"the size of a tie {what}"
        ties = tuple((unit, name, as_int(n, words, minimum=0)) for unit, name, n in self.ties)
        object.__setattr__(self, "ties", ties)

    @property
    def frozen_parts(self) -> tuple[tuple[int, np.dtype[Any]], ...]:
        """Elements and dtype of each flat buffer of frozen parameters; no empty ones."""
        given = self.frozen if isinstance(self.frozen, tuple) else ((self.frozen, self.dtype),)
        return tuple((size, np.dtype(dtype)) for size, dtype in given if size)

    @property
    def elements(self) -> int:
        """Elements of all parameters, frozen ones too."""
        return self.size + sum(size for size, _ in self.frozen_parts)


def even_units(params: float, layers: int, dtype: DTypeLike = np.float32) -> tuple[UnitSize, ...]:
    """Return ``layers`` units that have ``params`` parameters together, as evenly as it goes.

    Raises:
        ArgumentError: a number that is not whole, or below 1.
    """
    total = as_finite(params, "the number of parameters", minimum=1)
    layers = as_int(layers, "the number of layers", minimum=1)
    if total != math.floor(total):
        raise ArgumentError(f"the number of parameters must be a whole number, got {params!r}")
    each, more = divmod(int(total), layers)
    return tuple(UnitSize(f"layer {i}", each + (i < more), dtype) for i in range(layers))


@dataclass(frozen=True)
class UnitBytes:
    """The flat buffers of one unit under a strategy; sizes in bytes, on one rank.

    Attributes:
        trained: layout of the parameters that are trained, in the dtype that is gathered.
        frozen: layouts of the others, one for each dtype.
        dtypes: of the trained parameters.
        ties: for each tied parameter, the number of its owner, its name there, and
            the elements of its gradient.
        exact: as of ``UnitSize``.
    """

    name: str
    trained: FlatLayout
    frozen: tuple[FlatLayout, ...]
    dtypes: Dtypes
    ties: tuple[tuple[int, str, int], ...] = ()
    exact: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        unit: UnitSize,
        numbers: Mapping[str, int],
        shards: int,
        precision: Precision,
        block: int,
        *,
        lags: bool = False,
    ) -> UnitBytes:
        """Lay a unit out over so many shards; ``numbers`` are those of all units, by name."""
        ties = tuple((numbers[owner], param, size) for owner, param, size in unit.ties)
        master = np.dtype(unit.dtype)
        dtypes = replace(precision.dtypes(master), lags=lags)
        frozen = [
            _flat(size, dtypes.param if dtype == master else dtype, shards, block)
            for size, dtype in unit.frozen_parts
        ]
        trained = _flat(unit.size, dtypes.param, shards, block)
        return cls(unit.name, trained, tuple(frozen), dtypes, ties, unit.exact)

    @property
    def parts(self) -> tuple[FlatLayout, ...]:
        """All layouts, without empty ones."""
        return tuple(layout for layout in (self.trained, *self.frozen) if layout.size)

    @property
    def gathered(self) -> int:
        """All parameters, padding included."""
        return sum(_nbytes(layout) for layout in self.parts)

    @property
    def gradients(self) -> int:
        """The full gradients, padding included."""
        return self.trained.padded_size * self.dtypes.grad.itemsize


def lay_out(
    units: Sequence[UnitSize],
    shards: int,
    precision: Precision | None,
    *,
    virtual: bool,
    lags: bool = False,
) -> tuple[UnitBytes, ...]:
    """Lay all units out over so many shards.

    Args:
        units: in order.
        shards: of each flat buffer.
        precision: None for that of the units.
        virtual: there are virtual ranks, so that shards begin at blocks.
        lags: see ``Travel``.
    """
    numbers = {unit.name: number for number, unit in enumerate(units)}
    dtypes, block = precision or Precision(), LEAF_BLOCK if virtual else 1
    return tuple(UnitBytes.of(unit, numbers, shards, dtypes, block, lags=lags) for unit in units)


@dataclass(frozen=True)
class Persistent:
    """What a rank holds between steps, in bytes.

    Attributes:
        parameters: master shards, and what is gathered as far as it stays; padding included.
        gradients: what is kept of the reduced gradients; padding included.
        optimizer: state of the optimizer; it has no padding.
    """

    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, arrays: Iterable[PersistentArray]) -> Persistent:
        """Add up what a rank is planned to hold, by what it is for."""
        return cls.by_kind((each.kind, each.nbytes) for each in arrays)

    @classmethod
    def by_kind(cls, sizes: Iterable[tuple[ArrayKind, int]]) -> Persistent:
        """Add up bytes, planned or measured."""
        sums = dict.fromkeys(ArrayKind, 0)
        for kind, nbytes in sizes:
            sums[kind] += nbytes
        parameters = sums[ArrayKind.FROZEN] + sums[ArrayKind.TRAINED] + sums[ArrayKind.MASTER]
        return cls(parameters, sums[ArrayKind.GRADIENT], sums[ArrayKind.STATE])

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def persistent(
    units: Sequence[UnitBytes],
    placement: Placement,
    rank: int,
    *,
    optimizer_states: int,
    windowed: bool,
) -> Persistent:
    """Add up what ``rank`` holds between steps; see ``Plan`` for the rules."""
    shard = rank % placement.shards
    return Persistent.of(
        array
        for unit in units
        for array in persistent_arrays(
            unit.trained,
            unit.frozen,
            unit.dtypes,
            placement,
            shard,
            [unit.trained.valid_size(shard)] * optimizer_states,
            windowed=windowed,
        )
    )


def _flat(size: int, dtype: np.dtype[Any], shards: int, block: int) -> FlatLayout:
    return FlatLayout.build({"flat": size}, dtype, shards, block)


def _nbytes(layout: FlatLayout) -> int:
    return layout.padded_size * layout.dtype.itemsize
