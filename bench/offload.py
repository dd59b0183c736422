"""Steps of an engine with and without ``fc.Offload``: seconds, memory of the process, bytes moved.

Every variant is a job of its own, so that none inherits memory::

    python bench/offload.py --directory /var/tmp --params 32e6 --world 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import fsdpcore as fc

VARIANTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "parameters": {"what": "parameters"},
    "all": {"what": "all"},
    "all, nothing ahead": {"what": "all", "ahead": 0},
    "all, system's cache": {"what": "all", "evict": False},
}
UNITS = 16


def memory(field: str) -> int:
    """Return what the kernel says about this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def moved() -> tuple[int, int]:
    """Return how many bytes this process has read from disks, and written to them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = dict(line.split(": ") for line in lines)
    return int(found["read_bytes"]), int(found["write_bytes"])


def job(backend: fc.Backend, directory: str, params: int, steps: int, variant: str) -> None:
    """Train, and print a line on rank 0."""
    options = VARIANTS[variant]
    before = memory("VmRSS")
    engine = fc.FSDP(
        [fc.Unit(f"u{i}", {"w": fc.Spec((params // UNITS,))}) for i in range(UNITS)],
        backend,
        optimizer=fc.optim.AdamW(),
        window=False,
        offload=None if options is None else fc.Offload(directory, **options),
    )
    taken, disk = [], (0, 0)
    for _ in range(steps):
        at, began = moved(), time.perf_counter()
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (values, grads):
                    np.multiply(values["w"], 0.5, out=grads["w"])
            step.update(clip=1.0)
        taken.append(time.perf_counter() - began)
        disk = tuple(b - a for a, b in zip(at, moved(), strict=True))  # type: ignore[assignment]
    stats = engine.offload_stats
    if backend.rank == 0:
        row = {
            "step_s": min(taken[1:]),
            "rss": memory("VmRSS") - before,
            "peak": memory("VmHWM") - before,
            "held": stats.held,
            "read": stats.read,
            "disk_read": disk[0],
            "written": stats.written,
            "disk_written": disk[1],
            "ready": stats.ready / max(1, stats.used),
            "waited_s": stats.waited,
            "flushed_s": stats.flushed,
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    """Run all variants, each in processes of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=".", help="on a disk")
    parser.add_argument("--params", type=float, default=32e6, help="float32 numbers in all")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, as a line of JSON")
    given = parser.parse_args()
    if given.variant:
        args = (given.directory, int(given.params), given.steps, given.variant)
        fc.launch(job, world_size=given.world, transport="zmq", args=args)
        return
    names = ["step s", "rss MiB", "peak", "held", "read", "on disk", "written", "on disk"]
    print(f"{'':22}" + "".join(f"{name:>9}" for name in [*names, "ready", "waited", "flushed"]))
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
        row = json.loads(result.stdout)
        sizes = ("rss", "peak", "held", "read", "disk_read", "written", "disk_written")
        cells = [f"{row['step_s']:9.3f}", *(f"{row[name] / 2**20:9.0f}" for name in sizes)]
        cells += [f"{row['ready']:9.0%}", f"{row['waited_s']:9.3f}", f"{row['flushed_s']:9.3f}"]
        print(f"{variant:22}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
