"""``cupy.cuda.Stream``, ``ExternalStream``, ``Event``, ``get_current_stream``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from support.fake_cuda import current
from support.fake_cuda.queues import Queue


class Event:
    """A point in a stream. One that was never recorded is done."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        machine = current.machine()
        self.ptr = machine.new_handle()
        machine.events[self.ptr] = self
        self._recorded: tuple[Queue, int, Any] | None = None
        self._time: float | None = None
        self._timed = not disable_timing

    @property
    def done(self) -> bool:
        """Whether the device has come to it; on a device that has failed, no."""
        return self._query() == 0

    def _query(self) -> int:
        """A status of CUDA: 0, 600 for not yet, or what work on the device has failed with."""
        if self._recorded is None:
            return 0
        machine = current.machine()
        queue, position, clock = self._recorded
        if status := machine.sticky(queue.device):
            return status
        if queue.finished < position:
            return 600
        machine.order.host_saw(clock)
        return 0

    def record(self, stream: _BaseStream | None = None) -> None:
        """Put it behind what a stream has so far; the current stream by default."""
        machine = current.machine()
        queue = machine.queue(get_current_stream() if stream is None else stream)

        def note() -> None:
            self._time = time.perf_counter()

        position = queue.put("event", note if self._timed else _nothing)
        self._recorded = (queue, position, machine.order.clock_of(queue))
        machine.note("event.record", queue, event=self.ptr)

    def synchronize(self) -> None:
        """Block the host until it is done."""
        machine = current.machine()
        machine.note("event.synchronize", machine.queue(None), event=self.ptr)
        if self._recorded is not None:
            queue, position, clock = self._recorded
            queue.wait(position)
            machine.order.host_saw(clock)


def _nothing() -> None:
    pass


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two events that are done."""
    assert start_event._time is not None
    assert end_event._time is not None
    return (end_event._time - start_event._time) * 1e3


class _BaseStream:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def __enter__(self) -> _BaseStream:
        place = current.machine().place
        place.enter_stream(self, self._match())
        return self

    def __exit__(self, *exc: object) -> None:
        current.machine().place.leave_stream()

    def use(self) -> _BaseStream:
        """Make it the current stream of this thread."""
        current.machine().place.set_stream(self, self._match())
        return self

    def _match(self) -> int:
        device = current.machine().place.device
        if self.device_id not in (-1, device):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id})"
                f" does not match with the current device ({device})"
            )
        return device

    @property
    def done(self) -> bool:
        """Whether all work on it is done; on a device that has failed, no."""
        return self._query() == 0

    def _query(self) -> int:
        """A status of CUDA, as of an event."""
        machine = current.machine()
        queue = machine.queue(self)
        clock = machine.order.clock_of(queue)
        if status := machine.sticky(queue.device):
            return status
        if queue.finished < queue.issued:
            return 600
        machine.order.host_saw(clock)
        return 0

    @property
    def priority(self) -> int:
        """The priority that it was made with."""
        return current.machine().queue(self).priority

    def synchronize(self) -> None:
        """Block the host until all work on it is done."""
        machine = current.machine()
        queue = machine.queue(self)
        machine.note("stream.synchronize", queue)
        clock = machine.order.clock_of(queue)
        queue.wait()
        machine.order.host_saw(clock)

    def launch_host_func(self, callback: Callable[..., None], arg: object) -> None:
        """Call ``callback(arg)`` behind what it has so far."""
        current.machine().queue(self).put("host function", lambda: callback(arg))

    def record(self, event: Event | None = None) -> Event:
        """Record an event, a new one by default."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Have work that is enqueued from now on wait for an event, as it is recorded now."""
        machine = current.machine()
        queue = machine.queue(self)
        machine.note("stream.wait_event", queue, event=event.ptr)
        if event._recorded is not None:
            other, position, clock = event._recorded
            queue.put("wait", lambda: other.pass_by(position))
            machine.order.join(queue, clock)


class Stream(_BaseStream):
    """A stream, or with ``null=True`` the null stream of the current device."""

    null: ClassVar[Stream]

    def __init__(
        self,
        null: bool = False,
        non_blocking: bool = False,
        ptds: bool = False,
        priority: int | None = None,
    ) -> None:
        self._queue: Queue | None = None
        self._owner: object = None
        if ptds:
            raise NotImplementedError("the stand-in has no per-thread default stream")
        if null:
            super().__init__(0, -1)
            return
        machine = current.machine()
        self._queue = machine.new_queue(machine.place.device, not non_blocking)
        # The device knows six levels; what is outside of them is moved to the nearest.
        self._queue.priority = max(-5, min(0, priority or 0))
        super().__init__(self._queue.handle, self._queue.device)

    def __del__(self) -> None:
        if getattr(self, "_queue", None) is not None and current.is_on():
            self._queue.destroy()

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        """The stream of an object that has ``__cuda_stream__``, which it keeps."""
        if not hasattr(obj, "__cuda_stream__"):
            raise TypeError(
                f"Object of type {type(obj).__name__} does not implement the CUDA stream protocol "
                "(__cuda_stream__ method)"
            )
        made = cls(null=True)
        made.ptr, made._owner = obj.__cuda_stream__()[1], obj
        return made


Stream.null = Stream(null=True)


class ExternalStream(_BaseStream):
    """A stream by its handle, which somebody else keeps."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn(
            "ExternalStream is deprecated. Use Stream.from_external() instead to interoperate "
            "with external streams that implement the CUDA stream protocol.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(ptr, device_id)


def get_current_stream(device_id: int = -1) -> _BaseStream:
    """The current stream of this thread."""
    place = current.machine().place
    return place.stream(place.device if device_id == -1 else device_id)
