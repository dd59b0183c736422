"""MPI's own collectives, and its progress, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support import spmd_mpi_bodies as bodies_
from support.cases import bodies
from support.spmd import run


@pytest.mark.parametrize("world_size", [1, 3])
@bodies(
    bodies_.reductions,
    bodies_.movement,
    bodies_.in_place,
    bodies_.without_a_copy,
    bodies_.ragged,
    bodies_.in_pieces,
    bodies_.groups_at_once,
    bodies_.advances_by_itself,
    bodies_.training,
)
def test_native(body: Any, world_size: int) -> None:
    run(body, transport="mpi", world_size=world_size, deterministic=False)


def test_data_that_comes_after_a_failure() -> None:
    run(bodies_.late_data, transport="mpi", world_size=2, eager_bytes=0)


@pytest.mark.campaign
def test_beyond_32_bits() -> None:
    run(bodies_.large, transport="mpi", world_size=2, timeout=300, op_timeout=200)
