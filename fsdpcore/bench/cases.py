"""What is measured: operations, sizes, and the bandwidths that a time stands for.

The conventions are those of nccl-tests (its doc/PERFORMANCE.md): a size is that of the larger of
the two buffers of a rank, so for all_gather, gather, reduce_scatter, scatter and all_to_all it is
the sum over the ranks; GB are 1e9 bytes; ``busbw`` is ``algbw`` times a factor that makes it
comparable to what the hardware moves, whatever the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpcore.collectives.operations.table import OPERATIONS
from fsdpcore.collectives.spec import Operation
from fsdpcore.core.buffers import DTYPES
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.reductions import Reduction
from fsdpcore.core.text import nearest

MEASURED = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
)
# The oracle's small numbers are no values of the others.
OP_NAMES = ("sum", "mean", "min", "max", "prod")  # of which the oracle knows the results
DTYPE_NAMES = tuple(dtype.name for dtype in DTYPES if dtype.kind not in "bc")
PLACES = ("out", "in")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Case:
    """One line of a table: an operation on one size.

    Attributes:
        operation: one of ``MEASURED``.
        count: elements that one rank contributes or, where it is split, that one rank gets.
        dtype: name of one of ``DTYPE_NAMES``.
        op: name of the reduction, "none" where nothing is reduced.
        root: -1 where there is none.
        world_size: number of ranks.
        in_place: the output is the input, or the rank's own part of the larger one.
    """

    operation: str
    count: int
    dtype: str
    op: str
    root: int
    world_size: int
    in_place: bool

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the arrays."""
        return next(dtype for dtype in DTYPES if dtype.name == self.dtype)

    @property
    def definition(self) -> Operation:
        """The operation."""
        return OPERATIONS[self.operation]

    @property
    def size(self) -> int:
        """Bytes, by the convention of the module docstring."""
        return self.count * _parts(self.definition, self.world_size) * self.numpy_dtype.itemsize

    def source_count(self, rank: int) -> int:
        """Elements of a rank's input; 0 where it has none."""
        if not self.definition.splits:
            return self.count
        gives = not self.definition.rooted or rank == self.root
        return self.count * self.world_size if gives else 0

    def output_count(self, rank: int) -> int:
        """Elements of a rank's output; 0 where it gets none."""
        if self.definition.to_root and rank != self.root:
            return 0
        return self.count * self.world_size if self.definition.joins else self.count


def _parts(operation: Operation, world_size: int) -> int:
    """Into how many parts a size is spread: each rank contributes, or gets, one."""
    return world_size if operation.splits or operation.joins else 1


def busbw_factor(operation: str, world_size: int) -> float:
    """What ``algbw`` is multiplied by to get ``busbw``."""
    p = world_size
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (p - 1) / p


def algbw(size: int, seconds: float) -> float:
    """Gigabytes (1e9) per second; 0 where no time passed."""
    return size / seconds / 1e9 if seconds > 0 else 0.0


def parse_size(text: str) -> int:
    """Read a number of bytes: 8, 64KiB, 64M (which is MiB, as in nccl-tests).

    Raises:
        ArgumentError: it is no size.
    """
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ArgumentError(f"{text!r} is no size; write it like 8, 64KiB or 64MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def sizes(first: int, last: int, factor: int) -> list[int]:
    """The sizes from ``first`` to at most ``last`` bytes, each ``factor`` times the one before.

    Raises:
        ArgumentError: there are none, or they would not grow.
    """
    if factor < 2:
        raise ArgumentError(f"the factor between sizes (-f) must be at least 2, got {factor}")
    if last < first:
        raise ArgumentError(f"the last size (-e), {last} B, is smaller than the first, {first} B")
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


def chosen_operations(names: Sequence[str]) -> list[str]:
    """The operations that were asked for, each once; "all" stands for every one.

    Raises:
        ArgumentError: there is no such operation.
    """
    wanted: list[str] = []
    for name in names:
        if name != "all" and name not in MEASURED:
            known = ("all", *MEASURED)
            raise ArgumentError(
                f"no operation {name!r}{nearest(name, known)}; there are {', '.join(known)}"
            )
        wanted += MEASURED if name == "all" else [name]
    return list(dict.fromkeys(wanted))


def make_cases(
    operation: str,
    wanted: Sequence[int],
    world_size: int,
    *,
    dtype: str,
    op: str,
    root: int,
    in_place: bool,
) -> list[Case]:
    """The cases of one operation, one for each size that differs from the one before.

    A size that does not divide evenly is rounded down to whole elements, the same number for
    each rank, but to no less than one.
    """
    cases: list[Case] = []
    itemsize = next(d for d in DTYPES if d.name == dtype).itemsize
    definition = OPERATIONS[operation]
    for size in wanted:
        case = Case(
            operation,
            max(1, size // itemsize // _parts(definition, world_size)),
            dtype,
            op if definition.reduces else "none",
            root if definition.rooted else -1,
            world_size,
            in_place,
        )
        if not cases or case != cases[-1]:
            cases.append(case)
    return cases


def has_place(operation: str, place: str) -> bool:
    """Whether an operation can be measured out of place ("out") or in place ("in")."""
    return place == "out" or operation != "all_to_all"


def check_kind(dtype: str, op: str, root: int, world_size: int) -> None:
    """Check what all cases share.

    Raises:
        ArgumentError: no such dtype, reduction or root, or the dtype has no such reduction.
    """
    if dtype not in DTYPE_NAMES:
        raise ArgumentError(
            f"no dtype {dtype!r}{nearest(dtype, DTYPE_NAMES)}; "
            f"the bench has {', '.join(DTYPE_NAMES)}"
        )
    if op not in OP_NAMES:
        near = nearest(op, OP_NAMES)
        raise ArgumentError(f"no reduction {op!r}{near}; there are {list(OP_NAMES)}")
    Reduction.of(op, next(known for known in DTYPES if known.name == dtype))
    if not 0 <= root < world_size:
        raise ArgumentError(f"root {root} is not a rank of {world_size}")
