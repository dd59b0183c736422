"""``bench/fsdp_step.py``: tiny steps of real ranks, and whether it would notice wrong ones."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import typer
from support.jobs import clean_environ, finished, python
from typer.testing import CliRunner

import fsdpcore as fc

BENCH = Path(__file__).parents[2] / "bench"
SCRIPT = BENCH / "fsdp_step.py"
QUICK = ["--rounds", 2, "--iters", 2, "--warmup", 1]
# 35 elements per unit, which two ranks cannot share evenly.
SMALL = ["--units", 3, "--rows", 7, "--columns", 5]
SMALL_GPT = ["--layers", 1, "--width", 8, "--heads", 2, "--context", 8, "--batch", 4]
TINY = [*QUICK, *SMALL, *SMALL_GPT]

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


@pytest.fixture
def module(monkeypatch):
    """Import a module of the bench by name."""
    monkeypatch.syspath_prepend(str(BENCH))
    return lambda name: importlib.import_module(f"fsdp_bench.{name}")


@pytest.fixture
def step(monkeypatch, tmp_path):
    """Run the command in this process; its ranks are processes of their own."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - set(clean_environ()):
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("fsdp_step", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fsdp_step", script)  # where typer looks up the types
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the script extends
    spec.loader.exec_module(script)
    app = typer.Typer()
    app.command()(script.main)
    return lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])


def rows(done):
    """The cells of each contestant's line, by the headings of its table."""
    found = []
    for line in done.output.splitlines():
        if line.startswith("# contestant"):
            found.append({})
        elif not line.startswith("#"):
            name, _, cells = line.strip().partition("  ")
            found[-1][name] = cells.split()
    return found


@pytest.mark.tools
def test_both_modes_alone(step, tmp_path):
    record, transport = tmp_path / "step.json", "zmq://?shm=off"
    done = step(*TINY, "--transport", transport, "--json", record)
    assert done.exit_code == 0, done.output
    exchange, training = rows(done)
    assert list(exchange) == ["fsdpcore"]
    assert list(training) == ["fsdpcore", "compute only"]
    assert "% of our step" in done.output

    content = json.loads(record.read_text())
    assert content["schema"] == "fsdpcore.bench.fsdp_step/1"
    assert content["settings"]["transport"] == transport
    assert [result["case"]["kind"] for result in content["results"]] == ["exchange", "training"]
    for result in content["results"]:
        for row in result["rows"]:
            assert row["wrong"] == 0
            assert [len(ranks) for ranks in row["samples_ms"]] == [2, 2]
            assert row["time_ms"]["best"] > 0
            assert row["memory_mib"]["peak_rss"] > 1
    for share in ("communication_percent", "outside_layers_percent", "slower_rank_percent"):
        assert content["results"][0][share] is None
        assert set(content["results"][1][share]) == {"median", "lowest", "highest"}
    # Some time goes into layers, some into the engine.
    outside = content["results"][1]["outside_layers_percent"]["median"]
    assert 0 <= content["results"][1]["slower_rank_percent"]["median"] < outside < 100


@pytest.mark.tools
def test_beside_the_engine_as_it_comes(step, tmp_path):
    """With what a step moves between memory and files."""
    record = tmp_path / "step.json"
    disk = ["--transport", "sim", "--dir", tmp_path, "--json", record]
    picture = ["--plot", tmp_path / "step.png"] if HAS_MATPLOTLIB else []
    done = step(*TINY, *disk, *picture, "--against", "offload")
    assert done.exit_code == 0, done.output
    exchange, training = json.loads(record.read_text())["results"]
    assert [row["contestant"] for row in exchange["rows"]] == ["fsdpcore"]
    assert all(row["wrong"] == 0 for row in training["rows"])
    assert list(training["moved"]) == ["offload"]
    assert training["moved"]["offload"]["held"] > 0
    assert 0 < training["moved"]["offload"]["ready"] <= 1
    if picture:
        assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_contestants_of_ours_differ_in(module, monkeypatch, tmp_path):
    """The same orders as over a socket, carried out by ranks in this process."""
    member, training = module("member"), module("training")
    monkeypatch.setattr(member, "keep_freed_memory", lambda: None)  # of this process
    case = module("cases").Training(layers=1, width=8, heads=2, context=8, batch=8)
    made, given = fc.FSDP, {}

    def orders(backend, name):
        def engine(*arguments, **keywords):
            wanted = keywords["prefetch"], keywords["virtual_ranks"], keywords["offload"]
            given[name] = wanted
            return made(*arguments, **keywords)

        monkeypatch.setattr(training.fc, "FSDP", engine)
        rank = member._ours(backend, {"contestant": name, "directory": str(tmp_path)})

        def obey(do, **details):
            return rank.obey({"contestant": name, "do": do, **details})

        obey("prepare", case=module("cases").to_order(case))
        losses, moved = obey("losses", count=2), dict(enumerate(obey("moved")))
        rank.close()
        return losses, moved[0]

    (plain, nothing), *others = (
        fc.launch(orders, world_size=1, transport="sim", args=(name,))[0]
        for name in ("fsdpcore", *module("cases").VARIANTS)
    )
    assert nothing == 0
    # Virtual ranks add up in another order.
    assert others[1][0] == pytest.approx(plain, rel=1e-6)
    assert all(losses == plain for losses, _ in others[:1] + others[2:])
    assert [held > 0 for _, held in others] == [False, False, True, True, True, True]
    aside = str(tmp_path)
    assert given == {
        "fsdpcore": (None, None, None),
        "no-prefetch": (0, None, None),
        "virtual-ranks": (None, 8, None),
        "offload": (None, None, fc.Offload(aside, "all")),
        "offload-params": (None, None, fc.Offload(aside, "parameters")),
        "offload-ahead-0": (None, None, fc.Offload(aside, "all", ahead=0)),
        "offload-cached": (None, None, fc.Offload(aside, "all", evict=False)),
    }


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize(
    ("mode", "setting", "names"),
    [
        ("exchange", "auto", ["fsdpcore", "fsdp2"]),
        ("training", "default", ["fsdpcore", "compute only", "fsdp2"]),
    ],
)
def test_beside_fsdp2(step, mode, setting, names):
    peer = ["--against", "fsdp2", "--peer-setting", setting]
    done = step(*TINY, "--transport", "sim", "--mode", mode, *peer)
    assert done.exit_code == 0, done.output
    (table,) = rows(done)
    assert list(table) == names
    assert ("fsdp2 is measured with" in done.output) == (setting == "auto")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--units", 0], "--units must be at least 1"),
        (["--batch", 3], "--batch 3 does not split evenly over 2 ranks"),
        (["--width", 9], "does not split into 2 heads"),
        (["--prefetch", -1], "--prefetch must not be negative"),
        (["--mode", "all"], "--mode must be one of both, exchange, training"),
        (["--against", "fsdp"], "did you mean 'fsdp2'"),
        (["--peer-setting", "best"], "--peer-setting must be auto or one of"),
        (["--json", "none/step.json"], "there is no directory none"),
        (["--dir", "none"], "--dir none is no directory"),
        (["--rounds", 0], "--rounds must be at least 1"),
        (["-n", 0], "-n must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line(step, options, words):
    done = step(*options)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("fsdpcore: ")
    assert words in line


def test_the_peer_is_not_installed(module, monkeypatch):
    request = module("run").StepRun(cases=(), against=("fsdp2",))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(fc.MissingDependencyError, match="pip install torch --index-url"):
        request.check()


@pytest.mark.tools
def test_the_script_of_a_checkout():
    done = finished(python(SCRIPT, "-n", 1, "--transport", "sim", "--mode", "exchange", *TINY))
    assert done.code == 0, done.err
    assert "fsdpcore" in done.out


def test_a_case_survives_the_way_to_a_rank(module):
    cases = module("cases")
    for case in (cases.Exchange(3, 4, 5, 0, "default"), cases.Training(width=8)):
        assert cases.from_order(json.loads(json.dumps(cases.to_order(case)))) == case


def exchange_check(module, ranks):
    case = module("cases").Exchange(units=3, rows=7, columns=5)

    def main(backend):
        return module("exchange").OurExchange(case, backend).check()

    return fc.launch(main, world_size=ranks, transport="sim")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_exchange_is_right(module, ranks):
    assert exchange_check(module, ranks) == [0] * ranks


def test_wrong_parameters_are_counted(module, monkeypatch):
    pattern = module("exchange").Pattern
    right = pattern.fill

    def wrong_in_one_unit(self, out, start, *, seed, name):
        right(self, out, start, seed=seed, name=name)
        if self.unit == 1:
            out[0] += 1

    monkeypatch.setattr(pattern, "fill", wrong_in_one_unit)
    # The first element of both shards, in forward and backward, on each rank.
    assert exchange_check(module, 2) == [4, 4]


def test_wrong_gradients_are_counted(module, monkeypatch):
    case = module("cases").Exchange
    right = case.gradients

    def wrong_on_one_rank(self, unit, rank, start, stop):
        values = right(self, unit, rank, start, stop)
        if (unit, rank) == (2, 0):
            values[-1] += 1  # of 35 elements, the second rank has the last
        return values

    monkeypatch.setattr(case, "gradients", wrong_on_one_rank)
    assert exchange_check(module, 2) == [0, 1]


def test_training_alone_computes_what_the_engine_does(module):
    training = module("training")
    case = module("cases").Training(layers=2, width=8, heads=2, context=8, batch=4)

    def main(backend):
        return training.OurTraining(case, backend).losses(4)

    (ours,) = fc.launch(main, world_size=1, transport="sim")
    alone = training.Alone(case, 0, 1).losses(4)
    assert alone == pytest.approx(ours, rel=1e-5)
    assert alone[-1] < alone[0]


def test_losses_that_disagree_are_counted(module):
    run = module("run")
    case = module("cases").Training(batch=2)

    class Team:
        def __init__(self, losses):
            self.losses = losses

        def ask(self, name, do, **details):
            return self.losses if do == "losses" else [[], []]

    def wrong(ours, alone, peer):
        teams = {"fsdpcore": ours, "compute only": alone, "fsdp2": peer}
        entrants = [run.Entrant(name, Team(losses)) for name, losses in teams.items()]
        return run._wrong_losses(entrants, case)

    ours = [[5.0, 4.0, 3.0], [5.2, 4.2, 3.2]]
    alone = [[5.0, 4.5, 4.5], [5.2, 4.5, 4.5]]  # goes its own way after the first
    swapped = [[5.2, 4.2, 3.2], [5.0, 4.0, 3.0]]
    assert wrong(ours, alone, swapped) == {"fsdpcore": 0, "compute only": 0, "fsdp2": 0}
    other = [[5.0, 4.0, 3.5], [5.2, 4.3, 3.2]]
    assert wrong(ours, alone, other) == {"fsdpcore": 0, "compute only": 0, "fsdp2": 2}
    lost = [[float("nan"), 4.0, 3.0], [5.2, 4.2, 3.2]]
    assert wrong(lost, alone, ours)["fsdpcore"] == 1


def test_waiting_for_a_slower_rank_is_what_goes_beyond_the_shortest_wait(module, monkeypatch):
    """Of three ranks: seconds of a step, those that it computed, and waited in two passes."""
    run = module("run")
    answers = [[10.0, 6.0, 1.0, 2.0], [10.0, 4.0, 2.0, 0.0], [20.0, 10.0, 4.0, 0.0]]
    team = mock.Mock()
    team.ask = lambda name, what, **order: answers if what == "split" else [None] * 3
    monkeypatch.setattr(run, "run_seconds", lambda *args: None)
    case = module("cases").Training()
    assert run._outside(team, case, 2, 1) == ([50.0], [100 * (4 + 2) / 40])
