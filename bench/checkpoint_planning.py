"""What thousands of ranks cost the one that plans a checkpoint, and those that load it.

All ranks' parts of the plan are made in this process, and nothing is written::

    python bench/checkpoint_planning.py [--case flat tensor rows] [--ranks 64 256 1024] [--dcp]
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.file_layout import lay_out, places_of
from fsdpcore.checkpoint.plan.held import HeldArray, decode, encode, held_piece, tabled
from fsdpcore.checkpoint.plan.save_plan import SavePlan, plan_tables
from fsdpcore.checkpoint.save.step_folder import RankFile, described
from fsdpcore.checkpoint.save.writing import FileSums
from fsdpcore.core.collector import collector_paused
from fsdpcore.core.geometry.regions import Box, Range, regions_inside

ARRAYS, ROWS, COLUMNS, TENSOR = 1000, 4096, 1024, 8
SHAPE = (ROWS, COLUMNS)
# Other sizes, so that the cuts of a flat buffer lie anywhere.
NAMES = {f"blocks.{number}.weight": (ROWS + number % 7, COLUMNS) for number in range(ARRAYS)}


def flat(ranks: int) -> Iterator[list[HeldArray]]:
    """Give what each rank has of units of 10 arrays, each a flat buffer over all ranks."""
    names = list(NAMES)
    for rank in range(ranks):
        arrays: list[HeldArray] = []
        for first in range(0, ARRAYS, 10):
            sizes = [math.prod(NAMES[name]) for name in names[first : first + 10]]
            share = -(-sum(sizes) // ranks)
            at = 0
            for name, size in zip(names[first : first + 10], sizes, strict=True):
                start = max(rank * share - at, 0)
                stop = min((rank + 1) * share - at, size)
                pieces = (held_piece(Range(start, stop), NAMES[name]),) if start < stop else ()
                arrays.append(HeldArray(name, "float32", NAMES[name], pieces))
                at += size
        yield arrays


def tensor(ranks: int) -> Iterator[list[HeldArray]]:
    """Give what ranks have of columns that are cut 8 ways, and those by a flat buffer each."""
    names, share_of = list(NAMES), ranks // TENSOR
    width = COLUMNS // TENSOR
    for rank in range(ranks):
        row, column = divmod(rank, TENSOR)
        arrays: list[HeldArray] = []
        for first in range(0, ARRAYS, 10):
            sizes = [NAMES[name][0] * width for name in names[first : first + 10]]
            share = -(-sum(sizes) // share_of)
            at = 0
            for name, size in zip(names[first : first + 10], sizes, strict=True):
                shape = NAMES[name]
                start = max(row * share - at, 0)
                stop = min((row + 1) * share - at, size)
                box = Box((0, column * width), (shape[0], (column + 1) * width))
                run = Range(start, stop)
                found = regions_inside(box, run, shape) if start < stop else []
                pieces = tuple(held_piece(each, shape) for each in found)
                arrays.append(HeldArray(name, "float32", shape, pieces))
                at += size
        yield arrays


def rows(ranks: int) -> Iterator[list[HeldArray]]:
    """Give what ranks have of arrays of which each has some rows."""
    for rank in range(ranks):
        start, stop = rank * ROWS // ranks, (rank + 1) * ROWS // ranks
        box = held_piece(Box((start, 0), (stop, COLUMNS)), SHAPE)
        yield [HeldArray(name, "float32", SHAPE, (box,)) for name in NAMES]


CASES: dict[str, Callable[[int], Iterator[list[HeldArray]]]] = {
    "flat": flat,
    "tensor": tensor,
    "rows": rows,
}


def planned(told: list[str]) -> SavePlan:
    """Do what rank 0 does with what the ranks tell, up to its replies."""
    made = plan_tables(decode(told))
    for rank in range(len(told)):
        made.written.encoded(rank)
    return made


def metadata_of(made: SavePlan, starts: list[int]) -> bytes:
    """Do what rank 0 does once all files are written."""
    with collector_paused():
        files = [
            RankFile(rank, places_of(written, starts[rank]), FileSums(0, 0))
            for rank, written in enumerate(made.written)
            if written
        ]
        about = {"save_id": "0" * 32, "step": 1, "world_size": len(made.written)}
        return described(files, arrays=made.arrays, **about).to_bytes()  # type: ignore[arg-type]


def load(data: bytes) -> Catalog:
    """Do what each rank does that loads."""
    return Catalog(Metadata.from_bytes(data))


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    began = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - began, result


def peak(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the MiB that a call needs, in another call than the one that is timed."""
    tracemalloc.start()
    function(*arguments)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most / 2**20


def measure(case: str, ranks: int, memory: bool) -> tuple[float, ...]:
    """Print a row; return its seconds."""
    # All have the same arrays, which the first one names.
    told = [encode(tabled(each), named=not rank) for rank, each in enumerate(CASES[case](ranks))]
    planning, made = timed(planned, told)
    starts = [len(lay_out(each, "0" * 32, 0).header) if each else 0 for each in made.written]
    describing, data = timed(metadata_of, made, starts)
    loading, catalog = timed(load, data)
    pieces = len(catalog)
    del catalog
    mib = [math.nan] * 3
    if memory:
        mib = [peak(planned, told), peak(metadata_of, made, starts), peak(load, data)]
    print(
        f"{case:>7} {ranks:>6} {pieces:>9} {sum(map(len, told)) / 1e6:>8.1f} "
        f"{planning:>7.2f} {mib[0]:>6.0f} {describing:>9.2f} {mib[1]:>6.0f} "
        f"{len(data) / 1e6:>7.1f} {loading:>6.2f} {mib[2]:>6.0f}",
        flush=True,
    )
    return planning, describing, loading


def dcp(ranks: int) -> float | None:
    """Return the seconds of PyTorch DCP's global plan for ``rows``; None without torch."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    package = "torch.distributed.checkpoint"
    default_planner: Any = importlib.import_module(f"{package}.default_planner")
    metadata: Any = importlib.import_module(f"{package}.metadata")
    planner: Any = importlib.import_module(f"{package}.planner")
    properties = metadata.TensorProperties(dtype=torch.float32)
    plans = []
    for rank in range(ranks):
        start, stop = rank * ROWS // ranks, (rank + 1) * ROWS // ranks
        offsets, sizes = torch.Size([start, 0]), torch.Size([stop - start, COLUMNS])
        chunk = metadata.ChunkStorageMetadata(offsets, sizes)
        items = [
            planner.WriteItem(
                index=metadata.MetadataIndex(name, offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk, properties, torch.Size(SHAPE)),
            )
            for name in NAMES
        ]
        plans.append(planner.SavePlan(items, planner_data={}))

    def run() -> None:
        made = default_planner.DefaultSavePlanner()
        made.set_up_planner({}, is_coordinator=True)
        made.create_global_plan(plans)

    return timed(run)[0]


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", nargs="*", type=int, default=[64, 256, 1024])
    parser.add_argument("--memory", action="store_true", help="measure MiB, too: 3 times slower")
    parser.add_argument("--dcp", action="store_true", help="the global plan of PyTorch for rows")
    args = parser.parse_args()
    print(
        "   case  ranks    pieces  told MB  plan s    MiB  describe s  MiB  meta MB load s    MiB"
    )
    for case in args.case:
        found = [measure(case, ranks, args.memory) for ranks in args.ranks]
        if len(found) > 1:
            span = math.log(args.ranks[-1] / args.ranks[0])
            powers = [math.log(b / a) / span for a, b in zip(found[0], found[-1], strict=True)]
            print(f"{case:>7} exponents in ranks:", " ".join(f"{each:.2f}" for each in powers))
    for ranks in args.ranks if args.dcp else []:
        took = dcp(ranks)
        print(f"DCP's global plan of rows, {ranks} ranks:", "no torch" if took is None else took)


if __name__ == "__main__":
    main()
