"""NCCL through us beside NCCL through CuPy alone, in the same processes, in turn.

For each size both enqueue the same number of calls back to back. *device* is the time between two
events around them, *host* that until the last call has returned, each per call.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

import fsdpcore as fc
from fsdpcore.bench.cases import MEASURED, Case, algbw, busbw_factor, make_cases
from fsdpcore.bench.contestants import Ours
from fsdpcore.bench.harness.measurements import OURS
from fsdpcore.bench.harness.turns import alternate
from gpu_bench.bare import Bare

BARE, STARTED = "cupy", "fsdpcore, async"
SIZES = (8, 512, 4096, 32768, 262144, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
_FEW = (8, 4096, 65536, 1 << 20, 16 << 20, 64 << 20)
# More calls than that in flight make the host wait for the GPU, whose queues are full.
_MOST = 200
_FEWEST = 2

Step = Callable[[], Any]
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class NcclPlan:
    """How to measure.

    Attributes:
        rounds: how often the two take turns.
        seconds: of one turn, roughly.
        budget: when so many seconds are over, what is left to do is left out.
        largest: size in bytes.
    """

    rounds: int = 7
    seconds: float = 0.02
    budget: float = 60.0
    largest: int = SIZES[-1]


@dataclass(frozen=True)
class Sample:
    """One turn, in seconds per call."""

    device: float
    host: float


def measure(backend: fc.Backend, plan: NcclPlan, tell: Tell) -> None:
    """Measure on all ranks, and ``tell`` rows on rank 0, as they come.

    Args:
        backend: of the nccl transport.
        plan: how.
        tell: takes one row; see ``bench/README.md``.
    """
    with contextlib.closing(Bare(backend)) as bare, _nccl_even_alone():
        ours = Ours(backend)
        end = time.monotonic() + plan.budget
        for case in _cases(backend.world_size, plan.largest):
            late = fc.all_reduce(np.int32(time.monotonic() > end), backend, op="max")
            if late:
                tell({"left_out": asdict(case)})
                continue
            row = _one(backend, ours, bare, case, plan)
            if backend.rank == 0:
                tell(row)


@contextlib.contextmanager
def _nccl_even_alone() -> Iterator[None]:
    """Have a single rank call NCCL, which it otherwise does without, to see what a call costs."""
    calls: Any = importlib.import_module("fsdpcore.transports.nccl.calls")
    before = calls.Collectives.copies_alone
    calls.Collectives.copies_alone = False
    try:
        yield
    finally:
        calls.Collectives.copies_alone = before


def _cases(ranks: int, largest: int) -> Iterator[Case]:
    sizes = [size for size in (SIZES if ranks == 1 else _FEW) if size <= largest]
    for operation in MEASURED:
        for in_place in (False, True) if operation == "all_reduce" and ranks > 1 else (False,):
            yield from make_cases(
                operation, sizes, ranks, dtype="float32", op="sum", root=0, in_place=in_place
            )


def _one(backend: fc.Backend, ours: Ours, bare: Bare, case: Case, plan: NcclPlan) -> dict[str, Any]:
    xp, rank = backend.device.xp, backend.rank
    source = xp.zeros(case.source_count(rank), np.float32)
    outputs = [
        source if case.in_place else xp.zeros(case.output_count(rank), np.float32) for _ in range(2)
    ]
    given = source if case.source_count(rank) else None
    mine, theirs = (output if case.output_count(rank) else None for output in outputs)
    steps: dict[str, Step] = {
        OURS: ours.step(case, given, mine),
        BARE: bare.step(case, given, theirs),
    }
    if case.operation == "all_reduce" and not case.in_place:
        steps[STARTED] = _started(backend, given, mine)
    values = np.random.default_rng(rank).integers(-99, 99, source.size)
    source[:] = backend.device.from_host(values.astype(np.float32))
    wrong = None if case.in_place else _wrong(backend, steps, mine, theirs)
    count = _iterations(backend, steps, plan.seconds)
    samples = alternate(steps, plan.rounds, lambda name, _: _timed(backend, steps[name], count))
    return _row(case, count, wrong, samples)


def _started(backend: fc.Backend, source: Any, output: Any) -> Step:
    return lambda: fc.all_reduce(source, backend, out=output, async_op=True).wait()


def _wrong(backend: fc.Backend, steps: dict[str, Step], mine: Any, theirs: Any) -> int:
    """Elements in which the two results differ, over all ranks; on small integers, so none may."""
    for name in (OURS, BARE):
        steps[name]()
    backend.device.synchronize()
    found = 0
    if mine is not None:
        assert theirs is not None
        found = int((mine != theirs).sum())
    return int(fc.all_reduce(np.int64(found), backend))


def _iterations(backend: fc.Backend, steps: dict[str, Step], seconds: float) -> int:
    """As many calls as fit, the same on all ranks and for both."""
    slowest = 0.0
    for step in steps.values():
        _timed(backend, step, 2)
        started = time.perf_counter()
        _timed(backend, step, 3)
        slowest = max(slowest, (time.perf_counter() - started) / 3)
    slowest = float(fc.all_reduce(np.float64(slowest), backend, op="max"))
    return int(min(_MOST, max(_FEWEST, seconds / slowest)))


def _timed(backend: fc.Backend, step: Step, count: int) -> Sample:
    events: Any = backend.device.xp.cuda
    before, after = events.Event(), events.Event()
    backend.device.synchronize()
    backend.barrier()
    enabled = gc.isenabled()
    gc.disable()
    try:
        before.record()
        started = time.perf_counter()
        for _ in range(count):
            step()
        host = time.perf_counter() - started
        after.record()
        after.synchronize()
    finally:
        if enabled:
            gc.enable()
    device = events.get_elapsed_time(before, after) / 1e3
    return Sample(device / count, host / count)


def _row(
    case: Case, count: int, wrong: int | None, samples: dict[str, list[Sample]]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "operation": case.operation,
        "size": case.size,
        "ranks": case.world_size,
        "place": "in" if case.in_place else "out",
        "type": case.dtype,
        "iterations": count,
        "wrong": wrong,
        "contestants": {
            name: {**_times(case, found), "samples_us": _microseconds(found)}
            for name, found in samples.items()
        },
    }
    pairs = list(zip(samples[OURS], samples[BARE], strict=True))
    # Round by round, so that what disturbs both counts for neither.
    row["bandwidth_ratio"] = median(theirs.device / ours.device for ours, theirs in pairs)
    row["host_us_more"] = 1e6 * median(ours.host - theirs.host for ours, theirs in pairs)
    return row


def _times(case: Case, samples: list[Sample]) -> dict[str, float]:
    device = median(sample.device for sample in samples)
    bandwidth = algbw(case.size, device)
    return {
        "device_us": 1e6 * device,
        "host_us": 1e6 * median(sample.host for sample in samples),
        "algbw_gbs": bandwidth,
        "busbw_gbs": bandwidth * busbw_factor(case.operation, case.world_size),
    }


def _microseconds(samples: list[Sample]) -> list[list[float]]:
    return [[round(1e6 * sample.device, 2), round(1e6 * sample.host, 2)] for sample in samples]
