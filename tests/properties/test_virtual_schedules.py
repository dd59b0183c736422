"""Many schedules of the same programs, with faults: the right result, or an error; never a hang.

A failing one is repeated by its seed: ``play(carry_out, ranks, Schedule.of(seed, ranks), [seed],
...)``, as ``_search`` does, goes the same way to the same event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.bodies.random_programs import carry_out
from support.schedules import Played, Schedule, elsewhere, play, seeds
from support.visits import ALL, counted

import fsdpcore as fc
from fsdpcore.collectives.algorithms import ring
from fsdpcore.collectives.context import CollectiveContext

SIZES = (2, 3, 4, 5)


def _ranks(seed: int) -> int:
    return SIZES[seed % len(SIZES)]


def _played(seed: int) -> tuple[Schedule, Played]:
    schedule = Schedule.of(seed, _ranks(seed))
    return schedule, play(carry_out, _ranks(seed), schedule, [seed], seed % 2 == 0)


def _bad(schedule: Schedule, played: Played) -> bool:
    return bool(played.wrong or (played.errors and not schedule.fault))


def _search(seeds: Iterable[int]) -> int | None:
    """Play one program and schedule for each seed; return the first seed that goes wrong."""
    for seed in seeds:
        schedule, played = _played(seed)
        if _bad(schedule, played):
            print(
                f"seed {seed}, {_ranks(seed)} ranks, {schedule}: turn {played.turns}, "
                f"digest {played.digest:08x}: {played.errors}"
            )
            return seed
    return None


def test_schedules() -> None:
    with counted() as seen:
        assert _search(range(200)) is None
    missed = ALL - {*seen}  # the campaign comes through all of them
    assert len(missed) <= 0.15 * len(ALL), f"no schedule comes through {sorted(missed)}"


@pytest.mark.campaign
def test_many_schedules() -> None:
    chosen = seeds(20_000)
    kinds: Counter[str] = Counter()
    with counted() as seen:
        for seed in chosen:
            schedule, played = _played(seed)
            assert not _bad(schedule, played), f"seed {seed}: {schedule}: {played.errors}"
            ends = "an error" if played.errors else "the right results"
            kinds[f"{schedule.fault or 'no fault'}: {ends}"] += 1
    print(f"{chosen}: {dict(kinds)}")
    print(f"{len(ALL & {*seen})} of {len(ALL)} transitions: {dict(seen)}")


def test_a_seed_is_a_schedule() -> None:
    """The same in another process with other hashes; another seed, another order."""
    here = _ways(12)
    assert elsewhere("properties.test_virtual_schedules", "_ways(12)") == str(here)
    assert len({digest for digest, *_ in here}) == 12


def _ways(count: int) -> list[tuple[int, int, float]]:
    return [(p.digest, p.turns, p.seconds) for _, p in map(_played, range(count))]


def _gather_without_waiting(context: CollectiveContext, own: Any, out: Any, bounds: Any) -> None:
    """``ring.all_gather`` that passes on what has not come yet."""
    me, p = context.rank, context.size

    def chunk(index: int) -> Any:
        return out[bounds[index % p] : bounds[index % p + 1]]

    np.copyto(chunk(me), own)
    for step in range(p - 1):
        receiving = context.irecv(chunk(me - 1 - step), (me - 1) % p)
        context.send(chunk(me - step), (me + 1) % p)
        if step % 2:
            context.wait(receiving)
    context.wait_all()


def _found(seeds: Iterable[int], wrong: Callable[[int], Played]) -> Played | None:
    return next((played for played in map(wrong, seeds) if played.wrong), None)


def test_a_broken_algorithm_is_found_and_repeated() -> None:
    def program(backend: fc.Backend) -> None:
        out = np.full(300 * backend.world_size, -1)  # not what an earlier one has left there
        rows = fc.all_gather(np.full(300, backend.rank), backend, out=out, algorithm="ring")
        assert (rows.reshape(-1, 300) == np.arange(backend.world_size)[:, None]).all()

    def wrong(seed: int) -> Played:
        return play(program, 5, Schedule.of(4 * seed, 5), eager_bytes=0)

    assert _found(range(50), wrong) is None
    with mock.patch.object(ring, "all_gather", _gather_without_waiting):
        first = _found(range(1000), wrong)
        assert first is not None
        again = _found(range(1000), wrong)
    assert again is not None
    assert (first.digest, first.turns, first.seconds) == (again.digest, again.turns, again.seconds)
