"""Which transports and numbers of ranks a test of the conformance suite runs on."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
from support.spmd import TRANSPORTS

# Seven ranks make a tree of as many levels as eight do, with one of them left over at each. Two are
# in the tests of algorithms, and wherever more would add nothing.
WORLD_SIZES = (1, 3, 4, 7)
ALL_SIZES = (1, 2, 3, 4, 7, 8)
LARGE = (7, 8)
# Elements: more than eight blocks of a reduction, and float32 of more than 1 MiB.
MANY_ELEMENTS = 265_000
# The transports whose ranks are processes; and those that take what is the same on all of them,
# without the one whose processes start slowly and wait awake.
COSTLY = [name for name, transport in TRANSPORTS.items() if transport.costly]
NOT_VIRTUAL = [name for name in TRANSPORTS if name != "virtual"]
NOT_MPI = [name for name in TRANSPORTS if name != "mpi"]


def jobs(
    *sizes: int,
    of_processes: Container[int] | None = None,
    every_size: bool = False,
    on: Container[str] = TRANSPORTS,
) -> pytest.MarkDecorator:
    """Parametrise a test by ``transport`` and ``world_size``.

    What depends on the number of ranks does so in the algorithms, which see only their context: the
    threads of ``sim`` take all numbers. Those whose ranks are processes share the small ones, and
    ``virtual``, which is ``sim`` in another time, takes one.

    Args:
        *sizes: numbers of ranks; by default those of every day, or with ``every_size`` all.
        of_processes: those of them to be had where ranks are processes.
        every_size: keep all numbers there, for a campaign.
        on: the names of the transports; by default all.
    """
    sizes = sizes or (ALL_SIZES if every_size else WORLD_SIZES)
    several = [size for size in sizes if 1 < size < min(LARGE)][::-1]
    chosen = []
    for name, transport in TRANSPORTS.items():
        mine: Container[int] = sizes
        if transport.alike and not every_size:
            mine = several[:1] or sizes
        elif transport.costly and not every_size:
            mine = several[transport.turn :: 2] or several or sizes
            if of_processes is not None:
                mine = of_processes
        chosen += [(name, size) for size in sizes if name in on and size in mine]
    return pytest.mark.parametrize(("transport", "world_size"), chosen)


def bodies(*functions: Any) -> pytest.MarkDecorator:
    """Parametrise a test by ``body``, named like the functions."""
    return pytest.mark.parametrize("body", functions, ids=[f.__name__ for f in functions])
