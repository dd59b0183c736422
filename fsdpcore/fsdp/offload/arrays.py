"""The arrays that a rank holds of a unit all the time, by what they are for."""

from __future__ import annotations

import enum
from typing import NamedTuple


class ArrayKind(enum.Enum):
    """What an array of a unit is for.

    ``OWN`` is the part of ``TRAINED`` that this rank writes: all of it, or a slice where the rank
    keeps everybody's.
    """

    FROZEN = "frozen parameters"
    TRAINED = "trained parameters"
    OWN = "own trained parameters"
    MASTER = "trained parameters at full precision"
    STATE = "optimizer state"
    GRADIENT = "gradients"


GATHERED = (ArrayKind.FROZEN, ArrayKind.TRAINED)
WRITTEN = (ArrayKind.FROZEN, ArrayKind.OWN, ArrayKind.MASTER)
UPDATED = (ArrayKind.OWN, ArrayKind.MASTER, ArrayKind.STATE)
GRADIENTS = (ArrayKind.GRADIENT,)
INITIAL = (ArrayKind.FROZEN, ArrayKind.TRAINED, ArrayKind.MASTER, ArrayKind.STATE)


class PersistentArray(NamedTuple):
    """An array that a rank holds of a unit all the time.

    Attributes:
        kind: what it is for.
        nbytes: how large it is.
        padding: how many of these bytes are padding.
    """

    kind: ArrayKind
    nbytes: int
    padding: int = 0
