"""Which arrays are taken from somewhere, what they are called then, and with which dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from numpy.typing import DTypeLike

from fsdpcore.checkpoint.format.strict_json import check_text, short
from fsdpcore.checkpoint.interchange.array_sources import ArraySource, ArraySpec
from fsdpcore.checkpoint.interchange.patterns import refuse_idle
from fsdpcore.checkpoint.memory.rounding import rounding_dtype
from fsdpcore.checkpoint.plan.targets import checked_patterns, chosen
from fsdpcore.core.checks import rounds_into
from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.state.state import OPTIMIZER_PREFIX

Renaming = Mapping[str, str] | Callable[[str], str]


class SelectedArray(NamedTuple):
    """An array that is taken.

    Attributes:
        source: its name where it comes from.
        array: dtype and shape where it goes to.
    """

    source: str
    array: ArraySpec


@dataclass(frozen=True)
class Selection:
    """What to take, and how.

    Attributes:
        names: patterns (of the shell) of names in the source; None for all.
        optimizer: with the arrays of the optimizer.
        rename: new names by old ones, or a function that gives them. A name that a mapping does
            not have goes through the next two.
        strip_prefix: taken away from the names that begin with it.
        add_prefix: put in front of names.
        dtype: floating arrays are rounded to it; the others keep theirs.
    """

    names: str | Iterable[str] | None = None
    optimizer: bool = True
    rename: Renaming | None = None
    strip_prefix: str = ""
    add_prefix: str = ""
    dtype: DTypeLike | None = None

    def of(self, source: ArraySource) -> dict[str, SelectedArray]:
        """Return what is taken of a source, by its new name, in the order of the source.

        Raises:
            ArgumentError: a pattern or the prefix fits no name, two arrays would have the same
                name, nothing is left of one, or ``dtype`` is not floating.
        """
        dtype = rounding_dtype(self.dtype, "what is written")
        known = list(source.arrays)
        if not self.optimizer:
            known = [name for name in known if not name.startswith(OPTIMIZER_PREFIX)]
        patterns = checked_patterns(self.names)
        refuse_idle(patterns, known, source.what)
        old = chosen(known, patterns)
        taken: dict[str, SelectedArray] = {}
        for name, new in zip(old, self._renamed(old, source.what), strict=True):
            if new in taken:
                raise ArgumentError(
                    f"{short(taken[new].source)} and {short(name)} would both be called "
                    f"{short(new)}"
                )
            array = source.arrays[name]
            if dtype is not None and rounds_into(array.dtype, dtype):
                array = ArraySpec(dtype, array.shape)
            taken[new] = SelectedArray(name, array)
        return taken

    def _renamed(self, names: list[str], what: str) -> list[str]:
        mapping: Mapping[str, str] = self.rename if isinstance(self.rename, Mapping) else {}
        known = set(names)
        for old in mapping:
            if old not in known:
                raise ArgumentError(f"{short(old)} cannot be renamed: {what} has no such array")
        strip = self.strip_prefix
        if strip and not any(name.startswith(strip) for name in names):
            raise ArgumentError(f"no name in {what} begins with {strip!r}, which is to be stripped")
        found = []
        for name in names:
            if name in mapping:
                new = mapping[name]
            else:
                new = self.add_prefix + name.removeprefix(strip)
                if callable(self.rename):
                    new = self.rename(new)
            check_text(new, f"the new name of {short(name)}")
            if not new:
                raise ArgumentError(f"nothing would be left of the name {short(name)}")
            found.append(new)
        return found
