"""Bodies of the conformance suite on the ``nccl`` transport, with the stand-in for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import (
    agreement,
    asynchronous,
    coalescing,
    endings,
    groups,
    layouts,
    movement,
    reductions,
    splitting,
)
from support.cases import bodies
from support.nccl_ranks import run

EXACT = [
    reductions.every_shape,
    reductions.special_values,
    reductions.all_reduce_in_two_steps,
    movement.every_shape,
    movement.every_dtype,
    movement.ragged_gather,
    movement.ragged_rooted,
    movement.ragged_reduction,
    movement.ragged_exchange,
    layouts.every_layout,
    layouts.own_chunk_in_place,
    asynchronous.between_blocking_calls,
    asynchronous.every_collective,
    asynchronous.into_out,
    coalescing.as_single_calls,
    coalescing.into_out,
    coalescing.lists,
]
GROUPS = [
    groups.any_members_in_any_order,
    groups.nested,
    groups.between_calls_of_the_parent,
    splitting.by_color,
    splitting.without_color,
    splitting.split_again,
    splitting.two_steps_on_a_mesh,
]


@bodies(*EXACT)
def test_canonical(body: Any) -> None:
    run(body, 3, deterministic=True)


@bodies(*GROUPS)
def test_groups(body: Any) -> None:
    run(body, 4, deterministic=True)


@bodies(reductions.every_shape, movement.every_dtype, layouts.every_layout, coalescing.lists)
def test_alone(body: Any) -> None:
    run(body, 1)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_dtype_and_op(world_size: int) -> None:
    run(reductions.every_dtype_and_op, world_size, 3, 1, deterministic=True)


@bodies(
    reductions.ring_to_rounding,
    movement.every_dtype,
    movement.ragged_exchange,
)
def test_native(body: Any) -> None:
    run(body, 3)


@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "operation"])
def test_difference(what: str) -> None:
    run(agreement.difference, 2, what)


@pytest.mark.parametrize("call", ["all_reduce", "started"])
def test_aborted(call: str) -> None:
    run(endings.aborted, 2, call)


@bodies(endings.left_at_different_times)
def test_endings(body: Any) -> None:
    run(body, 3)


@bodies(reductions.every_shape, movement.every_dtype, layouts.every_layout)
def test_arrays_of_the_host(body: Any) -> None:
    run(body, 2, moved=False)
