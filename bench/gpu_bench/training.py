"""Training steps on a GPU: the contestants take turns on the same model, ours and PyTorch's."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import gpt_model
from fsdp_bench.cases import PEER

from fsdpcore.bench.harness.measurements import OURS, Measurement, compare
from fsdpcore.bench.harness.memory import Memory, highest_rss
from fsdpcore.bench.harness.start import RankProgram
from fsdpcore.bench.harness.team import Team
from fsdpcore.bench.harness.turns import Entrant, RoundPlan, start_all, take_turns
from fsdpcore.core.errors import RankFailedError
from gpu_bench.cases import CONTESTANTS, PLAIN, GpuTraining

# Where a rank finds the modules of its program, which are in no package that is installed.
FOLDERS = (Path(__file__).parents[1], Path(gpt_model.__file__).parent)
_LOSSES = 3
_TOLERANCES = {"fp32": 1e-3, "bf16": 2e-2}

Tell = Callable[[dict[str, Any]], None]


def round_plan(rounds: int = 5, seconds: float = 0.15) -> RoundPlan:
    """How each case is measured."""
    return RoundPlan(rounds, seconds=seconds, warmup=1, check=False, fewest=2, most=400)


@dataclass(frozen=True)
class _Prelude:
    """What a contestant did by itself, before it took turns.

    Attributes:
        losses: of its first steps, the mean over the ranks.
        memory: bytes that its library had of the GPU at most.
    """

    losses: list[float]
    memory: int


def measure(
    cases: list[GpuTraining],
    ranks: int,
    transport: str,
    plan: RoundPlan,
    budget: float,
    tell: Tell,
) -> None:
    """Measure all cases, and ``tell`` a row for each as soon as it is there.

    A contestant that fails is left out from then on, and a row says why. When ``budget`` seconds
    are over, what is left to do is left out.
    """
    end = time.monotonic() + budget
    program = RankProgram.module("gpu_bench.member", *FOLDERS)
    peers = [PEER] if importlib.util.find_spec("torch") is not None else []
    share = cases[0].share_gpu
    wanted = program.starts(ranks, transport, [OURS], peers, share_gpu=share)
    with contextlib.ExitStack() as stack:
        teams: dict[str, Team] = {}
        for name, start in wanted.items():
            try:
                teams.update(start_all(stack, ranks, {name: start}))
            except (RankFailedError, OSError) as error:
                tell({"contestant": name, "error": str(error)})
        if OURS not in teams:
            return
        entrants = [
            Entrant(name, teams[team])
            for name in CONTESTANTS
            if (team := PEER if name == PEER else OURS) in teams
        ]
        for case in cases:
            if time.monotonic() > end:
                tell({"left_out": asdict(case)})
                continue
            measured: dict[str, Measurement] | None = None
            while measured is None:  # each time without who has failed
                entrants, preludes = _able(entrants, case, tell)
                if not entrants or entrants[0].contestant != OURS:
                    return
                measured = _turns(entrants, plan, case, tell)
            tell(_row(case, ranks, preludes, measured))


def _able(
    entrants: Sequence[Entrant], case: GpuTraining, tell: Tell
) -> tuple[list[Entrant], dict[str, _Prelude]]:
    """Let each make a few steps by itself, for its memory; those that could, and what they did."""
    able: list[Entrant] = []
    preludes: dict[str, _Prelude] = {}
    lost: set[int] = set()
    for entrant in entrants:
        name, team = entrant
        if id(team) in lost:
            continue
        try:
            team.ask(name, "prepare", case=asdict(case))
            answers = team.ask(name, "losses", count=_LOSSES)
            memory = [Memory.read(answer) for answer in team.ask(name, "memory")]
            team.ask(name, "release")
        except RankFailedError as error:
            lost.add(id(team))
            tell({"contestant": name, "error": str(error)})
            continue
        able.append(entrant)
        losses = [mean(step) for step in zip(*answers, strict=True)]
        preludes[name] = _Prelude(losses, highest_rss(memory))
    return [each for each in able if id(each.team) not in lost], preludes


def _turns(
    entrants: Sequence[Entrant], plan: RoundPlan, case: GpuTraining, tell: Tell
) -> dict[str, Measurement] | None:
    """Let them take turns; None if one of them failed."""
    try:
        return take_turns(entrants, plan, asdict(case))
    except RankFailedError as error:
        tell({"order": "turns", "error": str(error)})
        return None


def _row(
    case: GpuTraining,
    ranks: int,
    preludes: Mapping[str, _Prelude],
    measured: Mapping[str, Measurement],
) -> dict[str, Any]:
    row: dict[str, Any] = {"case": asdict(case), "ranks": ranks, "contestants": {}}
    for name, one in measured.items():
        row["contestants"][name] = {
            "step_ms": 1e3 * one.seconds,
            "tokens_per_second": case.tokens / one.seconds,
            "gpu_memory_bytes": preludes[name].memory,
            "losses": preludes[name].losses,
            "agrees": _agrees(name, preludes, case.precision),
            "time_over_ours": compare(measured[OURS], one).ratio.median,
            "samples_ms": [round(1e3 * value, 4) for value in one.rounds],
        }
    if PLAIN in measured:
        # What of our step is neither layers nor loss, norm and optimizer.
        beside = compare(measured[OURS], measured[PLAIN])
        row["exposed_ms"] = 1e3 * beside.difference.median
        row["exposed_percent"] = beside.share.median
    return row


def _agrees(contestant: str, preludes: Mapping[str, _Prelude], precision: str) -> bool:
    """Whether the losses are ours; without other ranks only the first one has to be."""
    mine, ours = preludes[contestant].losses, preludes[OURS].losses
    count = 1 if contestant == PLAIN else _LOSSES
    tolerance = _TOLERANCES[precision]
    return all(
        abs(a - b) <= tolerance * abs(b) for a, b in zip(mine[:count], ours[:count], strict=True)
    )
