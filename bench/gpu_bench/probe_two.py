"""Probes of two processes with bare CuPy and NCCL on one GPU: does it let them, and how it ends.

    python -m gpu_bench.probe_two WAY QUESTION

prints JSON. ``WAY`` is a key of ``WAYS``: environment variables by which NCCL may be persuaded.
``QUESTION`` is ``talk`` (communicate, time it), ``abort`` (one rank does not come, the other gives
up) or ``death`` (one rank is killed in a collective).
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import ml_dtypes
import numpy as np

# What differs between ranks is a tuple.
WAYS: dict[str, dict[str, str | tuple[str, str]]] = {
    "plain": {},
    "hostid": {"NCCL_HOSTID": ("rank0", "rank1")},
    "multi_rank": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    "hostid, lo": {"NCCL_HOSTID": ("rank0", "rank1"), "NCCL_SOCKET_IFNAME": "lo"},
    "both": {"NCCL_HOSTID": ("rank0", "rank1"), "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
}
# Until the communicator is there; and for what comes after it.
_INIT_SECONDS, _SECONDS = 12.0, 25.0


class _Rank:
    """A communicator, and what it takes to call it."""

    def __init__(self, rank: int, identity: bytes) -> None:
        self.cupy: Any = importlib.import_module("cupy")
        self.lib: Any = importlib.import_module("cupy.cuda.nccl")
        self.rank = rank
        self.stream = self.cupy.cuda.Stream(non_blocking=True)
        start = time.perf_counter()
        self.comm = self.lib.NcclCommunicator(2, identity, rank)
        self.init_seconds = time.perf_counter() - start

    def all_reduce(self, x: Any, kind: int) -> None:
        at = x.data.ptr
        self.comm.allReduce(at, at, x.size, kind, self.lib.NCCL_SUM, self.stream.ptr)

    def wait(self, seconds: float) -> bool:
        """Whether the stream gets done in time."""
        end = time.monotonic() + seconds
        while not self.stream.done:
            if time.monotonic() > end:
                return False
            time.sleep(0.001)
        return True


def _talk(rank: _Rank) -> dict[str, Any]:
    cupy, lib = rank.cupy, rank.lib
    found: dict[str, Any] = {}
    for dtype, kind in (
        (np.float32, lib.NCCL_FLOAT32),
        (np.dtype(ml_dtypes.bfloat16), lib.NCCL_BFLOAT16),
    ):
        x = cupy.asarray(np.full(1000, rank.rank + 1, np.float32)).astype(dtype)
        cupy.cuda.Device().synchronize()
        rank.all_reduce(x, kind)
        done = rank.wait(10)
        name = np.dtype(dtype).name
        found[name] = bool((x.astype(np.float32) == 3).all()) if done else "not done after 10 s"
        if not done:
            return found
    for size in (8, 1 << 20, 1 << 26):
        x = cupy.zeros(size // 4, np.float32)
        rank.all_reduce(x, lib.NCCL_FLOAT32)
        rank.wait(10)
        start = time.perf_counter()
        for _ in range(5):
            rank.all_reduce(x, lib.NCCL_FLOAT32)
        rank.wait(20)
        found[f"all_reduce of {size} B, us"] = 2e5 * (time.perf_counter() - start)
    out, x = cupy.zeros(4, np.float32), cupy.full(4, rank.rank, np.float32)
    cupy.cuda.Device().synchronize()
    lib.groupStart()
    rank.comm.send(x.data.ptr, 4, lib.NCCL_FLOAT32, 1 - rank.rank, rank.stream.ptr)
    rank.comm.recv(out.data.ptr, 4, lib.NCCL_FLOAT32, 1 - rank.rank, rank.stream.ptr)
    lib.groupEnd()
    rank.wait(10)
    found["exchange"] = bool((out == 1 - rank.rank).all())
    start = time.perf_counter()
    pair = rank.comm.commSplit(0, -rank.rank)
    found["commSplit, s"] = time.perf_counter() - start
    found["rank in the split"] = pair.rank_id()
    pair.destroy()
    start = time.perf_counter()
    rank.comm.destroy()
    found["destroy, s"] = time.perf_counter() - start
    return found


def _stuck(rank: _Rank) -> Any:
    """Make one collective with both ranks and one that only rank 0 comes to."""
    x = rank.cupy.zeros(1 << 20, np.float32)
    rank.all_reduce(x, rank.lib.NCCL_FLOAT32)
    rank.wait(10)
    if rank.rank == 0:
        rank.all_reduce(x, rank.lib.NCCL_FLOAT32)
    return x


def _given_up(rank: _Rank) -> dict[str, Any]:
    """Abort in a thread; how long that takes, and what becomes of the stream."""
    found: dict[str, Any] = {"stream done before": rank.wait(1.0)}
    try:
        found["check_async_error before"] = str(rank.comm.check_async_error())
    except Exception as error:  # that is the answer
        found["check_async_error before"] = f"{type(error).__name__}: {error}"
    ended: dict[str, float] = {}
    start = time.perf_counter()

    def abort() -> None:
        rank.comm.abort()
        ended["s"] = time.perf_counter() - start

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    found["stream done after"] = rank.wait(10.0)
    found["stream done after, s"] = time.perf_counter() - start
    thread.join(10.0)
    found["abort, s"] = ended.get("s", "not done after 10 s")
    try:
        y = rank.cupy.ones(3, np.float32)
        found["the GPU goes on"] = float(y.sum()) == 3.0
    except Exception as error:
        found["the GPU goes on"] = f"{type(error).__name__}: {error}"
    return found


def _main(number: int, way: str, question: str, pipe: Connection) -> None:
    """The program of a rank."""
    for name, value in WAYS[way].items():
        os.environ[name] = value[number] if isinstance(value, tuple) else value
    try:
        lib: Any = importlib.import_module("cupy.cuda.nccl")
        if number == 0:
            pipe.send(bytes(lib.get_unique_id()))
        rank = _Rank(number, pipe.recv())
        pipe.send({"init_s": rank.init_seconds, "nccl": lib.get_version()})
        if question == "talk":
            pipe.send(_talk(rank))
        else:
            keep = _stuck(rank)
            if number == 1:
                pipe.send({})
                time.sleep(_SECONDS)
            else:
                if question == "death":
                    pipe.send("kill the other")
                    pipe.recv()
                pipe.send(_given_up(rank))
            del keep
    except Exception as error:  # that is the answer
        pipe.send({"error": f"{type(error).__name__}: {error}"})
    pipe.close()
    os._exit(0)  # a communicator that was given up may not let the interpreter end


def probe(way: str, question: str) -> dict[str, Any]:
    """Ask two new processes; what came of it, by rank."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(number, way, question, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        identity = _heard(pipes[0], _INIT_SECONDS)
        if isinstance(identity, dict):
            return {"rank 0": identity}
        for pipe in pipes:
            pipe.send(identity)
        found = {f"rank {n}": [_heard(pipe, _INIT_SECONDS)] for n, pipe in enumerate(pipes)}
        if any("error" in answers[0] for answers in found.values()):
            return found
        answer = _heard(pipes[0], _SECONDS)
        if answer == "kill the other":
            processes[1].kill()
            pipes[0].send("done")
            answer = _heard(pipes[0], _SECONDS)
        found["rank 0"].append(answer)
        if question == "talk":
            found["rank 1"].append(_heard(pipes[1], _SECONDS))
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def _heard(pipe: Connection, seconds: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(seconds) else {"error": f"no answer after {seconds:g} s"}
    except EOFError:
        return {"error": "its process has died"}


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], sys.argv[2])))
