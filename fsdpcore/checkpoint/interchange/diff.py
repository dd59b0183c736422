"""``diff``: what two checkpoints, or files, do not have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fsdpcore.checkpoint.interchange.array_sources import (
    ArrayRegion,
    ArraySource,
    ArraySpec,
    ProgressCallback,
)
from fsdpcore.checkpoint.interchange.entries import other_entries
from fsdpcore.checkpoint.interchange.opening import opened_source
from fsdpcore.checkpoint.interchange.patterns import refuse_idle
from fsdpcore.checkpoint.interchange.streaming import ProgressCounter
from fsdpcore.checkpoint.plan.targets import checked_patterns, chosen
from fsdpcore.checkpoint.storage.opening import StoragePath
from fsdpcore.checkpoint.storage.ranking import Step
from fsdpcore.core.buffers import Array, byte_view
from fsdpcore.core.geometry.regions import whole

_Dtype = np.dtype[Any]


class Changed(NamedTuple):
    """An array of which dtype or shape differ; its values are not compared."""

    name: str
    one: ArraySpec
    other: ArraySpec


class Values(NamedTuple):
    """An array whose values differ.

    Attributes:
        name: of the array.
        elements: how many of them have other bits.
        size: how many there are.
        max_abs: largest absolute difference; NaN where one of two is NaN, inf where one of two
            is infinite, 0 where only the bits differ, as with -0 and 0 or payloads of NaN. None
            for booleans.
    """

    name: str
    elements: int
    size: int
    max_abs: float | None


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints.

    Attributes:
        only_one, only_other: names that the other does not have.
        changed: arrays of another dtype or shape.
        values: arrays of other values.
        entries: names of what is no array, such as numbers and random generators, and differs, or
            is in one only; what engines remember, such as the number of steps, is not compared.
        compared: how many arrays are in both, with the same dtype and shape.
        nbytes: of these, in one of the two.
    """

    only_one: tuple[str, ...]
    only_other: tuple[str, ...]
    changed: tuple[Changed, ...]
    values: tuple[Values, ...]
    compared: int
    nbytes: int
    entries: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs, bit for bit."""
        arrays = self.only_one or self.only_other or self.changed or self.values
        return not (arrays or self.entries)


def diff(
    one: StoragePath,
    other: StoragePath,
    *,
    step: Step = None,
    other_step: Step = None,
    names: str | Iterable[str] | None = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Difference:
    """Compare the arrays of two checkpoints, however each is sharded; blocks.

    Streamed, in less than 64 MiB beyond what the names of all arrays take; every byte of our own
    checkpoints is verified.

    Args:
        one: a folder of steps, or that of one; a ``.safetensors`` file or ``.json`` index; or the
            folder of a distributed checkpoint of PyTorch.
        other: the same.
        step: of ``one``, see ``load``; by default the newest that is valid.
        other_step: of ``other``; likewise.
        names: patterns (of the shell) of the arrays to compare; by default all.
        threads: that read.
        progress: called with the bytes that are compared and those in all, of one of the two.

    Returns:
        In what they differ: arrays that only one has, and those whose bits differ.

    Raises:
        ArgumentError: something makes no sense, or a pattern fits no name of either.
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: it is damaged.
        CheckpointError: it could not be read, or has arrays of which elements were not saved.

    Example::

        print(fc.checkpoint.diff("run", "other", names="*.weight"))
    """
    patterns = checked_patterns(names)
    with ExitStack() as stack:
        first = stack.enter_context(opened_source(one, step, threads))
        second = stack.enter_context(opened_source(other, other_step, threads))
        of_both = [*first.arrays, *second.arrays]
        refuse_idle(patterns, of_both, f"{first.what} or {second.what}")
        ours, theirs = (chosen(list(each.arrays), patterns) for each in (first, second))
        both = sorted({*ours} & {*theirs})
        changed = tuple(
            Changed(name, first.arrays[name], second.arrays[name])
            for name in both
            if first.arrays[name] != second.arrays[name]
        )
        same = sorted({*both} - {each.name for each in changed})
        for source in (first, second):
            source.check(same)
        nbytes = sum(first.arrays[name].nbytes for name in same)
        values = tuple(_compared(first, second, same, ProgressCounter(nbytes, progress)))
        return Difference(
            tuple(sorted({*ours} - {*theirs})),
            tuple(sorted({*theirs} - {*ours})),
            changed,
            values,
            len(same),
            nbytes,
            tuple(chosen(other_entries(first, second), patterns)),
        )


def _compared(
    first: ArraySource, second: ArraySource, names: list[str], counting: ProgressCounter
) -> Iterator[Values]:
    """Give the arrays that differ; both have the same dtypes and shapes."""
    wants = [ArrayRegion(name, whole(first.arrays[name].shape)) for name in names]
    found: dict[int, Values] = {}
    for (index, one), (_, other) in zip(first.stream(wants), second.stream(wants), strict=True):
        count, largest = compare(one, other)
        if count:
            before = found.get(index) or Values(names[index], 0, wants[index].region.size, None)
            found[index] = before._replace(
                elements=before.elements + count, max_abs=_larger(before.max_abs, largest)
            )
        counting.add(one.nbytes)
    yield from found.values()


def _larger(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def compare(one: Array, other: Array) -> tuple[int, float | None]:
    """Return how many elements have other bits, and their largest absolute difference.

    Both are flat and contiguous, of the same dtype and size. See ``Values`` for the difference.
    """
    bits = _bits(one) != _bits(other)
    differs = bits.any(axis=1) if bits.ndim > 1 else bits
    count = int(np.count_nonzero(differs))
    if not count or one.dtype == np.bool_:
        return count, None
    return count, _largest(one[differs], other[differs])


def _bits(array: Array) -> Array:
    """Return something of the same bits that can be compared."""
    size = array.dtype.itemsize
    if size <= 8:
        return array.view(f"u{size}")
    return byte_view(array).view(np.uint64).reshape(array.size, -1)


def _largest(one: Array, other: Array) -> float:
    kind = one.dtype.name
    if kind.startswith(("int", "uint")):
        if one.dtype.kind not in "iu":  # of ml_dtypes, with less than a byte
            one, other = one.astype(np.int64), other.astype(np.int64)
        # Exact where the difference itself would overflow.
        unsigned = f"u{one.itemsize}"
        high, low = np.maximum(one, other), np.minimum(one, other)
        return float((high.view(unsigned) - low.view(unsigned)).max())
    wide = np.complex128 if "complex" in kind else np.float64
    with np.errstate(all="ignore"):
        one, other = one.astype(wide), other.astype(wide)
        gaps = np.abs(one - other)
        gaps[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
        # Finite values, or unlike infinities: NaN only if one of the two is.
        gaps[np.isnan(gaps) & ~(np.isnan(one) | np.isnan(other))] = np.inf
    return float(gaps.max())
