"""Memory of the devices, which is the host's, and CuPy's pool, which hands it out again at once."""

from __future__ import annotations

import bisect
import ctypes
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from support.fake_cuda import current
from support.fake_cuda.errors import CUDARuntimeError

if TYPE_CHECKING:
    from support.fake_cuda.machine import Machine

Bytes = NDArray[np.uint8]
UNIT = 512
# Memory that nobody has written is NaN in every floating dtype, and -1 in integers.
_UNWRITTEN = 0xFF


class Chunk:
    """A piece of real memory that stays where it is until the machine is switched off.

    Attributes:
        number: of its own.
        device: ordinal of the GPU, or -1 for pinned memory of the host.
        data: the bytes, at an address that is a multiple of 512.
    """

    def __init__(self, number: int, device: int, size: int) -> None:
        raw = np.empty(size + UNIT, np.uint8)
        start = -raw.ctypes.data % UNIT
        self.number = number
        self.device = device
        self.data: Bytes = raw[start : start + size]
        self.data.fill(_UNWRITTEN)
        self.address: int = self.data.ctypes.data
        self.size = size


class Memories:
    """All memory of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._chunks: list[Chunk] = []
        self._free: dict[tuple[int, int, int], list[Chunk]] = {}
        self._used: dict[int, int] = {}

    def take(self, device: int, stream: int, size: int) -> Chunk:
        """Memory of a device for a stream: what that stream gave back last, if there is some."""
        rounded = -(-size // UNIT) * UNIT
        with self._lock:
            self._used[device] = self._used.get(device, 0) + rounded
            if self._used[device] > self._machine.faults.limit:
                self._used[device] -= rounded
                raise CUDARuntimeError(2)
            found = self._free.get((device, stream, rounded))
            if found:
                return found.pop()
            return self._add(Chunk(self._machine.new_handle(), device, rounded))

    def give_back(self, chunk: Chunk, stream: int) -> None:
        """Take back memory, though other streams may be using it: that is what the pool does."""
        with self._lock:
            self._used[chunk.device] -= chunk.size
            self._free.setdefault((chunk.device, stream, chunk.size), []).append(chunk)

    def pinned(self, size: int) -> Chunk:
        """Pinned memory of the host, rounded up as CuPy's pool does."""
        with self._lock:
            rounded = max(UNIT, -(-size // UNIT) * UNIT)
            return self._add(Chunk(self._machine.new_handle(), -1, rounded))

    def used(self, device: int) -> int:
        """Bytes that arrays have."""
        return self._used.get(device, 0)

    def free_bytes(self, device: int) -> int:
        """Bytes that the pool keeps."""
        with self._lock:
            return sum(c.size for (d, _, _), cs in self._free.items() if d == device for c in cs)

    def forget_free(self, device: int) -> None:
        """Have the pool give back what it keeps. Its content is gone."""
        with self._lock:
            for key in [key for key in self._free if key[0] == device]:
                for chunk in self._free.pop(key):
                    chunk.data.fill(_UNWRITTEN)

    def find(self, address: int) -> Chunk:
        """The memory that an address is in."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at >= 0 and address < self._starts[at] + self._chunks[at].size:
                return self._chunks[at]
        raise CUDARuntimeError(700)

    def at(self, address: int, size: int) -> Bytes:
        """The bytes at an address; raises if not all of them are memory of one piece."""
        if not size:
            return np.empty(0, np.uint8)
        chunk = self.find(address)
        begin = address - chunk.address
        if begin + size > chunk.size:
            raise CUDARuntimeError(700)
        return chunk.data[begin : begin + size]

    def is_pinned(self, address: int) -> bool:
        """Whether an address is in pinned memory of the host."""
        try:
            return self.find(address).device == -1
        except CUDARuntimeError:
            return False

    def _add(self, chunk: Chunk) -> Chunk:
        at = bisect.bisect(self._starts, chunk.address)
        self._starts.insert(at, chunk.address)
        self._chunks.insert(at, chunk)
        return chunk


class BaseMemory:
    """Memory with ``ptr``, ``size`` and ``device_id``."""

    ptr: int
    size: int
    device_id: int

    @property
    def device(self) -> Any:
        from support.fake_cuda.device import Device

        return Device(self.device_id)


class PooledMemory(BaseMemory):
    """Memory of the pool, given back when it is collected."""

    def __init__(self, size: int, device: int, stream: int) -> None:
        machine = current.machine()
        self._home = machine.memories
        self._stream = stream
        self._chunk = machine.memories.take(device, stream, size) if size else None
        self.size = size
        self.device_id = device
        self.ptr = self._chunk.address if self._chunk else 0

    def __del__(self) -> None:
        if getattr(self, "_chunk", None) is not None:
            self._home.give_back(self._chunk, self._stream)


class UnownedMemory(BaseMemory):
    """Memory that somebody else keeps: of a device, or pinned of the host."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id == -1:
            machine = current.machine()
            found = machine.memories.find(ptr).device if size else machine.place.device
            device_id = machine.place.device if found == -1 else found
        self.ptr = ptr
        self.size = size
        self.device_id = device_id
        self._owner = owner


class MemoryPointer:
    """An address in memory, which it keeps."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    @property
    def device(self) -> Any:
        return self.mem.device

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        """Copy from a device, on a stream."""
        from support.fake_cuda import copies

        copies.memcpy_async(self.ptr, src.ptr, size, copies.DEVICE_TO_DEVICE, _handle(stream))

    def copy_from_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        """Copy from an address of the host, on a stream."""
        from support.fake_cuda import copies

        copies.memcpy_async(self.ptr, int(mem), size, copies.HOST_TO_DEVICE, _handle(stream))

    def copy_to_host_async(self, mem: int, size: int, stream: Any = None) -> None:
        """Copy to an address of the host, on a stream."""
        from support.fake_cuda import copies

        copies.memcpy_async(int(mem), self.ptr, size, copies.DEVICE_TO_HOST, _handle(stream))

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        """Set bytes, on a stream."""
        from support.fake_cuda import copies

        copies.memset_async(self.ptr, value, size, _handle(stream))


def _handle(stream: Any) -> int:
    machine = current.machine()
    return int(machine.queue(stream).handle) if stream is None else int(stream.ptr)


class MemoryPool:
    """``cupy.get_default_memory_pool()``: of the current device."""

    def malloc(self, size: int) -> MemoryPointer:
        """Memory for the current stream."""
        machine = current.machine()
        queue = machine.queue(None)
        return MemoryPointer(PooledMemory(size, queue.device, queue.handle), 0)

    def used_bytes(self) -> int:
        """Bytes that arrays have."""
        machine = current.machine()
        return machine.memories.used(machine.place.device)

    def free_bytes(self) -> int:
        """Bytes that it keeps."""
        machine = current.machine()
        return machine.memories.free_bytes(machine.place.device)

    def total_bytes(self) -> int:
        """Both together."""
        return self.used_bytes() + self.free_bytes()

    def free_all_blocks(self, stream: Any = None) -> None:
        """Give back what it keeps; waits for the device, as cudaFree does."""
        machine = current.machine()
        device = machine.place.device
        if machine.memories.free_bytes(device):
            machine.synchronize(device)
            machine.memories.forget_free(device)


def alloc(size: int) -> MemoryPointer:
    """Memory of the pool."""
    return MemoryPool().malloc(size)


class PinnedMemory(BaseMemory):
    """Pinned memory of the host."""

    def __init__(self, size: int, flags: int = 0) -> None:
        machine = current.machine()
        self._chunk = machine.memories.pinned(size)
        self.ptr = self._chunk.address
        self.size = self._chunk.size
        self.device_id = machine.place.device


class _Pinned:
    """Also a buffer, so that ``np.frombuffer`` takes it."""

    mem: PinnedMemory
    ptr: int

    def size(self) -> int:
        """Bytes from here to the end."""
        return self.mem.size - (self.ptr - self.mem.ptr)


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    """A place in pinned memory, which it keeps."""
    # An instance of a ctypes array is a buffer; it keeps the memory.
    made = type("PinnedMemoryPointer", (_Pinned, ctypes.c_ubyte * (mem.size - offset)), {})
    pointer = made.from_buffer(mem._chunk.data, offset)
    pointer.mem = mem
    pointer.ptr = mem.ptr + offset
    return pointer


def alloc_pinned_memory(size: int) -> Any:
    """Pinned memory, of at least so many bytes: CuPy's pool takes the next power of two."""
    return PinnedMemoryPointer(PinnedMemory(1 << max(size - 1, 511).bit_length()), 0)


class PinnedMemoryPool:
    """``cupy.get_default_pinned_memory_pool()``: keeps nothing here."""

    def malloc(self, size: int) -> Any:
        """Pinned memory."""
        return alloc_pinned_memory(size)

    def free_all_blocks(self) -> None:
        """Nothing to do."""
