"""Taking turns: the order, the number of iterations, and what is made of the samples."""

from __future__ import annotations

import pytest

from fsdpcore.bench.cases import Case
from fsdpcore.bench.harness.measurements import compare
from fsdpcore.bench.harness.memory import MIB, highest_rss, pss_per_rank
from fsdpcore.bench.harness.team import Team
from fsdpcore.bench.harness.turns import MAX_ITERATIONS, MIN_ITERATIONS, Entrant, RoundPlan
from fsdpcore.bench.main import measure
from fsdpcore.bench.rows import Row
from fsdpcore.core.errors import ArgumentError

CASE = Case("all_reduce", 250_000, "float32", "sum", -1, 2, in_place=False)  # 1 MB


class FakeTeam(Team):
    """Two ranks that take ``seconds`` per iteration, one of them 20 per cent longer."""

    def __init__(self, log, seconds=0.001, wrong=0):
        self.versions = {}
        self._log = log
        self._seconds = seconds
        self._wrong = wrong

    def ask(self, contestant, do, **details):
        self._log.append((contestant, do, details.get("iterations")))
        if do == "check":
            return [[self._wrong], [0]]
        if do == "run":
            took = self._seconds * details["iterations"]
            return [[took], [1.2 * took]]
        if do == "memory":
            return [[7, 3 * MIB, MIB], [8, 4 * MIB, 3 * MIB]]
        return [[], []]


def measured(plan, **teams):
    log = []
    entrants = [Entrant(name, FakeTeam(log, **options)) for name, options in teams.items()]
    return measure(entrants, plan, CASE), log


def test_contestants_take_turns():
    rows, log = measured(
        RoundPlan(rounds=3, iterations=7), fsdpcore={}, gloo={"seconds": 0.002}, mpi={}
    )
    turns = [name for name, do, iterations in log if do == "run" and iterations == 7]
    assert turns == ["fsdpcore", "gloo", "mpi"] * 3
    assert list(rows) == ["fsdpcore", "gloo", "mpi"]
    assert all(len(row.samples) == 3 for row in rows.values())


def test_every_case_is_prepared_first_and_released_last():
    _, log = measured(RoundPlan(), fsdpcore={}, gloo={})
    doing = [(name, do) for name, do, _ in log]
    assert doing[:2] == [("fsdpcore", "prepare"), ("fsdpcore", "check")]
    assert doing[-4:] == [
        (name, do) for name in ("fsdpcore", "gloo") for do in ("memory", "release")
    ]


def test_memory_is_that_of_all_ranks_at_the_end():
    rows, _ = measured(RoundPlan(rounds=1), fsdpcore={})
    memory = rows["fsdpcore"].memory
    assert [one.process for one in memory] == [7, 8]
    assert highest_rss(memory) == 4 * MIB
    assert pss_per_rank(memory) == 2 * MIB


def test_results_are_checked_apart_from_the_timed_runs_and_only_if_wanted():
    rows, log = measured(RoundPlan(), fsdpcore={"wrong": 3})
    assert rows["fsdpcore"].wrong == 3
    assert [do for _, do, _ in log].count("check") == 1
    rows, log = measured(RoundPlan(check=False), fsdpcore={"wrong": 3})
    assert rows["fsdpcore"].wrong is None
    assert "check" not in [do for _, do, _ in log]


@pytest.mark.parametrize(
    ("seconds", "iterations"),
    [(1e-9, MAX_ITERATIONS), (1e-3, 83), (1e-4, 833), (0.5, MIN_ITERATIONS), (0, MAX_ITERATIONS)],
)
def test_as_many_iterations_as_fit(seconds, iterations):
    # The slower rank decides: it takes 1.2 times as long.
    rows, _ = measured(RoundPlan(seconds=0.1), fsdpcore={"seconds": seconds})
    assert rows["fsdpcore"].iterations == iterations


def test_a_number_of_iterations_that_was_asked_for_is_kept():
    rows, _ = measured(RoundPlan(iterations=20), fsdpcore={"seconds": 1.0})
    assert rows["fsdpcore"].iterations == 20


def test_who_cannot_do_a_case_is_left_out():
    log = []
    half = Case("all_reduce", 4, "bfloat16", "sum", -1, 2, in_place=False)
    entrants = [Entrant(name, FakeTeam(log)) for name in ("fsdpcore", "gloo", "mpi")]
    assert list(measure(entrants, RoundPlan(), half)) == ["fsdpcore", "gloo"]
    assert "mpi" not in {name for name, _, _ in log}


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"iterations": -1}, {"warmup": -1}, {"seconds": 0.0}]
)
def test_a_plan_that_makes_no_sense(wrong):
    with pytest.raises(ArgumentError, match=next(iter(wrong))[:4]):
        RoundPlan(**wrong)


def test_a_row_in_numbers():
    # Three rounds on two ranks: means 0.001, 0.004, 0.002 s.
    row = Row("fsdpcore", 5, 0, [[0.0008, 0.0012], [0.002, 0.006], [0.001, 0.003]], case=CASE)
    assert row.seconds == pytest.approx(0.002)
    assert row.fastest_rank == pytest.approx(0.001)
    assert row.slowest_rank == pytest.approx(0.003)
    assert row.algbw == pytest.approx(0.5)  # 1 MB in 2 ms
    assert row.busbw == pytest.approx(0.5)


def test_a_comparison_goes_round_by_round():
    ours = Row("fsdpcore", 5, 0, [[1.0], [2.0], [4.0]], case=CASE)
    theirs = Row("mpi", 5, 0, [[2.0], [2.0], [2.0]], case=CASE)
    compared = compare(ours, theirs)
    assert compared.ratio == (1.0, 0.5, 2.0)
    assert compared.difference == (0.0, -1.0, 2.0)
    assert compared.overhead == (0.0, -50.0, 100.0)
    assert compared.best_difference == -1.0  # 1 s in the first round of ours, 2 s of theirs
