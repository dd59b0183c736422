"""AdamW on a GPU beside a copy on the same GPU, both by the bytes that they move.

An update cannot be faster than its bytes: a copy of large arrays tells what the memory gives. The
contestants take turns, timed by events on the stream, so that launching is not in it as long as the
host is ahead of the GPU. ``lanes`` and ``block`` are how the kernel is launched; those of the rows
with a ``target`` are what ``AdamW.update`` does, and the others are for choosing better ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from fsdpcore.bench.harness.turns import alternate
from fsdpcore.core.array_module import address
from fsdpcore.core.buffers import BFLOAT16, Array
from fsdpcore.fsdp.gpu.kernel import LANES, run_pass
from fsdpcore.fsdp.optim import AdamW
from fsdpcore.fsdp.optim.formulas import formula

ELEMENTS = 100_000_000
COPY = "copy"

_LAUNCHES = tuple((lanes, block) for lanes in (LANES, 1) for block in (128, 256, 512))
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class _TimedUpdate:
    """Something to be timed.

    Attributes:
        name: in the rows.
        nbytes: that it reads and writes.
        call: enqueues it once.
        more: for its row.
    """

    name: str
    nbytes: int
    call: Callable[[], None]
    more: Mapping[str, Any]


def measure(
    xp: Any, *, elements: int = ELEMENTS, rounds: int = 11, iterations: int = 5
) -> list[dict[str, Any]]:
    """Time AdamW with float32 state on the current device, and copies beside it; blocks.

    Args:
        xp: CuPy.
        elements: of the shard. Needs 20 bytes of the device for each.
        rounds: how often the contestants take turns.
        iterations: back to back in each round.

    Returns:
        A row for each contestant: ``name``, ``elements``, ``bytes`` that one iteration reads and
        writes, ``seconds`` of one (the median over the rounds), all ``samples``,
        ``gigabytes_per_second``, and ``share_of_copy``, its bandwidth over the copy's. ``target``
        is true where at least 80 % are wanted.
    """
    contestants = _contestants(xp, elements)
    calls = {each.name: each.call for each in contestants}
    for call in calls.values():
        _seconds(xp, call, iterations)  # compiles, and wakes the device up
    samples = alternate(calls, rounds, lambda name, _: _seconds(xp, calls[name], iterations))
    bandwidths = {each.name: each.nbytes / median(samples[each.name]) for each in contestants}
    return [
        {
            "name": each.name,
            "elements": elements,
            "bytes": each.nbytes,
            "seconds": median(samples[each.name]),
            "samples": samples[each.name],
            "gigabytes_per_second": bandwidths[each.name] / 1e9,
            "share_of_copy": bandwidths[each.name] / bandwidths[COPY],
            **each.more,
        }
        for each in contestants
    ]


def _contestants(xp: Any, elements: int) -> list[_TimedUpdate]:
    flat: dict[str, Array] = {
        name: xp.zeros(elements + LANES, np.float32)
        for name in ("param", "grad", "exp_avg", "exp_avg_sq")
    }
    flat["grad"].fill(1e-3)
    halves = {name: xp.zeros(elements + LANES, BFLOAT16) for name in ("grad", "out")}
    # One element behind a multiple of four, as shards may begin; the copy has it easier.
    arrays, narrow = (
        {name: array[1 : elements + 1] for name, array in each.items()} for each in (flat, halves)
    )
    target, source = address(flat["exp_avg"]), address(flat["grad"])
    optimizer = AdamW()
    state = {name: arrays[name] for name in optimizer.state_names}

    def copy() -> None:
        stream = xp.cuda.get_current_stream().ptr
        runtime = xp.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target, source, 4 * elements, kind, stream)

    def update() -> None:
        optimizer.update(arrays["param"], arrays["grad"], state, step=10)

    # As where a rank's parameters are a slice of all ranks', and the others are not.
    apart = flat["param"][2 : elements + 2]

    def elsewhere() -> None:
        optimizer.update(apart, arrays["grad"], state, step=10)

    def rounded() -> None:
        optimizer.update(arrays["param"], narrow["grad"], state, step=10, out=narrow["out"])

    wanted: dict[str, Any] = {"lanes": LANES, "block": 128, "target": True}
    found = [
        _TimedUpdate(COPY, 2 * 4 * elements, copy, {}),
        _TimedUpdate("adamw float32", 28 * elements, update, wanted),
        _TimedUpdate("adamw float32, bfloat16 in and out", 28 * elements, rounded, wanted),
        _TimedUpdate("adamw float32, parameters begin elsewhere", 28 * elements, elsewhere, {}),
    ]
    step, scalars = optimizer.gpu_update(step=10, lr=1e-3)
    kernel, numbers = formula(step, rounded=False), (1.0, *scalars)

    def launched(lanes: int, block: int) -> Callable[[], None]:
        return lambda: run_pass(kernel, arrays, numbers, _FLOAT32, lanes=lanes, block_size=block)

    return found + [
        _TimedUpdate(
            f"adamw float32, {lanes} to a thread, blocks of {block}",
            28 * elements,
            launched(lanes, block),
            {"lanes": lanes, "block": block},
        )
        for lanes, block in _LAUNCHES
    ]


def _seconds(xp: Any, call: Callable[[], None], iterations: int) -> float:
    """Time one iteration on the device."""
    first, last = xp.cuda.Event(), xp.cuda.Event()
    first.record()
    for _ in range(iterations):
        call()
    last.record()
    last.synchronize()
    return float(xp.cuda.get_elapsed_time(first, last)) / 1e3 / iterations
