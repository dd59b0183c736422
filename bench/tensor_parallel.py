"""Measure the forward and backward pass of a tensor-parallel transformer block.

    python bench/tensor_parallel.py                     # ours, 2 ranks over zmq
    python bench/tensor_parallel.py --against dtensor   # beside PyTorch's DTensor on Gloo

bench/README.md says what is measured, and how.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # the unsharded block

from tensor_bench.cases import PEERS, Case

from fsdpcore import __version__
from fsdpcore.bench.harness import options, record, table
from fsdpcore.bench.harness.measurements import OURS, Measurement, wrong_in
from fsdpcore.bench.harness.start import RankProgram
from fsdpcore.bench.harness.turns import RoundPlan, start_all, take_turns, versions_of

_FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "examples")
_MODES = ("both", "whole", "sequence")


def main(
    ranks: options.Ranks = 2,
    transport: options.Transport = "zmq",
    mode: Annotated[
        str, typer.Option(help=f"What is between the matrices: {', '.join(_MODES)}.")
    ] = "both",
    width: Annotated[int, typer.Option(help="Features.")] = 512,
    heads: Annotated[int, typer.Option(help="Of the attention.")] = 8,
    hidden: Annotated[int, typer.Option(help="Features of the MLP.")] = 2048,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    length: Annotated[int, typer.Option(help="Positions of a sequence.")] = 128,
    threads: options.Threads = 0,
    iterations: options.Iterations = 0,
    seconds: options.Seconds = 0.5,
    rounds: options.Rounds = 9,
    warmup: options.Warmup = 2,
    check: Annotated[bool, typer.Option(help="Compare with the unsharded block.")] = True,
    against: Annotated[str, options.against(PEERS)] = "",
    json: options.Json = None,
) -> None:
    """Measure a tensor-parallel transformer block, alone or beside PyTorch's DTensor on Gloo.

    The exit code is 1 if a result was wrong, and 2 if there is none.
    """

    def bench() -> int:
        chosen = options.one_of(mode, _MODES, "--mode")
        cases = [
            Case(width, heads, hidden, batch, length, sequence)
            for name, sequence in (("whole", False), ("sequence", True))
            if chosen in ("both", name)
        ]
        plan = RoundPlan(rounds, iterations, seconds, warmup, check)
        each = options.threads_per_rank(ranks, threads)
        run = BlockRun(ranks, transport, each, plan, options.names(against))
        options.check_known("--against", run.against, PEERS)
        for case in cases:
            case.check_ranks(ranks)
        options.check_writable(json)
        options.check_torch(run.against)
        return run.measure(cases, json)

    options.measure(bench)


@dataclass(frozen=True)
class BlockRun:
    """What all cases have in common."""

    ranks: int
    transport: str
    threads: int
    plan: RoundPlan
    against: tuple[str, ...]

    def measure(self, cases: Sequence[Case], json: Path | None) -> int:
        """Measure all cases; how many elements were wrong, over all contestants."""
        run = record.RunRecord("tensor_parallel")
        first = f"fsdpcore {__version__}, transport {self.transport}, {self.ranks} ranks"
        for line in table.heading(run.machine, f"{first}, {self.threads} threads each"):
            typer.echo(line)
        program = RankProgram.module("tensor_bench.member", *_FOLDERS, threads=self.threads)
        wanted = program.starts(self.ranks, self.transport, [OURS], self.against)
        results = []
        with contextlib.ExitStack() as stack:
            entrants = start_all(stack, self.ranks, wanted)
            for case in cases:
                rows = take_turns(entrants, self.plan, asdict(case))
                for line in _table(case, rows):
                    typer.echo(line)
                results.append((case, rows))
            versions = versions_of(entrants)
        content = [_result(case, rows) for case, rows in results]
        run.save(json, versions=versions, settings=asdict(self), results=content)
        return sum(wrong_in(rows) for _, rows in results)


def _table(case: Case, rows: Mapping[str, Measurement]) -> list[str]:
    how = "cut along the sequence between" if case.sequence else "whole between"
    return [
        f"# block: width {case.width}, {case.heads} heads, hidden {case.hidden}, input "
        f"{case.batch} x {case.length}, {how}; forward and backward",
        *table.lines(rows, [*table.times(), *table.ratios(rows), *table.wrong()]),
    ]


def _result(case: Case, rows: Mapping[str, Measurement]) -> dict[str, Any]:
    return {
        "case": asdict(case),
        "rows": [record.row(row, "ms") for row in rows.values()],
        "ratios": record.ratios(rows),
    }


if __name__ == "__main__":
    typer.run(main)
