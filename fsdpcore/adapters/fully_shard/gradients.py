"""Where the objects that ``fully_shard`` is given leave the gradients of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fsdpcore.adapters.fully_shard.attributes import (
    MISSING,
    AttributePath,
    FoundArray,
    is_parameter,
)
from fsdpcore.adapters.fully_shard.guards import Placeholder
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError

# Called with a layer and a parameter's name there.
GradientOf = Callable[[Any, str], Any]


class Convention:
    """How gradients are called: a pattern with ``{}``, or the name of one attribute for all.

    Raises:
        ArgumentError: it is neither.
    """

    def __init__(self, grads: str) -> None:
        self._grads = grads
        self._is_pattern = "{}" in grads
        name = grads.replace("{}", "x")
        if grads.count("{}") > 1 or not name.isidentifier() or grads == "{}":
            raise ArgumentError(
                f"grads={grads!r} says not where gradients are: give a pattern of attribute names "
                "such as 'd{}', the name of an attribute that has them all by name, or a function "
                "of a layer and a parameter's name"
            )

    def place(self, parameter: AttributePath) -> AttributePath:
        """Return where the gradient of the parameter at a place is."""
        path = [parameter.attribute, *parameter.keys]
        if self._is_pattern:
            # The innermost name: items of a list have those of the list's.
            last = max(number for number, key in enumerate(path) if isinstance(key, str))
            path[last] = self._grads.replace("{}", path[last])
            return AttributePath(parameter.owner, path[0], tuple(path[1:]))
        by_name = parameter.keys and isinstance(parameter.keys[0], str)
        keys = parameter.keys if by_name else tuple(path)
        return AttributePath(parameter.owner, self._grads, keys)

    def without_gradients(self, found: Sequence[FoundArray]) -> list[FoundArray]:
        """Leave out what is a gradient of something else."""
        if not self._is_pattern:
            return [each for each in found if each.place.attribute != self._grads]
        gradients = {self.place(each.place).key for each in found}
        return [each for each in found if each.place.key not in gradients]


class GradientPlace:
    """Where a layer's backward pass leaves one gradient.

    If there is an array in the beginning, the backward pass may write into it or add to it: it
    finds one of zeros there.

    Args:
        place: where.
        label: words that messages use for the parameter.

    Attributes:
        written: it had an array in the beginning.
    """

    def __init__(self, place: AttributePath, label: str) -> None:
        self.place = place
        self.label = label
        self._initial = place.get()
        self.written = is_parameter(self._initial)
        self._shape = self._initial.shape if self.written else ()
        self._dtype = self._initial.dtype if self.written else None
        if self.written:
            self._initial = MISSING

    @property
    def says(self) -> str:
        """What is said where it is read too late."""
        return (
            f"the gradient of {self.label} is there inside of the backward pass only; then it is "
            "the engine's, and the next one begins as zeros"
        )

    def offer(self, array: Array) -> None:
        """Have zeros there, for the backward pass to write to."""
        self.place.put(array)

    def take(self) -> Any:
        """Return what the backward pass has left, or None."""
        value = self.place.get()
        return None if value is MISSING or isinstance(value, Placeholder) else value

    def reset(self) -> None:
        """Have there what was there in the beginning, but no array."""
        if self._initial is not MISSING:
            self.place.put(self._initial)
        elif self.written and self.place.keys:
            self.place.put(Placeholder(self.says))
        else:
            self.place.clear()

    def give_back(self) -> None:
        """Have there what was there in the beginning: for an array, zeros."""
        if self.written:
            self.place.put(np.zeros(self._shape, self._dtype))
        else:
            self.reset()

    def zeros(self, module: Any) -> Any:
        """Return what is offered where the engine takes no gradient."""
        return module.zeros(self._shape, self._dtype)
