"""Bodies: arrays on a GPU, saved and loaded without an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from support.arrays import Array, array_of
from support.ckpt_gpus import check_parts, moved, rank_part, strided

import fsdpcore as fc

# How each array is made, since all that collect the tests import this.
ARRAYS: dict[str, Callable[[], Array]] = {
    "flat": lambda: array_of(0, (370, 290), np.float32),
    "columns": lambda: array_of(1, (500, 300), ml_dtypes.bfloat16),
    "rows": lambda: array_of(2, (3000, 200), np.float16),
    "whole": lambda: array_of(3, (5, 4, 3), np.complex64),
    "scalar": lambda: np.array(-7, np.int64),
    "bool": lambda: array_of(4, (1000,), np.bool_),
    "large": lambda: array_of(5, (3000, 2500), np.float32),
}
SAVED = {"flat": "flat", "columns": "axis 1", "rows": "axis 0", "large": "flat"}
LOADED = {"flat": "axis 0", "columns": "flat", "rows": "axis 1", "whole": "axis 2"}
SHAPE = (2500, 2000)
ROUNDS = 300


def parts(backend: fc.Backend, cuts: dict[str, str]) -> dict[str, Any]:
    """This rank's share of all arrays, on the host."""
    return {
        name: rank_part(made(), cuts.get(name, "whole"), backend.rank, backend.world_size)
        for name, made in ARRAYS.items()
    }


def placed(backend: fc.Backend, state: dict[str, Any]) -> dict[str, Any]:
    """The same on the rank's device, if that is a GPU."""
    if backend.device.on_host:
        return state
    xp = backend.device.xp
    return {name: moved(shard, lambda x: strided(xp, x)) for name, shard in state.items()}


def save(backend: fc.Backend, path: str) -> None:
    fc.checkpoint.save(path, placed(backend, parts(backend, SAVED)), backend, step=3)


def load(backend: fc.Backend, path: str) -> None:
    state = parts(backend, LOADED)
    blank = {name: moved(shard, np.zeros_like) for name, shard in state.items()}
    target = placed(backend, blank)
    loaded = fc.checkpoint.load(path, target, backend)
    assert loaded.missing == loaded.unexpected == loaded.uncovered == ()
    check_parts(target, state)


def save_while_it_computes(backend: fc.Backend, path: str, *, own_stream: bool) -> None:
    """What was enqueued before a save is in it, and nothing that is enqueued after it."""
    xp = backend.device.xp
    stream = xp.cuda.Stream(non_blocking=True) if own_stream else xp.cuda.Stream.null
    with stream, fc.checkpoint.AsyncCheckpointer(path, backend) as checkpointer:
        x = xp.zeros(SHAPE, np.float32)
        for _ in range(ROUNDS):
            x += 1
        future = checkpointer.save({"x": x, "x.T": x.T[::3]}, step=4)
        x.fill(0)
        future.wait()
        for _ in range(ROUNDS):
            x += 1
        fc.checkpoint.save(path, {"x": x, "x.T": x.T[::3]}, backend, step=5)
        stream.synchronize()
