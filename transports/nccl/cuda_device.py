"""A GPU as the place of a rank's arrays, with CuPy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fsdpcore.core.buffers import Array, Bytes, dtype_code
from fsdpcore.core.device import Device, Ticket
from fsdpcore.core.errors import ArgumentError, CommunicationError, StateError
from fsdpcore.core.work import Deadline

# Of ``cudaError_t``.
_OUT_OF_MEMORY = 2
_NOT_READY = 600
# A host that waits for the device looks again after so long, at first and at most.
_LOOK, _LOOK_AT_MOST = 10e-6, 1e-3
# Streams whose numbers are lower have a higher priority; those that there are not are moved to the
# highest that there is.
_HIGHEST = -100


def reached(event: Any) -> bool:
    """Whether the device has come to an event.

    Raises:
        CUDARuntimeError: something that the device was given before has failed. (``Event.done``
            takes that for "not yet", for ever.)
    """
    status = runtime.eventQuery(event.ptr)
    if status == _NOT_READY:
        return False
    if status:
        raise runtime.CUDARuntimeError(status)
    return True


class CudaTicket(Ticket):
    """An event behind what was enqueued in the background."""

    def __init__(self, device: CudaDevice) -> None:
        self.event = device.new_event()
        self._device = device

    def done(self) -> bool:
        try:
            return reached(self.event)
        except runtime.CUDARuntimeError as error:
            raise CommunicationError(f"{self._device} has failed: {error}") from error

    def join(self) -> None:
        self._device.check_thread()
        cupy.cuda.get_current_stream().wait_event(self.event)

    def block(self, seconds: float) -> bool:
        deadline, pause = Deadline(seconds), _LOOK
        while not self.done():
            if not deadline.remaining():
                return False
            time.sleep(min(pause, deadline.remaining()))
            pause = min(2 * pause, _LOOK_AT_MOST)
        return True


class CudaDevice(Device):
    """A GPU.

    Args:
        ordinal: its number in this process.
        check: raises if what was communicated cannot be trusted; called by those methods that wait
            for the device, after that.

    Attributes:
        ordinal: its number in this process.
        stream: where collectives run beside what the caller enqueues.
    """

    on_host = False

    def __init__(self, ordinal: int, check: Callable[[], None]) -> None:
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self._check = check
        with self.entered():
            self.stream = cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST)
        self._events: list[Any] = []

    @property
    def xp(self) -> Any:
        return cupy

    def use(self) -> None:
        """Make it the calling thread's current device."""
        runtime.setDevice(self.ordinal)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the calling thread's current device for a ``with`` block."""
        before = runtime.getDevice()
        if before == self.ordinal:
            yield
            return
        runtime.setDevice(self.ordinal)
        try:
            yield
        finally:
            runtime.setDevice(before)

    def check_thread(self) -> None:
        """Raise ``StateError`` unless it is the calling thread's current device.

        CuPy computes on that one, whichever the arrays belong to.
        """
        current = runtime.getDevice()
        if current != self.ordinal:
            raise StateError(
                f"this thread's current GPU is cuda:{current}, but the rank computes on "
                f"{self.name}: call cupy.cuda.Device({self.ordinal}).use() when the thread begins"
            )

    # Arrays.

    def owns(self, array: object) -> bool:
        return isinstance(array, cupy.ndarray) and array.data.device_id == self.ordinal

    def operand(self, value: ArrayLike) -> Array:
        self.check_thread()
        array: Any = value
        if not self.owns(array):
            if hasattr(array, "__cuda_array_interface__"):
                raise ArgumentError(f"array is {self.foreign(array)}")
            raise ArgumentError(
                f"expected an array of {self.name}, got {_in_words(value)}; "
                "backend.device.from_host() copies a NumPy array there"
            )
        dtype_code(array.dtype)
        found: Array = array if array.flags.c_contiguous else cupy.ascontiguousarray(array)
        return found

    def check_out(self, out: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if type(out) is not cupy.ndarray or out.data.device_id != self.ordinal:
            plain = "" if not self.owns(out) else f": {type(out).__name__}, which is not plain"
            raise ArgumentError(
                f"out must be an array of {self.name}, as the input is, got {_in_words(out)}{plain}"
            )
        if out.shape != shape or out.dtype != dtype:
            raise ArgumentError(
                f"out must have shape {shape} and dtype {dtype}, got {out.shape} and {out.dtype}"
            )
        if not out.flags.c_contiguous and _is_repeated(out):
            raise ArgumentError(
                "out has several elements at one place in memory, as broadcast_to() makes them; "
                "pass one that has room for each"
            )
        found: Array = out
        return found

    def foreign(self, array: object) -> str:
        if isinstance(array, cupy.ndarray):
            return (
                f"{_in_words(array)}, but this rank computes on {self.name}: make it there, with "
                f"cupy.cuda.Device({self.ordinal}).use() when the thread begins"
            )
        return (
            f"{_in_words(array)}, on a GPU but not CuPy's: cupy.asarray() makes an array of CuPy "
            "of it, without a copy"
        )

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        if runtime.getDevice() == self.ordinal:  # a shortcut past what follows
            return cast(Array, cupy.empty(shape, dtype))
        with self.entered():
            return cast(Array, cupy.empty(shape, dtype))

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        with self.entered():
            made: Array = cupy.zeros(shape, dtype)
        return made

    def to_host(self, array: Any) -> NDArray[Any]:
        if isinstance(array, np.ndarray):
            return array
        with self.entered():
            found: NDArray[Any] = cupy.asnumpy(array)
        self._check()
        return found

    def from_host(self, array: NDArray[Any]) -> Array:
        if not isinstance(array, (np.ndarray, np.generic)):
            raise ArgumentError(f"from_host() takes a NumPy array, got {_in_words(array)}")
        # Ordinary memory is staged before the call returns; of page-locked memory the device reads
        # when it comes to it, so that is waited for.
        with self.entered():
            made: Array = cupy.array(array, blocking=not _is_ordinary(array))
        return made

    def write(self, target: Array, source: NDArray[Any]) -> None:
        with self.entered():
            target[...] = self.from_host(source)

    def fetch(self, target: NDArray[Any], source: Array) -> None:
        with self.entered():
            source.get(out=target, blocking=False)  # type: ignore[attr-defined]

    def page_locked(self, nbytes: int) -> Bytes:
        try:
            with self.entered():
                memory = _page_locked(nbytes)
        except runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            return np.empty(nbytes, np.uint8)  # there may be as much that can be paged out
        return np.frombuffer(memory, np.uint8, nbytes)

    def pinned(self, shape: int | Sequence[int], dtype: DTypeLike) -> Array:
        with self.entered():
            sizes = tuple(np.broadcast_shapes(shape))
            nbytes = int(np.prod(sizes, dtype=object)) * np.dtype(dtype).itemsize
            memory = _page_locked(nbytes)
            # The device knows such memory by the host's address.
            owned = cupy.cuda.UnownedMemory(memory.ptr, nbytes, memory, self.ordinal)
            made: Array = cupy.ndarray(sizes, dtype, cupy.cuda.MemoryPointer(owned, 0))
        return made

    def overlap(self, first: Array, second: Array) -> bool:
        low, high = self.address(first), self.address(second)
        return low < high + second.nbytes and high < low + first.nbytes

    def address(self, array: Array) -> int:
        return int(array.data.ptr)  # type: ignore[attr-defined]

    # Order.

    def new_event(self) -> Any:
        """A new event that can be recorded on the device's streams."""
        if runtime.getDevice() == self.ordinal:  # a shortcut past what follows
            return cupy.cuda.Event(disable_timing=True)
        with self.entered():
            return cupy.cuda.Event(disable_timing=True)

    def take_event(self) -> Any:
        """An event that was given back, or a new one."""
        try:
            return self._events.pop()
        except IndexError:
            return self.new_event()

    def give_event(self, event: Any) -> None:
        """Let an event be used again; nobody may look at it any more."""
        self._events.append(event)

    @contextlib.contextmanager
    def background(self) -> Iterator[Ticket]:
        self.check_thread()
        ticket, before = CudaTicket(self), self.take_event()
        current = cupy.cuda.get_current_stream()
        before.record(current)
        self.stream.wait_event(before)
        self.give_event(before)  # who waits for it waits for what it was when he began to
        # Not by ``with``, at whose end CuPy forgets a stream that was made current by ``use()``.
        self.stream.use()
        try:
            yield ticket
        finally:
            current.use()
        ticket.event.record(self.stream)

    def synchronize(self) -> None:
        with self.entered():
            runtime.deviceSynchronize()
        self._check()


def _page_locked(nbytes: int) -> Any:
    """New memory of the host that stays where it is, until the result is collected.

    CuPy's pool would round it up to a power of two, and never give it back.
    """
    memory = cupy.cuda.PinnedMemory(max(nbytes, 1), runtime.hostAllocPortable)
    return cupy.cuda.PinnedMemoryPointer(memory, 0)


def _is_ordinary(array: NDArray[Any]) -> bool:
    """Whether an array is in memory that NumPy has allocated."""
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base.base is None


def _is_repeated(array: Any) -> bool:
    """Whether all elements along some axis are the same one."""
    axes = zip(array.shape, array.strides, strict=True)
    return bool(array.size) and any(size > 1 and not stride for size, stride in axes)


def _in_words(value: object) -> str:
    if isinstance(value, cupy.ndarray):
        return f"one of cuda:{value.data.device_id}"
    return f"{type(value).__module__}.{type(value).__name__}"
