"""Every collective, on every transport, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import layouts, movement, outputs, overview, reductions
from support.cases import COSTLY, LARGE, MANY_ELEMENTS, bodies, jobs
from support.spmd import TRANSPORTS, run

pytestmark = pytest.mark.side_by_side("transport")


# What depends on the number of ranks; what is about values and dtypes, which no transport looks at;
# and what is about where arrays lie.
OF_RANKS = [
    reductions.every_shape,
    movement.every_shape,
    movement.barriers,
    movement.python_values,
    movement.ragged_gather,
    movement.ragged_rooted,
    movement.ragged_reduction,
    movement.ragged_exchange,
    movement.ragged_refusals,
]
OF_VALUES = [
    reductions.special_values,
    reductions.means_of_integers,
    reductions.combinations_refused,
    reductions.all_reduce_in_two_steps,
    movement.every_dtype,
]
OF_ARRAYS = [
    layouts.every_layout,
    layouts.odd_strides,
    layouts.out_is_input,
    layouts.own_chunk_in_place,
    layouts.partial_overlap,
]


@jobs()
@bodies(*OF_RANKS)
def test_collectives(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(1, 3)
def test_wrong_out(transport: str, world_size: int) -> None:
    run(outputs.refused, transport=transport, world_size=world_size)


@jobs(3)
@pytest.mark.parametrize(
    "what", ["all_gather_v", "gather_v", "all_to_all_v", "scatter", "scatter_v"]
)
def test_out_that_others_do_not_fit(what: str, transport: str, world_size: int) -> None:
    run(outputs.not_foreseen, transport=transport, world_size=world_size, args=(what,))


@jobs(1, 3, on=["sim"])
@bodies(*OF_VALUES)
def test_values(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(1, 3)
@bodies(*OF_ARRAYS)
def test_arrays(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs(2, 7)
@bodies(reductions.ring_to_rounding)
def test_rounding(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@pytest.mark.campaign
@jobs(every_size=True)
@bodies(*OF_VALUES, *OF_ARRAYS, reductions.ring_to_rounding, reductions.every_dtype_and_op)
def test_arrays_on_all_numbers_of_ranks(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size)


@jobs()
def test_every_dtype_and_op(transport: str, world_size: int) -> None:
    """All of them on three ranks that are threads; elsewhere a part, not the same on all."""
    every = 1 if (transport, world_size) == ("sim", 3) else 7
    args = (every, world_size % every)
    run(reductions.every_dtype_and_op, transport=transport, world_size=world_size, args=args)


@jobs(3, 7, of_processes=[3])
@bodies(reductions.large_arrays, movement.large_arrays)
def test_large_arrays(body: Any, transport: str, world_size: int) -> None:
    elements = 40_000 if world_size in LARGE else MANY_ELEMENTS
    run(body, transport=transport, world_size=world_size, args=(elements,))


@jobs(3, 7)
@bodies(reductions.every_shape, movement.every_shape, movement.ragged_exchange)
def test_short_messages_the_long_way(body: Any, transport: str, world_size: int) -> None:
    run(body, transport=transport, world_size=world_size, **TRANSPORTS[transport].tight)


@pytest.mark.campaign
@jobs(1, 2, 4, 7, 8, every_size=True)
@bodies(reductions.large_arrays, movement.large_arrays)
def test_large_arrays_on_other_numbers_of_ranks(body: Any, transport: str, world_size: int) -> None:
    elements = 40_000 if world_size in LARGE else MANY_ELEMENTS
    run(body, transport=transport, world_size=world_size, args=(elements,))


@pytest.mark.campaign
@jobs(1, 2, 4, 7, every_size=True)
@bodies(reductions.every_shape, movement.every_dtype, movement.ragged_exchange)
def test_short_messages_the_long_way_on_other_numbers_of_ranks(
    body: Any, transport: str, world_size: int
) -> None:
    run(body, transport=transport, world_size=world_size, **TRANSPORTS[transport].tight)


@jobs(2, 5)
@bodies(reductions.large_arrays, movement.large_arrays)
def test_many_segments(body: Any, transport: str, world_size: int) -> None:
    tight = TRANSPORTS[transport].tight
    run(body, transport=transport, world_size=world_size, args=(20_000,), **tight)


@pytest.mark.parametrize("transport", COSTLY)
def test_many_processes(transport: str) -> None:
    large = TRANSPORTS[transport].large
    run(overview.some_of_everything, transport=transport, world_size=large)


def test_one_process() -> None:
    run(overview.some_of_everything, transport="zmq", world_size=1)


@pytest.mark.campaign
@pytest.mark.parametrize("world_size", LARGE)
@pytest.mark.parametrize("transport", COSTLY)
def test_other_numbers_of_processes(transport: str, world_size: int) -> None:
    run(overview.some_of_everything, transport=transport, world_size=world_size)
