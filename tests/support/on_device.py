"""Runs the bodies of the conformance suite on the arrays of a backend's device.

The bodies make NumPy arrays and call ``fc.all_reduce(array, backend)``. With ``moved_bodies()``
their ``fc`` is ``Moved``, whose collectives copy each array to the device, with its strides and
with the memory around it, call the real one there, and copy back what is in that memory after it.
So layouts, outputs inside of inputs and writes beside them are what they are on the host. Where
``backend.device`` is the host, nothing is moved.

Algorithms of which a device has none are ``auto`` there. ``auto`` is exact to the bit in jobs with
``deterministic=True``. Where a body goes through a table of algorithms, a device has ``auto`` three
times, since the third call of a kind may go a shorter way, and ``direct`` if the table has it.
Exact reductions have no shorter way: a device has ``auto`` twice, the first call and a later one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import NDArray
from support.bodies import movement, reductions

import fsdpcore
from fsdpcore.collectives.on_device import device_twin
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.collectives.state import state_of
from fsdpcore.core.buffers import DTYPES
from fsdpcore.core.device import Device

Array = NDArray[Any]

_COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "all_gather_v",
    "reduce_scatter_v",
    "gather_v",
    "scatter_v",
    "all_to_all_v",
    "all_reduce_many",
)


@contextmanager
def moved_bodies() -> Iterator[None]:
    """Let all bodies that were imported move their arrays; not to be entered twice at a time."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("support.bodies.") and getattr(module, "fc", None) is fsdpcore
    ]
    stand_in = Moved()
    for module in modules:
        module.fc = stand_in  # type: ignore[attr-defined]
    tables = [(table, dict(table)) for table in (reductions.CANONICAL, movement.ALGORITHMS)]
    for table, kept in tables:
        times = 2 if table is reductions.CANONICAL else 3
        table.update((name, _of_a_device(those, times)) for name, those in kept.items())
    try:
        yield
    finally:
        for table, kept in tables:
            table.update(kept)
        for module in modules:
            module.fc = fsdpcore  # type: ignore[attr-defined]


def _of_a_device(algorithms: list[str], times: int) -> list[str]:
    return [*["auto"] * times, *(name for name in algorithms if name == "direct")]


def body_on_device(backend: fsdpcore.Backend, body: Callable[..., Any], *args: Any) -> Any:
    """A body that calls another one with its arrays moved; for ranks that are processes."""
    with moved_bodies():
        return body(backend, *args)


class Moved:
    """Stands for the package in a body."""

    def __getattr__(self, name: str) -> Any:
        real = getattr(fsdpcore, name)
        if name not in _COLLECTIVES:
            return real

        def call(array: Any, backend: Any, *args: Any, **options: Any) -> Any:
            device = _device_of(backend)
            if device is None:
                return real(array, backend, *args, **options)
            if "algorithm" in options:
                options["algorithm"] = _known(name, backend, options["algorithm"])
            moves = Moves(device)
            options = moves.options(options)
            return moves.back(real(moves.there(array), backend, *args, **options))

        call.__name__ = name
        return call

    def coalesce(self, backend: Any, **options: Any) -> Any:
        """As the package's, with calls that move their arrays."""
        batch, device = fsdpcore.coalesce(backend, **options), _device_of(backend)
        if device is None:
            return batch
        return MovedBatch(batch, device, later=bool(options.get("async_op")))


def _device_of(backend: Any) -> Device | None:
    device = backend.device if isinstance(backend, fsdpcore.Backend) else None
    return None if device is None or device.on_host else device


def _known(function: str, backend: fsdpcore.Backend, algorithm: Any) -> Any:
    """The algorithm, or "auto" where it is one that only arrays of the host have."""
    collective = function.removesuffix("_v").removesuffix("_many")
    there = state_of(device_twin(backend)).own_algorithms.get(collective, {})
    general = isinstance(algorithm, str) and algorithm in ALGORITHMS[collective]
    return "auto" if general and algorithm not in there else algorithm


class Moves:
    """The arrays of one call, and what they are on the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._memories: dict[int, _Memory] = {}
        self._twins: dict[int, tuple[Array, Any]] = {}  # by the id of the host's

    def there(self, value: Any) -> Any:
        """Return what stands for a value: what cannot be moved stays as it is."""
        if isinstance(value, (list, tuple)) and any(isinstance(v, np.ndarray) for v in value):
            return [self.there(item) for item in value]
        if isinstance(value, np.generic):
            value = np.asarray(value)
        if not isinstance(value, np.ndarray) or value.dtype not in DTYPES:
            return value
        if id(value) not in self._twins:
            self._twins[id(value)] = (value, self._twin(value))
        return self._twins[id(value)][1]

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return keywords with ``out`` moved; one that nobody may write to is left as it is."""
        out = options.get("out")
        if isinstance(out, np.ndarray) and not out.flags.writeable:
            return options
        return {**options, "out": self.there(out)} if out is not None else options

    def _twin(self, array: Array) -> Any:
        if array.size == 0:
            return self.device.empty(array.shape, array.dtype)
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) not in self._memories:
            self._memories[id(root)] = _Memory(self.device, root)
        return self._memories[id(root)].twin(array)

    def back(self, result: Any) -> Any:
        """Copy back, and return a result as the host's, or a work that does so at its end."""
        if isinstance(result, fsdpcore.Work):
            return MovedWork(self, result)
        for memory in self._memories.values():
            memory.bring_back()
        return self.home(result)

    def home(self, result: Any) -> Any:
        """Return what a body gets for a result on the device."""
        if isinstance(result, list):
            return [self.home(item) for item in result]
        for array, twin in self._twins.values():
            if twin is result:
                return array
        return self.device.to_host(result) if self.device.owns(result) else result

    def deliver(self, result: Any) -> Any:
        """Return the same as ``home``; of what was moved, only the result is written."""
        home = self.home(result)
        if self.device.owns(result) and any(twin is result for _, twin in self._twins.values()):
            home[...] = self.device.to_host(result)
        return home


class _Memory:
    """The memory of an array of the host, with a copy on the device."""

    def __init__(self, device: Device, root: Array) -> None:
        self._device = device
        self._root = root
        self._low, high = byte_bounds(root)
        content = (ctypes.c_uint8 * (high - self._low)).from_address(self._low)
        self._bytes = np.ctypeslib.as_array(content)
        self._room = device.from_host(self._bytes.copy())

    def twin(self, array: Array) -> Any:
        """Return the array of the device that is at the place of ``array``."""
        offset = array.__array_interface__["data"][0] - self._low
        room: Any = self._room
        return self._device.xp.ndarray(
            array.shape, array.dtype, memptr=room.data + offset, strides=array.strides
        )

    def bring_back(self) -> None:
        """Copy all of it to the host, where that may be written."""
        if self._root.flags.writeable:
            self._bytes[...] = self._device.to_host(self._room)


class MovedWork(fsdpcore.Work):
    """A collective on the device whose result is copied back when it is first waited for."""

    def __init__(self, moves: Moves, work: fsdpcore.Work) -> None:
        self._moves: Moves | None = moves
        self._work = work
        self._result: Any = None

    def done(self) -> bool:
        return self._work.done()

    def wait(self, timeout: float | None = None) -> Any:
        result = self._work.wait(timeout)
        if self._moves is not None:
            self._result = self._moves.deliver(result)
            self._moves = None
        return self._result


class MovedBatch:
    """A batch whose calls move their arrays."""

    def __init__(self, batch: fsdpcore.Batch, device: Device, *, later: bool) -> None:
        self._batch = batch
        self._device = device
        self._later = later
        self._works: list[MovedWork] = []

    def __enter__(self) -> MovedBatch:
        self._batch.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._batch.__exit__(kind, error, traceback)
        if error is None and not self._later:
            for work in self._works:
                work.wait()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._batch, name)

        def call(array: Any, **options: Any) -> MovedWork:
            moves = Moves(self._device)
            work = MovedWork(moves, method(moves.there(array), **moves.options(options)))
            self._works.append(work)
            return work

        call.__name__ = name
        return call
