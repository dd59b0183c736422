"""Measuring cases: the contestants take turns, each round anew, on the same sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fsdpcore.bench import peer_gloo, peer_mpi
from fsdpcore.bench.cases import Case
from fsdpcore.bench.memory import Memory
from fsdpcore.bench.results import Row, Timing
from fsdpcore.bench.team import Team
from fsdpcore.core.errors import ArgumentError

MIN_ITERATIONS = 5
MAX_ITERATIONS = 20_000
# The number of iterations is chosen after a trial of at least this part of a block's time.
_TRIAL = 0.2

_REFUSALS = {"gloo": peer_gloo.refusal, "mpi": peer_mpi.refusal}


@dataclass(frozen=True)
class Plan:
    """How each case is measured.

    Attributes:
        rounds: how often the contestants take turns.
        iterations: back to back in one round; 0 for as many as fit ``seconds``.
        seconds: of one contestant's part of a round, roughly; big sizes take longer.
        warmup: iterations before anything is timed.
        check: whether to compare the results with the oracle.
        fewest: iterations in one round, however long they take.
    """

    rounds: int = 5
    iterations: int = 0
    seconds: float = 0.1
    warmup: int = 5
    check: bool = True
    fewest: int = MIN_ITERATIONS

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ArgumentError(f"--rounds must be at least 1, got {self.rounds}")
        if self.iterations < 0 or self.warmup < 0:
            raise ArgumentError(
                "--iters and --warmup must not be negative, "
                f"got {self.iterations} and {self.warmup}"
            )
        if not 0 < self.seconds < float("inf"):
            raise ArgumentError(f"--seconds must be more than 0, got {self.seconds:g}")


class Entrant(NamedTuple):
    """A contestant, and the team that plays for it; several may have the same team."""

    contestant: str
    team: Team


class Session:
    """Measures one case after the other.

    Every decision follows from what all ranks have answered, so that ranks that each run a session
    of their own (``LocalTeam``) make the same.
    """

    def __init__(self, entrants: Sequence[Entrant], plan: Plan) -> None:
        self._entrants = list(entrants)
        self._plan = plan

    def measure(self, case: Case) -> dict[str, Row]:
        """Measure one case; the rows by contestant. Those who cannot do it are left out."""
        able = [e for e in self._entrants if not refusal(e.contestant, case)]
        timings = take_turns(able, self._plan, asdict(case))
        return {name: Row(**vars(timing), case=case) for name, timing in timings.items()}


def take_turns(
    entrants: Sequence[Entrant], plan: Plan, case: Mapping[str, Any]
) -> dict[str, Timing]:
    """Have all entrants prepare a case, run it in turn, and release it.

    Args:
        entrants: who takes part.
        plan: how often, how long.
        case: as the members of the teams take it.
    """
    timings: dict[str, Timing] = {}
    for contestant, team in entrants:
        team.ask(contestant, "prepare", case=dict(case))
        wrong = None
        if plan.check:
            wrong = sum(int(answer) for (answer,) in team.ask(contestant, "check"))
        iterations = _choose_iterations(team, contestant, plan)
        timings[contestant] = Timing(contestant, iterations, wrong)
    for number in range(plan.rounds):
        for contestant, team in entrants:
            timing = timings[contestant]
            # What the others' turns have pushed out of the caches has to come back.
            warmup = min(plan.warmup, max(1, timing.iterations // 4))
            # Before the first round, the trial has warmed up.
            seconds = _seconds(team, contestant, warmup if number else 0, timing.iterations)
            timing.samples.append([value / timing.iterations for value in seconds])
    for contestant, team in entrants:
        answers = team.ask(contestant, "memory")
        timings[contestant].memory = [Memory.read(answer) for answer in answers]
        team.ask(contestant, "release")
    return timings


def _choose_iterations(team: Team, contestant: str, plan: Plan) -> int:
    if plan.iterations:
        _seconds(team, contestant, plan.warmup, 1)
        return plan.iterations
    tried, warmup = 1, plan.warmup
    while True:
        took = max(_seconds(team, contestant, warmup, tried))
        if took >= _TRIAL * plan.seconds or tried >= MAX_ITERATIONS:
            break
        warmup = 0
        reach = int(_TRIAL * plan.seconds * tried / took) + 1 if took > 0 else MAX_ITERATIONS
        tried = min(MAX_ITERATIONS, max(2 * tried, reach))
    fitting = round(plan.seconds * tried / took) if took > 0 else MAX_ITERATIONS
    return min(MAX_ITERATIONS, max(plan.fewest, fitting))


def refusal(contestant: str, case: Case) -> str:
    """Why a contestant cannot do a case; empty if it can."""
    refuse = _REFUSALS.get(contestant)
    return refuse(case) if refuse is not None else ""


def versions_of(entrants: Sequence[Entrant]) -> Mapping[str, dict[str, str]]:
    """Versions of libraries, by contestant."""
    return {contestant: team.versions[contestant] for contestant, team in entrants}


def _seconds(team: Team, contestant: str, warmup: int, iterations: int) -> list[float]:
    answers = team.ask(contestant, "run", warmup=warmup, iterations=iterations)
    return [answer for (answer,) in answers]
