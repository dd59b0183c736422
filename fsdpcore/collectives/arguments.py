"""From the arguments of a collective to its ``CallSpec``: checked, and remembered by the group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives.fingerprint import Fingerprint
from fsdpcore.collectives.on_device import mover
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.collectives.shared.algorithm import NAME as SHARED
from fsdpcore.collectives.spec import CallSpec, Choice, Layout, Operation, Shape
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, dtype_code
from fsdpcore.core.checks import as_instance

# Kinds of calls that a group remembers: an engine makes three of each unit.
_REMEMBERED = 2048


def check_backend(backend: Backend) -> None:
    """Raise ``ArgumentError`` if what a caller passed as the backend is none."""
    order = "a collective takes the array, then the backend"
    as_instance(backend, Backend, "the backend", "a Backend", order)


def operand(array: ArrayLike, backend: Backend) -> tuple[Array, Backend]:
    """Check the first arguments of a collective.

    Whether arrays of its dtype travel is for ``spec_for`` to check.

    Returns:
        The array, C-contiguous, and the group that moves such arrays.

    Raises:
        ArgumentError: one of them is not what it should be.
    """
    if type(array) is np.ndarray and array.flags.c_contiguous and isinstance(backend, Backend):
        return array, backend
    check_backend(backend)
    backend = mover(backend, array)
    return backend.moves.operand(array), backend


def remembered(backend: Backend, make: Callable[..., CallSpec], *key: Any) -> CallSpec:
    """Return ``make(backend, *key)``, made once for equal keys."""
    try:
        found: CallSpec = state_of(backend).specs[make, key]
    except KeyError:
        found = make(backend, *key)
        remember(backend, (make, key), found)
    except TypeError:  # what cannot be a key is wrong, and ``make`` says how
        found = make(backend, *key)
    return found


def recall(backend: Backend, key: tuple[Any, ...]) -> CallSpec | None:
    """Return what ``remember`` has kept."""
    try:
        return state_of(backend).specs.get(key)
    except TypeError:  # what cannot be a key is wrong, and whoever makes the spec says how
        return None


def remember(backend: Backend, key: tuple[Any, ...], spec: CallSpec) -> None:
    """Keep a spec with the group, for the next call of its kind."""
    known = state_of(backend).specs
    if len(known) >= _REMEMBERED:
        known.clear()
    known[key] = spec


def spec_for(
    backend: Backend,
    operation: str,
    definition: Operation | None = None,
    dtype: np.dtype[Any] | None = None,
    shape: Shape = (),
    *,
    size: int | None = None,
    layout: Layout | None = None,
    out_shape: Shape = (),
    algorithm: str = "auto",
    label: str = "",
    counts: tuple[int, ...] = (),
    ragged: bool = False,
) -> CallSpec:
    """Describe a call; the arguments are those of ``Fingerprint`` and ``CallSpec``.

    Raises:
        ArgumentError: the dtype cannot travel, or the collective has no such algorithm.
    """
    if dtype is not None:
        dtype_code(dtype)
    as_instance(label, str, f"{operation}: a label", "a string")
    layout = layout or Layout()
    fingerprint = Fingerprint(
        operation,
        dtype,
        shape,
        layout.reduction.told if layout.reduction else "",
        layout.root,
        algorithm,
        counts,
        label,
        ragged,
        policy=str(backend.root.policy),
    )
    spec = CallSpec(fingerprint, definition, size, layout=layout, out_shape=out_shape)
    if definition is not None:
        op = layout.reduction.name if layout.reduction else ""
        spec.choose = _chooser(backend, definition.name, fingerprint, op)
        if algorithm != SHARED or not _memory_is_open(backend):
            spec.choose(spec.size)  # refuses an unknown algorithm before anything is sent
    return spec


def _chooser(
    backend: Backend, collective: str, fingerprint: Fingerprint, op: str
) -> Callable[[int], Choice]:
    group = weakref.ref(backend)  # which remembers the spec

    def choose_for(size: int) -> Choice:
        backend = group()
        assert backend is not None, "the group is in use"
        return choose(
            collective,
            fingerprint.algorithm,
            size,
            backend,
            fingerprint.dtype,
            op,
        )

    return choose_for


def _memory_is_open(backend: Backend) -> bool:
    """Whether a group may share memory: it is known only once its first collective runs."""
    memory = backend.root.memory
    if memory is None or not backend.moves.on_host:
        return False
    return memory.available and state_of(backend).context is None
