"""Tables of costs, what is made of measurements, and ``fsdpcore tune`` run for real."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jobs import clean_environ, finished, fsdpcore
from support.spmd import run
from typer.testing import CliRunner

from fsdpcore.bench.tune import QUICK, Timing, fastest, fit, fit_own, measure
from fsdpcore.collectives.algorithms import star
from fsdpcore.collectives.selection.choose import choose
from fsdpcore.collectives.selection.costs import (
    format_table,
    parse_table,
    read_table,
    shipped,
    write_table,
)
from fsdpcore.collectives.selection.overrides import parse
from fsdpcore.collectives.selection.table import ALGORITHMS
from fsdpcore.comm import registry
from fsdpcore.commands.main import app
from fsdpcore.commands.tune import DEFAULT_FILE
from fsdpcore.core.algorithm import Algorithm, CostTerms
from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import AlgorithmRanges, Costs, MeasuredAlgorithms, Tuning
from fsdpcore.launch.config import resolve

# Tables.


def test_the_shipped_table_parses_and_is_used() -> None:
    table = shipped()
    assert {"sim", "zmq"} <= set(table) <= set(registry.schemes())
    for tuning in table.values():
        for costs in filter(None, (tuning.costs, *tuning.own.values())):
            assert 0 < costs.beta < costs.alpha < 1
            assert 0 < costs.gamma < costs.alpha
    for scheme in ("sim", "zmq"):
        config = resolve({"transport": scheme}, {})
        assert config.policy.tuning == table[scheme]
        assert config.policy.tuning.costs is not None


FULL_TABLE = {
    "zmq": Tuning(
        Costs(6e-05, 5e-10, 1e-10),
        {"shared": Costs(2e-06, 1e-10, 1e-10)},
        (
            MeasuredAlgorithms(
                4,
                1,
                {"all_reduce": parse("all_reduce", "shared:0-9;direct:10-max", "")},
                {"all_reduce": parse("all_reduce", "doubling:0-9;direct:10-max", "")},
            ),
            MeasuredAlgorithms(4, 2, {"broadcast": parse("broadcast", "tree", "")}),
        ),
    ),
    "of-some.body+else": Tuning(Costs(1.0, 0.0, 0.0, 0.25)),
}


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    assert parse_table(format_table(FULL_TABLE), "here") == FULL_TABLE
    file = tmp_path / "table.toml"
    file.write_text("something else")
    write_table(file, FULL_TABLE)
    assert read_table(file) == FULL_TABLE
    assert [path.name for path in tmp_path.iterdir()] == ["table.toml"]


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.*cannot be written"):
        write_table(tmp_path / "absent" / "table.toml", FULL_TABLE)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["format = None", "fsdpcore tune"]),
        ("format = 2", ["format = 2", "fsdpcore tune"]),
        ("format = ", ["not valid TOML"]),
        ("format = 1\nzmq = 3", ["[zmq] is not a table"]),
        ("format = 1\n[zmq]\nalhpa = 1", ["[zmq]", "'alhpa'", "did you mean 'alpha'"]),
        ("format = 1\n[zmq]\nalpha = 1.0", ["[zmq]", "beta must be seconds", "None"]),
        ("format = 1\n[zmq]\nalpha = -1\nbeta = 0\ngamma = 0", ["alpha must be", "-1"]),
        ("format = 1\n[zmq]\nalpha = nan\nbeta = 0\ngamma = 0", ["alpha must be", "nan"]),
        ("format = 1\n[zmq]\nalpha = inf\nbeta = 0\ngamma = 0", ["alpha must be", "inf"]),
        ("format = 1\n[zmq]\nalpha = true\nbeta = 0\ngamma = 0", ["alpha must be", "True"]),
        ("format = 1\n[zmq.own]\nshared = 1", ["own shared is not a table"]),
        ("format = 1\n[zmq.own.shared]\nalpha = 1", ["own shared", "beta must be"]),
        ("format = 1\n[zmq]\nmeasured = 1", ["measured is not a list"]),
        ("format = 1\n[[zmq.measured]]\nhosts = 1", ["ranks must be 1 or more"]),
        ("format = 1\n[[zmq.measured]]\nranks = 0", ["ranks must be 1 or more"]),
        ("format = 1\n[[zmq.measured]]\nranks = 2\nhosts = 0", ["hosts must be 1 or more"]),
        ("format = 1\n[[zmq.measured]]\nranks = 2\nx = 'star'", ["unknown collective 'x'"]),
        ("format = 1\n[[zmq.measured]]\nranks = 2\ngather = 'x'", ["2 ranks", "gather='x'"]),
        ("format = 1\n[[zmq.measured]]\nranks = 2\ngeneral.gather = 'x'", ["general", "gather="]),
        (
            "format = 1\n[[zmq.measured]]\nranks = 2\nall_reduce = 'ring'",
            ["'ring' does not reduce in the canonical order"],
        ),
        (
            "format = 1\n[[zmq.measured]]\nranks = 2\n[[zmq.measured]]\nranks = 2",
            ["two for 2 ranks on 1 hosts"],
        ),
    ],
)
def test_what_is_wrong_in_a_table_is_said(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_table(text, "my table")
    for word in ["my table", *words]:
        assert word in str(caught.value)


# The setting.


def test_a_users_table_is_found_and_wins_over_the_shipped_one(tmp_path: Path) -> None:
    write_table(tmp_path / "mine.toml", {"sim": Tuning(own={"shared": Costs(1.0, 1.0, 1.0)})})
    write_table(tmp_path / "other.toml", {"sim": Tuning(Costs(1.0, 2.0, 3.0))})
    (tmp_path / "fsdpcore.toml").write_text('tuning = "mine.toml"\n')
    config = resolve({}, {}, tmp_path)
    assert config.policy.tuning.own["shared"] == Costs(1.0, 1.0, 1.0)
    assert config.policy.tuning.costs == shipped()["sim"].costs, "where the user's says nothing"
    config = resolve({}, {"FSDPCORE_TUNING": "other.toml"}, tmp_path)
    assert config.policy.tuning.costs == Costs(1.0, 2.0, 3.0)
    config = resolve({"transport": "zmq"}, {"FSDPCORE_TUNING": "other.toml"}, tmp_path)
    assert config.policy.tuning == shipped()["zmq"], "it says nothing about zmq"
    assert resolve({"tuning": ""}, {}, tmp_path).policy.tuning == shipped()["sim"]


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, {"FSDPCORE_TUNING": "absent.toml"}, tmp_path)
    assert "environment variable FSDPCORE_TUNING" in str(caught.value)
    assert "absent.toml cannot be read" in str(caught.value)


def test_two_tables_together() -> None:
    ring, star = (AlgorithmRanges(parse("gather", name, "")) for name in ("tree", "star"))
    new = Tuning(None, {"a": Costs(1, 1, 1)}, (MeasuredAlgorithms(2, 1, {"gather": ring}),))
    old = Tuning(
        Costs(5, 5, 5),
        {"a": Costs(2, 2, 2), "b": Costs(3, 3, 3)},
        (MeasuredAlgorithms(2, 1, {"gather": star}), MeasuredAlgorithms(2, 2, {"gather": star})),
    )
    both = new.over(old)
    assert both.costs == old.costs
    assert both.own == {"a": Costs(1, 1, 1), "b": Costs(3, 3, 3)}
    assert both.for_group(2, 1) == new.measured[0]
    assert both.for_group(2, 2) == old.measured[1]
    assert both.for_group(3, 1) is None


# From times to ranges and costs.


def _rows(times: dict[int, dict[str, float]]) -> list[Timing]:
    return [Timing("all_reduce", size, seconds) for size, seconds in times.items()]


def _never(row: Timing) -> str:
    return "none of them"


def test_algorithms_change_between_the_sizes_that_were_measured() -> None:
    times = {
        100: {"a": 1.0, "b": 2.0},
        400: {"a": 4.0, "b": 2.0},
        1600: {"a": 9.0, "b": 2.0},
        6400: {"a": 1.0, "b": 2.0},
    }
    assert str(fastest(_rows(times), _never)) == "a:0-200;b:201-3200;a:3201-max"
    assert fastest(_rows(dict(reversed(times.items()))), _never) == fastest(_rows(times), _never)


def test_a_small_difference_changes_nothing() -> None:
    times = {100: {"a": 1.0, "b": 1.1}, 400: {"a": 1.04, "b": 1.0}, 1600: {"a": 1.0, "b": 1.1}}
    assert str(fastest(_rows(times), _never)) == "a:0-max"
    assert str(fastest(_rows(times), lambda row: "a")) == "a:0-max"
    equal = {size: {"a": 1.0, "b": 1.01} for size in times}
    assert str(fastest(_rows(equal), lambda row: "b")) == "b:0-max", "the usual one"
    assert str(fastest(_rows({8: {"a": 1.0, "b": 1.2}}), lambda row: "b")) == "a:0-max"


def test_one_outlier_does_not_hide_a_real_change() -> None:
    times = {
        size: {"a": 1.0 if size < 1000 else 3.0, "b": 3.0 if size < 1000 else 1.0}
        for size in (100, 200, 400, 800, 1600, 3200, 6400)
    }
    times[200]["a"] = 3.5
    expected = f"a:0-{math.isqrt(800 * 1600)};b:{math.isqrt(800 * 1600) + 1}-max"
    assert str(fastest(_rows(times), _never)) == expected


def test_costs_are_found_again() -> None:
    sizes = np.array([8, 1024, 2.0**20])
    terms = np.stack([np.ones(3), sizes], axis=1)
    found = fit(terms, terms @ [50e-6, 2e-9])
    np.testing.assert_allclose(found, [50e-6, 2e-9], rtol=1e-9)


def test_costs_are_never_negative() -> None:
    sizes = np.array([1.0, 10.0, 100.0])
    terms = np.stack([np.ones(3), sizes], axis=1)
    falling, steep = fit(terms, np.array([3.0, 2.0, 1.0])), fit(terms, sizes**1.5)
    assert falling[1] == 0
    assert falling[0] > 0
    assert steep[0] == 0
    assert steep[1] > 0


def test_costs_of_a_transports_own_algorithms_are_found_again() -> None:
    shared = Algorithm(star, lambda p: CostTerms(p, 2, 3))
    moves = Algorithm(star, lambda p: CostTerms(1, p, 0))
    costs = Costs(3e-6, 2e-10, 5e-11)

    def seconds(terms: CostTerms, nbytes: int) -> float:
        moved, reduced = terms.beta * costs.beta, terms.gamma * costs.gamma
        return terms.alpha * costs.alpha + nbytes * (moved + reduced)

    timings = []
    for nbytes in (8, 1000, 10**6):
        other = {"star": 1.0}
        timings += [
            Timing("all_reduce", nbytes, {"shared": seconds(CostTerms(4, 2, 3), nbytes), **other}),
            Timing("broadcast", nbytes, {"shared": seconds(CostTerms(1, 4, 0), nbytes), **other}),
        ]
    known = {"all_reduce": {"shared": shared}, "broadcast": {"shared": moves}}
    found = fit_own(known, timings, 4)
    assert list(found) == ["shared"]
    np.testing.assert_allclose(
        dataclasses.astuple(found["shared"]), dataclasses.astuple(costs), rtol=1e-6
    )


# For real.


def test_what_is_measured() -> None:
    """The structure; the numbers are what they are."""
    first, *others = run(measure, transport="sim", world_size=3, args=(QUICK,), hosts=3)
    assert others == [None, None]
    (entry,) = first.tuning.measured
    assert (entry.ranks, entry.hosts) == (3, 3)
    assert first.tuning.costs.alpha > 0
    assert first.tuning.costs.gamma > 0
    own = {n for row in first.timings for n in row.seconds if n not in ALGORITHMS[row.collective]}
    assert set(first.tuning.own) == own
    for collective, ranges in entry.best.items():
        assert (collective in entry.general) == any(item.algorithm in own for item in ranges)
    assert list(entry.best) == list(ALGORITHMS)
    for row in first.timings:
        assert "ring" not in row.seconds or "reduce" not in row.collective
        assert all(seconds > 0 for seconds in row.seconds.values())
        assert entry.best[row.collective].at(row.nbytes) in row.seconds
    sizes = {(row.collective, row.nbytes) for row in first.timings}
    assert len(sizes) == len(first.timings) == len(ALGORITHMS) * len(QUICK.sizes)
    assert all(gain[0] > 0 for gain in first.gains.values())


def test_every_reduction_is_measured_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithms are asked whether they have the sum that is measured, those of scan, too."""
    asked: dict[str, set[str]] = {name: set() for name in ALGORITHMS}

    def listening(collective: str, algorithm: Algorithm) -> Algorithm:
        def supports(dtype: np.dtype[Any] | None, op: str) -> bool:
            asked[collective].add(op)
            return algorithm.supports(dtype, op)

        return algorithm._replace(supports=supports)

    for name, known in ALGORITHMS.items():
        heard = {key: listening(name, algorithm) for key, algorithm in known.items()}
        monkeypatch.setitem(ALGORITHMS, name, heard)
    findings, _ = run(measure, transport="sim", world_size=2, args=(QUICK,), hosts=2)
    sums = {name for name, ops in asked.items() if "sum" in ops}
    assert sums == {"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"}
    assert all("" not in asked[name] for name in sums)
    assert sums <= {row.collective for row in findings.timings}


Tune = Callable[..., Any]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Run the command in this process."""
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)

    def tune(*arguments: object, **environ: str) -> Any:
        return CliRunner().invoke(app, ["tune", *map(str, arguments)], env=environ)

    return tune


def test_tune_writes_a_table_that_is_used(tune: Tune, tmp_path: Path) -> None:
    # That there is no such table yet must not keep it from being written.
    file = DEFAULT_FILE
    (tmp_path / "fsdpcore.toml").write_text(f'tuning = "{file}"\ndeterministic = true\n')
    for transport, ranks in (("zmq", 2), ("sim", 3)):
        options = ("--transport", transport, "--quick")
        if transport == "sim":  # as if a launcher had started the threads
            done = tune(*options, "-o", file, FSDPCORE_THREADS=str(ranks))
            code, out, err = done.exit_code, done.stdout, done.stderr
        else:
            ran = finished(fsdpcore("tune", "-n", ranks, *options), cwd=tmp_path)
            code, out, err = ran.code, ran.out, ran.err
        assert code == 0, err
        assert f"{transport}, {ranks} ranks, 1 host" in out
        assert "all_to_all" in out
        assert f"FSDPCORE_TUNING={file}" in out
        assert out.count(f"Written to {file}") == 1
        assert err.strip() == ""
    table = read_table(tmp_path / file)
    assert sorted(table) == ["sim", "zmq"]
    assert [entry.ranks for entry in table["zmq"].measured] == [2]
    assert [entry.ranks for entry in table["sim"].measured] == [3]
    config = resolve({"transport": "zmq"}, {}, tmp_path)
    assert config.policy.tuning == table["zmq"]


def _chosen(backend: Any) -> list[str]:
    return [choose("broadcast", "auto", nbytes, backend).name for nbytes in (9, 10)]


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_ranks_use_the_table(transport: str, tmp_path: Path) -> None:
    ranges = {"broadcast": parse("broadcast", "star:0-9;tree:10-max", "")}
    file = tmp_path / "table.toml"
    write_table(file, {transport: Tuning(measured=(MeasuredAlgorithms(2, 1, ranges),))})
    found = run(_chosen, transport=transport, world_size=2, tuning=str(file))
    assert found == [["star", "tree"], ["star", "tree"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "how many ranks? Say so with -n"),
        (["-n", 1], "a single rank exchanges no messages"),
        (["-n", -1], "world_size must not be negative"),
        (["-n", 2, "--transport", "zqm"], "did you mean 'zmq'"),
        (["-n", 2, "-o", "absent/x.toml"], "there is no such directory"),
        (["-n", 2, "-o", "bad.toml"], "bad.toml: not valid TOML"),
    ],
)
def test_tune_refuses(tune: Tune, tmp_path: Path, arguments: list[object], words: str) -> None:
    (tmp_path / "bad.toml").write_text("format = \n")
    done = tune(*arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
