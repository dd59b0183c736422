"""Who has which part of which array, where no engine says so. Pure: no files, no communication."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.checkpoint.format.dtypes import stored_as
from fsdpcore.checkpoint.format.marker import check_save_id
from fsdpcore.checkpoint.format.metadata import MAX_STEP
from fsdpcore.checkpoint.format.metadata_builder import check_shape
from fsdpcore.checkpoint.format.strict_json import check_json, check_text
from fsdpcore.checkpoint.plan.held import HeldArray, held_piece, holding
from fsdpcore.checkpoint.plan.save_plan import SavePlan, plan
from fsdpcore.core.buffers import split_sizes
from fsdpcore.core.checks import as_dtype, as_int, as_rank, as_shape
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.geometry.layout import FlatLayout, ParamRange
from fsdpcore.core.geometry.regions import Range, Region, as_region, regions_inside


def compute_shard_sizes(total: int, world_size: int) -> list[int]:
    """Return sizes of ``total`` items over the ranks that differ by one at most, larger ones first.

    The rule of ``numpy.array_split``, and of ``reduce_scatter`` where axis 0 does not divide. The
    engine cuts its flat buffers by another one: ``flat_shard_sizes``. ::

        compute_shard_sizes(10, 3)  # [4, 3, 3]

    Args:
        total: items; may be 0.
        world_size: number of ranks.

    Raises:
        ArgumentError: ``total`` is negative, ``world_size`` is below 1, or they are no integers.
    """
    total = as_int(total, "total", minimum=0)
    return split_sizes(total, as_int(world_size, "world_size", minimum=1))


def flat_shard_sizes(total: int, world_size: int) -> list[int]:
    """Return how many elements of a flat buffer each rank has, padding left out.

    The rule of the engine: ``ceil(total / world_size)`` for each rank as long as there are any, so
    that only the last ranks have fewer, or none. With padding all shards have the first's size. ::

        flat_shard_sizes(10, 3)  # [4, 4, 2]

    Args:
        total: elements of the buffer; may be 0.
        world_size: number of ranks.

    Raises:
        ArgumentError: ``total`` is negative, ``world_size`` is below 1, or they are no integers.
    """
    total = as_int(total, "total", minimum=0)
    layout = FlatLayout((ParamRange("buffer", (total,), 0),), np.dtype(np.uint8), world_size)
    return [layout.valid_size(rank) for rank in range(layout.world_size)]


@dataclass(frozen=True)
class TensorShardSpec:
    """Which part of an array one rank has.

    Attributes:
        name: of the array.
        dtype: of the array; what ``np.dtype`` takes may be given.
        shape: of the whole array.
        regions: ranges of the array flattened in C order, ascending; or one box. Empty ones are
            left out, so that this is empty where the rank has nothing of the array.
        box: as of a ``ShardedArray``: the box of the array that the regions are ranges of, instead
            of the whole.
        replica, replicas: as of a ``ShardedArray``: which of how many copies this is a part of.

    Raises:
        ArgumentError: this dtype cannot be stored, or the regions are none of such an array.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    regions: tuple[Region, ...] = ()
    box: ArrayBox | None = None
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        check_text(self.name, "the name of an array")
        if not self.name:
            raise ArgumentError("the name of an array must not be empty")
        what = f"array {self.name!r:.80}"
        dtype = as_dtype(self.dtype, what)
        try:
            stored_as(dtype)
        except ArgumentError as error:
            raise ArgumentError(f"{what}: {error}") from None
        shape = as_shape(self.shape, what)
        check_shape(shape, dtype.itemsize, self.name, ArgumentError)
        if not isinstance(self.regions, (tuple, list)):
            raise ArgumentError(f"regions of {what} must be a tuple, got {self.regions!r:.80}")
        self._check_copy(shape, what)
        of = shape if self.box is None else self.box.shape
        given = tuple(as_region(region, of, f"a region of {what}") for region in self.regions)
        for region in given:
            if self.box is not None and not isinstance(region, Range):
                raise ArgumentError(f"regions of {what} are ranges of its box, got {region}")
        regions = tuple(region for region in given if region.size)
        _check_ascending(regions, what)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "regions", regions)

    def _check_copy(self, shape: tuple[int, ...], what: str) -> None:
        if self.box is not None and getattr(self.box, "whole", None) != shape:
            raise ArgumentError(f"the box of {what} of shape {shape} is none of it: {self.box!r}")
        for name, minimum in (("replicas", 1), ("replica", 0)):
            number = as_int(getattr(self, name), f"{name} of {what}", minimum=minimum)
            object.__setattr__(self, name, number)
        if self.replica >= self.replicas:
            raise ArgumentError(
                f"replica {self.replica} of {what} does not exist; there are {self.replicas}, "
                "counted from 0"
            )

    @property
    def size(self) -> int:
        """Elements of this rank's part."""
        return sum(region.size for region in self.regions)

    @cached_property
    def parts(self) -> tuple[Region, ...]:
        """The regions as regions of the whole array."""
        if self.box is None:
            return self.regions
        box = self.box.region
        return tuple(
            part
            for run in self.regions
            if isinstance(run, Range)
            for part in regions_inside(box, run, self.shape)
        )


def _check_ascending(regions: Sequence[Region], what: str) -> None:
    behind = 0
    for region in regions:
        if not isinstance(region, Range):
            if len(regions) > 1:
                raise ArgumentError(f"{what} has a box besides other regions on one rank")
        elif region.start < behind:
            raise ArgumentError(
                f"{what} has {region} behind element {behind}; the ranges of a rank ascend and do "
                "not overlap"
            )
        else:
            behind = region.stop


@dataclass(frozen=True)
class ShardMetadata:
    """What all ranks save together; every rank makes the same one.

    The parts of the ranks cover every array. Several ranks may have the same region: then their
    elements are equal, and one of them, or each a share, writes it. Otherwise no two regions of a
    replica share an element; where those of different replicas do, the first replica is written.

    Attributes:
        step: updates before the save.
        world_size: number of ranks that save.
        save_id: of this attempt: 1 to 128 letters, digits, dots, dashes. The same on all ranks, and
            another one for every attempt, be it of the same step.
        shards: for each rank what it has. A rank may leave out what it has nothing of, but each
            array is named by one at least, the empty ones too.
        extra: anything that JSON can hold; the keys of objects come back sorted.

    Raises:
        ArgumentError: regions overlap or leave gaps, ranks disagree about an array, or a value is
            not as said above.
    """

    step: int
    world_size: int
    save_id: str
    shards: tuple[tuple[TensorShardSpec, ...], ...]
    extra: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        step = as_int(self.step, "step", minimum=0)
        if step > MAX_STEP:
            raise ArgumentError(f"step must be below 2**62, got {step}")
        object.__setattr__(self, "step", step)
        world_size = as_int(self.world_size, "world_size", minimum=1)
        object.__setattr__(self, "world_size", world_size)
        check_save_id(self.save_id)
        check_json(self.extra, "extra")
        # A copy, as the caller's may change; sorted, so that all ranks write the same bytes.
        object.__setattr__(self, "extra", json.loads(json.dumps(self.extra, sort_keys=True)))
        object.__setattr__(self, "shards", _checked_shards(self.shards, world_size))
        _ = self.plan

    @cached_property
    def plan(self) -> SavePlan:
        """Which rank writes what; follows from the rest."""
        return plan(self._held)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all of it, 64 hexadecimal digits: equal exactly where all is."""
        text = json.dumps([self.step, self.world_size, self.save_id, self.extra])
        found = hashlib.sha256(text.encode())
        for each in self._held:
            names, count, numbers = holding(each)
            found.update(f"\n{names} {count} ".encode() + numbers.astype("<i8").tobytes())
        return found.hexdigest()

    @cached_property
    def arrays(self) -> Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape of all arrays by name, in the order in which the ranks name them."""
        return {spec.name: (spec.dtype, spec.shape) for each in self.shards for spec in each}

    @property
    def _held(self) -> list[list[HeldArray]]:
        return [[_held_array(spec) for spec in each] for each in self.shards]


def _checked_shards(shards: object, world_size: int) -> tuple[tuple[TensorShardSpec, ...], ...]:
    if not isinstance(shards, Sequence) or not all(isinstance(each, Sequence) for each in shards):
        raise ArgumentError("shards must be a sequence with a sequence of specs for each rank")
    if len(shards) != world_size:
        raise ArgumentError(f"shards are of {len(shards)} ranks, but world_size is {world_size}")
    for rank, specs in enumerate(shards):
        seen: set[str] = set()
        for spec in specs:
            if not isinstance(spec, TensorShardSpec):
                raise ArgumentError(f"shards of rank {rank} have {spec!r:.80}, no TensorShardSpec")
            if spec.name in seen:
                raise ArgumentError(
                    f"rank {rank} has {spec.name!r:.80} twice; one spec has all of its regions"
                )
            seen.add(spec.name)
    return tuple(tuple(specs) for specs in shards)


def _held_array(spec: TensorShardSpec) -> HeldArray:
    held = tuple(held_piece(region, spec.shape) for region in spec.parts)
    return HeldArray(spec.name, spec.dtype.name, spec.shape, held, spec.replica)


def flat_shard_metadata(
    shapes: Mapping[str, int | Sequence[int]],
    dtypes: DTypeLike | Mapping[str, DTypeLike],
    world_size: int,
    *,
    step: int,
    save_id: str,
    extra: Any = None,
) -> ShardMetadata:
    """Describe arrays that lie in one flat buffer, of which each rank has an equal share.

    The arrays lie one behind the other in the mapping's order, C order inside each, and the buffer
    is cut by ``flat_shard_sizes``. Arrays of another dtype lie in a buffer of their own. What a
    rank has of a buffer are the regions of the specs of that dtype in ``shards[rank]``, in order.

    Args:
        shapes: of the whole arrays, by name.
        dtypes: of all arrays, or of each by name.
        world_size: number of ranks.
        step: updates before the save.
        save_id: of this attempt: 1 to 128 letters, digits, dots, dashes. The same on all ranks, and
            another one for every attempt, be it of the same step.
        extra: anything that JSON can hold, to be stored beside; None for nothing.

    Returns:
        What every rank has, for ``save_distributed`` and ``load_distributed``.

    Raises:
        ArgumentError: names, shapes or dtypes are none that can be stored, or as ``ShardMetadata``.

    Example::

        meta = fc.checkpoint.flat_shard_metadata(
            {"w": (10, 6)}, {"w": np.float32}, 2, step=30, save_id="run7-30-1"
        )
    """
    world_size = as_int(world_size, "world_size", minimum=1)
    if not isinstance(shapes, Mapping):
        raise ArgumentError(f"shapes must map names to shapes, got {type(shapes).__name__}")
    by_name: Mapping[Any, Any] | None = dtypes if isinstance(dtypes, Mapping) else None
    if by_name is not None and by_name.keys() != shapes.keys():
        some = sorted(map(repr, by_name.keys() ^ shapes.keys()))[0]
        raise ArgumentError(f"dtypes and shapes have different names, for instance {some}")
    specs: dict[str, TensorShardSpec] = {}
    buffers: dict[np.dtype[Any], dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        what = f"array {name!r:.80}"
        given: Any = dtypes if by_name is None else by_name[name]
        dtype = as_dtype(given, what)
        spec = specs[name] = TensorShardSpec(name, dtype, as_shape(shape, what))
        buffers.setdefault(spec.dtype, {})[name] = spec.shape
    held: list[dict[str, Range]] = [{} for _ in range(world_size)]
    for dtype, of_buffer in buffers.items():
        for rank, name, region in flat_cuts(FlatLayout.build(of_buffer, dtype, world_size)):
            held[rank][name] = region
    shards = []
    for rank, mine in enumerate(held):
        # The first rank names all, which gives them their order, those without elements included.
        named = mine if rank else specs
        shards.append(tuple(_with_region(specs[name], mine.get(name)) for name in named))
    return ShardMetadata(step, world_size, save_id, tuple(shards), extra)


def flat_cuts(layout: FlatLayout) -> Iterator[tuple[int, str, Range]]:
    """Give what each rank has of a flat buffer: rank, name and region, one array after another."""
    shard = layout.shard_size
    for param in layout.params:
        if param.size:
            for rank in range(param.offset // shard, (param.stop - 1) // shard + 1):
                start = max(param.offset, rank * shard) - param.offset
                stop = min(param.stop, (rank + 1) * shard) - param.offset
                yield rank, param.name, Range(start, stop)


def _with_region(spec: TensorShardSpec, region: Range | None) -> TensorShardSpec:
    regions = () if region is None else (region,)
    return TensorShardSpec(spec.name, spec.dtype, spec.shape, regions)


def check_rank_of(rank: int, world_size: int) -> tuple[int, int]:
    """Return a rank and the number of ranks as integers; ArgumentError unless it is one of them."""
    world_size = as_int(world_size, "world_size", minimum=1)
    return as_rank(rank, world_size, "rank"), world_size
