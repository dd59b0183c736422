"""What of the conformance suite is run among ranks whose arrays are on GPUs, where each is dear."""

from __future__ import annotations

from support.bodies import (
    asynchronous,
    coalescing,
    groups,
    layouts,
    movement,
    reductions,
    splitting,
)

# To the bit, with canonical algorithms.
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
# About groups of ranks.
GROUPS = [
    groups.any_members_in_any_order,
    groups.nested,
    groups.between_calls_of_the_parent,
    splitting.by_color,
    splitting.without_color,
    splitting.split_again,
    splitting.two_steps_on_a_mesh,
]
# NCCL reduces in an order of its own; what moves arrays is exact there, too.
NATIVE = [reductions.ring_to_rounding, movement.every_dtype, movement.ragged_exchange]
