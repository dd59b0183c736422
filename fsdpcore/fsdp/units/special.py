"""Parameters that are not simply trained by their unit: tied, frozen, ignored."""

from __future__ import annotations

import fnmatch
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from fsdpcore.core.array_module import address, array_module, place
from fsdpcore.core.errors import ArgumentError


@dataclass(frozen=True)
class Tied:
    """A parameter that is another one, of this or of another unit: same values, one gradient.

    The other unit, the *owner*, has the memory. It is gathered wherever a unit that is tied to it
    is; gradients of all uses are added up and reduced by the owner's last backward pass.

    Args:
        unit: name of the owner.
        param: its name there.

    Example::

        fc.Unit("head", {"w": fc.Tied("embed", "w")})
    """

    unit: str
    param: str

    def __str__(self) -> str:
        return f"{self.unit}.{self.param}"


def elements_of(value: object) -> Hashable:
    """Return what arrays of the same elements have in common, also views; None for no elements."""
    if array_module(value) is None:
        return None
    array: Any = value
    return (place(array), address(array), array.size) if array.size else None


def chosen(unit: str, names: Iterable[str], patterns: str | Iterable[str], what: str) -> set[str]:
    """Return those of ``names`` that match one of ``patterns`` (as of the shell).

    Raises:
        ArgumentError: a pattern matches nothing.
    """
    known = list(names)
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = fnmatch.filter(known, pattern)
        if not matching:
            raise ArgumentError(
                f"{what}={pattern!r} matches no parameter of unit {unit!r}; it has "
                f"{', '.join(known) or 'none'}"
            )
        found.update(matching)
    return found
