"""What a step, a unit or an engine refuses, and that it says what was expected instead."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_steps import cause_of, is_clean, launch, one_pass, train, values_of

import fsdpcore as fc


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (3, 5), "b": (5,), "scale": (), "none": (0, 4)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def engine_of(backend, units=2, **options):
    made = [fc.Unit(f"u{i}", arrays(i)) for i in range(units)]
    options.setdefault("optimizer", fc.optim.SGD(lr=1.0))
    return fc.FSDP(made, backend, **options)


def whole_pass(engine, step):
    one_pass(step, engine.units)


def misuse_backward_first(engine):
    with engine.step() as step, step.backward("u0"):
        pass


def misuse_second_backward(engine):
    with engine.step() as step:
        with step.forward("u0"):
            pass
        for _ in range(2):
            with step.backward("u0"):
                pass


def misuse_update_twice(engine):
    with engine.step() as step:
        whole_pass(engine, step)
        step.update()
        step.update()


def misuse_update_first(engine):
    with engine.step() as step:
        step.update()


def misuse_forward_after_update(engine):
    with engine.step() as step:
        whole_pass(engine, step)
        step.update()
        with step.forward("u0"):
            pass


def misuse_no_update(engine):
    with engine.step() as step:
        whole_pass(engine, step)


def misuse_half_a_backward(engine):
    with engine.step() as step:
        for unit in engine.units:
            with step.forward(unit):
                pass
        with step.backward("u1"):
            pass
        step.update()


def misuse_nested_units(engine):
    with engine.step() as step, step.forward("u0"), step.forward("u1"):
        pass


def misuse_nested_steps(engine):
    with engine.step(), engine.step():
        pass


def misuse_outside_of_a_step(engine):
    with engine.step().forward("u0"):
        pass


def misuse_backward_in_evaluation(engine):
    with engine.evaluation() as step:
        with step.forward("u0"):
            pass
        with step.backward("u0"):
            pass


def misuse_two_engines(engine):
    fc.FSDP(engine.units, engine.backend)


def misuse_unfinished_gradients(engine):
    engine.units[0].begin_gradients()
    engine.units[0].begin_gradients()


def misuse_nothing_to_reduce(engine):
    engine.units[0].reduce_gradients()


def misuse_update_inside_a_unit(engine):
    with engine.step() as step:
        whole_pass(engine, step)
        with step.forward("u0"):
            step.update()


def misuse_update_after_the_step(engine):
    with engine.step() as step:
        whole_pass(engine, step)
        step.update()
    with engine.step() as step:
        pass
    step.update()


def misuse_forward_after_the_step(engine):
    with engine.step() as step:
        pass
    with step.forward("u0"):
        pass


def misuse_no_sync_never_reduced(engine):
    with engine.step() as step:
        with step.no_sync():
            whole_pass(engine, step)
        step.update()


def misuse_no_sync_for_one_unit_too_many(engine):
    with engine.step() as step:
        with step.no_sync():
            whole_pass(engine, step)
        one_pass(step, ["u0"])
        step.update()


def misuse_no_sync_twice(engine):
    with engine.step() as step, step.no_sync(), step.no_sync():
        pass


def misuse_evaluation_in_a_step(engine):
    with engine.step(), engine.evaluation():
        pass


def misuse_update_in_evaluation(engine):
    with engine.evaluation() as step:
        with step.forward("u0"):
            pass
        step.update()


def misuse_gradients_begun_by_hand_in_backward(engine):
    with engine.step() as step:
        with step.forward("u0"):
            pass
        with step.backward("u0"):
            engine.units[0].begin_gradients()


def misuse_forward_with_open_gradients(engine):
    engine.units[0].begin_gradients()
    with engine.step() as step, step.forward("u0"):
        pass


def misuse_params_too_early(engine):
    _ = engine.units[0].params


def misuse_params_after_the_context(engine):
    with engine.step() as step, step.forward("u0"):
        pass
    _ = engine.units[0].params


def misuse_gradients_after_the_context(engine):
    with engine.step() as step:
        with step.forward("u0"):
            pass
        with step.backward("u0") as (_, grads):
            pass
        grads["w"] = np.zeros((3, 5), np.float32)


def misuse_update_without_an_optimizer(engine):
    bare = fc.FSDP([fc.Unit("bare", arrays())], engine.backend)
    train(bare)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (misuse_backward_first, "backward of unit 'u0' without a forward pass in this step"),
        (misuse_second_backward, "backward of unit 'u0' without a forward"),
        (misuse_update_twice, "update\\(\\) was called already"),
        (
            misuse_update_first,
            r"update\(\) without gradients; run .* has no rows in this step goes",
        ),
        (misuse_forward_after_update, "forward after update"),
        (misuse_no_update, "gradients that were never applied; call step.update"),
        (misuse_half_a_backward, "units \\['u0'\\] had a forward pass without its backward"),
        (misuse_nested_units, "inside the context of unit 'u0'; leave"),
        (misuse_nested_steps, "a step is open already"),
        (misuse_outside_of_a_step, "forward outside of the step"),
        (misuse_backward_in_evaluation, "an evaluation has no backward pass"),
        (misuse_two_engines, "belongs to an engine already"),
        (misuse_unfinished_gradients, "gradients that were not reduced"),
        (misuse_nothing_to_reduce, "has no gradients to reduce"),
        (misuse_update_inside_a_unit, "update\\(\\) inside the context of unit 'u0'"),
        (misuse_update_after_the_step, r"update\(\) outside of the step; use it inside"),
        (misuse_forward_after_the_step, "forward outside of the step; use it inside 'with engine"),
        (
            misuse_no_sync_never_reduced,
            r"gradients of units \['u0', 'u1'\] were kept by no_sync\(\) and never reduced; run "
            r"the backward pass of the last microbatch outside of no_sync\(\)",
        ),
        (misuse_no_sync_for_one_unit_too_many, r"units \['u1'\] were kept by no_sync"),
        (misuse_no_sync_twice, r"no_sync\(\) inside of no_sync\(\); one is enough"),
        (misuse_evaluation_in_a_step, "a step is open already; leave it"),
        (misuse_update_in_evaluation, r"an evaluation has no update\(\); use engine\.step"),
        (misuse_gradients_begun_by_hand_in_backward, "unit 'u0' has gradients that were not"),
        (misuse_forward_with_open_gradients, "unit 'u0' has gradients that were not reduced"),
        (misuse_params_too_early, r"of unit 'u0' are sharded; call unshard\(\) first"),
        (misuse_params_after_the_context, "of unit 'u0' are sharded; call unshard"),
        (misuse_gradients_after_the_context, r"were reduced or dropped; write them before"),
        (misuse_update_without_an_optimizer, r"no optimizer; pass one: FSDP\(\.\.\., optimizer="),
    ],
)
def test_misuse_says_what_was_expected(misuse, message):
    error = cause_of(lambda backend: misuse(engine_of(backend)))
    assert isinstance(error, fc.StateError)
    with pytest.raises(fc.StateError, match=message):
        raise error


def test_a_unit_without_an_engine_says_so():
    with pytest.raises(fc.StateError, match="belongs to no engine yet"):
        fc.Unit("u", arrays()).unshard()


def test_a_refused_update_may_be_tried_again():
    def body(backend):
        engine = engine_of(backend)
        before = values_of(engine)
        with engine.step() as step:
            with step.forward("u0"):
                pass
            with pytest.raises(fc.StateError, match=r"update\(\) without gradients"):
                step.update()
            with step.backward("u0") as (_, grads):
                with pytest.raises(fc.ArgumentError, match=r"gradient of u0\.w must have shape"):
                    grads["w"] = np.ones(15, np.float32)
                with pytest.raises(fc.ArgumentError, match="and dtype float32, got"):
                    grads["w"] = np.ones((3, 5))
                grads["w"] = np.ones((3, 5), np.float32)
            with pytest.raises(fc.ArgumentError, match="clip must be a positive number"):
                step.update(clip=-1.0)
            with step.forward("u1"):
                with pytest.raises(fc.StateError, match=r"update\(\) inside the context"):
                    step.update()
                with pytest.raises(fc.StateError, match="leave that one first"), step.forward("u0"):
                    pass
            with step.backward("u1"):
                pass
            step.update()
            with pytest.raises(fc.StateError, match=r"update\(\) was called already"):
                step.update()
        assert engine.steps == 1
        after = values_of(engine)
        assert_array_equal(after["u0"]["w"], before["u0"]["w"] - 1)
        for unit, name in (("u0", "b"), ("u1", "w"), ("u1", "b")):
            assert_array_equal(after[unit][name], before[unit][name])
        assert is_clean(engine)

    launch(body, 3)


@pytest.mark.parametrize("window", [True, False])
def test_parameters_are_gone_after_their_block(window):
    """Also where their memory is still there: what is wrong elsewhere is wrong here."""

    def body(backend):
        engine = engine_of(backend, window=window)
        with engine.step() as step:
            with step.forward("u0") as early:
                assert early["w"].size
            with step.backward("u0") as (late, _), step.forward("u0") as again:
                assert again["w"].size
            for params in (early, late, again):
                for use in (lambda p: p["w"], len, list, lambda p: "w" in p):
                    with pytest.raises(fc.StateError, match="inside of the with block only"):
                        use(params)
            step.update()

    fc.launch(body, world_size=2)


def test_parameters_cannot_be_written_in_a_pass():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            with step.forward("u0") as params:
                with pytest.raises(ValueError, match="read-only"):
                    params["w"][0] = 1
                with pytest.raises(TypeError, match="item assignment"):
                    params["w"] = np.ones((3, 5), np.float32)
            with (
                step.backward("u0") as (params, _),
                pytest.raises(ValueError, match="WRITEABLE"),
            ):
                params["w"].flags.writeable = True
            step.update()

    for window in (True, False):
        launch(body, 2, hosts=1 if window else 2)


@pytest.mark.parametrize("window", [True, False])
def test_ranks_that_go_different_ways_are_told_which(window):
    """Of sizes that match, so that nothing else would be noticed."""

    def body(backend):
        units = [fc.Unit(f"u{i}", {"w": np.zeros(6, np.float32)}) for i in range(3)]
        engine = fc.FSDP(
            units, backend, strategy="no_shard", window=window, optimizer=fc.optim.SGD(lr=1.0)
        )
        order = ["u0", "u2", "u1"] if backend.rank == 1 else ["u0", "u1", "u2"]
        with engine.step() as step:
            for unit in order:
                with step.forward(unit):
                    pass
            for unit in ("u2", "u1", "u0"):
                with step.backward(unit):
                    pass
            step.update()

    error = cause_of(body, 3)
    assert isinstance(error, fc.MismatchError)
    assert str(error) == (
        "the ranks went through the units in different orders: use 2 of this step was forward of "
        "unit 'u1' on rank 0, but forward of unit 'u2' on rank 1; all ranks must take the same way "
        "through the model"
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clip": 1.0}, "clip is nan on rank 0, but 1 on rank 1"),
        ({"lr": 0.5}, "lr is nan on rank 0, but 0.5 on rank 1"),
    ],
)
def test_ranks_that_update_differently_are_told_how(options, named):
    def body(backend):
        train(engine_of(backend), **(options if backend.rank == 1 else {}))

    error = cause_of(body, 2)
    assert isinstance(error, fc.MismatchError)
    assert f"update: {named}; give all ranks the same" in str(error)
