"""Contestants take turns: in every round each of them does the same case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fsdpcore.bench.harness.measurements import Measurement
from fsdpcore.bench.harness.memory import Memory
from fsdpcore.bench.harness.start import Start
from fsdpcore.bench.harness.team import RemoteTeam, Team
from fsdpcore.core.errors import ArgumentError

MIN_ITERATIONS = 5
MAX_ITERATIONS = 20_000
# The number of iterations is chosen after a trial of at least this part of a turn's time.
_TRIAL = 0.2

T = TypeVar("T")


@dataclass(frozen=True)
class RoundPlan:
    """How each case is measured.

    Attributes:
        rounds: how often the contestants take turns.
        iterations: back to back in one round; 0 for as many as fit ``seconds``.
        seconds: of one contestant's part of a round, roughly; big sizes take longer.
        warmup: iterations before anything is timed.
        check: whether to look at the results.
        fewest, most: iterations in one round, however long they take.
    """

    rounds: int = 5
    iterations: int = 0
    seconds: float = 0.1
    warmup: int = 5
    check: bool = True
    fewest: int = MIN_ITERATIONS
    most: int = MAX_ITERATIONS

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


def start_all(stack: ExitStack, world_size: int, wanted: Mapping[str, Start]) -> list[Entrant]:
    """Start them one after the other; those that are up sleep meanwhile, and end with the stack."""
    return [
        Entrant(name, stack.enter_context(RemoteTeam(name, world_size, start)))
        for name, start in wanted.items()
    ]


def alternate(
    names: Iterable[str], rounds: int, turn: Callable[[str, int], T]
) -> dict[str, list[T]]:
    """Have all take one turn after the other, ``rounds`` times; what their turns gave.

    Whatever disturbs the machine for a while disturbs all of them, so that rounds are comparable.
    """
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        for name, turns in found.items():
            turns.append(turn(name, number))
    return found


def take_turns(
    entrants: Sequence[Entrant], plan: RoundPlan, case: Mapping[str, Any]
) -> dict[str, Measurement]:
    """Have all entrants prepare a case, run it in turn, and release it.

    Every decision follows from what all ranks have answered, so that ranks that each do this for
    themselves (``LocalTeam``) make the same.

    Args:
        entrants: who takes part.
        plan: how often, how long.
        case: as the members of the teams take it.
    """
    rows: dict[str, Measurement] = {}
    teams = dict(entrants)
    for contestant, team in entrants:
        team.ask(contestant, "prepare", case=dict(case))
        wrong = None
        if plan.check:
            wrong = sum(int(answer) for (answer,) in team.ask(contestant, "check"))
        iterations = _choose_iterations(team, contestant, plan)
        rows[contestant] = Measurement(contestant, iterations, wrong)

    def turn(contestant: str, number: int) -> list[float]:
        iterations = rows[contestant].iterations
        # What the others' turns have pushed out of the caches has to come back; before the first
        # round, the trial has warmed up.
        warmup = min(plan.warmup, max(1, iterations // 4)) if number else 0
        seconds = run_seconds(teams[contestant], contestant, warmup, iterations)
        return [value / iterations for value in seconds]

    for contestant, samples in alternate(rows, plan.rounds, turn).items():
        rows[contestant].samples = samples
    for contestant, team in entrants:
        answers = team.ask(contestant, "memory")
        rows[contestant].memory = [Memory.read(answer) for answer in answers]
        team.ask(contestant, "release")
    return rows


def _choose_iterations(team: Team, contestant: str, plan: RoundPlan) -> int:
    if plan.iterations:
        run_seconds(team, contestant, plan.warmup, 1)
        return plan.iterations
    tried, warmup = 1, plan.warmup
    while True:
        took = max(run_seconds(team, contestant, warmup, tried))
        if took >= _TRIAL * plan.seconds or tried >= plan.most:
            break
        warmup = 0
        reach = int(_TRIAL * plan.seconds * tried / took) + 1 if took > 0 else plan.most
        tried = min(plan.most, max(2 * tried, reach))
    fitting = round(plan.seconds * tried / took) if took > 0 else plan.most
    return min(plan.most, max(plan.fewest, fitting))


def versions_of(entrants: Sequence[Entrant]) -> dict[str, dict[str, str]]:
    """Versions of libraries, by contestant."""
    return {contestant: team.versions[contestant] for contestant, team in entrants}


def run_seconds(team: Team, contestant: str, warmup: int, iterations: int) -> list[float]:
    """Have a case run that is prepared; the seconds of so many iterations on each rank."""
    answers = team.ask(contestant, "run", warmup=warmup, iterations=iterations)
    return [answer for (answer,) in answers]
