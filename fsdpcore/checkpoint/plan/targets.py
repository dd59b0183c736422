"""Which stored tensor belongs to which array of the target, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.checkpoint.memory.shards import Shard, dtype_of, parts_of, shape_of
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import WantedPart
from fsdpcore.core.array_module import on_host
from fsdpcore.core.checks import rounds_into
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.state.state import OPTIMIZER_PREFIX

_SHOWN = 8  # names in a message


@dataclass(frozen=True)
class TargetMatch:
    """How the arrays of a rank and the stored tensors fit.

    Attributes:
        wanted: every piece of an array, with the number of the tensor that it is read from.
        names: of the array that each of these is of.
        missing: arrays that nothing is stored for.
        used: for each stored tensor, whether this rank reads it, or has a name for it.
    """

    wanted: list[WantedPart]
    names: list[str]
    missing: list[str]
    used: NDArray[np.uint8]


def match(
    catalog: Catalog,
    state: Mapping[str, Shard],
    ties: Mapping[str, str],
    *,
    cast: bool,
    stored: Mapping[str, str] | None = None,
) -> TargetMatch:
    """Find the tensor for each array.

    Args:
        catalog: of what is stored.
        state: arrays to be filled, by name.
        ties: of the target: for each tied parameter the name of its owner.
        cast: values may be rounded to the dtypes of the arrays.
        stored: the same as ``ties``, of the checkpoint.

    Raises:
        ArgumentError: an array has another shape, another dtype, or is read-only.
    """
    wanted: list[WantedPart] = []
    names: list[str] = []
    missing: list[str] = []
    problems: list[str] = []
    used = np.zeros(len(catalog.tensors), np.uint8)
    aliases = _Aliases(catalog, ties, stored or {})
    for name, shard in state.items():
        number = catalog.number.get(name)
        if number is None:
            number = aliases.find(name)
        if number is None:
            missing.append(name)
            continue
        used[number] = 1
        problem = _misfit(catalog, number, shard, cast)
        for part in parts_of(shard):
            if on_host(part.array) and not part.array.flags.writeable:
                problem = problem or "is read-only; loading writes in place"
            wanted.append(WantedPart(number, part))
            names.append(name)
        if problem:
            problems.append(f"{name!r} {problem}")
    if problems:
        more = len(problems) - _SHOWN
        shown = "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ArgumentError(shown)
    return TargetMatch(wanted, names, missing, used)


def _misfit(catalog: Catalog, number: int, shard: Shard, cast: bool) -> str:
    """Say why an array cannot be filled from a tensor; "" if it can."""
    tensor = catalog.tensors[number]
    shape, dtype = shape_of(shard), dtype_of(shard)
    if shape != tensor.shape:
        return f"has shape {shape}, but {tensor.shape} in the checkpoint"
    if dtype == tensor.dtype or dtype.newbyteorder("=") == tensor.dtype:
        return ""
    if not cast:
        return (
            f"has dtype {dtype}, but {tensor.dtype} in the checkpoint; cast=True rounds the values"
        )
    if not (rounds_into(tensor.dtype, dtype) or _safe(tensor.dtype, dtype)):
        return f"has dtype {dtype}, to which {tensor.dtype} of the checkpoint cannot be rounded"
    return ""


def _safe(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    try:
        return np.can_cast(stored, wanted, "safe")
    except TypeError:  # types of ml_dtypes that NumPy knows no conversion between
        return False


class _Aliases:
    """Finds arrays of parameters that were tied differently when they were saved."""

    def __init__(
        self, catalog: Catalog, ties: Mapping[str, str], stored: Mapping[str, str]
    ) -> None:
        self._number = catalog.number
        self._stored = stored
        self._tied: dict[str, list[str]] = {}
        for name, owner in ties.items():
            self._tied.setdefault(owner, []).append(name)

    def find(self, name: str) -> int | None:
        """Return the number of the tensor that ``name`` was saved as, under another name."""
        prefix, param = _split(name)
        own = [param, *self._tied.get(param, ())]
        for other in [*own, *(self._stored.get(each) for each in own)]:
            number = self._number.get(f"{prefix}{other}")
            if number is not None:
                return number
        return None


def is_tied(name: str, ties: Mapping[str, str]) -> bool:
    """Whether the array is that of another name: of a tied parameter, or of its optimizer."""
    return _split(name)[1] in ties


def _split(name: str) -> tuple[str, str]:
    """Return what stands before the name of a parameter, and that."""
    if not name.startswith(OPTIMIZER_PREFIX):
        return "", name
    state, _, param = name.removeprefix(OPTIMIZER_PREFIX).partition("/")
    return f"{OPTIMIZER_PREFIX}{state}/", param


def chosen(names: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """Return the names that fit one of the patterns (of the shell); all without patterns."""
    if patterns is None:
        return list(names)
    known = set(names)
    plain = {each for each in patterns if each in known}
    rest = [each for each in patterns if each not in known]
    return [
        name
        for name in names
        if name in plain or any(fnmatchcase(name, pattern) for pattern in rest)
    ]


def checked_patterns(names: object) -> list[str] | None:
    """Return patterns as a list; None for None.

    Raises:
        ArgumentError: they are no strings.
    """
    if names is None:
        return None
    if isinstance(names, str):
        return [names]
    if isinstance(names, (Mapping, bytes)) or not hasattr(names, "__iter__"):
        raise ArgumentError(f"names are patterns of names, got {names!r}")
    patterns = list(names)
    if not patterns or not all(isinstance(each, str) for each in patterns):
        raise ArgumentError(
            f"names are patterns of names, such as 'block.*', got {patterns!r:.200}"
        )
    return patterns
