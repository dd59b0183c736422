"""The conformance suite on a GPU: one rank with the real NCCL, in this process."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import (
    asynchronous,
    bounded,
    coalescing,
    endings,
    groups,
    layouts,
    movement,
    reductions,
    splitting,
)
from support.cases import bodies
from support.gpu_ranks import alone, moved_alone, through_nccl
from support.on_device import body_on_device

EXACT = [
    reductions.every_shape,
    reductions.every_dtype_and_op,
    reductions.special_values,
    reductions.combinations_refused,
    reductions.all_reduce_in_two_steps,
    movement.every_shape,
    movement.every_dtype,
    movement.barriers,
    movement.python_values,
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
    asynchronous.many_outstanding,
    asynchronous.between_blocking_calls,
    asynchronous.every_collective,
    asynchronous.into_out,
    bounded.more_than_fit,
    coalescing.as_single_calls,
    coalescing.every_dtype_and_op,
    coalescing.into_out,
    coalescing.started,
    coalescing.nothing_and_misuse,
    coalescing.left_by_an_exception,
    coalescing.lists,
    coalescing.lists_refused,
    groups.any_members_in_any_order,
    groups.equal_members_do_not_mix,
    groups.impossible_groups,
    groups.closing_a_group,
    splitting.by_color,
    splitting.without_color,
    splitting.split_refusals,
    splitting.meshes,
    splitting.two_steps_on_a_mesh,
    splitting.blocking_beside_started,
]
# NCCL reduces in an order of its own; what moves arrays is exact there, too.
NATIVE = [
    reductions.ring_to_rounding,
    movement.every_shape,
    movement.every_dtype,
    movement.ragged_gather,
    movement.ragged_rooted,
    movement.ragged_exchange,
    asynchronous.every_collective,
    groups.any_members_in_any_order,
]


@bodies(*EXACT)
def test_exact(body: Any) -> None:
    moved_alone(body, deterministic=True)


@bodies(*NATIVE)
def test_native(body: Any) -> None:
    moved_alone(body)


@bodies(reductions.every_dtype_and_op, reductions.every_shape, coalescing.as_single_calls, *NATIVE)
def test_nccl_with_one_rank(body: Any) -> None:
    """Of one rank's array, NCCL's result is that array, too."""
    alone(through_nccl, body_on_device, body)


@bodies(reductions.every_dtype_and_op, movement.every_dtype, endings.after_close)
def test_arrays_of_the_host_go_as_ever(body: Any) -> None:
    alone(body)


@pytest.mark.parametrize("body", [reductions.large_arrays, movement.large_arrays])
def test_large(body: Any) -> None:
    moved_alone(body, 3_000_000, deterministic=True)
