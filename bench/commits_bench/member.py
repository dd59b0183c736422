"""The program of a rank: as in ``fsdpcore.bench.member``, written with the public interface alone.

It runs under the old checkout and under the new one, so it imports neither the rest of the bench
nor anything of fsdpcore that a user would not.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fsdpcore as fc

Array = Any
Step = Callable[[], object]

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
_UNITS = 8
_BLOCKS = 4
_EMPTY = np.empty
_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": fc.optim.Adam,
    "adamw": fc.optim.AdamW,
    "lion": fc.optim.Lion,
    "sgd": lambda: fc.optim.SGD(1e-3, momentum=0.9),
    "rmsprop": lambda: fc.optim.RMSprop(lr=1e-3),
    "adagrad": lambda: fc.optim.Adagrad(lr=1e-3),
}


class Job:
    """A case on this rank.

    Args:
        make: makes the step, which is what is timed.
        after: what follows each step untimed; the fastest step is then what counts.
        anew: each block has a step of its own.
    """

    def __init__(
        self, make: Callable[[], Step], after: Step | None = None, *, anew: bool = False
    ) -> None:
        self.after = after
        self.anew = anew
        self._make = make
        self._made = None if anew else make()

    def step(self) -> Step:
        """Return the step for a block."""
        return self._make() if self._made is None else self._made


def make_job(case: Mapping[str, Any], backend: fc.Backend) -> Job:
    """Prepare a case of ``cases``."""
    name, _, detail = case["name"].partition(".")
    if name == "step":
        if detail == "small_units":
            return Job(lambda: _small_units(case["size"], backend))
        return Job(lambda: _training(detail, case["size"], backend))
    if name == "optimizer":
        return _update(detail, case["size"])
    if name in ("save", "load"):
        return _checkpoint(name, case, backend)
    return Job(lambda: _collective(name, case, backend))


def _collective(name: str, case: Mapping[str, Any], backend: fc.Backend) -> Step:
    if name == "barrier":
        return backend.barrier
    rank, p = backend.rank, backend.world_size
    parts = p if name.removesuffix("_v") in _SPLIT else 1
    count = max(1, case["size"] // 4 // parts)

    def array(size: int) -> Array:
        made = np.empty(size, np.float32)
        if case["memory"] == "backend":
            made = backend.empty((size,), np.float32)
        made.fill(0)
        return made

    function = getattr(fc, name)
    if name.endswith("_v"):
        counts = [count + r % 2 for r in range(p)]
        if name == "all_gather_v":
            source, out = array(counts[rank]), array(sum(counts))
            return lambda: function(source, backend, out=out)
        if name == "reduce_scatter_v":
            source, out = array(sum(counts)), array(counts[rank])
            return lambda: function(source, backend, counts, out=out)
        sends = [count + (rank + r) % 2 for r in range(p)]  # each gets what it sends
        source, out = array(sum(sends)), array(sum(sends))
        return lambda: function(source, backend, sends, recv_counts=sends, out=out)
    sizes = {  # of input and output
        "all_gather": (count, count * p),
        "reduce_scatter": (count * p, count),
        "all_to_all": (count * p, count * p),
        "gather": (count, 0 if rank else count * p),
        "scatter": (0 if rank else count * p, count),
        "reduce": (count, 0 if rank else count),
    }
    given, taken = sizes.get(name, (count, count))
    source, out = (array(size) if size else None for size in (given, taken))
    keywords = {"root": 0} if name in _ROOTED else {}
    return lambda: function(source, backend, out=out, **keywords)


def _engine(strategy: str, nbytes: int, backend: fc.Backend) -> fc.FSDP:
    """Units with three parameters each, ``nbytes`` of float32 in all."""
    wide = max(1, nbytes // 4 // _UNITS // 4)
    shapes = {"weight": (2, wide), "other": (wide,), "bias": (max(1, wide // 4),)}
    params = {name: fc.Spec(shape) for name, shape in shapes.items()}
    units = [fc.Unit(f"unit{number}", params) for number in range(_UNITS)]
    return fc.FSDP(units, backend, strategy=strategy, optimizer=fc.optim.AdamW())


def _training(strategy: str, nbytes: int, backend: fc.Backend) -> Step:
    engine = _engine(strategy, nbytes, backend)
    shapes = {name: array.shape for name, array in _shapes(engine).items()}
    values = {name: np.full(shape, 1e-3, np.float32) for name, shape in shapes.items()}

    def write(grads: Any) -> None:
        for name, value in values.items():
            grads[name] = value

    return _stepping(engine, write)


def _small_units(nbytes: int, backend: fc.Backend) -> Step:
    """A step that computes nothing, with ten arrays of 4 KiB in each unit."""
    params = {f"p{number}": fc.Spec((1024,)) for number in range(10)}
    units = [fc.Unit(f"unit{number}", params) for number in range(nbytes // 40960)]
    engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW())

    return _stepping(engine, lambda grads: grads["p0"].fill(1e-3))


def _stepping(engine: fc.FSDP, write: Callable[[Any], None]) -> Step:
    """A step that computes nothing; ``write`` writes the gradients of a unit."""

    def step() -> None:
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (_, grads):
                    write(grads)
            step.update(clip=1.0)

    return step


def _shapes(engine: fc.FSDP) -> dict[str, Array]:
    unit = engine.units[0]
    unit.unshard()
    found = dict(unit.params)
    unit.reshard()
    return found


def _update(name: str, nbytes: int) -> Job:
    """An update of one shard, for each block at other addresses.

    It takes up to an eighth longer where arrays do not begin at a cache line, the optimizer's own
    scratch included. Where NumPy puts them depends on all that the process has done before, its
    imports too, and is the same in every process of a commit.
    """
    policy = _OPTIMIZERS[name]()
    values = np.random.default_rng(0).standard_normal((2, max(1, nbytes // 4)), np.float32)
    drawn = random.Random(0)  # noqa: S311 (no secret)
    return Job(lambda: _Update(policy, values, drawn), anew=True)


class _Update:
    """Updates arrays of its own, all of them at addresses that are drawn, but for whole pages."""

    def __init__(self, policy: Any, values: Array, drawn: random.Random) -> None:
        self._policy, self._drawn = policy, drawn
        self._param, self._grad = (_placed(row, drawn) for row in values)
        made = policy.init_state(self._param.size, self._param.dtype)
        self._state = {name: _placed(array, drawn) for name, array in made.items()}
        self._scratch = np.empty(0)
        self._steps = 0

    def __call__(self) -> None:
        self._steps += 1
        vars(np)["empty"] = self._empty
        try:
            self._policy.update(self._param, self._grad, self._state, step=self._steps)
        finally:
            vars(np)["empty"] = _EMPTY

    def _empty(self, shape: Any, dtype: Any = float) -> Array:
        """What ``np.empty`` gives the optimizer: its scratch, which is two blocks."""
        if shape != self._scratch.shape:
            self._scratch = _placed(_EMPTY(shape, dtype), self._drawn)
        return self._scratch


def _placed(values: Array, drawn: random.Random) -> Array:
    """Return a copy."""
    memory = _EMPTY(values.nbytes + 4096, np.uint8)
    start = (16 * drawn.randrange(256) - memory.ctypes.data) % 4096
    copy = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def _checkpoint(name: str, case: Mapping[str, Any], backend: fc.Backend) -> Job:
    engine = _engine("full_shard", case["size"], backend)
    folder = Path(case["folder"])
    folder.mkdir(exist_ok=True)

    def load() -> None:
        fc.checkpoint.load(folder, engine, backend, step=1)

    def save() -> None:
        fc.checkpoint.save(folder, engine, backend, step=1)

    if name == "load":
        save()
        return Job(lambda: load, lambda: None)

    def remove() -> None:
        if backend.rank == 0:
            shutil.rmtree(folder)
            folder.mkdir()

    return Job(lambda: save, remove)


def timed(backend: fc.Backend, job: Job, warmup: int, iterations: int) -> float:
    """Seconds of so many steps, at the pace of the fastest of a few blocks.

    Whatever else the machine does falls on one of them rather than on all.
    """
    blocks = min(_BLOCKS, iterations) if job.after is None else iterations
    each = iterations // blocks
    took: list[float] = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(blocks):
            if job.anew or not took:
                step = job.step()
                _block(backend, step, job.after, warmup)
            took.append(_block(backend, step, job.after, each))
        return min(took) / each * iterations
    finally:
        if enabled:
            gc.enable()


def _block(backend: fc.Backend, step: Step, after: Step | None, iterations: int) -> float:
    """Seconds of steps back to back; where something follows each, there is one."""
    turns = range(iterations)
    backend.barrier()
    started = time.perf_counter()
    for _ in turns:
        step()
    took = time.perf_counter() - started
    if after is not None and iterations:
        backend.barrier()
        after()
        backend.barrier()
    return took


def obey(backend: fc.Backend, order: Mapping[str, Any], jobs: dict[str, Job]) -> list[float]:
    """Carry out an order of ``fsdpcore.bench.member``'s table."""
    if order["do"] == "prepare":
        case = order["case"]
        folder = str(Path(case["folder"]) / order["contestant"])
        jobs["now"] = make_job({**case, "folder": folder}, backend)
    elif order["do"] == "release":
        jobs.clear()
        gc.collect()
    elif order["do"] == "memory":
        return [float(os.getpid()), 0.0, 0.0]
    elif order["do"] == "run":
        return [timed(backend, jobs["now"], order["warmup"], order["iterations"])]
    return []


def main(backend: fc.Backend, options: Mapping[str, Any]) -> None:
    """Take orders until there are no more."""
    version = {"fsdpcore": str(fc.__file__), "numpy": np.__version__}
    hello = {
        "rank": backend.rank,
        "world_size": backend.world_size,
        "versions": {options["contestant"]: version},
    }
    jobs: dict[str, Job] = {}
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(options["path"])
        with channel.makefile("rwb") as lines:

            def say(message: Mapping[str, Any]) -> None:
                lines.write(json.dumps(message).encode() + b"\n")
                lines.flush()

            say(hello)
            for line in lines:
                try:
                    answer = obey(backend, json.loads(line), jobs)
                except Exception as error:
                    say({"error": f"{type(error).__name__}: {error}"})
                    raise
                say({"answer": answer})
    jobs.clear()


if __name__ == "__main__":
    fc.launch(main, args=(json.loads(sys.argv[1]),))
