"""One body with some of everything, where running all the others would take too long."""

from __future__ import annotations

from support.arrays import arrays_of
from support.bodies import asynchronous, groups, layouts, movement, point_to_point, reductions

import fsdpcore as fc


def _every_algorithm(backend: fc.Backend) -> None:
    parts = arrays_of(backend.world_size, (2 * backend.world_size + 1, 2))
    reductions.check_reductions(backend, parts, "mean", root=backend.world_size - 1)
    movement.check_movements(backend, parts, root=0)


BODIES = (
    _every_algorithm,
    movement.ragged_exchange,
    layouts.own_chunk_in_place,
    point_to_point.tags_in_any_order,
    point_to_point.many_outstanding,
    groups.several_at_once,
    groups.nested,
    groups.equal_members_do_not_mix,
    asynchronous.every_collective,
)


def some_of_everything(backend: fc.Backend) -> None:
    """Run one body of every kind after the other on one backend."""
    for body in BODIES:
        body(backend)
        backend.barrier()
