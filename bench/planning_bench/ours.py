"""What planning a save, the next one, and a load take of rank 0, and of a rank that loads."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdpcore.checkpoint.format.metadata import Metadata, make_metadata
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.held import HeldTable, decode, holding
from fsdpcore.checkpoint.plan.save_plan import SavePlan, decode_written, plan_table
from fsdpcore.checkpoint.save.commit import written_files
from fsdpcore.core.digests import hex_digest
from planning_bench.layouts import Layout


@dataclass(frozen=True)
class Cost:
    """Seconds, and MiB of memory at the highest beyond what was there before."""

    seconds: float
    mib: float


@dataclass(frozen=True)
class Measured:
    """Of one layout.

    Attributes:
        pieces: that are written.
        gathered, metadata: bytes that rank 0 gets and writes.
        rank: what a rank takes to describe its part and to read its answer.
        save, again, load: rank 0's first save, the next one, and any rank's load.
    """

    pieces: int
    gathered: int
    metadata: int
    rank: Cost
    save: Cost
    again: Cost
    load: Cost


class _Gathered:
    """What rank 0 has got of all ranks."""

    def __init__(self, layout: Layout) -> None:
        self.texts: list[str] = []
        self.names: list[str] = []
        for rank in range(layout.ranks):
            told = holding(layout.holding(rank))
            names = hex_digest(told.names.encode())
            self.texts.append(told.encode(named=names not in self.names[:1]))
            self.names.append(names)
        self.summaries = [json.dumps([rank, rank, 4096, None]) for rank in range(layout.ranks)]

    def plan(self) -> tuple[SavePlan, list[str]]:
        """Plan, and answer."""
        made = plan_table(HeldTable.of(decode(self.texts, self.names)), len(self.texts))
        return made, [made.encode(rank) for rank in range(len(self.texts))]

    def described(self, plan: SavePlan) -> bytes:
        """Return the metadata."""
        summaries = [json.loads(each) for each in self.summaries]
        return make_metadata(
            save_id="5f0c",
            step=1,
            world_size=plan.ranks,
            created="then",
            files=written_files(plan, summaries),
            arrays=plan.arrays,
            pieces=plan.table,
            ranks=[each[-1] for each in summaries],
        ).to_bytes()


def measure(layout: Layout, rounds: int) -> Measured:
    """Plan a save and a load of a layout; the fastest of some rounds."""
    gathered = _Gathered(layout)

    def save() -> tuple[SavePlan, list[str], bytes]:
        plan, answers = gathered.plan()
        return plan, answers, gathered.described(plan)

    first, (plan, answers, data) = _cost(save, rounds)
    again, same = _cost(lambda: gathered.described(plan), rounds)
    assert same == data
    load, catalog = _cost(lambda: Catalog(Metadata.from_bytes(data)), rounds)
    assert len(catalog) == len(plan.table)

    def rank() -> None:
        told = holding(mine)
        told.encode(named=False)
        decode_written(answers[1], mine)

    mine = layout.holding(1)
    of_rank, _ = _cost(rank, rounds)
    sent = sum(map(len, gathered.texts)) + sum(map(len, gathered.summaries))
    return Measured(len(catalog), sent, len(data), of_rank, first, again, load)


def _cost(action: Callable[[], Any], rounds: int) -> tuple[Cost, Any]:
    """Run something a few times for its time, and once for its memory."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        found = action()
        best = min(best, time.perf_counter() - began)
        del found
    tracemalloc.start()
    found = action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Cost(best, peak / 2**20), found
