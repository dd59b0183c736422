"""Where the time of a step went: ``engine.report().times``, and what a trace shows of it."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import time

import numpy as np
import pytest
from support.spmd import run_on
from support.windows import WithoutWindow, WithWindow
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.commands.main import app
from fsdpcore.diagnostics import entries
from fsdpcore.fsdp.step.step_times import OUTSIDE, StepTimes

FORWARD, BACKWARD, BETWEEN, LATE, UPDATE = 0.02, 0.03, 0.025, 0.05, 0.015


class SlowSGD(fc.optim.SGD):
    sleep = staticmethod(time.sleep)

    def update(self, *args, **options):
        self.sleep(UPDATE)
        super().update(*args, **options)


def make_step(engine, rank):
    """Computes in unit "a" alone; rank 1 comes late to the backward pass of "b"."""
    sleep = engine.backend.root.clock.sleep
    with engine.step() as step:
        for name in ("a", "b"):
            with step.forward(name):
                sleep(FORWARD * (name == "a"))
        sleep(BETWEEN + LATE * rank)
        for name in ("b", "a"):
            with step.backward(name) as (_, grads):
                grads["w"][:] = 1.0
                sleep(BACKWARD * (name == "a"))
        step.update(clip=1.0)


def engine_of(backend):
    units = [fc.Unit(name, {"w": np.zeros(64, np.float32)}) for name in ("a", "b")]
    optimizer = SlowSGD(lr=0.1)
    object.__setattr__(optimizer, "sleep", backend.root.clock.sleep)
    return fc.FSDP(units, backend, optimizer=optimizer, prefetch=0, window=False)


def test_each_second_is_where_it_was_spent():
    """In virtual time, in which nothing takes any but to sleep."""
    now = []

    def body(backend):
        engine = engine_of(backend)
        make_step(engine, 0)
        clock = backend.root.clock
        backend.barrier()
        before = clock.now()
        make_step(engine, backend.rank)
        now.append(clock.now() - before)
        return engine.report().times, engine.stats

    (times, stats), (late, _) = fc.launch(body, world_size=2, transport="sim://?clock=virtual")
    spent = {(row.unit, row.phase, part): getattr(row, part) for row in times.rows
             for part in ("computing", "waiting", "moving", "optimizer")}  # fmt: skip
    assert {key: seconds for key, seconds in spent.items() if seconds > 1e-4} == {
        ("a", "forward", "computing"): pytest.approx(FORWARD, abs=1e-4),
        ("a", "backward", "computing"): pytest.approx(BACKWARD, abs=1e-4),
        ("b", "backward", "waiting"): pytest.approx(LATE, abs=1e-4),
        ("", "", "computing"): pytest.approx(BETWEEN, abs=1e-4),
        ("a", "update", "optimizer"): pytest.approx(UPDATE, abs=1e-4),
        ("b", "update", "optimizer"): pytest.approx(UPDATE, abs=1e-4),
    }
    assert sum(spent.values()) == pytest.approx(now[0])
    assert stats.seconds == pytest.approx(now[0])
    assert stats.waited == pytest.approx(LATE, abs=1e-4)
    computed = FORWARD + BACKWARD + BETWEEN + LATE
    assert late.by_part()["computing"] == pytest.approx(computed, abs=1e-4)


def test_time_around_gradients_is_the_callers_or_spent_waiting():
    """Rank 1 comes late to a look at the gradients, and all ranks compute in and after it."""

    def body(backend):
        engine, sleep = engine_of(backend), backend.root.clock.sleep
        with engine.step() as step:
            for name in ("a", "b"):
                with step.forward(name):
                    pass
            for name in ("b", "a"):
                with step.backward(name) as (_, grads):
                    grads["w"][:] = np.inf
            sleep(LATE * backend.rank)
            with step.gradients(full=True, write=True) as grads:
                sleep(FORWARD)
            sleep(BACKWARD)
            with pytest.raises(fc.NonFiniteGradientError):
                step.update()
            sleep(BETWEEN)
            if backend.rank:
                sleep(LATE)
        return engine.stats.times.by_part()

    early, late = fc.launch(body, world_size=2, transport="sim://?clock=virtual")
    own = FORWARD + BACKWARD + BETWEEN
    assert early["computing"] == pytest.approx(own, abs=1e-4)
    assert early["waiting"] == pytest.approx(LATE, abs=1e-4)
    assert late["computing"] == pytest.approx(own + 2 * LATE, abs=1e-4)
    assert early["moving"] + early["optimizer"] < 1e-4


def test_the_parts_add_up_to_the_step():
    def body(backend):
        engine = engine_of(backend)
        found = []
        for _ in range(4):  # another process may come in between
            before = time.perf_counter()
            make_step(engine, 0)
            taken = time.perf_counter() - before
            parts = sum(row.seconds for row in engine.report().times.rows)
            assert parts <= taken
            found.append(parts / taken)
        return max(found)

    assert run_on(WithoutWindow, body, world_size=1)[0] > 0.97


def test_what_comes_after_the_users_block_is_the_engines_time():
    def body(backend):
        engine = engine_of(backend)
        make_step(engine, 0)
        return [doing for _, _, doing in engine.stats.times if doing.unit == "a"]

    (doings,) = run_on(WithoutWindow, body, world_size=1)
    for phase in ("forward", "backward"):
        parts = [doing.part for doing in doings if doing.phase == phase]
        at = parts.index("computing")
        assert (parts[at - 1], parts[at + 1]) == ("moving", "moving")


def test_a_report_says_it():
    def body(backend):
        engine = engine_of(backend)
        make_step(engine, 0)
        return engine.report()

    (report,) = run_on(WithoutWindow, body, world_size=1)
    lines = [line.split() for line in str(report).splitlines()]
    assert ["unit", "pass", "computing", "waiting", "moving", "optimizer", "together"] in lines
    assert any(line[:2] == ["a", "backward"] for line in lines)
    assert any(line[:3] == ["all", "units", "outside"] for line in lines)
    assert str(pickle.loads(pickle.dumps(report))) == str(report)
    told = json.loads(json.dumps(report.as_dict()))["times"]
    assert sum(sum(list(row.values())[2:]) for row in told) == pytest.approx(report.times.seconds)


def test_an_evaluation_that_never_ends_keeps_sums_only():
    def body(backend):
        engine = engine_of(backend)
        with engine.evaluation() as step:
            for _ in range(4500):
                with step.forward("b"):
                    pass
        return engine.stats

    (stats,) = run_on(WithoutWindow, body, world_size=1)
    moments = stats.times.marks[::2]
    assert len(moments) < 21_000
    assert stats.seconds > 1e-9 * (moments[-1] - moments[0])
    assert sum(row.seconds for row in stats.times.rows) == pytest.approx(stats.seconds)


def test_a_trace_has_the_passes_of_units(tmp_path):
    def body(backend):
        engine = engine_of(backend)
        make_step(engine, 0)
        with engine.step() as step, step.forward("b"):
            fc.dump_trace(backend, tmp_path)  # what is open goes up to now

    run_on(WithoutWindow, body, world_size=2)
    assert CliRunner().invoke(app, ["trace", str(tmp_path)]).exit_code == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        mine = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        passes = [event for event in mine if event["cat"] == "pass" and event["args"]["unit"]]
        assert [event["name"] for event in passes] == [
            "forward a", "forward b", "backward b", "backward a", "update a", "update b",
            "forward b",
        ]  # fmt: skip
        # What the flight recorder has noted of collectives lies in the part that waits for them.
        gathers = [event for event in mine if event["args"].get("label") == "forward of unit b"]
        waits = [event for event in mine if event["name"] == "waiting"]
        assert len(gathers) == 2
        for gather in gathers:
            begin, end = gather["ts"], gather["ts"] + gather["dur"]
            assert any(w["ts"] <= begin and end <= w["ts"] + w["dur"] + 1 for w in waits)


def test_small_units_take_few_calls():
    """What Python does for a unit in a step is counted, since it cannot be timed beside others."""

    def body(backend):
        units = [
            fc.Unit(f"u{number}", {f"p{n}": np.zeros(8, np.float32) for n in range(10)})
            for number in range(20)
        ]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW())
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        def make_step():
            with engine.step() as step:
                for unit in engine.units:
                    with step.forward(unit):
                        pass
                for unit in reversed(engine.units):
                    with step.backward(unit) as (_, grads):
                        grads["p0"].fill(1e-3)
                step.update(clip=1.0)

        make_step()
        make_step()
        sys.setprofile(count)
        make_step()
        sys.setprofile(None)
        return calls / len(units)

    assert run_on(WithWindow, body, world_size=1)[0] < 385


def test_an_open_step_goes_on_until_now():
    marks = [10, ("", "", "computing"), 20, ("a", "forward", "moving"), 30, ("a", "forward", "x")]
    found = [
        (each["step"], each["start_ns"], each["end_ns"]) for each in entries.spans(7, marks, 50)
    ]
    assert found == [(7, 20, 30), (7, 30, 50)]


def test_marks_that_are_not_kept_count_once():
    ticks = itertools.count(0, 1000)
    times = StepTimes(lambda: next(ticks))
    for _ in range(100_000):
        times.shorten()
        times.mark(OUTSIDE)
    assert len(times.marks) < 60_000
    assert times.seconds == pytest.approx(99_999e-6, rel=1e-9)
    assert sum(times.by_part().values()) == pytest.approx(99_999e-6, rel=1e-9)


def test_who_waits_for_a_reduction_waits():
    def body(backend):
        units = [fc.Unit("a", {"w": np.zeros(64, np.float32)})]
        engine = fc.FSDP(
            units, backend, optimizer=fc.optim.SGD(0.1), prefetch=0, window=False,
            strategy="shard_grad_op",
        )  # fmt: skip
        with engine.step() as step:
            with step.forward("a"):
                pass
            with step.backward("a") as (_, grads):
                grads["w"][:] = 1.0
                backend.root.clock.sleep(0.05 * backend.rank)
            step.update()
        return engine.report().times.by_part()

    early, late = fc.launch(body, world_size=2, transport="sim://?clock=virtual")
    assert early["waiting"] == pytest.approx(0.05, abs=1e-3)
    assert late["waiting"] < 1e-3
    assert early["moving"] < 1e-3
