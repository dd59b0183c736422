"""Which transports and numbers of ranks a test of the conformance suite runs on."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
from support.spmd import TRANSPORTS

WORLD_SIZES = (1, 2, 3, 4, 7, 8)
LARGE = (7, 8)


def jobs(
    *sizes: int,
    of_processes: Container[int] | None = None,
    large_if_costly: bool = False,
    every_large: bool = False,
    on: Container[str] = TRANSPORTS,
) -> pytest.MarkDecorator:
    """Parametrise a test by ``transport`` and ``world_size``.

    Args:
        *sizes: numbers of ranks; by default all.
        of_processes: those of them to be had where ranks are processes; by default all but large
            ones.
        large_if_costly: keep a large number also where ranks are processes: one of them, not the
            same for all transports.
        every_large: keep all large numbers there, for a campaign.
        on: the names of the transports; by default all.
    """
    chosen = [
        (name, size)
        for name, transport in TRANSPORTS.items()
        if name in on
        for size in sizes or WORLD_SIZES
        if not transport.costly
        or every_large
        or (size not in LARGE if of_processes is None else size in of_processes)
        or (large_if_costly and size == transport.large)
    ]
    return pytest.mark.parametrize(("transport", "world_size"), chosen)


def bodies(*functions: Any) -> pytest.MarkDecorator:
    """Parametrise a test by ``body``, named like the functions."""
    return pytest.mark.parametrize("body", functions, ids=[f.__name__ for f in functions])


def only_if_asked_for(request: pytest.FixtureRequest) -> None:
    """Skip a test that is too long for every day, unless ``-m campaign`` names it."""
    if "campaign" not in str(request.config.getoption("markexpr")):
        pytest.skip("long: started with -m campaign")
