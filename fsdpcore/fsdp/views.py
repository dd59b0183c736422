"""A unit's parameters and gradients by name, as views of its flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdpcore.buffers import Array
from fsdpcore.errors import ArgumentError, StateError
from fsdpcore.fsdp.layout import FlatLayout


class UnknownParameterError(ArgumentError, KeyError):
    """A unit has no parameter of that name."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class Places:
    """Where the parameters of a unit lie in its flat buffer; worked out once for all views.

    Attributes:
        unit: the unit's name.
        layout: its layout.
    """

    def __init__(self, unit: str, layout: FlatLayout) -> None:
        self.unit = unit
        self.layout = layout
        self._found = {p.name: (slice(p.offset, p.stop), p.shape) for p in layout.params}

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def view(self, flat: Array, name: str) -> Array:
        """Return the part of ``flat`` that is parameter ``name``, in its shape.

        Raises:
            UnknownParameterError: there is no such parameter.
        """
        try:
            place, shape = self._found[name]
        except KeyError:
            known = ", ".join(self._found) or "none"
            raise UnknownParameterError(
                f"unit {self.unit!r} has no parameter {name!r}; it has {known}"
            ) from None
        return flat[place].reshape(shape)


class Params(Mapping[str, Array]):
    """Gathered parameters by name, as read-only views; valid until the unit is resharded.

    ``flat`` is the padded flat buffer, of shape ``(layout.padded_size,)``.
    """

    def __init__(self, flat: Array, places: Places) -> None:
        self._flat = read_only(flat)
        self._places = places
        self._views: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._places.view(self._flat, name)
        return view

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Gradients(MutableMapping[str, Array]):
    """A unit's gradients by name, as writable views that begin as zeros.

    ``grads[name] = array`` copies into the view after checking shape and dtype; views can also be
    written directly, as in ``np.matmul(x.T, dy, out=grads["w"])``. What is not written stays zero.
    A view is filled with zeros when it is first asked for; ``empty`` leaves that out.

    ``flat`` is the padded flat buffer, of shape ``(layout.padded_size,)``, with any content.
    """

    def __init__(self, flat: Array, places: Places) -> None:
        self._flat: Array | None = flat
        self._places = places
        self._views: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        view = self._views.get(name)
        if view is None:
            view = self.empty(name)
            view.fill(0)
        return view

    def empty(self, name: str) -> Array:
        """Return the gradient with whatever was written to it before, or any content.

        For an operation that writes all of it: ``np.matmul(x.T, dy, out=grads.empty("w"))``.
        """
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._places.view(self._open(), name)
        return view

    def __setitem__(self, name: str, value: Array) -> None:
        view, value = self._views.get(name), np.asarray(value)
        if view is None:
            view = self._places.view(self._open(), name)
        if value.shape != view.shape or value.dtype != view.dtype:
            raise ArgumentError(
                f"gradient of {self._places.unit}.{name} must have shape {view.shape} and dtype "
                f"{view.dtype}, got {value.shape} and {value.dtype}"
            )
        if value is not view:
            view[...] = value
        self._views[name] = view

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(
            f"a gradient cannot be removed; leave {self._places.unit}.{name} as zeros"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def finish(self) -> Array:
        """Fill with zeros what was never asked for, padding too, and return the flat buffer."""
        flat = self._open()
        if len(self._views) < len(self._places):
            for name in self._places:
                self[name]
        if self._places.layout.padding:
            flat[self._places.layout.size :] = 0
        return flat

    def close(self) -> Array:
        """Return the flat buffer, to be used for something else: views are not given any more."""
        flat, self._flat = self._open(), None
        self._views = {}
        return flat

    def _open(self) -> Array:
        if self._flat is None:
            raise StateError(
                f"the gradients of unit {self._places.unit!r} were reduced or dropped; write them "
                "before, and get new ones with begin_gradients() or step.backward(unit)"
            )
        return self._flat


def read_only(flat: Array) -> Array:
    """Return a view through which nobody can write, not even by setting ``flags.writeable``."""
    # A view of an array can be made writable again, one of a buffer cannot. By way of bytes, since
    # not every dtype can be exported as a buffer.
    shown: NDArray[Any] = np.asarray(flat.view(np.uint8).data.toreadonly())
    return shown.view(flat.dtype)
