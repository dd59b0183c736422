"""The current device and the current streams of every thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from support.fake_cuda.errors import CUDARuntimeError

if TYPE_CHECKING:
    from support.fake_cuda.machine import Machine


class Place(threading.local):
    """Where the calling thread is. Threads begin on device 0 and its null stream.

    ``threading.local`` calls ``__init__`` again in every thread, with the same arguments.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._device = 0
        self._current: dict[int, Any] = {}
        self._streams: dict[int, list[Any]] = {}
        self._entered: list[int] = []

    @property
    def device(self) -> int:
        """Ordinal of the current device."""
        self._machine.faults.check_driver()
        return self._device

    def set_device(self, device: int) -> None:
        """Make a device current."""
        self._machine.faults.check_driver()
        if not 0 <= device < self._machine.devices:
            raise CUDARuntimeError(101)
        self._device = device

    def stream(self, device: int) -> Any:
        """The current stream of a device."""
        return self._current.get(device) or self._stack(device)[-1]

    def set_stream(self, stream: Any, device: int) -> None:
        """Make a stream current, until another one is, or any one is left."""
        self._current[device] = stream

    def enter_stream(self, stream: Any, device: int) -> None:
        """Make a stream current, until ``leave_stream``."""
        self._stack(device).append(stream)
        self._entered.append(device)
        self._current[device] = stream

    def leave_stream(self) -> None:
        """Go back to the stream entered before; as by CuPy, ``set_stream`` is forgotten."""
        device = self._entered.pop()
        stack = self._stack(device)
        stack.pop()
        self._current[device] = stack[-1]

    def _stack(self, device: int) -> list[Any]:
        from support.fake_cuda.streams import Stream

        return self._streams.setdefault(device, [Stream.null])
