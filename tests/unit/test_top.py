"""``engine.on_step``, and ``fsdpcore top``: what a running job says of itself, and to whom."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest
from support.spmd import run_on
from support.windows import WithoutWindow
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.commands.main import app
from fsdpcore.commands.top import as_text, slowest, summary
from fsdpcore.diagnostics import live


def engine_of(backend):
    units = [fc.Unit(name, {"w": np.zeros(1000, np.float32)}) for name in ("a", "b")]
    return fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=0.1), window=False)


def make_step(engine, *, seconds=0.0, clip_first=False, **options):
    """Of the norm: clip by it in the update; ahead of that; or only ask for it, with None."""
    with engine.step(**options) as step:
        for name in ("a", "b"):
            with step.forward(name):
                time.sleep(seconds)
        for name in ("b", "a"):
            with step.backward(name) as (_, grads):
                grads["w"][:] = 3.0
        if clip_first:
            step.clip_grad_norm(1.0)
        if clip_first is not False:
            assert (step.grad_norm() == pytest.approx(1.0)) == bool(clip_first)
        step.update(clip=1e9 if clip_first is False else None)


# Callbacks.


def test_callbacks_get_the_figures_of_each_training_step():
    def body(backend):
        engine, told = engine_of(backend), []
        engine.on_step(lambda figures: told.append(figures))
        make_step(engine, tokens=50, seconds=0.01)
        with engine.evaluation() as step, step.forward("a"):
            pass
        with pytest.raises(ZeroDivisionError), engine.step():
            raise ZeroDivisionError
        with engine.step() as step:
            with step.forward("a"), np.errstate(all="ignore"):
                pass
            with step.backward("a") as (_, grads):
                grads["w"][:] = np.inf
            step.update(skip_nonfinite=True)
        peak = engine.report().measured.peak_bytes
        make_step(engine, clip_first=True)
        make_step(engine, clip_first=None)
        engine.close()
        with pytest.raises(fc.StateError, match="on_step\\(\\) of an engine that was closed"):
            engine.on_step(print)
        return told, peak, backend.world_size

    for told, peak, size in run_on(WithoutWindow, body, world_size=2):
        first, second, third, fourth = told
        assert first["step"] == 1
        assert first["tokens"] == 50
        assert first["skipped"] == 0
        assert first["tokens_per_second"] == pytest.approx(50 / first["seconds"])
        parts = [first[name] for name in ("computing", "waiting", "moving", "optimizer")]
        assert sum(parts) == pytest.approx(first["seconds"])
        assert first["computing"] > 0.02
        assert first["grad_norm"] == pytest.approx(3.0 * np.sqrt(2000))
        assert first["memory_bytes"] >= 3 * 2 * 4000 / size
        assert (second["step"], second["skipped"]) == (1, 1)
        assert second["memory_bytes"] == peak
        assert "tokens" not in second
        assert "grad_norm" not in second
        assert third["grad_norm"] == fourth["grad_norm"] == first["grad_norm"]


def test_what_a_callback_raises_is_raised_after_the_step():
    def body(backend):
        engine = engine_of(backend)
        with pytest.raises(fc.ArgumentError, match="takes a function, got dict"):
            engine.on_step({})
        with pytest.raises(fc.ArgumentError, match="tokens must be"):
            engine.step(tokens=-1)
        engine.on_step(lambda figures: figures["loss"])
        with pytest.raises(KeyError):
            make_step(engine)
        return engine.steps

    assert run_on(WithoutWindow, body, world_size=1) == [1]


# A running job.


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "folder", lambda: tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture
def job(place):
    """A job of two ranks that goes on until the end; rank 1 computes for longer."""
    ended = threading.Event()

    def body(backend):
        engine = engine_of(backend)
        while not fc.all_reduce(int(ended.is_set()), backend):
            make_step(engine, seconds=0.01 + 0.03 * backend.rank, tokens=10)

    ranks = threading.Thread(target=fc.launch, args=(body,), kwargs={"world_size": 2})
    ranks.start()
    yield
    ended.set()
    ranks.join()


def test_top_asks_a_running_job(job, place):
    time.sleep(0.3)
    assert not place.exists()  # nobody has asked
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith(f"job pid-{os.getpid()}: 2 ranks, ")
    assert lines[1].startswith("rank 1 is the slowest: in a step it works ")
    header, *rows = (line.split("  ") for line in lines[3:])
    assert [row.split()[0] for row in lines[4:6]] == ["0", "1"]
    assert len(rows) == 2
    assert "waiting" in "".join(header)
    time.sleep(0.6)
    assert not place.exists()  # nobody asks any more


def test_a_rank_answers_within_a_step_too(place):
    def body(backend):
        engine = engine_of(backend)
        live.ask()
        with pytest.raises(ZeroDivisionError), engine.step() as step:
            with step.forward("a"):
                found = live.read(0.0)
            raise ZeroDivisionError
        return [(each["phase"], each["unit"]) for each in found]

    assert run_on(WithoutWindow, body, world_size=1) == [[("forward", "a")]]


def answer(rank, **figures):
    known = {"rank": rank, "world_size": 3, "job": "j", "written": time.time() + 60}
    return {**known, "figures": figures}


def test_the_slowest_is_who_works_longest_from_one_step_to_the_next():
    quick = {"seconds": 0.1, "waiting": 0.09, "between_steps": 0.001}
    loading = {"seconds": 0.02, "waiting": 0.01, "between_steps": 0.081}
    ranks = [answer(0, **quick), answer(1, **loading), answer(2)]
    assert slowest(ranks) is ranks[1]
    assert "rank 1 is the slowest: in a step it works 91 ms" in summary(ranks)[1]
    assert "the others 11 ms" in summary(ranks)[1]
    assert slowest([ranks[0], answer(1, **quick), ranks[2]]) is None
    assert summary(ranks[:2])[0].startswith("job j: 2 of its 3 ranks on this host")
    two = [{**each, "here": 3} for each in ranks[:2]]
    assert summary(two)[0].startswith("job j: 2 of the 3 ranks on this host answer")


def test_a_row_has_the_time_between_steps_and_no_codes_for_the_terminal():
    shown = {"resident": 1, "phase": "forward", "unit": "a\x1b[2J"}
    told = as_text([answer(0, seconds=0.5, waiting=0.0, between_steps=0.25) | shown])
    header, row = (line.split("  ") for line in told.splitlines()[-2:])
    header, row = ([cell.strip() for cell in cells if cell] for cells in (header, row))
    assert dict(zip(header, row, strict=True))["between steps"] == "250 ms"
    assert row[-1] == "'forward a\\x1b[2J'"


def test_tokens_count_against_the_time_between_steps_too():
    def body(backend):
        engine, told = engine_of(backend), []
        engine.on_step(told.append)
        for _ in range(2):
            make_step(engine, tokens=50)
            time.sleep(0.05)
        return told

    ((first, second),) = run_on(WithoutWindow, body, world_size=1)
    assert "between_steps" not in first
    assert second["between_steps"] > 0.05
    taken = second["seconds"] + second["between_steps"]
    assert second["tokens_per_second"] == pytest.approx(50 / taken)


def test_tokens_are_numbers():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            for wrong in (-3, np.nan, "x"):
                with pytest.raises(fc.ArgumentError, match="tokens"):
                    step.tokens = wrong
            step.tokens = np.int64(7)
            assert type(step.tokens) is float
            raise ZeroDivisionError

    def whole(backend):
        with pytest.raises(ZeroDivisionError):
            body(backend)

    run_on(WithoutWindow, whole, world_size=1)


def test_what_is_half_written_or_gone_is_no_answer(place):
    live.ask()
    live.Answers("job", 0).give({"rank": 0})
    (place / ".part.json").write_text(next(place.glob("[!.]*.json")).read_text())
    assert [each["rank"] for each in live.read(0.0)] == [0]
    live.end()
    assert live.read(0.0) == []
    assert not place.exists()


def test_top_finds_nobody(place):
    result = CliRunner().invoke(app, ["top", "--once", "--patience", "0"])
    assert (result.exit_code, "no job of this user answers" in result.output) == (1, True)
    assert not place.exists()


@pytest.mark.parametrize("stranger", ["others may enter", "a link"])
def test_a_folder_that_is_not_ones_own_alone_is_not_used(place, stranger):
    aim = place.with_name("theirs")
    aim.mkdir(mode=0o700)
    (aim / "asked").touch()
    if stranger == "a link":
        place.symlink_to(aim)
    else:
        aim.rename(place)
        place.chmod(0o755)
    answers = live.Answers("job", 0)
    assert answers.wanted
    answers.give({"rank": 0})
    assert os.listdir(place) == ["asked"]
    result = CliRunner().invoke(app, ["top", "--once"])
    assert result.exit_code != 0
    assert "cannot be used" in result.output


# An example.


def scalars(folder):
    """What is in an event file, which has records: a length, four bytes, the record, four bytes."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    (path,) = folder.iterdir()
    data, found = path.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        record, data = event.FromString(data[12 : 12 + size]), data[16 + size :]
        for value in record.summary.value:
            found.setdefault(value.tag, {})[record.step] = value.simple_value
    return found


def test_tensorboard_gets_them(tmp_path):
    pytest.importorskip("tensorboardX")
    example = importlib.import_module("linear_tensorboard")
    run_on(WithoutWindow, example.main, world_size=2, args=(str(tmp_path), 3))
    for rank in range(2):
        found = scalars(tmp_path / f"rank{rank}")
        assert found["step/tokens"] == dict.fromkeys((1, 2, 3), example.BATCH)
        assert set(found["loss"]) == {1, 2, 3}
        assert found["step/waiting"][2] < found["step/seconds"][2]


TOLD = {"rank": 0, "world_size": 2, "here": 2, "pid": 1, "resident": 1, "figures": {"step": 3}}


def test_what_a_job_has_answered_to_somebody_before_is_not_shown(place):
    live.ask()
    live.Answers("job", 0).give(TOLD)
    assert [each["job"] for each in live.read(0.0)] == ["job"]
    result = CliRunner().invoke(app, ["top", "--once", "--patience", "0"])
    assert (result.exit_code, "no job of this user answers" in result.output) == (1, True)


def test_a_rank_that_says_nothing_any_more_is_named():
    now = time.time()
    ranks = [{**answer(rank), "written": now - silent} for rank, silent in enumerate((0, 9))]
    assert summary(ranks)[-1] == "rank 1: silent for 3 s and more"
    assert len(summary(ranks[:1])) == 1


def test_who_has_ended_is_not_shown_for_long(place, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    live.ask()
    for rank, pid in enumerate((os.getpid(), ended.pid)):
        live.Answers("job", rank).give({"rank": rank, "pid": pid})
    assert [each["rank"] for each in live.read(0.0)] == [0, 1]
    now = time.time() + 1.1 * live.SILENT_SECONDS
    monkeypatch.setattr(time, "time", lambda: now)
    assert [each["rank"] for each in live.read(0.0)] == [0]
    monkeypatch.setattr(live, "_pids", lambda: "those of another container")
    assert [each["rank"] for each in live.read(0.0)] == [0, 1]


def test_who_may_not_be_asked_about_is_there(place, monkeypatch):
    live.ask()
    live.Answers("job", 0).give({"rank": 0})
    now = time.time() + 1.1 * live.SILENT_SECONDS
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(os, "kill", mock.Mock(side_effect=PermissionError))
    assert [each["rank"] for each in live.read(0.0)] == [0]
    os.kill.assert_called_once_with(os.getpid(), 0)


def test_ranks_do_not_answer_to_who_has_died(place):
    live.ask()
    answers = live.Answers("job", 0)
    assert answers.wanted
    os.utime(place / "asked", (time.time() - 6,) * 2)
    assert not answers.wanted


def test_each_callback_has_figures_of_its_own():
    def body(backend):
        engine = fc.FSDP([fc.Unit("a", {"w": np.zeros(9)})], backend, optimizer=fc.optim.SGD(0.1))
        told = []
        engine.on_step(dict.clear)
        engine.on_step(told.append)
        with engine.step() as step:
            with step.forward("a"):
                pass
            with step.backward("a") as (_, grads):
                grads["w"][:] = 1.0
            step.update()
        return told

    assert run_on(WithoutWindow, body, world_size=1)[0][0]["step"] == 1
