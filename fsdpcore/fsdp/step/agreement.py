"""What all ranks agree on before an update: one small collective."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives import all_gather, all_gather_v
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import MismatchError

Events = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class UpdateArguments:
    """Arguments of a step and its update, and what came of those before; nan for None.

    The same on all ranks.
    """

    lr: float
    clip: float
    norm_type: float
    clip_value: float
    divisor: float
    skip_nonfinite: float
    steps: float
    loss_scale: float

    @classmethod
    def of(cls, *given: float | None) -> UpdateArguments:
        """Take the arguments in this order."""
        return cls(*(math.nan if value is None else float(value) for value in given))


# That each rank tells all others: what is wanted, a hash of the order, and three numbers.
AGREED_BYTES = 8 * (len(fields(UpdateArguments)) + 2 + 3)


def agree(
    backend: Backend,
    wanted: UpdateArguments,
    events: Events,
    names: Sequence[str],
    local: Sequence[float],
    *,
    algorithm: str,
) -> NDArray[np.float64]:
    """Compare what the ranks want and have done, and tell all of them the numbers of each.

    Args:
        backend: all ranks.
        wanted: by this rank.
        events: units that it went through in this step: phase, and number of the unit.
        names: of the units.
        local: numbers of this rank.
        algorithm: of the collective.

    Returns:
        ``local`` of every rank, of shape ``(world_size, len(local))``.

    Raises:
        MismatchError: they differ. On all ranks, unless another rank's end of the job comes first.
    """
    digest = hashlib.blake2b(repr(events).encode(), digest_size=8).digest()
    mine = [getattr(wanted, field.name) for field in fields(UpdateArguments)]
    row = np.array([*mine, *np.frombuffer(digest, np.uint32), *local], np.float64)
    rows = all_gather(row, backend, algorithm=algorithm, label="update")
    table = rows.reshape(backend.world_size, -1)
    bits = table.view(np.uint64)
    for column, field in enumerate(fields(UpdateArguments)):
        differing = np.flatnonzero(bits[:, column] != bits[0, column])
        if differing.size:
            theirs = ", ".join(
                f"{table[n, column]:g} on rank {backend.ranks[n]}" for n in differing
            )
            raise MismatchError(
                f"update: {field.name} is {table[0, column]:g} on rank {backend.ranks[0]}, but "
                f"{theirs}; give all ranks the same"
            )
    hashes = bits[:, len(mine) : len(mine) + 2]
    if (hashes != hashes[0]).any():
        raise _diverged(backend, events, names, algorithm)
    values: NDArray[np.float64] = table[:, len(mine) + 2 :]
    return values


def _diverged(
    backend: Backend, events: Events, names: Sequence[str], algorithm: str
) -> MismatchError:
    """Say where the ranks' ways through the units part; a collective."""
    phases = ("forward", "backward")
    mine = np.array([(phases.index(phase), unit) for phase, unit in events], np.int32)
    lengths = all_gather(np.int64(len(events)), backend, algorithm=algorithm, label="update, ways")
    rows: Any = all_gather_v(
        mine.reshape(-1, 2), backend, algorithm=algorithm, label="update, ways"
    )
    ends = np.cumsum(lengths)
    ways = [rows[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
    first = ways[0]
    other, theirs = next((n, way) for n, way in enumerate(ways) if way != first)
    pairs = enumerate(zip(first, theirs, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(first), len(theirs)))

    def said(way: list[list[int]]) -> str:
        if at >= len(way):
            return "nothing more"
        phase, unit = way[at]
        return f"{phases[phase]} of unit {names[unit]!r}"

    return MismatchError(
        f"the ranks went through the units in different orders: use {at + 1} of this step was "
        f"{said(first)} on rank {backend.ranks[0]}, but {said(theirs)} on rank "
        f"{backend.ranks[other]}; all ranks must take the same way through the model"
    )
