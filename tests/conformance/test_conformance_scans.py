"""Prefix reductions, on every transport."""

from __future__ import annotations

from typing import Any

from support.bodies import scans
from support.cases import bodies, jobs
from support.spmd import run


@jobs()
@bodies(
    scans.combinations,
    scans.shapes,
    scans.where_results_go,
    scans.own_reductions,
    scans.exclusive,
    scans.exclusive_of_nothing,
)
def test_scan(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 4)
def test_mismatched_scan(transport: str, world_size: int) -> None:
    run(scans.mismatched, transport=transport, world_size=world_size)
