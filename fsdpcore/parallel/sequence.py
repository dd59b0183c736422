"""Layers without parameters that begin and end a stretch which is cut along the sequence.

The sequence is axis -2 of (..., T, features), cut as by ``split``: T need not divide evenly. Inside
the stretch every rank has its own positions, outside of it all ranks of the group must have the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_real_array
from fsdpcore.core.errors import ArgumentError
from fsdpcore.parallel import exchange
from fsdpcore.parallel.splits import as_gradient


class ScatterSequence:
    """Each rank keeps its part of the sequence: nothing is communicated in the forward pass.

    The backward pass joins the parts of the gradient: one all_gather.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        group: ranks that share a sequence, such as ``mesh["tensor"]``.
    """

    def __init__(self, group: Backend) -> None:
        self.group = exchange.as_group(group, type(self).__name__)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return no parameters."""
        return {}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Map (..., T, features) to (..., own T, features), a copy."""
        x = _checked(x, type(self).__name__)
        part = exchange.local_part(x, self.group, -2)
        return (part if self.group.world_size == 1 else part.copy()), x.shape

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Map (..., own T, features) to (..., T, features)."""
        label = "parallel sequence, gradient"
        dy = as_gradient(dy, saved, type(self).__name__, self.group)
        return exchange.all_gather(dy, self.group, -2, size=saved[-2], label=label)


class GatherSequence:
    """Every rank gets the whole sequence: one all_gather in the forward pass.

    What follows is the same on all ranks of the group, and so is the gradient that comes back, of
    which each rank takes its part without communication.

    It is a ``fc.Layer``, which says what the methods take.

    Args:
        group: ranks that share a sequence, such as ``mesh["tensor"]``.
    """

    def __init__(self, group: Backend) -> None:
        self.group = exchange.as_group(group, type(self).__name__)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return no parameters."""
        return {}

    def forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Any]:
        """Map (..., own T, features) to (..., T, features)."""
        x = _checked(x, type(self).__name__)
        y = exchange.all_gather(x, self.group, -2, label="parallel sequence")
        return y, y.shape

    def backward(
        self, params: Mapping[str, Array], saved: Any, dy: Array, grads: MutableMapping[str, Array]
    ) -> Array:
        """Map (..., T, features) to (..., own T, features), a copy."""
        dy = as_gradient(dy, saved, type(self).__name__)
        part = exchange.local_part(dy, self.group, -2)
        return part if self.group.world_size == 1 else part.copy()


def _checked(x: Array, what: str) -> Array:
    x = as_real_array(x, f"{what}: the input")
    if x.ndim < 2:
        raise ArgumentError(f"{what}: the input is (..., sequence, features), got {x.shape}")
    return x
