"""Every collective, on every transport, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import layouts, movement, overview, reductions
from support.cases import LARGE, bodies, jobs
from support.spmd import TRANSPORTS, run

pytestmark = pytest.mark.side_by_side("transport")


@jobs()
@bodies(
    reductions.every_shape,
    reductions.special_values,
    reductions.combinations_refused,
    reductions.ring_to_rounding,
    reductions.all_reduce_in_two_steps,
    movement.every_dtype,
    movement.every_shape,
    movement.python_values,
    movement.barriers,
    movement.ragged_gather,
    movement.ragged_rooted,
    movement.ragged_reduction,
    movement.ragged_exchange,
    movement.ragged_refusals,
    layouts.every_layout,
    layouts.odd_strides,
    layouts.out_is_input,
    layouts.own_chunk_in_place,
    layouts.partial_overlap,
)
def test_collectives(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(large_if_costly=True)
def test_every_dtype_and_op(transport: str, world_size: int) -> None:
    sparing = TRANSPORTS[transport].costly and world_size in LARGE
    body = reductions.every_dtype_and_op
    run(body, transport=transport, world_size=world_size, args=(7 if sparing else 1,))


@jobs(large_if_costly=True)
@bodies(reductions.large_arrays, movement.large_arrays)
def test_large_arrays(body: Any, transport: str, world_size: int) -> None:
    elements = 40_000 if world_size in LARGE else 300_000
    run(body, transport=transport, world_size=world_size, args=(elements,))


@jobs(2, 3, 8)
@bodies(reductions.every_shape, movement.every_dtype, movement.ragged_exchange)
def test_short_messages_the_long_way(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, **TRANSPORTS[transport].tight)


@jobs(2, 5)
@bodies(reductions.large_arrays, movement.large_arrays)
def test_many_segments(body: Any, transport: str, world_size: int) -> None:
    tight = TRANSPORTS[transport].tight
    run(body, transport=transport, world_size=world_size, args=(20_000,), **tight)


@pytest.mark.parametrize("world_size", LARGE)
@pytest.mark.parametrize("transport", [name for name, t in TRANSPORTS.items() if t.costly])
def test_many_processes(transport: str, world_size: int) -> None:
    run(overview.some_of_everything, transport=transport, world_size=world_size)
