"""What all ranks agree on before an update: one small collective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fsdpcore.collectives import all_gather
from fsdpcore.collectives.objects import all_gather_object
from fsdpcore.comm.backend import Backend
from fsdpcore.core.digests import digest
from fsdpcore.core.disagreement import check_same

Events = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class UpdateArguments:
    """What a step and its update are called with, and what came of those before; nan for None.

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


# That each rank tells all others: arguments, a hash of the order, and five numbers.
AGREED_BYTES = 8 * (len(fields(UpdateArguments)) + 2 + 5)


def compare_updates(
    backend: Backend,
    arguments: UpdateArguments,
    events: Events,
    names: Sequence[str],
    local: Sequence[float],
    *,
    algorithm: str,
    what: str = "update",
) -> NDArray[np.float64]:
    """Compare what the ranks want and have done; tell all of them the numbers of each.

    Args:
        backend: all ranks.
        arguments: of this rank.
        events: units that it went through in this step: phase, and number of the unit.
        names: of the units.
        local: numbers of this rank.
        algorithm: of the collective.
        what: the ranks have called.

    Returns:
        ``local`` of every rank, of shape ``(world_size, len(local))``.

    Raises:
        MismatchError: they differ. On all ranks, unless another rank's end of the job comes first.
    """
    hashed = digest(repr(events).encode(), 8)
    mine = [getattr(arguments, field.name) for field in fields(UpdateArguments)]
    row = np.array([*mine, *np.frombuffer(hashed, np.uint32), *local], np.float64)
    rows = all_gather(row, backend, algorithm=algorithm, label=what)
    table = rows.reshape(backend.world_size, -1)
    bits = table.view(np.uint64)
    compared = len(mine) + 2
    if (bits[:, :compared] != bits[0, :compared]).any():
        check_same(
            bits[:, : len(mine)].tolist(),  # a nan is one like the other
            backend.ranks,
            lambda found: (
                f"{what}: {fields(UpdateArguments)[found.position].name} is {found.sentence}; give "
                "all ranks the same"
            ),
            words=lambda word: f"{np.uint64(word).view(np.float64):g}",
        )
        _refuse_orders(backend, events, names, what)
    values: NDArray[np.float64] = table[:, compared:]
    return values


def _refuse_orders(backend: Backend, events: Events, names: Sequence[str], what: str) -> None:
    """Say where the ranks' ways through the units part, and raise; a collective."""
    used = [f"{phase} of unit {names[unit]!r}" for phase, unit in events]
    check_same(
        all_gather_object(used, backend, label=f"{what}, order of units"),
        backend.ranks,
        lambda found: (
            f"the ranks went through the units in different orders: use {found.position + 1} of "
            f"this step was {found.sentence}; all ranks must take the same way through the model"
        ),
    )
