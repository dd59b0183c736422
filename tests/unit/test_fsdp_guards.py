"""What would silently go wrong, and is refused: torn updates, views loaded into themselves, ..."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support import zmq_ranks
from support.fsdp_steps import by_strategy, cause_of, launch, one_pass, train, values_of

import fsdpcore as fc
from fsdpcore.fsdp.units.unit import sharded_of


def engine_of(backend, **options):
    units = [fc.Unit(name, {"w": fc.Spec(7), "v": fc.Spec(7)}) for name in "ab"]
    options.setdefault("optimizer", fc.optim.SGD(lr=1.0))
    return fc.FSDP(units, backend, **options)


def ones(unit, params, grads):
    for name in grads:
        grads[name].fill(1)


def test_an_update_that_was_left_half_done_is_noticed(monkeypatch):
    """As by an interrupt that the program catches, to save what there is."""

    def body(backend):
        engine = engine_of(backend, window=False)
        train(engine, ones)
        saved = engine.state_dict(full=True)
        sharded = sharded_of(engine.units[1])
        update = sharded.update

        def interrupted(**options):
            raise KeyboardInterrupt

        sharded.update = interrupted
        with pytest.raises(KeyboardInterrupt):
            train(engine, ones)
        sharded.update = update
        for use in (
            engine.state_dict,
            lambda: engine.state_dict(full=True),
            engine.step().__enter__,
        ):
            with pytest.raises(fc.StateError, match="an update was left half done"):
                use()
        engine.load_state_dict(saved)
        train(engine, ones)
        for named in values_of(engine).values():
            assert_array_equal(named["w"], -2)

    launch(body, 2)


def test_a_step_is_entered_once():
    def body(backend):
        engine = engine_of(backend)
        step = engine.step()
        with pytest.raises(fc.StateError, match="never applied"), step:
            one_pass(step, engine.units, ones)
        with pytest.raises(fc.StateError, match="entered once"), step:
            pass
        assert engine.steps == 0

    launch(body, 2)


def test_a_context_that_is_closed_late_leaves_the_next_step_alone():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            late = step.forward("a")
            late.__enter__()
        with engine.step() as step:
            with step.forward("a"):
                pass
            with step.backward("a") as (_, grads):
                grads["w"].fill(1)
                late.__exit__(None, None, None)
                grads["v"].fill(1)
            step.update()
        for array in values_of(engine)["a"].values():
            assert_array_equal(array, -1)

    launch(body, 2)


@pytest.mark.parametrize("window", [True, False])
def test_parameters_can_be_loaded_from_their_own_views(window):
    def body(backend):
        engine = engine_of(backend, window=window)
        unit = engine["a"]
        unit.load({"w": np.arange(7.0, dtype=np.float32), "v": np.ones(7, np.float32)})
        unit.unshard()
        shown = unit.params
        swapped = {"w": shown["v"], "v": shown["w"]}
        if not window:  # that memory is given back by load
            swapped = {name: array.copy() for name, array in swapped.items()}
        unit.load(swapped)
        assert_array_equal(values_of(engine)["a"]["w"], 1)
        assert_array_equal(values_of(engine)["a"]["v"], np.arange(7))

    launch(body, 3)


def test_a_unit_in_use_is_not_written():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            with step.forward("a"), pytest.raises(fc.StateError, match="inside of its own context"):
                engine["a"].load({"w": np.zeros(7, np.float32)})
            with step.backward("a"):
                pass
            step.update()

    launch(body, 2)


def skip_differs(backend, engine):
    train(engine, ones, skip_nonfinite=backend.rank == 1)


def steps_differ(backend, engine):
    engine.steps = backend.rank
    train(engine, ones)


@pytest.mark.parametrize(
    ("body", "what"), [(skip_differs, "skip_nonfinite"), (steps_differ, "steps")]
)
def test_ranks_that_would_drift_apart_are_told(body, what):
    error = cause_of(lambda backend: body(backend, engine_of(backend)), 2)
    assert isinstance(error, fc.MismatchError)
    assert f"update: {what} is 0 on rank 0, but 1 on rank 1" in str(error)


SAME = {"w": np.ones(3), "b": np.ones(2), "m": np.ones(4)}
LONG = {f"{number}": np.ones(1) for number in range(100)}


@pytest.mark.parametrize(
    ("params", "options", "words"),
    [
        ({"v": np.ones(3)}, {}, "in names: ['w', 'b', 'm'] on rank 0, but ['w', 'b', 'v', 'm'] on"),
        ({"b": np.ones((2, 1))}, {}, "in the shape or dtype of b: float64 (2,) on rank 0, but"),
        ({"b": np.ones(2, "f4"), "w": np.ones(3, "f4")}, {}, "dtype of w: float64 (3,) on rank 0"),
        ({"b": np.zeros(2)}, {}, "in the initial values of b between rank 0 and ranks 1, 2; give"),
        ({"b": fc.Spec(2, np.float64)}, {}, "in the initial values of b between rank 0 and ranks"),
        ({}, {"frozen": "w"}, "in what is frozen: [] on rank 0, but ['w'] on rank 1 and rank 2"),
        ({"m": np.ones(5)}, {}, "in what is ignored: [('m', 'float64', (4,))] on rank 0, but [("),
        ({"b": fc.Tied("u", "w")}, {}, "in names: ['w', 'b', 'm'] on rank 0, but ['w', 'm', 'b']"),
        (LONG, {}, "'7', '8', '9', '10', '11', "),
    ],
)
def test_in_what_units_differ(params, options, words):
    def body(backend):
        mine = (params, options) if backend.rank else ({}, {})
        first = fc.Unit("first", {"w": np.ones(2)})
        fc.FSDP([first, fc.Unit("u", SAME | mine[0], ignored="m", **mine[1])], backend)

    error = cause_of(body, 3)
    assert isinstance(error, fc.MismatchError)
    assert str(error).startswith("unit 'u' differs in ")
    assert words in str(error)
    assert len(str(error)) < 1000


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_initial_values_that_differ_are_told_where_they_may_come_from(ranks):
    """Ranks that are threads share the random state of NumPy: nobody else does."""

    def body(backend):
        values = np.full(3, backend.rank, np.float32)
        fc.FSDP([fc.Unit("u", {"w": values})], backend)

    # Those of zmq are threads here, too, but it does not know.
    zmq = ranks == "processes"
    text = zmq_ranks.run_threads(body, 2)[0].text if zmq else str(cause_of(body, 2))
    assert "the initial values of w between rank 0 and rank 1" in text
    assert "np.random.default_rng(seed)" in text
    assert ("jax.random.key(seed)" in text) == ("jax" in sys.modules)
    shared = "threads of one process, which share the states of np.random, random and torch"
    assert (shared in text) is (ranks == "threads")


def test_numbers_of_any_type_give_the_same_bits():
    def body(backend):
        found = []
        for three in (3, 3.0, np.float32(3), np.float64(3), np.int64(3)):
            engine = engine_of(backend, optimizer=fc.optim.AdamW(lr=0.1))
            with engine.step(divisor=three) as step:
                one_pass(step, engine.units, ones)
                step.update(clip=three / 7, norm_type=three)
            found.append(values_of(engine)["a"]["w"].tobytes())
        return found

    for found in launch(body, 2):
        assert len(set(found[:2])) == 1
        assert len(set(found[3:])) == 1


def test_a_constructor_that_fails_leaves_the_units_as_they_were():
    def body(backend):
        units = [fc.Unit("u", {"w": fc.Spec(5)})]
        with pytest.raises(fc.ConfigError):
            fc.FSDP(units, backend, offload=fc.Offload("/nowhere/at/all"))
        engine = fc.FSDP(units, backend)
        with pytest.raises(fc.StateError, match="belongs to an engine already"):
            fc.FSDP(units, backend)
        return engine.units[0].valid_size

    assert sum(launch(body, 2)) == 5


def test_an_engine_that_is_closed_has_no_threads():
    """A hybrid strategy has one for sums over shards, and one for those over replicas."""

    def body(backend):
        own = f"fsdpcore-rank{backend.rank}"
        most = 0
        for _ in range(3):
            strategy = fc.Strategy("hybrid_shard", shard_group_size=2)
            engine = engine_of(backend, strategy=strategy, prefetch=fc.Prefetch(reductions=1))
            train(engine, ones)
            most = max(most, sum(thread.name.startswith(own) for thread in threading.enumerate()))
            engine.close()
        return most, sum(thread.name.startswith(own) for thread in threading.enumerate())

    assert launch(body, 4) == [(2, 0)] * 4


@by_strategy
def test_an_engine_closes_all_groups_it_made_but_not_the_backend(strategy):
    def body(backend):
        engine = engine_of(backend, strategy=strategy)
        groups = engine._model.groups
        found = (groups.shards, groups.replicas, groups.regather_group, groups.everyone)
        engine.close()
        return [(group is backend) is not group.order.closed for group in found]

    assert launch(body) == [[True] * 4] * 4


def test_units_without_parameters_of_their_own_send_nothing(monkeypatch):
    def body(backend):
        units = [
            fc.Unit("e", {"w": fc.Spec(8)}),
            fc.Unit("t", {"w": fc.Tied("e", "w")}),
            fc.Unit("i", {"m": np.ones(3)}, ignored="m"),
        ]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=1.0), window=False)
        before = backend.order.issued
        for unit in engine.units[1:]:
            unit.unshard()
            unit.reshard()
        assert backend.order.issued == before

    launch(body, 2)


def test_a_report_needs_a_training_step():
    def body(backend):
        engine = engine_of(backend)
        with pytest.raises(fc.StateError, match="the last training step"):
            engine.report()
        train(engine, ones)
        report = str(engine.report())
        assert "peak" in report
        with engine.evaluation() as step, step.forward("a"):
            pass
        assert str(engine.report()) == report  # of the training step still

    launch(body, 2)


def test_shards_that_the_engine_shows_are_no_copy_to_go_back_to():
    def body(backend):
        engine = engine_of(backend)
        shown = engine.state_dict()
        train(engine, ones)
        engine.load_state_dict(shown)

    assert "a view of what the engine has now" in str(cause_of(body, 2))
