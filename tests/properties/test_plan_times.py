"""A step in virtual time takes as long as its plan says.

The plan goes by the cost formulas. In virtual time the messages of the engine go over a network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plan_steps import train
from support.virtual_time import launch, network_file

import fsdpcore as fc
from fsdpcore.fsdp.plan.make_plan import Sync

NETWORK = """
[[level]]
name = "host"
size = {per_host}
rate = "5GB/s"
latency = 0
[[level]]
name = "switch"
size = 0
rate = "100MB/s"
latency = "50us"
[compute]
message = "20us"
reduce = "inf"
memory = "2GB/s"
"""
FORWARD = 0.004
SIZES = (300_000, 100_000, 100_000, 700_000, 300_000)
NOTHING_AHEAD = fc.Prefetch(0, reductions=0)
AHEAD = fc.Prefetch(1, reductions=1)
FAR_AHEAD = fc.Prefetch(3, reductions=1)
STRATEGIES = [
    fc.Strategy(),
    fc.Strategy("full_shard", 2),
    fc.Strategy("shard_grad_op"),
    fc.Strategy("shard_optimizer"),
    fc.Strategy("no_shard"),
    fc.Strategy("hybrid_shard", shard_group_size=2),
]


def _both(
    backend: fc.Backend, strategy: fc.Strategy, ahead: fc.Prefetch, microbatches: int, sync: Sync
) -> tuple[Any, Any]:
    """The plan of a step, and what was measured of the second one."""
    units = [fc.Unit(f"unit{n}", {"w": fc.Spec(size)}) for n, size in enumerate(SIZES)]
    engine = fc.FSDP(units, backend, strategy=strategy, optimizer=fc.optim.AdamW(), prefetch=ahead)
    with np.errstate(all="ignore"):  # nobody has written the gradients
        for _ in range(2):
            train(engine, microbatches, sync, lambda factor: backend.clock.sleep(factor * FORWARD))
    plan = engine.plan(microbatches=microbatches, sync=sync, compute_seconds=[FORWARD] * len(units))
    return plan, engine.report().measured


PASSES: list[tuple[fc.Prefetch, int, Sync]] = [
    (NOTHING_AHEAD, 1, "each"),
    (AHEAD, 1, "each"),
    (FAR_AHEAD, 2, "each"),
    (AHEAD, 3, "last"),
]
# Every strategy with every kind of passes, on each network every second time.
CASES = [
    (1 + (m + n) % 2, strategy, *passes)
    for m, strategy in enumerate(STRATEGIES)
    for n, passes in enumerate(PASSES)
]


@pytest.mark.parametrize(("per_host", "strategy", "ahead", "microbatches", "sync"), CASES, ids=str)
def test_a_step_takes_as_long_as_its_plan_says(
    tmp_path: Path,
    per_host: int,
    strategy: fc.Strategy,
    ahead: fc.Prefetch,
    microbatches: int,
    sync: Sync,
) -> None:
    path = tmp_path / "network.toml"
    path.write_text(NETWORK.format(per_host=per_host))
    plan, measured = fc.launch(
        _both,
        world_size=4,
        transport="sim",
        args=(strategy, ahead, microbatches, sync),
        clock="virtual",
        network=str(path),
        arrays="abstract",
    )[0]
    close = pytest.approx(0, abs=0.05 * plan.step_seconds)
    assert measured.step_seconds - plan.step_seconds == close
    assert measured.exposed_seconds - plan.exposed_seconds == close
    assert measured.peak_bytes == plan.peak_bytes
    assert measured.bytes_sent == plan.bytes_sent


def _of_a_mesh(backend: fc.Backend) -> float:
    mesh = fc.Mesh(backend, {"shard": 4, "tensor": 2})
    units = [fc.Unit("u", {"w": fc.Spec(10**6)})]
    engine = fc.FSDP(units, mesh["shard"], tensor=mesh["tensor"], optimizer=fc.optim.SGD(lr=0.1))
    return engine.plan(compute_seconds=[0.0]).step_seconds or 0.0


def test_groups_beside_others_share_the_links(tmp_path: Path) -> None:
    """Ranks with other boxes of the parameters do the same, over the same links."""

    def alone(backend: fc.Backend) -> float:
        units = [fc.Unit("u", {"w": fc.Spec(10**6)})]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=0.1))
        return engine.plan(compute_seconds=[0.0]).step_seconds or 0.0

    def seconds(main: Any, world_size: int, per_host: int) -> float:
        text = NETWORK.format(per_host=per_host).replace('memory = "2GB/s"', "")
        return float(launch(main, world_size, network=network_file(tmp_path, text))[0])

    assert seconds(_of_a_mesh, 8, 2) == pytest.approx(2 * seconds(alone, 4, 1), rel=0.2)
