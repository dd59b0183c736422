"""``MessageStatus``: what a message is that has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class MessageStatus:
    """What a message is: returned by ``probe``, and filled in by a receive that is given one.

    ::

        status = fc.MessageStatus()
        backend.recv(room, fc.ANY, status=status)
        array = room[: status.count].reshape(status.shape)
        backend.send(f(array), status.source)

    Attributes:
        source: the rank that has sent it, by its number in the group; -1 before one has come.
        tag: what it was sent with; -1 before one has come.
        dtype: of the array that was sent; None before one has come.
        shape: of the array that was sent.
    """

    source: int = -1
    tag: int = -1
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)
