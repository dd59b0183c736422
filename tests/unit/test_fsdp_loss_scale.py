"""Scaled losses, and gradients that are inf or nan: all ranks skip, or all of them say why not."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import (
    WORLD,
    by_strategy,
    is_clean,
    launch,
    nothing,
    one_pass,
    state_bytes,
    strategies_in_turn,
    train,
    values_of,
)

import fsdpcore as fc

SHAPES = {"w": (5, 3), "b": (4,), "scale": ()}


def engine_of(backend, dtype=np.float32, **options):
    rng = np.random.default_rng(0)
    units = [
        fc.Unit(f"u{i}", {n: rng.normal(size=s).astype(dtype) for n, s in SHAPES.items()})
        for i in range(2)
    ]
    options.setdefault("optimizer", fc.optim.AdamW(lr=0.01))
    return fc.FSDP(units, backend, **options)


def noise(rank, number, scale=1.0):
    """Gradients of this rank in a step, times the scale of the loss."""

    def give(unit, params, grads):
        rng = np.random.default_rng((rank, number, int(unit.name[1])))
        for name, array in params.items():
            value = rng.normal(size=array.shape) * scale
            grads[name] = np.asarray(value).astype(grads[name].dtype)

    return give


POLICIES = [
    fc.LossScale(16.0, 2.0, 0.5, 3),
    fc.LossScale(8.0, growth=4.0, backoff=0.25, interval=2, minimum=2.0, maximum=64.0),
    fc.LossScale(8.0, growth=1.0, interval=1),
    fc.LossScale(8.0, backoff=1.0, interval=1, maximum=8.0),
]
OVERFLOWS = [0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def scales(policy):
    """The scale before each update, and in the end; told a second time."""
    found, scale, row = [policy.initial], policy.initial, 0
    for overflow in OVERFLOWS:
        row = 0 if overflow else row + 1
        if overflow:
            scale = scale * policy.backoff
        elif row % policy.interval == 0:
            scale, row = scale * policy.growth, 0
        scale = sorted([policy.minimum, scale, policy.maximum])[1]
        found.append(scale)
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_the_scale_grows_and_falls_as_documented_and_alike_on_all_ranks(policy):
    def body(backend):
        engine = engine_of(backend, precision=fc.Precision(loss_scale=policy))
        found = [engine.loss_scale]
        for number, overflow in enumerate(OVERFLOWS):
            bad = overflow and number % backend.world_size == backend.rank

            def give(unit, params, grads, bad=bad):
                if bad and unit.name == "u1":
                    grads["b"][-1] = np.inf

            step, _ = train(engine, give)
            assert step.skipped == bool(overflow)
            found.append(engine.loss_scale)
        assert engine.steps == OVERFLOWS.count(0)
        return found

    assert launch(body, 3) == [scales(policy)] * 3


@pytest.mark.parametrize(
    ("bad", "clip"),
    [
        (math.nan, {}),
        (math.nan, {"clip": 1.0}),
        (math.inf, {"clip": 1.0}),
        (-math.inf, {"clip_value": 0.5}),
    ],
)
@by_strategy
def test_inf_or_nan_on_one_rank_makes_all_of_them_skip(strategy, bad, clip):
    def body(backend):
        scaling = fc.LossScale(4.0, backoff=0.5)
        engine = engine_of(backend, strategy=strategy, precision=fc.Precision(loss_scale=scaling))
        train(engine, noise(backend.rank, 0, 4.0))
        before, values = state_bytes(engine), values_of(engine)

        def give(unit, params, grads):
            noise(backend.rank, 1, 4.0)(unit, params, grads)
            if backend.rank == 2 and unit.name == "u0":
                grads["w"][3, 1] = bad

        step, norm = train(engine, give, **clip)
        assert step.skipped
        assert norm is None or not math.isfinite(norm)
        assert state_bytes(engine) == before
        for unit, named in values_of(engine).items():
            for name, array in named.items():
                assert_array_equal(array, values[unit][name])
        assert (engine.steps, engine.loss_scale) == (1, 2.0)
        assert is_clean(engine)
        step, _ = train(engine, noise(backend.rank, 1, 2.0), **clip)
        assert not step.skipped
        assert engine.steps == 2
        return {unit.name: unit.shard_rank for unit in engine.units}, state_bytes(engine)

    results = launch(body)
    by_shard = {tuple(ranks.values()): state for ranks, state in results}
    for ranks, state in results:
        assert state == by_shard[tuple(ranks.values())]


CLIPS = [
    *({}, {"clip": 0.7}, {"clip": 0.7, "norm_type": 1.0}, {"clip_value": 0.25}),
    *({"clip": math.inf}, {"clip_value": math.inf}),  # no limits
]


def trained(backend, loss_scale, clip, dtype, strategy="full_shard"):
    precision = fc.Precision(dtype, np.float32, loss_scale)
    engine = engine_of(backend, precision=precision, strategy=strategy)
    norms = []
    for number in range(5):
        _, norm = train(engine, noise(backend.rank, number, engine.loss_scale), **clip)
        norms.append(norm)
    return norms, state_bytes(engine)


@pytest.mark.parametrize(
    ("dtype", "clip"),
    [*zip([None, ml_dtypes.bfloat16] * 3, CLIPS, strict=True)],
    ids=str,
)
def test_scales_that_are_powers_of_two_change_no_bit(dtype, clip):
    expected = launch(lambda backend: trained(backend, None, clip, dtype), 3)
    for scaling in (2.0**16, 2.0**-3, fc.LossScale(256.0, growth=8.0, interval=2)):
        assert launch(lambda backend, s=scaling: trained(backend, s, clip, dtype), 3) == expected


@pytest.mark.parametrize("scaling", [None, 3.0, fc.LossScale(1024.0)])
@by_strategy
def test_norm_and_limits_are_those_of_gradients_without_the_scale(strategy, scaling):
    clip = 0.5

    def body(backend):
        found = []
        for options in ({"clip": clip}, {"clip_value": clip}):
            engine = engine_of(
                backend,
                strategy=strategy,
                precision=fc.Precision(loss_scale=scaling),
                optimizer=fc.optim.SGD(lr=1.0),
            )
            before = values_of(engine)
            _, norm = train(engine, noise(backend.rank, 0, engine.loss_scale), **options)
            after = values_of(engine)
            found.append((norm, {u: {n: p[n] - after[u][n] for n in p} for u, p in before.items()}))
        return found

    full: dict[str, dict[str, np.ndarray]] = {f"u{i}": {} for i in range(2)}
    for unit, named in full.items():
        draws = [np.random.default_rng((rank, 0, int(unit[1]))) for rank in range(WORLD)]
        for name, shape in SHAPES.items():
            named[name] = np.mean([rng.normal(size=shape) for rng in draws], axis=0)
    flat = np.concatenate([np.ravel(a) for named in full.values() for a in named.values()])
    expected = np.linalg.norm(flat)
    for (norm, by_norm), (none, by_value) in launch(body):
        assert_allclose(norm, expected, rtol=1e-6)
        assert none is None
        for unit, named in full.items():
            for name, exact in named.items():
                scaled = exact * min(1.0, clip / expected)
                assert_allclose(by_norm[unit][name], scaled, atol=1e-6)
                assert_allclose(by_value[unit][name], np.clip(exact, -clip, clip), atol=1e-6)


def test_float16_overflows_until_the_scale_is_small_enough_and_then_learns():
    """The gradient is 1; scaled by more than 65504 it is inf in float16."""

    def body(backend):
        engine = engine_of(
            backend,
            precision=fc.Precision(np.float16, np.float16, fc.LossScale(2.0**20)),
            optimizer=fc.optim.SGD(lr=2.0**-6),
        )
        before, skipped = engine.units[0].shard.copy(), []

        def give(unit, params, grads):
            with np.errstate(over="ignore"):
                grads["w"] = np.full((5, 3), engine.loss_scale, np.float32).astype(np.float16)

        for _ in range(8):
            step, norm = train(engine, give, clip=1e9)
            skipped.append(step.skipped)
        assert_allclose(norm, 30**0.5, rtol=1e-6)
        assert engine.loss_scale == 2.0**15
        moved = before - engine.units[0].shard
        return skipped, moved[: engine.units[0].valid_size]

    results = launch(body, 2)
    assert [skipped for skipped, _ in results] == [[True] * 5 + [False] * 3] * 2
    flat = np.concatenate([moved for _, moved in results])
    assert_allclose(flat[:15], 3 * 2.0**-6, atol=1e-6)
    assert_array_equal(flat[15:], 0)


def test_small_gradients_that_float16_would_lose_are_kept_by_the_scale():
    def body(backend, scaling):
        engine = engine_of(
            backend,
            precision=fc.Precision(np.float16, np.float32, scaling),
            optimizer=fc.optim.SGD(lr=1.0),
        )

        def give(unit, params, grads):
            grads["b"] = np.full(4, 1e-8 * engine.loss_scale).astype(np.float16)

        with engine.step() as step:
            one_pass(step, engine.units, give)
            return step.update(clip=1.0)

    assert launch(lambda b: body(b, None), 2) == [0.0] * 2
    for norm in launch(lambda b: body(b, 65536.0), 2):
        assert_allclose(norm, 1e-8 * 8**0.5, rtol=1e-3)


def test_a_constant_scale_stays_as_it_is_and_inf_is_skipped():
    def body(backend):
        engine = engine_of(backend, precision=fc.Precision(loss_scale=128))
        for bad in (0.0, np.inf, 0.0):
            step, _ = train(engine, lambda u, p, g, bad=bad: g["w"].fill(bad))
            assert step.skipped == bool(bad)
            assert engine.loss_scale == 128
        return engine.steps

    assert launch(body, 2) == [2, 2]


@strategies_in_turn(1)
def test_without_scaling_inf_and_nan_are_errors_that_name_the_ranks(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        assert engine.loss_scale == 1.0
        before = state_bytes(engine)

        def give(unit, params, grads):
            if backend.rank == 1:
                grads["scale"] = np.float32(np.nan)  # the last element of the unit

        for clip in (None, 1.0):
            with pytest.raises(fc.NonFiniteGradientError) as caught:
                train(engine, give, clip=clip)
            assert state_bytes(engine) == before
            assert is_clean(engine)
        train(engine, nothing)
        return str(caught.value)

    (message,) = set(launch(body))
    assert message.startswith("the gradients of 'u")
    assert "are inf or nan; those of rank 1 were so before the sum" in message
    assert "no parameter was changed" in message
    for remedy in ("Leave the step without update", "lower the learning rate"):
        assert remedy in message
    assert "skip_nonfinite=True" in message
    assert "Precision(loss_scale=LossScale())" in message


def test_skip_nonfinite_leaves_the_update_out_without_scaling():
    def body(backend):
        engine = engine_of(backend)
        before = state_bytes(engine)

        def give(unit, params, grads):
            if backend.rank == 1:
                grads["w"][0, 0] = np.nan

        step, norm = train(engine, give, skip_nonfinite=True, clip=1.0)
        assert step.skipped
        assert math.isnan(norm)
        assert state_bytes(engine) == before
        step, _ = train(engine, nothing, skip_nonfinite=True)
        assert not step.skipped
        return engine.steps, engine.loss_scale

    assert launch(body, 3) == [(1, 1.0)] * 3


@by_strategy
def test_gradients_whose_squares_overflow_are_finite(strategy):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, optimizer=fc.optim.SGD(lr=1.0))

        def give(unit, params, grads):
            for array in grads.values():
                array[...] = 1e30

        for skip in (False, True):
            step, _ = train(engine, give, skip_nonfinite=skip)
            assert not step.skipped
        for named in values_of(engine).values():
            for array in named.values():
                assert_array_equal(array, np.float32(-2e30))

    launch(body)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.float32, 3e38), (np.float32, 1e-30), (np.float64, 1e300), (np.float64, 1e-200)],
)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
def test_norms_are_right_where_powers_overflow_or_vanish(dtype, value, norm_type):
    elements = 2 * sum(math.prod(shape) for shape in SHAPES.values())

    def body(backend):
        engine = engine_of(backend, dtype, optimizer=fc.optim.SGD(lr=1.0))

        def give(unit, params, grads):
            for array in grads.values():
                array[...] = value if backend.rank == 0 else 0

        with engine.step(divisor=1) as step:
            one_pass(step, engine.units, give)
            norm = step.update(clip=1.0, norm_type=norm_type)
        return norm, step.skipped

    expected = float(dtype(value)) * elements ** (1 / norm_type)
    for norm, skipped in launch(body):
        assert norm == pytest.approx(expected, rel=1e-6, abs=0)
        assert not skipped


def test_ranks_that_differ_in_what_they_ask_for_are_told():
    def body(backend):
        engine_of(backend, precision=fc.Precision(loss_scale=2.0 + backend.rank))

    with pytest.raises(fc.RankFailedError) as caught:
        launch(body, 2)
    assert isinstance(caught.value.__cause__, fc.MismatchError)
    assert "precision" in str(caught.value.__cause__)
