"""Probes that one process makes: what CuPy and NCCL do on this machine. Prints JSON.

python -m gpu_bench.probe_one arrays|nccl|pinned|costs
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np

Found = dict[str, Any]


def _tried(questions: dict[str, Callable[[], Any]]) -> Found:
    """The answer to each question, or the error it ended in."""
    found: Found = {}
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except Exception as error:  # that is the answer
            found[name] = f"{type(error).__name__}: {error}"
    return found


def _cupy() -> Any:
    return importlib.import_module("cupy")


def arrays() -> Found:
    """What CuPy can do with 16-bit floats, of what we build on."""
    return {
        dtype.name: _tried(_of_half(_cupy(), dtype))
        for dtype in (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
    }


def _of_half(cupy: Any, dtype: np.dtype[Any]) -> dict[str, Callable[[], Any]]:
    x = cupy.asarray(np.arange(6, dtype=np.float32).reshape(2, 3)).astype(dtype)
    room = cupy.empty_like(x)

    def add(module: Any) -> bool:
        module.add(x, x, out=room)
        return bool((room == x + x).all())

    return {
        "asarray of a NumPy array": lambda: str(cupy.asarray(x.get()).dtype),
        "zeros": lambda: str(cupy.zeros(3, dtype).dtype),
        "add with out": lambda: add(cupy),
        "np.add with out": lambda: add(np),
        "multiply by a float": lambda: str((x * 2.5).dtype),
        "matmul": lambda: (x @ x.T).astype(np.float32).get().tolist(),
        "matmul's dtype": lambda: str((x @ x.T).dtype),
        "matmul with out": lambda: str(cupy.matmul(x, x.T, out=cupy.zeros((2, 2), dtype)).dtype),
        "sum in float32": lambda: float(x.sum(dtype=np.float32)),
        "sum over an axis": lambda: x.sum(axis=0, dtype=np.float32).get().tolist(),
        "max": lambda: float(x.max()),
        "exp": lambda: str(cupy.exp(x).dtype),
        "where": lambda: str(cupy.where(x > 1, x, x).dtype),
        "indexing by an array": lambda: x[cupy.asarray([1, 0])].shape,
        "concatenate": lambda: str(cupy.concatenate([x, x]).dtype),
        "isfinite": lambda: bool(cupy.isfinite(x).all()),
        "get": lambda: str(x.get().dtype),
    }


def nccl() -> Found:
    """NCCL with one rank: streams, dtypes, groups, splits, and how long its ends take."""
    cupy = _cupy()
    lib: Any = importlib.import_module("cupy.cuda.nccl")
    begun = time.perf_counter()
    comm = lib.NcclCommunicator(1, lib.get_unique_id(), 0)
    found: Found = {"init_s": time.perf_counter() - begun, "version": lib.get_version()}
    x = cupy.arange(8, dtype=np.float32)

    def reduced(stream: Any, op: int, dtype: Any = np.float32, kind: int = -1) -> Any:
        source = cupy.arange(8).astype(dtype)
        out = cupy.zeros(8, dtype)
        kind = lib.NCCL_FLOAT32 if kind < 0 else kind
        cupy.cuda.Device().synchronize()
        comm.allReduce(source.data.ptr, out.data.ptr, 8, kind, op, stream.ptr)
        stream.synchronize()
        return out.astype(np.float32).get().tolist()

    def to_itself() -> Any:
        out = cupy.zeros_like(x)
        lib.groupStart()
        comm.send(x.data.ptr, 8, lib.NCCL_FLOAT32, 0, 0)
        comm.recv(out.data.ptr, 8, lib.NCCL_FLOAT32, 0, 0)
        lib.groupEnd()
        return out.get().tolist()

    def several() -> Any:
        outs = [cupy.zeros_like(x) for _ in range(3)]
        lib.groupStart()
        for out in outs:
            comm.broadcast(x.data.ptr, out.data.ptr, 8, lib.NCCL_FLOAT32, 0, 0)
        lib.groupEnd()
        return [out.get().tolist() == x.get().tolist() for out in outs]

    def split(color: int) -> Any:
        made = comm.commSplit(color, 0)
        return "none" if made is None else [made.size(), made.rank_id(), bool(made.comm)]

    def nothing() -> str:
        comm.allReduce(x.data.ptr, x.data.ptr, 0, lib.NCCL_FLOAT32, lib.NCCL_SUM, 0)
        return "ok"

    def ended(how: str) -> float:
        other = lib.NcclCommunicator(1, lib.get_unique_id(), 0)
        start = time.perf_counter()
        getattr(other, how)()
        return time.perf_counter() - start

    null, own = cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)
    found.update(
        _tried(
            {
                "sum on the null stream": lambda: reduced(null, lib.NCCL_SUM),
                "sum on a stream": lambda: reduced(own, lib.NCCL_SUM),
                "mean": lambda: reduced(own, lib.NCCL_AVG),
                "sum of bfloat16": lambda: reduced(
                    own, lib.NCCL_SUM, ml_dtypes.bfloat16, lib.NCCL_BFLOAT16
                ),
                "mean of float16": lambda: reduced(own, lib.NCCL_AVG, np.float16, lib.NCCL_FLOAT16),
                "no elements": nothing,
                "send to itself in a group": to_itself,
                "three broadcasts in a group": several,
                "commSplit(0)": lambda: split(0),
                "commSplit(-1)": lambda: split(-1),
                "check_async_error": lambda: str(comm.check_async_error()),
                "destroy_s": lambda: ended("destroy"),
                "abort_s": lambda: ended("abort"),
                "refused: a bad count": lambda: comm.allReduce(
                    x.data.ptr, x.data.ptr, 8, 99, lib.NCCL_SUM, 0
                ),
            }
        )
    )
    comm.destroy()
    return found


def pinned() -> Found:
    """Kernels on page-locked memory of the host, and how fast the bus is."""
    cupy = _cupy()
    size = 1 << 26
    memory = cupy.cuda.alloc_pinned_memory(4 * size)
    owned = cupy.cuda.UnownedMemory(memory.ptr, 4 * size, memory, cupy.cuda.Device().id)
    far = cupy.ndarray(size, np.float32, cupy.cuda.MemoryPointer(owned, 0))
    near = cupy.ones(size, np.float32)

    def rate(work: Callable[[], Any], moved: int) -> float:
        work()
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(5):
            work()
        cupy.cuda.Device().synchronize()
        return 5 * moved / (time.perf_counter() - start) / 1e9

    other = cupy.ones(size, np.float32)
    return _tried(
        {
            "a kernel writes it, GB/s": lambda: rate(lambda: cupy.add(near, 1, out=far), 4 * size),
            "a kernel reads it, GB/s": lambda: rate(lambda: cupy.add(far, 1, out=near), 4 * size),
            "what was written": lambda: float(far[12345]),
            "copy on the device, GB/s read and written": lambda: rate(
                lambda: cupy.copyto(near, other), 8 * size
            ),
        }
    )


def costs() -> Found:
    """Microseconds of the host for what a collective consists of."""
    cupy = _cupy()
    lib: Any = importlib.import_module("cupy.cuda.nccl")
    runtime = cupy.cuda.runtime
    comm = lib.NcclCommunicator(1, lib.get_unique_id(), 0)
    x, y = cupy.ones(2, np.float32), cupy.ones(2, np.float32)
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(disable_timing=True)
    at, to, kind = x.data.ptr, y.data.ptr, lib.NCCL_FLOAT32

    def grouped() -> None:
        lib.groupStart()
        comm.allReduce(at, to, 2, kind, lib.NCCL_SUM, stream.ptr)
        lib.groupEnd()

    work: dict[str, Callable[[], Any]] = {
        "allReduce": lambda: comm.allReduce(at, to, 2, kind, lib.NCCL_SUM, stream.ptr),
        "allReduce in a group": grouped,
        "memcpyAsync": lambda: runtime.memcpyAsync(
            to, at, 8, runtime.memcpyDeviceToDevice, stream.ptr
        ),
        "record an event": lambda: event.record(stream),
        "query an event": lambda: event.done,
        "a stream waits for it": lambda: stream.wait_event(event),
        "make an event": lambda: cupy.cuda.Event(disable_timing=True),
        "current stream": cupy.cuda.get_current_stream,
        "current device": runtime.getDevice,
        "data.ptr": lambda: x.data.ptr,
        "empty": lambda: cupy.empty(2, np.float32),
        "add": lambda: cupy.add(x, x, out=y),
        "check_async_error": comm.check_async_error,
    }
    found: Found = {}
    for name, do in work.items():
        samples = []
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(100):
                do()
            samples.append(1e4 * (time.perf_counter() - start))
            cupy.cuda.Device().synchronize()
        found[name] = round(median(samples), 2)
    comm.destroy()
    return found


if __name__ == "__main__":
    kinds: dict[str, Callable[[], Found]] = {
        "arrays": arrays,
        "nccl": nccl,
        "pinned": pinned,
        "costs": costs,
    }
    print(json.dumps(kinds[sys.argv[1]]()))
