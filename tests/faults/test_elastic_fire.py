"""A training on hosts that are lost, cut off and joined again, against the quiet run's bits."""

from __future__ import annotations

import functools
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.elastic_burned import BATCH, SAMPLES, Training
from support.elastic_fire import DOUBLE, KINDS, Fire, read, recoveries
from support.hosts.lab import Lab

import fsdpcore as fc

pytestmark = pytest.mark.usefixtures("needs_hosts")

_PER_EPOCH = -(-SAMPLES // BATCH)


@functools.cache
def quiet(steps: int, strategy: str) -> dict[str, Any]:
    """What one rank ends with to which nothing happens."""
    training = Training(steps, strategy)

    @fc.elastic.run
    def train(job: fc.elastic.Job) -> dict[str, Any]:
        return training.run(job, lambda *what, **more: None)

    found: dict[str, Any] = train()
    return found


def check(end: dict[str, Any], steps: int, strategy: str) -> None:
    """The bits are those of the quiet run, and each sample was used once in an epoch."""
    assert steps % _PER_EPOCH == 0
    assert end["used"] == [steps // _PER_EPOCH] * SAMPLES
    assert end["epochs"] == steps // _PER_EPOCH
    assert end["digest"] == quiet(steps, strategy)["digest"]


def faults(kinds: Iterator[str], fire: Fire, most: int) -> None:
    """Let things happen until the training ends, or there were enough of them."""
    while sum(fire.faults.values()) < most and not fire.ended():
        fire.strike(next(kinds))


def test_a_job_goes_on_whatever_is_lost(tmp_path: Path) -> None:
    steps, strategy = 160, "full_shard"
    kinds = iter(["rank_0", "host", "stop", "blink", "in_recovery"])
    with (
        Lab(3) as lab,
        Fire(lab, tmp_path, ["--steps", steps, "--pause", 0.1], per_host=1) as fire,
    ):
        faults(kinds, fire, 5)
        fire.flurry(14)
        assert sum(fire.faults.values()) >= 15, "the training ended before much could happen"
        check(fire.finish(), steps, strategy)


@pytest.mark.campaign
def test_under_fire(tmp_path: Path) -> None:
    """``TEST_FAULTS`` of them, 500 by default, in jobs of about 20 each, from ``TEST_SEED`` on."""
    wanted, seed = int(os.environ.get("TEST_FAULTS", "500")), int(os.environ.get("TEST_SEED", "0"))
    done: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {}
    recovered: list[float] = []
    while sum(done[kind] * (2 if kind in DOUBLE else 1) for kind in done) < wanted:
        drawn = random.Random(seed)
        strategy = drawn.choice(("full_shard", "shard_grad_op", "no_shard", "shard_optimizer"))
        every, saves = drawn.choice((1, 1, 4)), drawn.choice((0, 40))
        steps = 600
        arguments = ["--steps", steps, "--pause", 0.04, "--strategy", strategy]
        arguments += ["--every", every, "--saves", saves]

        def endless(drawn: random.Random = drawn) -> Iterator[str]:
            while True:
                yield drawn.choice(KINDS)

        folder = tmp_path / f"seed-{seed}"
        with Lab(3) as lab, Fire(lab, folder, arguments, seed=seed) as fire:
            faults(endless(), fire, 20)
            check(fire.finish(), steps, strategy)
        done += fire.faults
        recovered += recoveries(read(folder))
        for kind, some in fire.seconds.items():
            seconds.setdefault(kind, []).extend(some)
        print(f"seed {seed}: {strategy}, every {every}: {dict(fire.faults)}", flush=True)
        seed += 1
    print(f"from the notice to the next finished step: {median(recovered):.2f} s (median)")
    for kind, some in sorted(seconds.items()):
        print(f"{kind}: {done[kind]} times, whole again after {median(some):.1f} s (median)")
