"""Beside the passes of a step: norms and gradients before its update, counts, an end."""

from __future__ import annotations

import gc
import math
import weakref

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_states import assembled
from support.fsdp_steps import (
    STRATEGIES,
    WORLD,
    cause_of,
    is_clean,
    launch,
    one_pass,
    state_bytes,
    strategies_in_turn,
    train,
)
from support.fsdp_tensor import AXES, SHAPES, Grid, Model, engine_on, gradients_into

import fsdpcore as fc

TRAINED = {"a.w": (5, 3), "a.b": (7,), "z.gain": (), "unused.w": (3, 2)}
SCALE = 8.0


def arrays():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in TRAINED.items()}


def engine_of(backend, **options):
    given = arrays()
    units = [
        fc.Unit("a", {"w": given["a.w"], "b": given["a.b"]}),
        fc.Unit(
            "z",
            {
                "gain": given["z.gain"],
                "base": np.ones((2, 4)),
                "places": np.arange(9),
                "tied": fc.Tied("a", "w"),
            },
            frozen="base",
            ignored="places",
        ),
        fc.Unit("unused", {"w": given["unused.w"]}),
    ]
    options.setdefault("optimizer", fc.optim.SGD(lr=1.0))
    return fc.FSDP(units, backend, **options)


def drawn(rank, number):
    """The gradients of one backward pass, with those of the tied parameter."""
    rng = np.random.default_rng((rank, number))
    shapes = {n: s for n, s in TRAINED.items() if n != "unused.w"} | {"z.tied": (5, 3)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def expected_gradients(passes):
    """The mean over the ranks of what all passes give; zeros where there is none."""
    total = {name: np.zeros(shape) for name, shape in TRAINED.items()}
    for rank in range(WORLD):
        for number in passes:
            for name, value in drawn(rank, number).items():
                total["a.w" if name == "z.tied" else name] += value
    return {name: array / WORLD for name, array in total.items()}


def norm_of(grads, p=2.0):
    return float(np.linalg.norm(np.concatenate([array.ravel() for array in grads.values()]), p))


def backwards(step, engine, number, scale=1.0):
    def give(unit, params, grads):
        for name, value in drawn(engine.backend.rank, number).items():
            if name.startswith(f"{unit.name}."):
                grads[name.split(".")[1]] = value * scale

    one_pass(step, ["a", "z"], give)


def two_microbatches(step, engine, scale=1.0):
    with step.no_sync():
        backwards(step, engine, 0, scale)
    backwards(step, engine, 1, scale)


def parameters(engine):
    state = engine.state_dict(full=True, optimizer=False)
    return {name: state[name] for name in TRAINED}


# Norms and clipping


@strategies_in_turn(0, values=[2.0, 3.0, math.inf], name="p")
def test_norm_and_clipping_are_those_of_all_gradients(p, strategy):
    grads = expected_gradients([0, 1])
    norm = norm_of(grads, p)

    def body(backend):
        scaling = fc.Precision(loss_scale=fc.LossScale(SCALE, growth=1.0))
        options = {"strategy": strategy, "precision": scaling}
        engine, other = engine_of(backend, **options), engine_of(backend, **options)
        with engine.step() as step:
            two_microbatches(step, engine, SCALE)
            found = [step.grad_norm(norm_type=p), step.clip_grad_norm(norm / 4, norm_type=p)]
            found += [step.clip_grad_norm(norm), step.grad_norm(norm_type=p)]
            assert step.update() is None
        with other.step() as step:
            two_microbatches(step, other, SCALE)
            found.append(step.update(clip=norm / 4, norm_type=p))
        assert state_bytes(engine) == state_bytes(other)
        return found, parameters(engine)

    for (alone, before, again, after, at_once), params in launch(body):
        assert_allclose([alone, before, at_once], norm, rtol=1e-12)
        assert_allclose([after, again if p == 2.0 else norm / 4], norm / 4, rtol=1e-12)
        for name, value in arrays().items():
            assert_allclose(params[name], value - grads[name] / 4, rtol=1e-11, atol=1e-13)


def test_norm_counts_boxes_and_copies_once():
    model, grid = Model(), Grid(tensor=2, shard=2)

    def body(backend):
        engine = engine_on(grid, backend, model)
        with engine.step() as step:
            whole = model.gradients(0, engine.backend.rank)

            def give(unit, params, grads):
                gradients_into(grads, unit.name, whole, engine)

            one_pass(step, engine.units, give)
            norm = step.clip_grad_norm(0.5)
            assert step.grad_norm() == pytest.approx(0.5)
            with step.gradients(full=True) as grads:
                found = dict(grads)
            step.update()
        return norm, found, engine.num_parameters()

    mean = model.mean_gradients(0, grid.data)
    count = sum(math.prod(shape) for named in SHAPES.values() for shape in named.values())
    assert set(AXES) < set(mean)
    for norm, whole, counted in launch(body, grid.ranks):
        assert norm == pytest.approx(norm_of(mean))
        assert counted == count
        assert whole.keys() == mean.keys()
        for name, array in whole.items():
            assert_allclose(array, mean[name] * (0.5 / norm), rtol=1e-12)


def test_what_is_added_after_clipping_is_not_clipped():
    first, second = expected_gradients([0]), expected_gradients([1])

    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            backwards(step, engine, 0)
            step.clip_grad_norm(0.25 * norm_of(first))
            backwards(step, engine, 1)
            total = step.grad_norm()
            step.clip_grad_norm(total / 2)
            step.update(clip_value=0.25)
        return total, parameters(engine)

    both = {name: first[name] / 4 + second[name] for name in TRAINED}
    for total, params in launch(body):
        assert total == pytest.approx(norm_of(both))
        for name, value in arrays().items():
            assert_allclose(
                params[name], value - np.clip(both[name] / 2, -0.25, 0.25), 1e-11, 1e-13
            )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_clipping_leaves_what_is_not_finite_to_the_update(bad):
    def body(backend):
        engine = engine_of(backend)
        before = state_bytes(engine)

        def give(unit, params, grads):
            if backend.rank == 1 and unit.name == "a":
                grads["b"][2] = bad

        with engine.step() as step:
            one_pass(step, ["a"], give)
            assert not math.isfinite(step.clip_grad_norm(1.0))
            with pytest.raises(fc.NonFiniteGradientError):
                step.update()
        assert state_bytes(engine) == before
        with engine.step() as step:
            one_pass(step, ["a"])
            step.grad_norm()  # finite, until somebody writes
            with step.gradients(write=True) as grads:
                for piece in grads["a.b"].pieces:
                    piece.array[:] = bad
            with pytest.raises(fc.NonFiniteGradientError):
                step.update()
        assert state_bytes(engine) == before

    launch(body, 2)


def test_ranks_that_clip_differently_are_told():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            backwards(step, engine, 0)
            step.clip_grad_norm(1.0 + backend.rank)

    error = cause_of(body, 2)
    assert isinstance(error, fc.MismatchError)
    assert "clip_grad_norm: clip is 1" in str(error)


# Gradients by name


@strategies_in_turn(0)
def test_gradients_are_seen_and_written_by_name(strategy, window):
    grads = expected_gradients([0, 1])

    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        with engine.step() as step:
            two_microbatches(step, engine)
            with step.gradients(full=True) as found:
                whole = dict(found)
            with step.gradients() as found:
                shards = {
                    name: fc.ShardedArray(
                        array.shape,
                        array.dtype,
                        tuple((start, stop, data.copy()) for start, stop, data in array.pieces),
                        array.replica,
                        array.replicas,
                    )
                    for name, array in found.items()
                }
                for array in found.values():
                    for piece in array.pieces:
                        with pytest.raises(ValueError, match="read-only"):
                            piece.array[:] = 0
            with pytest.raises(fc.StateError, match="has ended"):
                found["a.w"]
            with step.gradients(write=True) as found:
                views = [piece.array for array in found.values() for piece in array.pieces]
                for view in views:
                    np.clip(view, -0.5, 0.5, out=view)
            for view in views:
                with pytest.raises(ValueError, match="read-only"):
                    view[...] = 0
            with step.gradients(full=True, write=True) as found:
                found["a.w"][1] = 0
                found["unused.w"][:] = 3.0
            norm = step.grad_norm()
            step.update()
        assert is_clean(engine)
        return whole, shards, norm, parameters(engine)

    results = launch(body)
    changed = {name: np.clip(array, -0.5, 0.5) for name, array in grads.items()}
    changed["a.w"][1] = 0
    changed["unused.w"][:] = 3.0
    for name, array in assembled([shards for _, shards, _, _ in results]).items():
        assert_allclose(array, grads[name], 1e-12, 1e-15)
    for whole, _, norm, params in results:
        assert whole.keys() == grads.keys()
        assert norm == pytest.approx(norm_of(changed))
        for name, value in arrays().items():
            assert_allclose(whole[name], grads[name], 1e-12, 1e-15)
            assert_allclose(params[name], value - changed[name], 1e-11, 1e-13)


def test_ranks_that_write_different_gradients_are_told_and_nothing_is_kept():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            backwards(step, engine, 0)
            with (
                pytest.raises(fc.MismatchError, match=r"a\.w was written differently on rank 0"),
                step.gradients(full=True, write=True) as found,
            ):
                found["a.w"][...] = backend.rank
            with step.gradients(full=True) as found:
                assert_allclose(
                    found["z.gain"], (drawn(0, 0)["z.gain"] + drawn(1, 0)["z.gain"]) / 2
                )
                assert (found["a.w"] != 1.0).all()
            step.update()

    launch(body, 2)


def misuse_norm_first(step, engine):
    step.grad_norm()


def misuse_norm_after_update(step, engine):
    backwards(step, engine, 0)
    step.update()
    step.clip_grad_norm(1.0)


def misuse_update_inside(step, engine):
    backwards(step, engine, 0)
    with step.gradients():
        step.update()


def misuse_pass_inside(step, engine):
    backwards(step, engine, 0)
    with step.gradients(), step.forward("a"):
        pass


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (misuse_norm_first, r"grad_norm\(\) without gradients; run step.forward"),
        (misuse_norm_after_update, r"clip_grad_norm\(\) after update\(\); begin a new step"),
        (misuse_update_inside, r"update\(\) inside of step.gradients\(\); leave that block"),
        (misuse_pass_inside, r"forward of unit 'a' inside of step.gradients\(\); leave"),
    ],
)
def test_misuse_says_what_was_expected(misuse, message):
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            misuse(step, engine)

    error = cause_of(body)
    assert isinstance(error, fc.StateError)
    with pytest.raises(fc.StateError, match=message):
        raise error


# All units


SOME = {name: STRATEGIES[name] for name in ("near", "shard_grad_op", "hybrid_shard")}


@strategies_in_turn(1, SOME)
def test_units_are_gathered_and_resharded_in_one_call_and_counted(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        engine.unshard()
        for name, value in arrays().items():
            unit, param = name.split(".")
            assert_array_equal(engine[unit].params[param], value)
        engine.reshard()
        engine.reshard()
        assert is_clean(engine)
        with engine.step() as step:
            for call in (engine.unshard, engine.reshard):
                with pytest.raises(fc.StateError, match=r"shard\(\) inside of a step"):
                    call()
            backwards(step, engine, 0)
            step.update()
        trained = sum(math.prod(shape) for shape in TRAINED.values())
        assert engine.num_parameters(trainable=True) == trained
        assert engine.num_parameters() == trained + 8

    launch(body)


@strategies_in_turn(0, SOME, ["all", 1, None], "to")
def test_release_hands_back_the_parameters_and_frees_the_rest(strategy, to):
    def body(backend):
        engine = engine_of(
            backend,
            strategy=strategy,
            optimizer=fc.optim.AdamW(),
            precision=fc.Precision("bfloat16", "float32"),
        )
        train(engine)
        expected = engine.state_dict(full=True, optimizer=False).arrays
        unit = engine.units[0]
        held = [weakref.ref(array) for array in unit.optimizer_state.values()]
        held += [weakref.ref(engine._model.units[0].trained_parameter.master)]
        groups = [engine._model.groups.shards, engine._model.groups.replicas]
        groups = [group for group in groups if group is not backend]
        with engine.step(), pytest.raises(fc.StateError, match=r"release\(\) inside of a step"):
            engine.release()
        params = engine.release(full=False) if to is None else engine.release(to=to)
        if to is None:  # copies, so that nothing larger lives on
            sharded = [each for each in params.values() if isinstance(each, fc.ShardedArray)]
            assert all(part.array.flags.owndata for each in sharded for part in each.pieces)
        gc.collect()
        assert [each() for each in held] == [None] * 3
        assert engine.held().total == 0
        assert engine.units == ()
        assert all(group.order.closed for group in groups)
        for call in (engine.step().__enter__, engine.state_dict, engine.release, engine.unshard):
            with pytest.raises(fc.StateError, match="of an engine that was released"):
                call()
        with pytest.raises(fc.StateError, match="unit 'a' is of no use: its engine was released"):
            unit.unshard()
        with pytest.raises(fc.StateError, match="belongs to an engine already"):
            fc.FSDP([unit], backend)
        engine.close()
        return params, expected

    results = launch(body)
    for rank, (params, expected) in enumerate(results):
        if to is None:
            continue
        if to not in ("all", rank):
            assert not params
            continue
        assert set(params) == {*expected, "z.tied"}
        assert params["z.tied"] is params["a.w"]
        for name, array in expected.items():
            assert params[name].tobytes() == array.tobytes()
            assert params[name].dtype == array.dtype
    if to is None:
        whole = assembled([params for params, _ in results])
        for name, array in results[0][1].items():
            assert whole[name].tobytes() == array.tobytes()
