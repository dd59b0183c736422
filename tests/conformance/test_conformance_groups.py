"""Groups by color, meshes, and operations of several groups at once, on every transport."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import splitting
from support.cases import bodies, jobs
from support.spmd import run

pytestmark = pytest.mark.side_by_side("transport")


@jobs()
@bodies(
    splitting.by_color,
    splitting.without_color,
    splitting.split_again,
    splitting.split_refusals,
    splitting.sub_refusals,
    splitting.named_in_any_order,
    splitting.meshes,
    splitting.two_steps_on_a_mesh,
    splitting.meshes_of_groups,
    splitting.overlapping_groups,
    splitting.blocking_beside_started,
)
def test_groups(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 4)
def test_mismatched_split(transport: str, world_size: int) -> None:
    run(splitting.mismatched_split, transport=transport, world_size=world_size)
