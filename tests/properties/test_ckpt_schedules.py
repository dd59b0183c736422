"""Checkpoints in many schedules, where ranks die, links break and time is short.

Whatever happens, the newest checkpoint is one that was saved as a whole, and no older than what a
rank was told is there. A job that comes after can save and load it, on another number of ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.schedules import Played, Schedule, play, seeds

import fsdpcore as fc

SIZES = (2, 3, 4)
ROWS, STEPS = 24, 3


def _part(value: float, backend: fc.Backend) -> dict[str, Any]:
    """A rank's part of one array, and what all have alike."""
    share = ROWS // backend.world_size
    mine = np.full((share, 5), value, np.float32) + backend.rank
    return {"w": fc.BoxShard((ROWS, 5), (backend.rank * share, 0), mine), "all": np.full(7, value)}


def _save(backend: fc.Backend, folder: str, told: Counter[int]) -> None:
    for step in range(1, STEPS + 1):
        fc.checkpoint.save(folder, _part(100 * step, backend), backend, step=step, timeout=10)
        told[step] += 1


def _load(backend: fc.Backend, folder: str, step: int, before: int) -> None:
    """Load what a job of so many ranks has saved last, and save over it."""
    loaded = _part(-1, backend)
    assert fc.checkpoint.load(folder, loaded, backend).step == step
    share = ROWS // backend.world_size
    rows = np.arange(backend.rank * share, (backend.rank + 1) * share)
    expected = 100 * step + rows // (ROWS // before)
    assert (loaded["w"].array == expected[:, None]).all()
    assert (loaded["all"] == 100 * step).all()
    fc.checkpoint.save(folder, _part(100 * step, backend), backend, step=step)


def _played(seed: int, folder: Path) -> tuple[Schedule, Played, str]:
    """Play a schedule; also what is wrong with what it has left, which is nothing as a rule."""
    ranks = SIZES[seed % len(SIZES)]
    schedule = Schedule.of(seed, ranks)
    told: Counter[int] = Counter()
    played = play(_save, ranks, schedule, str(folder), told)
    newest = None
    with contextlib.suppress(fc.CheckpointNotFoundError):
        newest = fc.checkpoint.latest(folder).step
    if max(told, default=0) > (newest or 0):
        return schedule, played, f"{dict(told)} were told, and {newest} is the newest"
    if newest is not None:
        after = SIZES[(seed // 3) % len(SIZES)]
        again = play(
            _load, after, Schedule(seed, type(schedule.faults)(), 0), str(folder), newest, ranks
        )
        if again.errors:
            return schedule, played, f"step {newest} on {after} ranks: {again.errors}"
    return schedule, played, ""


def _search(seeds: Iterable[int], folder: Path) -> tuple[int | None, Counter[str]]:
    """Play one schedule for each seed; the first seed that goes wrong, and how all of them went."""
    kinds: Counter[str] = Counter()
    for seed in seeds:
        schedule, played, wrong = _played(seed, folder / str(seed))
        ends = "an error" if played.errors else "all saved"
        kinds[f"{schedule.fault or 'no fault'}: {ends}"] += 1
        if wrong or played.wrong or (played.errors and not schedule.fault):
            print(f"seed {seed}, {schedule}: {wrong or played.errors}, digest {played.digest:08x}")
            return seed, kinds
    return None, kinds


def test_schedules_of_saves(tmp_path: Path) -> None:
    found, kinds = _search(range(60), tmp_path)
    assert found is None
    assert all(kinds[f"{fault}: an error"] for fault in ("a rank dies", "a link breaks"))


@pytest.mark.campaign
def test_many_schedules_of_saves(tmp_path: Path) -> None:
    chosen = seeds(5000)
    found, kinds = _search(chosen, tmp_path)
    assert found is None
    print(f"{chosen}: {dict(kinds)}")
