"""A unit's parameters and gradients by name, as views of its flat buffer."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.array_module import on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import HOST, Device
from fsdpcore.core.errors import ArgumentError, StateError
from fsdpcore.core.geometry.layout import FlatLayout

Shown = TypeVar("Shown")


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

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of parameter ``name``."""
        return self._found[name][1]

    def view(self, flat: Array, name: str) -> Array:
        """Return the part of ``flat`` that is parameter ``name``, in its shape.

        Raises:
            UnknownParameterError: there is no such parameter.
        """
        try:
            place, shape = self._found[name]
        except KeyError:
            raise unknown(self.unit, name, self._found) from None
        return flat[place].reshape(shape)

    def clear(self, flat: Array, besides: Container[str]) -> None:
        """Fill the parts of ``flat`` with zeros whose parameters are not in ``besides``."""
        for name, (place, _) in self._found.items():
            if name not in besides:
                flat[place].fill(0)


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


class Joined(Mapping[str, Array]):
    """Parameters of a unit by name, in the order of their declaration, from where each one lies.

    Args:
        unit: its name.
        sources: for each name, what gives the array.
    """

    def __init__(self, unit: str, sources: Mapping[str, Callable[[], Array]]) -> None:
        self._unit = unit
        self._sources = sources

    def __getitem__(self, name: str) -> Array:
        try:
            source = self._sources[name]
        except KeyError:
            raise unknown(self._unit, name, self._sources) from None
        return source()

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class ClosingArrays(Mapping[str, Shown]):
    """Arrays by name until ``close``; who asks for one after that gets an error."""

    def __init__(self, arrays: Mapping[str, Shown]) -> None:
        self._arrays: Mapping[str, Shown] | None = arrays

    def __getitem__(self, name: str) -> Shown:
        return self._open()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._open()

    def __iter__(self) -> Iterator[str]:
        return iter(self._open())

    def __len__(self) -> int:
        return len(self._open())

    def close(self) -> None:
        """Let go of the arrays."""
        self._arrays = None

    def _open(self) -> Mapping[str, Shown]:
        if self._arrays is None:
            raise StateError(self._closed())
        return self._arrays

    @abstractmethod
    def _closed(self) -> str:
        """Return what the error says."""


class ScopedParams(ClosingArrays[Array]):
    """A unit's parameters for a ``with`` block; who asks for one after its end gets an error.

    Without that, what is used too late would be right where parameters are in a window or stay
    gathered, and anything where their memory has been freed and used again.

    Args:
        unit: its name.
        params: the parameters.
    """

    def __init__(self, unit: str, params: Mapping[str, Array]) -> None:
        super().__init__(params)
        self._unit = unit

    def __setitem__(self, name: str, value: object) -> None:
        raise TypeError(
            f"no item assignment: {self._unit}.{name} is read-only in a step; the optimizer "
            "changes it, and engine.full_params(write=True)"
        )

    def _closed(self) -> str:
        return (
            f"the parameters of unit {self._unit!r} were there inside of the with block only "
            "that gave them, and are freed by now; gather the unit again, or copy in the block "
            "what is needed after it"
        )


class Gradients(MutableMapping[str, Array]):
    """A unit's gradients by name, as writable views that begin as zeros.

    ``grads[name] = array`` copies into the view after checking shape and dtype; views can also be
    written directly, as in ``np.matmul(x.T, dy, out=grads["w"])``. What is not written stays zero.
    A view is filled with zeros when it is first asked for; ``empty`` leaves that out. There are
    none of frozen parameters: ``name in grads`` tells.

    Args:
        flat: the padded flat buffer, of shape ``(layout.padded_size,)``, with any content.
        places: where the parameters lie in it.
        tied: the gradients of tied parameters, which lie apart, with any content.
        computed: dtype of the parameters, which assigned gradients may have, too.
        device: where the buffers are; NumPy's arrays are moved there when they are assigned.
    """

    def __init__(
        self,
        flat: Array,
        places: Places,
        tied: Mapping[str, Array] | None = None,
        computed: np.dtype[Any] | None = None,
        device: Device = HOST,
    ) -> None:
        self._device = device
        self._flat: Array | None = flat
        self._places = places
        self._tied = tied or {}
        self._computed = computed
        self._views: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._view(name)
            view.fill(0)
        return view

    def empty(self, name: str) -> Array:
        """Return the gradient with whatever was written to it before, or any content.

        For an operation that writes all of it: ``np.matmul(x.T, dy, out=grads.empty("w"))``.
        """
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = self._view(name)
        return view

    def __setitem__(self, name: str, value: Array) -> None:
        view = self._views.get(name)
        if view is None:
            view = self._view(name)
        if value is not view:
            given = value
            value = self._device.given(given, f"the gradient of {self._places.unit}.{name}")
            where = f"{self._places.unit}.{name}"
            check_gradient(where, value, view.shape, view.dtype, self._computed, given)
            self._device.assign(view, value)
        self._views[name] = view

    def __delitem__(self, name: str) -> None:
        raise ArgumentError(
            f"a gradient cannot be removed; leave {self._places.unit}.{name} as zeros"
        )

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._tied

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self._places, self._tied)

    def __len__(self) -> int:
        return len(self._places) + len(self._tied)

    def finish(self) -> Array:
        """Fill with zeros what was never asked for, padding too, and return the flat buffer."""
        flat, views = self._open(), self._views
        if not views and not self._tied:
            flat.fill(0)
            return flat
        if len(views) < len(self):
            self._places.clear(flat, views)
            for name, array in self._tied.items():
                if name not in views:
                    array.fill(0)
        if self._places.layout.padding:
            flat[self._places.layout.size :] = 0
        return flat

    def close(self) -> Array:
        """Return the flat buffer, to be used for something else: views are not given any more."""
        flat, self._flat = self._open(), None
        self._views = {}
        return flat

    def _view(self, name: str) -> Array:
        flat = self._open()
        if name in self._tied:
            return self._tied[name]
        if name not in self._places:
            raise UnknownParameterError(
                f"unit {self._places.unit!r} has no gradient of {name!r}; it has those of "
                f"{', '.join(self) or 'none'}. What is frozen or ignored has none: "
                "'name in grads' tells"
            )
        return self._places.view(flat, name)

    def _open(self) -> Array:
        if self._flat is None:
            raise StateError(
                f"the gradients of unit {self._places.unit!r} were reduced or dropped; write them "
                "before, and get new ones with begin_gradients() or step.backward(unit)"
            )
        return self._flat


def check_gradient(
    where: str,
    value: Array,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    computed: np.dtype[Any] | None,
    given: object = None,
) -> None:
    """Raise ArgumentError if an array cannot be the gradient of the parameter ``where``.

    Args:
        where: the parameter's name, with its unit's.
        value: the array.
        shape: of the parameter.
        dtype: of its gradient.
        computed: another dtype that it may have.
        given: what the array was made of.
    """
    fits = value.shape == shape
    if not fits or value.dtype not in (dtype, computed):
        also = f" (or {computed})" if computed not in (None, dtype) else ""
        advice = (
            "convert it with astype, or write into the array that grads[name] gives"
            if fits
            else "a gradient has the shape of its parameter, and is summed over the batch"
        )
        got = f"{value.shape} and {value.dtype}"
        if isinstance(given, (list, tuple, int, float)):
            kind = type(given).__name__
            got = f"a {kind}, of which NumPy makes {got}"
            advice = f"give np.asarray(..., np.{dtype})" if fits else advice
        raise ArgumentError(
            f"gradient of {where} must have shape {shape} and dtype {dtype}{also}, got "
            f"{got}; {advice}"
        )


def unknown(unit: str, name: object, known: Iterable[str]) -> UnknownParameterError:
    """Return the error for a parameter that a unit does not have."""
    names = ", ".join(known) or "none"
    return UnknownParameterError(f"unit {unit!r} has no parameter {name!r}; it has {names}")


def read_only(array: Array) -> Array:
    """Return a view through which nobody can write, not even by setting ``flags.writeable``.

    But of Python objects, which are no bytes: there that is possible. Arrays of a GPU have no such
    views: what is returned of them could be written, and must not be.
    """
    flat = array.reshape(-1)
    if not on_host(flat):
        return flat.view().reshape(array.shape)
    if flat.dtype.hasobject:
        view = flat.view()
        view.flags.writeable = False
        return view.reshape(array.shape)
    # A view of an array can be made writable again, one of a buffer cannot. By way of bytes, since
    # not every dtype can be exported as a buffer.
    shown: NDArray[Any] = np.asarray(flat.view(np.uint8).data.toreadonly())
    return shown.view(flat.dtype).reshape(array.shape)


def locked(view: Array) -> None:
    """Have nobody write through a view any more, as far as arrays of its kind can be locked."""
    if on_host(view):
        view.flags.writeable = False
