"""Parameters that are cut over a group of ranks, beside the sharding: each rank's engine has a box.

With two axes of a mesh, 3 ranks that shard and 2 that cut, rank 3 has::

    backend     1 3 5          shard its boxes between them
    tensor          2 3        have the other boxes of the same parameters
    everyone    0 2 4 1 3 5    number ``tensor.rank * backend.world_size + backend.rank``

What is no box is the same on all ranks of ``tensor``, but not at the same place of their flat
buffers, since boxes may be of different sizes: it lies in the buffer of its unit, among the boxes.
That costs special cases here and there (who counts it for a norm, who gives it to a state, whose
sums an optimizer goes by). A buffer of its own would need none of them, but one gathering and one
reduction more per unit and pass, for what in most units is a few biases and gains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdpcore.collectives import all_gather
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.checks import as_instance
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.geometry.boxes import ArrayBox
from fsdpcore.core.text import rank_list


def checked_tensor(tensor: Any, backend: Backend) -> Backend | None:
    """Return the ``tensor`` group of an engine on ``backend``; None where no other rank is in it.

    Raises:
        ArgumentError: it cannot be such a group.
    """
    if tensor is None:
        return None
    as_instance(
        tensor,
        Backend,
        "tensor",
        "the group of ranks that have the other boxes of the same parameters, such as "
        "mesh['tensor']",
    )
    me = backend.ranks[backend.rank]
    common = sorted(set(tensor.ranks) & set(backend.ranks))
    if tensor.root is not backend.root or common != [me]:
        raise ArgumentError(
            f"the ranks that shard ({rank_list(backend.ranks)}) and those of tensor "
            f"({rank_list(tensor.ranks)}) must be of one job, with rank {me} alone in both: take "
            "two axes of one mesh"
        )
    return tensor if tensor.world_size > 1 else None


def everyone_of(backend: Backend, tensor: Backend | None) -> Backend:
    """Return the group of all ranks that train together: ``backend`` itself without ``tensor``.

    A collective of ``backend`` with it.

    Raises:
        ArgumentError: the groups of the ranks make no grid.
    """
    if tensor is None:
        return backend
    told = all_gather(np.array(tensor.ranks, np.int64), backend, label="ranks of tensor")
    table = told.reshape(backend.world_size, tensor.world_size)
    members = table.T.reshape(-1).tolist()
    if table[:, tensor.rank].tolist() != list(backend.ranks) or len(set(members)) < len(members):
        raise ArgumentError(
            f"the ranks {rank_list(backend.ranks)}, which shard, have the groups "
            f"{table.tolist()!s:.200} as tensor; they must be rows of a grid of ranks, of which "
            "those that shard are a column: take two axes of one mesh"
        )
    return transport_of(backend).sub(members, name="fsdp everyone")


def described(box: ArrayBox) -> str:
    """Return a box in words."""
    ranges = ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
    return f"the box [{ranges}] of an array of shape {box.whole}"


def untiled(boxes: Sequence[ArrayBox]) -> str:
    """Say why the boxes of one array do not cover it once; "" if they do."""
    starts = np.array([box.start for box in boxes])[:, None]
    stops = np.array([box.stop for box in boxes])[:, None]
    least, most = np.minimum(stops, stops[:, 0]), np.maximum(starts, starts[:, 0])
    overlaps = np.triu((most < least).all(axis=2), 1)
    if overlaps.any():
        one, other = np.argwhere(overlaps)[0].tolist()
        return f"ranks {one} and {other} of tensor have the same elements"
    missing = math.prod(boxes[0].whole) - sum(box.size for box in boxes)
    return f"no rank of tensor has {missing} of its elements" if missing else ""
