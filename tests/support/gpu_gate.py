"""A gate on a CUDA stream: what is enqueued behind it waits until the host opens it.

It is how tests see what waits for what without a clock. The kernel gives up by itself after some
seconds, so that a call that waits on the host where it should not ends in a failed test, not in a
hang. Everything that is to run beside a closed gate must have run before, since loading a kernel
or getting memory from CUDA may wait for all that the GPU does.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

_SOURCE = """
extern "C" __global__ void gate(volatile unsigned int* open, long long cycles) {
    long long start = clock64();
    while (*open == 0 && clock64() - start < cycles) { }
}
"""
# About five seconds at the clock rates of today's GPUs.
_CYCLES = 10_000_000_000


class Gate:
    """One gate; open at first, and at the end of its block.

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._kernel = cupy.RawKernel(_SOURCE, "gate")
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._flag = np.frombuffer(self._memory, np.uint32, 1)
        self.open()
        self.enqueue()
        cupy.cuda.get_current_stream().synchronize()

    def enqueue(self) -> None:
        """Put the gate on the current stream."""
        self._kernel((1,), (1,), (np.uint64(self._memory.ptr), np.int64(_CYCLES)))

    def close(self) -> None:
        """Let streams stop at it."""
        self._flag[0] = 0

    def open(self) -> None:
        """Let them go on."""
        self._flag[0] = 1

    def __enter__(self) -> Gate:
        self.close()
        self.enqueue()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.open()
        self._cupy.cuda.get_current_stream().synchronize()
