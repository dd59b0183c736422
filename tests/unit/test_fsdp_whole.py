"""All units at once: ``Step.whole``, and what keeps parameters from one pass to the next."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support import mlp
from support.fsdp_steps import (
    STRATEGIES,
    WORLD,
    by_strategy,
    cause_of,
    in_turn,
    is_clean,
    launch,
    one_pass,
    state_bytes,
    strategies_in_turn,
    train,
    values_of,
)

import fsdpcore as fc

SHAPE = (5, 3)


def engine_of(backend, units=3, **options):
    """Units of equal sizes, whose gradients move them by their mean over the ranks."""
    rng = np.random.default_rng(0)
    made = [
        fc.Unit(f"u{i}", {"w": rng.normal(size=SHAPE).astype(np.float32)}) for i in range(units)
    ]
    options.setdefault("optimizer", fc.optim.SGD(lr=1.0))
    return fc.FSDP(made, backend, **options)


def gradient(unit, backend):
    """Another one for each unit and rank."""
    return np.full(SHAPE, 1 + int(unit[1:]) + 10 * backend.rank, np.float32)


# What it does.


@strategies_in_turn(0)
def test_it_is_the_same_as_a_pass_unit_by_unit(strategy, window):
    def body(backend):
        results = []
        for whole in (True, False):
            engine = engine_of(
                backend,
                strategy=strategy,
                window=window,
                optimizer=fc.optim.AdamW(lr=0.1),
            )
            for number in range(3):
                with engine.step() as step:
                    if whole:
                        with step.whole() as (params, grads):
                            found = {
                                unit: {"w": named["w"] * (number + backend.rank)}
                                for unit, named in params.items()
                            }
                            grads.update(found)
                    else:
                        one_pass(
                            step, engine.units, lambda _, p, g, n=number: give(p, g, n, backend)
                        )
                    norm = step.update(clip=1.0)
            results.append((norm, state_bytes(engine), engine.stats.reductions))
            assert is_clean(engine)
        return results

    def give(params, grads, number, backend):
        grads["w"] = params["w"] * (number + backend.rank)

    for whole, units in launch(body):
        assert whole == units


@strategies_in_turn(1)
def test_gradients_of_several_passes_add_up_in_any_way(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        before = values_of(engine)

        def whole(step):
            with step.whole() as (params, grads):
                for unit in params:
                    grads[unit] = {"w": gradient(unit, backend)}

        with engine.step(divisor=1) as step:
            with step.no_sync():
                whole(step)
            with step.forward("u1"):
                pass
            whole(step)  # while a unit waits for its backward pass
            with step.backward("u1") as (_, grads):
                grads["w"] = gradient("u1", backend)
            step.update()
        after = values_of(engine)
        assert is_clean(engine)
        return {unit: before[unit]["w"] - after[unit]["w"] for unit in before}

    ranks = range(4)
    for moved in launch(body):
        for number, times in enumerate((2, 3, 2)):
            want = times * sum(1 + number + 10 * rank for rank in ranks)
            assert_allclose(moved[f"u{number}"], np.full(SHAPE, want), rtol=1e-6)


def test_what_is_not_given_counts_as_zeros():
    def body(backend):
        rng = np.random.default_rng(0)
        units = [
            fc.Unit(name, {k: rng.normal(size=3).astype(np.float32) for k in "wx"})
            for name in "abc"
        ]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=1.0))
        before = values_of(engine)
        with engine.step() as step:
            with step.whole() as (_, grads):
                grads["a"] = {"w": np.ones(3, np.float32)}
                grads["a"] = {"w": None, "x": np.ones(3, np.float32)}  # in place of the first
                grads["c"]["w"][1] = 2
                assert_array_equal(grads["c"]["x"], [0, 0, 0])
                grads["c"]["x"] = np.full(3, 4, np.float32)
                grads["c"]["x"] += 1
                assert (list(grads), len(grads), "a" in grads, "z" in grads) == (
                    ["a", "b", "c"],
                    3,
                    True,
                    False,
                )
                assert (list(grads["a"]), len(grads["a"]), "x" in grads["b"]) == (
                    ["w", "x"],
                    2,
                    True,
                )
            step.update()
        after = values_of(engine)
        return {(u, n): before[u][n] - after[u][n] for u in before for n in before[u]}

    for moved in launch(body, 2):
        want = {("a", "x"): [1, 1, 1], ("c", "w"): [0, 2, 0], ("c", "x"): [5, 5, 5]}
        for key, difference in moved.items():
            assert_allclose(difference, want.get(key, [0, 0, 0]), atol=1e-6)


def mixed_units():
    shared = np.arange(4, dtype=np.float32)
    return [
        fc.Unit("embed", {"w": shared, "fixed": np.ones(3, np.float32)}, frozen="fixed"),
        fc.Unit("head", {"w": shared, "table": np.arange(5), "b": np.ones(2, np.float32)},
                ignored="table"),
        fc.Unit("alone", {"w": fc.Tied("embed", "w")}),
    ]  # fmt: skip


@strategies_in_turn(0)
def test_tied_frozen_and_ignored_parameters_are_there(strategy, window):
    def body(backend):
        engine = fc.FSDP(
            mixed_units(), backend, strategy=strategy, window=window, optimizer=fc.optim.SGD(lr=1.0)
        )
        with engine.step() as step:
            with step.whole() as (params, grads):
                assert {u: list(named) for u, named in params.items()} == {
                    "embed": ["w", "fixed"], "head": ["w", "table", "b"], "alone": ["w"],
                }  # fmt: skip
                assert {u: set(grads[u]) for u in grads} == {
                    "embed": {"w"}, "head": {"w", "b"}, "alone": {"w"},
                }  # fmt: skip
                # A function differentiates with respect to all that it gets.
                grads.update(
                    {u: {n: np.ones_like(a) for n, a in p.items()} for u, p in params.items()}
                )
                with pytest.raises(fc.ArgumentError, match="no gradient of 'fixed'"):
                    grads["embed"]["fixed"] = np.ones(3, np.float32)
            step.update()
        assert is_clean(engine)
        return values_of(engine)

    for values in launch(body):
        for unit in ("embed", "head", "alone"):
            assert_array_equal(values[unit]["w"], np.arange(4) - 3)
        assert_array_equal(values["embed"]["fixed"], [1, 1, 1])
        assert_array_equal(values["head"]["table"], np.arange(5))
        assert_array_equal(values["head"]["b"], [0, 0])


def exchanged(units, number):
    """For a unit, the parameters of the next but one, each under the name of the other one."""
    other = units[f"u{(number + 2) % 4}"]
    found = {"w": other["x"], "x": other["w"]}
    return {name: array[::-1, ::-1] for name, array in found.items()} if number == 0 else found


@by_strategy
def test_gradients_may_be_parameters_of_other_units(strategy):
    """They are read after those units were freed, and their memory was given to others.

    That memory may be where the gradients are written, so that they lie elsewhere in it.
    """

    def body(backend):
        rng = np.random.default_rng(0)
        units = [
            fc.Unit(f"u{i}", {name: rng.normal(size=SHAPE).astype(np.float32) for name in "wx"})
            for i in range(4)
        ]
        options = {"strategy": strategy, "window": False, "optimizer": fc.optim.SGD(lr=1.0)}
        engine = fc.FSDP(units, backend, **options)
        before = values_of(engine)
        with engine.step() as step:
            with step.whole() as (params, grads):
                grads.update({f"u{i}": exchanged(params, i) for i in range(4)})
                grads["u3"] = {"w": params["u3"]["w"]}  # its own
            step.update()
        return before, values_of(engine)

    for before, after in launch(body):
        want = {f"u{i}": exchanged(before, i) for i in range(4)}
        want["u3"] = {"w": before["u3"]["w"], "x": np.zeros(SHAPE, np.float32)}
        for unit, named in want.items():
            for name, grad in named.items():
                assert_allclose(after[unit][name], before[unit][name] - grad, rtol=1e-5)


def test_an_evaluation_has_parameters_only():
    def body(backend):
        engine = engine_of(backend)
        with engine.evaluation() as step:
            with step.whole() as (params, grads):
                total = sum(float(named["w"].sum()) for named in params.values())
                assert not any(
                    a.flags.writeable for named in params.values() for a in named.values()
                )
                for misuse in (lambda: grads["u0"], lambda: grads.update({"u0": {}})):
                    with pytest.raises(fc.StateError, match="an evaluation has no backward pass"):
                        misuse()
            assert not params
            with step.whole() as (again, _):
                assert sum(float(named["w"].sum()) for named in again.values()) == total
        assert is_clean(engine)
        return total

    assert len(set(launch(body, 3))) == 1


def test_with_half_precision_gradients_have_either_dtype():
    def body(backend):
        precision = fc.Precision(param_dtype=np.float16, reduce_dtype=np.float32)
        engine = engine_of(backend, precision=precision)
        with engine.step() as step:
            with step.whole() as (params, grads):
                assert params["u0"]["w"].dtype == np.float16
                grads["u0"] = {"w": np.ones(SHAPE, np.float16)}
                grads["u1"] = {"w": np.ones(SHAPE, np.float32)}
                with pytest.raises(fc.ArgumentError, match="must have shape"):
                    grads["u2"] = {"w": np.ones(SHAPE, np.float64)}
            return step.update(clip=100.0)

    assert launch(body, 2) == [pytest.approx(np.sqrt(2 * 15))] * 2


def test_of_boxes_there_are_those_of_this_rank():
    def body(backend):
        mesh = fc.Mesh(backend, {"shard": 2, "tensor": 2})
        whole = np.arange(20, dtype=np.float32).reshape(4, 5)
        columns = slice(0, 3) if mesh["tensor"].rank == 0 else slice(3, 5)
        box = fc.BoxShard((4, 5), (0, columns.start), whole[:, columns])
        unit = fc.Unit("u", {"w": box, "b": np.ones(3, np.float32)})
        optimizer = fc.optim.SGD(lr=1.0)
        engine = fc.FSDP([unit], mesh["shard"], tensor=mesh["tensor"], optimizer=optimizer)
        with engine.step() as step:
            with step.whole() as (params, grads):
                assert_array_equal(params["u"]["w"], whole[:, columns])
                grads["u"] = {"w": params["u"]["w"]}
            norm = step.update(clip=1e6)
        assert norm == pytest.approx(np.linalg.norm(whole))
        with engine.full_params() as after:
            assert_array_equal(after["u.w"], np.zeros((4, 5)))
        return True

    assert launch(body) == [True] * WORLD


def test_offloaded_parameters_come_back_and_go(tmp_path):
    def body(backend):
        results = []
        for offload in (None, fc.Offload(tmp_path, what="all")):
            engine = engine_of(backend, offload=offload, window=False)
            for _ in range(2):
                with engine.step() as step:
                    with step.whole() as (params, grads):
                        grads.update({u: {"w": p["w"]} for u, p in params.items()})
                    step.update()
            results.append(values_of(engine))
        return results

    for memory, files in launch(body, 2):
        for unit, named in memory.items():
            assert_array_equal(files[unit]["w"], named["w"])


# What it takes.


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_it_takes_the_model_and_the_gradients_of_a_unit(prefetch):
    def body(backend):
        engine = engine_of(backend, units=4, window=False, prefetch=prefetch)
        with engine.step() as step:
            with step.whole() as (params, grads):
                grads.update({u: {"w": np.ones(SHAPE, np.float32)} for u in params})
            step.update()
        unit = engine.units[0].layout.padded_size * 4
        return engine.gathered_peak / unit, engine.stats.gathers, engine.stats.reductions

    assert launch(body, 2) == [(4 + 1, 4, 4)] * 2


@in_turn("case", [(1, 1), (2, fc.Prefetch(0)), (3, 2)], lambda case: str(case[0]))
def test_it_moves_and_takes_what_the_plan_says(strategy, window, case):
    parts, prefetch = case

    def body(backend):
        rng = np.random.default_rng(0)
        shared = rng.normal(size=(4, 3)).astype(np.float32)
        units = [
            fc.Unit("a", {"w": shared, "f": np.ones(5)}, frozen="f"),
            fc.Unit("b", {"w": rng.normal(size=7).astype(np.float32)}),
            fc.Unit("c", {"w": shared, "x": np.ones(2, np.float32)}),
        ]
        options = {"strategy": strategy, "window": window, "prefetch": prefetch}
        engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW(lr=0.1), **options)
        for _ in range(2):
            with engine.step() as step:
                for part in range(parts):
                    with contextlib.ExitStack() as stack:
                        if part < parts - 1:
                            stack.enter_context(step.no_sync())
                        with step.whole():
                            pass
                step.update()
        report = engine.report()
        plan = engine.plan(microbatches=parts, sync="last", whole=True)
        assert report.plan.whole
        assert report.plan.bytes_sent == plan.bytes_sent
        assert plan.as_dict()["whole"]
        assert plan.peak_live_bytes == engine.gathered_peak
        ratios = {row.name: row.ratio for row in report.rows if "seconds" not in row.name}
        train(engine)
        assert not engine.report().plan.whole
        return ratios

    assert (
        launch(body)
        == [dict.fromkeys(("peak_bytes", "bytes_sent", "gathers", "reductions"), 1.0)] * WORLD
    )


def test_one_pass_unit_by_unit_takes_no_more_than_before():
    """That all units were there at once changes nothing for the next step."""

    def body(backend):
        engine = engine_of(backend, units=5, window=False)
        peaks = []
        for whole in (False, True, False):
            with engine.step() as step:
                if whole:
                    with step.whole():
                        pass
                else:
                    one_pass(step, engine.units)
                step.update()
            peaks.append(engine.gathered_peak)
        return peaks

    for first, second, third in launch(body, 2):
        assert first == third < second


# Misuse.


def whole_in_unit(step):
    with step.forward("u0"), step.whole():
        pass


def unit_in_whole(step):
    with step.whole(), step.forward("u0"):
        pass


def backward_in_whole(step):
    with step.whole(), step.backward("u0"):
        pass


def whole_in_whole(step):
    with step.whole(), step.whole():
        pass


def update_in_whole(step):
    with step.whole():
        step.update()


def whole_after_update(step):
    with step.whole():
        pass
    step.update()
    with step.whole():
        pass


def whole_without_update(step):
    with step.whole():
        pass


def gradients_after(step):
    with step.whole() as (_, grads):
        pass
    grads["u0"] = {}


MISUSE = {
    whole_in_unit: r"whole\(\) inside the context of unit 'u0'; leave that one first",
    unit_in_whole: r"forward of unit 'u0' inside the context of whole\(\); leave that one first",
    backward_in_whole: r"backward of unit 'u0' inside the context of whole\(\)",
    whole_in_whole: r"whole\(\) inside the context of whole\(\)",
    update_in_whole: r"update\(\) inside the context of whole\(\); leave it first",
    whole_after_update: r"whole\(\) after update\(\); begin a new step",
    whole_without_update: "gradients that were never applied",
    gradients_after: r"taken at the end of step.whole\(\)",
}


@pytest.mark.parametrize("misuse", MISUSE, ids=lambda function: function.__name__)
def test_misuse_says_what_was_expected(misuse):
    def body(backend):
        engine = engine_of(backend)
        with pytest.raises(fc.StateError, match=MISUSE[misuse]), engine.step() as step:
            misuse(step)
        assert is_clean(engine)
        train(engine)  # and it goes on

    launch(body, 1)


def test_it_is_refused_outside_of_a_step():
    def body(backend):
        step = engine_of(backend).step()
        with pytest.raises(fc.StateError, match=r"whole\(\) outside of the step"), step.whole():
            pass

    launch(body, 1)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"z": {}}, "the engine has no such unit; it has u0, u1, u2"),
        ({"u1": {"z": np.ones(SHAPE, np.float32)}}, "unit 'u1' has no gradient of 'z'"),
        ({"u1": {"w": np.ones((3, 5), np.float32)}}, r"gradient of u1.w must have shape \(5, 3\)"),
        ({"u1": {"w": np.ones(SHAPE)}}, "dtype float32, got .* and float64"),
        ({"u1": {"w": [[1.0], [2.0, 3.0]]}}, "the gradient of u1.w is no array"),
        ({"u1": np.ones(SHAPE)}, "must be a mapping from names to arrays, got ndarray"),
    ],
)  # fmt: skip
def test_gradients_that_do_not_fit_are_refused_before_anything_is_reduced(found, message):
    def body(backend):
        engine = engine_of(backend)
        before = state_bytes(engine)
        with engine.step() as step:
            with pytest.raises(fc.ArgumentError, match=message), step.whole() as (_, grads):
                grads["u2"] = {"w": np.ones(SHAPE, np.float32)}
                grads.update(found)
            assert all(unit.grad_state.value == "none" for unit in engine.units)
            assert engine.stats.reductions == 0
        assert state_bytes(engine) == before
        assert is_clean(engine)

    launch(body, 2)


def test_they_are_never_removed():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step, step.whole() as (_, grads):
            for misuse in (lambda: grads.pop("u0"), lambda: grads["u0"].pop("w")):
                with pytest.raises(fc.ArgumentError, match="cannot be removed"):
                    misuse()

    cause = cause_of(body)
    assert isinstance(cause, fc.StateError)  # no update


@strategies_in_turn(1)
def test_an_exception_leaves_the_step_as_it_was(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        before = values_of(engine)
        with engine.step() as step:
            for failing in (True, False):
                try:
                    with step.whole() as (params, grads):
                        grads.update({u: {"w": gradient(u, backend)} for u in params})
                        if failing:
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    assert not params
                    assert all(unit.grad_state.value == "none" for unit in engine.units)
            step.update()
        after = values_of(engine)
        assert is_clean(engine)
        return {unit: before[unit]["w"] - after[unit]["w"] for unit in before}

    for moved in launch(body):
        for number in range(3):
            assert_allclose(moved[f"u{number}"], np.full(SHAPE, 16 + number), rtol=1e-6)


def test_a_step_that_ends_inside_of_it_has_ended():
    def body(backend):
        engine = engine_of(backend)
        with pytest.raises(ZeroDivisionError), engine.step() as step:
            context = step.whole()
            context.__enter__()
            raise ZeroDivisionError
        assert is_clean(engine)
        train(engine)

    launch(body, 2)


def test_parameters_are_not_written_while_they_are_in_use():
    def body(backend):
        engine = engine_of(backend)
        with engine.evaluation() as step, step.whole():
            with pytest.raises(fc.StateError, match="written inside of its own context"):
                engine.units[0].load({})
            return True

    assert launch(body, 1) == [True]


# What stays from the forward to the backward pass.


@strategies_in_turn(0)
def test_parameters_stay_where_they_are_or_are_said_not_to(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        seen = {}
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit) as params:
                    view = params["w"]
                    seen[unit.name] = view, view.copy()
            kept = True
            for unit in reversed(engine.units):
                view, values = seen[unit.name]
                kept &= np.array_equal(view, values)
                with step.backward(unit) as (params, grads):
                    kept &= np.shares_memory(view, params["w"])
                    grads["w"].fill(1e9)  # which would be seen where memory is used again
            says = step.keeps_params
            step.update()
        with engine.evaluation() as evaluation:
            assert not evaluation.keeps_params
        return says, kept

    for says, kept in launch(body):
        assert kept or not says
        name = next(name for name, each in STRATEGIES.items() if each == strategy)
        assert says == (
            window or name in ("until_backward", "shard_grad_op", "shard_optimizer", "no_shard")
        )


def test_layers_that_hold_parameters_are_refused_where_these_go():
    def body(backend):
        layers = mlp.layers()
        layers[1][1].holds_params = True
        stack = fc.LayerStack(layers)
        x = mlp.batch(0)[0]
        said = []
        for strategy in ("full_shard", fc.Strategy("full_shard", reshard_after_forward=False)):
            engine = fc.FSDP(
                stack.units(np.random.default_rng(0)), backend, strategy=strategy, window=False
            )
            with engine.evaluation() as step:
                stack.forward(step, x)
            with engine.step() as step:
                try:
                    stack.forward(step, x)
                except fc.StateError as error:
                    said.append(str(error))
        return said

    for said in launch(body, 2):
        (message,) = said
        assert message.startswith("layers ['dense1'] hold their parameters until the backward pass")
