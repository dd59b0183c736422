"""``train_step``: sharded training by a function of the whole model, the same as unsharded."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support import mlp
from support.fsdp_steps import (
    WORLD,
    is_clean,
    launch,
    state_bytes,
    strategies_in_turn,
    values_of,
)
from support.spmd import run

import fsdpcore as fc
from fsdpcore.adapters.function import train_step

STEPS = 20
FEW = 6  # where it is the way there that differs, not the numbers


def engine_of(backend, dtype=np.float32, **options):
    units = [fc.Unit(name, params) for name, params in mlp.initial(dtype=dtype).items()]
    options.setdefault("optimizer", fc.optim.SGD(lr=mlp.LR, momentum=mlp.MOMENTUM))
    return fc.FSDP(units, backend, **options)


def train(backend, options=None, dtype=np.float32, steps=STEPS):
    """Losses of all rows, and the parameters in the end."""
    engine = engine_of(backend, dtype, **(options or {}))
    rows = mlp.rows_of(backend)
    losses = []
    for number in range(steps):
        x, wanted = mlp.batch(number, dtype)
        args = engine, mlp.loss_and_grads, x[rows], wanted[rows]
        loss = train_step(*args, divisor=mlp.BATCH)
        losses.append(float(fc.all_reduce(np.float64(loss), backend)) / mlp.BATCH)
    return losses, values_of(engine), engine.gathered_peak, is_clean(engine)


def assert_as_unsharded(results, dtype=np.float32, steps=STEPS):
    """Twenty steps of sums in another order differ by some units of the last place in each."""
    last = float(np.finfo(dtype).eps)
    want_losses, want = mlp.trained(steps, dtype)
    if steps == STEPS:
        assert want_losses[-1] < want_losses[0] / 2  # it learns, so the comparison says something
    for losses, params, *_, clean in results:
        assert clean
        assert_allclose(losses, want_losses, rtol=200 * last)
        for unit, named in want.items():
            for name, array in named.items():
                assert_allclose(params[unit][name], array, atol=200 * last)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_trains_as_numpy_does_unsharded(world_size, dtype):
    results = run(train, transport="sim", world_size=world_size, args=(None, dtype))
    assert_as_unsharded(results, dtype)


@strategies_in_turn(0)
def test_so_it_does_with_every_strategy(strategy, window):
    args = {"strategy": strategy, "window": window}, np.float32, FEW
    assert_as_unsharded(run(train, transport="sim", world_size=WORLD, args=args), steps=FEW)


def test_it_takes_the_model_and_the_gradients_of_the_largest_unit():
    for world_size in (2, 3):
        sizes = [
            -(-sum(a.size for a in named.values()) // world_size) * world_size * 4
            for named in mlp.initial().values()
        ]
        args = {"window": False}, np.float32, 2
        for result in run(train, transport="sim", world_size=world_size, args=args):
            # The gradients of a unit are reduced when its parameters have been freed.
            alive = [sum(sizes[: number + 1]) + sizes[number] for number in range(len(sizes))]
            assert result[2] == max(alive)


def test_what_the_function_gets_and_what_comes_back():
    def body(backend):
        engine = engine_of(backend)
        marker = object()
        seen = []

        def function(params, *batch):
            assert type(params) is dict
            assert {type(named) for named in params.values()} == {dict}
            assert not any(a.flags.writeable for named in params.values() for a in named.values())
            seen.extend([params, batch])
            return marker, {"dense1": {"b": np.ones(mlp.SIZES[2], np.float32)}}

        before = values_of(engine)
        assert train_step(engine, function, 1, "two", lr=0.5) is marker
        assert seen == [{}, (1, "two")]
        after = values_of(engine)
        assert_allclose(before["dense1"]["b"] - after["dense1"]["b"], 0.5, rtol=1e-6)
        assert all(np.array_equal(before["dense0"][n], after["dense0"][n]) for n in "wb")

    launch(body, 2)


@pytest.mark.parametrize(
    "result", [None, 1.0, (1.0, [1, 2]), (1.0, {}, 3), [1.0, {}]], ids=lambda r: type(r).__name__
)
def test_another_kind_of_result_is_refused(result):
    def body(backend):
        engine = engine_of(backend)
        before = state_bytes(engine)
        with pytest.raises(fc.ArgumentError, match="must return the loss, and a mapping"):
            train_step(engine, lambda params: result)
        if not isinstance(result, tuple):
            with pytest.raises(fc.ArgumentError, match=r"loss_and_grads or jax\.value_and_grad"):
                train_step(engine, lambda params: result)
        assert state_bytes(engine) == before
        assert is_clean(engine)

    launch(body, 1)


def test_arguments_in_another_order_are_refused():
    def body(backend):
        engine = engine_of(backend)
        x = np.ones(2)
        with pytest.raises(fc.ArgumentError, match=r"function of \(params, \*batch\), got ndarray"):
            train_step(engine, x, mlp.loss_and_grads)
        with pytest.raises(fc.ArgumentError, match="needs an FSDP engine, got function"):
            train_step(mlp.loss_and_grads, engine, x)
        assert is_clean(engine)

    launch(body, 1)


def test_the_update_has_its_options():
    def body(backend):
        engine = engine_of(backend)
        huge = {"dense0": {"b": np.full(mlp.SIZES[1], np.inf, np.float32)}}
        with pytest.raises(fc.NonFiniteGradientError):
            train_step(engine, lambda params: (0.0, huge))
        train_step(engine, lambda params: (0.0, huge), skip_nonfinite=True)
        assert engine.steps == 0
        before = values_of(engine)
        ones = {"dense0": {"b": np.ones(mlp.SIZES[1], np.float32)}}
        train_step(engine, lambda params: (0.0, ones), clip=0.1, lr=1.0)
        moved = before["dense0"]["b"] - values_of(engine)["dense0"]["b"]
        assert np.linalg.norm(moved) == pytest.approx(0.1, rel=1e-4)
        with pytest.raises(TypeError, match="clp"):
            train_step(engine, lambda params: (0.0, ones), clp=0.1)

    launch(body, 2)


def test_a_failing_function_changes_nothing():
    def body(backend):
        engine = engine_of(backend)
        before = state_bytes(engine)
        with pytest.raises(ZeroDivisionError):
            train_step(engine, lambda params: 1 / 0)
        assert state_bytes(engine) == before
        assert is_clean(engine)

    launch(body, 2)
