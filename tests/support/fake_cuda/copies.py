"""Copies between addresses on a stream, and work on arrays on a stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.fake_cuda import current
from support.fake_cuda.errors import CUDARuntimeError
from support.fake_cuda.queues import Queue

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)

Host = NDArray[Any]
Touched = Sequence[tuple[int, Host]]


def enqueue(
    queue: Queue,
    name: str,
    work: Callable[[], None],
    reads: Touched = (),
    writes: Touched = (),
) -> None:
    """Enqueue work and say which arrays, each with the number of its memory, it touches."""
    machine = current.machine()
    # All of them, those too that are through by now: the rule orders the work, not the clock.
    machine.order.enqueued(queue, name, reads, writes, machine.legacy_peers(queue))
    queue.put(name, work)


def _host_bytes(address: int, size: int) -> Host:
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), np.uint8)


def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """``cudaMemcpyAsync``: with ordinary memory of the host, that side is done on return."""
    machine = current.machine()
    queue = machine.queue(stream)
    memories = machine.memories
    if not 0 <= kind <= DEFAULT:
        raise CUDARuntimeError(1)
    if not size:
        return
    reads, writes, pageable = [], [], False
    if kind in (HOST_TO_DEVICE, HOST_TO_HOST) and not memories.is_pinned(src):
        source = _host_bytes(src, size).copy()
    else:
        source = memories.at(src, size)
        reads = [(memories.find(src).number, source)]
    if kind in (DEVICE_TO_HOST, HOST_TO_HOST) and not memories.is_pinned(dst):
        target, pageable = _host_bytes(dst, size), True
    else:
        target = memories.at(dst, size)
        writes = [(memories.find(dst).number, target)]
    machine.note("memcpyAsync", queue, size=size, kind=kind, blocks=pageable)
    enqueue(queue, "memcpyAsync", lambda: np.copyto(target, source), reads, writes)
    if pageable:
        clock = machine.order.clock_of(queue)
        queue.wait()
        machine.order.host_saw(clock)


def memset_async(ptr: int, value: int, size: int, stream: int) -> None:
    """``cudaMemsetAsync``."""
    machine = current.machine()
    target = machine.memories.at(ptr, size)
    queue = machine.queue(stream)
    machine.note("memsetAsync", queue, size=size)
    if size:
        writes = [(machine.memories.find(ptr).number, target)]
        enqueue(queue, "memsetAsync", lambda: target.fill(value & 0xFF), (), writes)
