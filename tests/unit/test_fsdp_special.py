"""Frozen and ignored parameters, and units that a step does not use."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_steps import (
    WORLD,
    is_clean,
    launch,
    nothing,
    one_pass,
    strategies_in_turn,
    train,
    values_of,
)

import fsdpcore as fc

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ODD_DTYPES = [
    np.int64,
    np.int8,
    np.uint16,
    np.bool_,
    np.float16,
    BFLOAT16,
    np.float64,
    np.complex64,
]


def weights(seed=0, shape=(5, 3)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ones(unit, params, grads):
    for name in grads:
        grads[name][...] = 1


def adapted(rank=2):
    """A frozen matrix and its trained adapter (LoRA), between units that are frozen as a whole."""
    return [
        fc.Unit("before", {"w": weights(1), "b": weights(2, (3,))}, frozen="*"),
        fc.Unit(
            "adapted",
            {
                "attn.w": weights(3, (7, 5)),
                "attn.lora_a": weights(4, (7, rank)),
                "attn.lora_b": np.zeros((rank, 5), np.float32),
                "norm.scale": np.ones(5, np.float32),
            },
            frozen=["*.w", "norm.*"],
        ),
        fc.Unit("after", {"w": weights(5)}, frozen="w"),
    ]


ADAPTER = 7 * 2 + 2 * 5


@strategies_in_turn(0)
def test_frozen_parameters_are_gathered_but_never_change(strategy, window):
    def body(backend):
        before = {unit.name: dict(unit.initial) for unit in adapted()}
        engine = fc.FSDP(
            adapted(),
            backend,
            strategy=strategy,
            window=window,
            optimizer=fc.optim.AdamW(lr=0.1, weight_decay=0.5),
        )

        def give(unit, params, grads):
            assert list(params) == list(before[unit.name])
            assert sorted(grads) == sorted(n for n in params if "lora" in n)
            ones(unit, params, grads)

        for accumulate in (False, True, False):
            with engine.step() as step:
                if accumulate:
                    with step.no_sync():
                        one_pass(step, engine.units, give)
                one_pass(step, engine.units, give)
                norm = step.update(clip=1e9)
            assert norm == np.float32((ADAPTER * (4 if accumulate else 1)) ** 0.5)
        for unit, named in values_of(engine).items():
            for name, array in named.items():
                if "lora" in name:
                    assert (array != before[unit][name]).all()
                else:
                    assert array.tobytes() == before[unit][name].tobytes()
        assert is_clean(engine)

    launch(body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_frozen_parameters_have_no_gradients_and_no_optimizer_state(world_size):
    def body(backend):
        engine = fc.FSDP(adapted(), backend, optimizer=fc.optim.AdamW(lr=0.1), window=False)
        train(engine, ones)
        for unit in engine.units:
            assert unit.trainable == (unit.name == "adapted")
            assert len(unit.optimizer_state) == (2 if unit.trainable else 0)
        return engine.held()

    shard = -(-ADAPTER // world_size)
    frozen = sum(-(-size // world_size) for size in (15 + 3, 35 + 5, 15))
    for held in launch(body, world_size):
        assert held.gradients == 4 * shard
        assert held.optimizer == 4 * 2 * shard
        assert held.parameters == 4 * (shard + frozen)


def test_full_gradients_of_frozen_parameters_are_never_allocated():
    def body(backend):
        engine = fc.FSDP(
            adapted(), backend, optimizer=fc.optim.SGD(lr=1.0), window=False, prefetch=0
        )
        with engine.step() as step:
            with step.forward("before"):
                assert engine.held().buffers == 4 * 20  # 18 elements, over four ranks
            with step.backward("before") as (params, grads):
                assert engine.held().buffers == 4 * 20
                assert len(params) == 2
                assert len(grads) == 0
            with step.forward("adapted"):
                pass
            with step.backward("adapted"):
                assert engine.held().buffers == 4 * (40 + ADAPTER + ADAPTER)
            step.update()

    launch(body)


@strategies_in_turn(1)
def test_frozen_parameters_may_have_any_dtype(strategy, window):
    def body(backend):
        rng = np.random.default_rng(0)
        frozen = {
            f"f{n}": (rng.normal(size=(3, n + 1)) * 50).astype(dtype)
            for n, dtype in enumerate(ODD_DTYPES)
        }
        params = {"w": weights(), **frozen, "none": np.zeros((0, 2), np.int32)}
        engine = fc.FSDP(
            [fc.Unit("u", params, frozen=[*frozen, "none"])],
            backend,
            strategy=strategy,
            window=window,
            precision=fc.Precision(BFLOAT16, np.float32),
            optimizer=fc.optim.SGD(lr=1.0),
        )
        train(engine, ones)
        unit, got = engine.units[0], values_of(engine)["u"]
        assert list(got) == list(params)
        for name, array in (frozen | {"none": params["none"]}).items():
            assert got[name].dtype == array.dtype
            assert_array_equal(got[name], array)
        assert_array_equal(got["w"], (weights() - 1).astype(BFLOAT16))
        unit.load({"f0": frozen["f0"] + 1, "f4": frozen["f4"] * 2})
        got = values_of(engine)["u"]
        assert_array_equal(got["f0"], frozen["f0"] + 1)
        assert_array_equal(got["f4"], frozen["f4"] * 2)
        assert_array_equal(got["f1"], frozen["f1"])
        assert is_clean(engine)

    launch(body)


def test_frozen_parameters_of_the_trained_dtype_are_computed_in_that_of_the_trained():
    def body(backend):
        params = {"w": weights(), "base": weights(1), "made": fc.Spec((4, 3), np.float32)}
        engine = fc.FSDP(
            [fc.Unit("u", params, frozen=["base", "made"])],
            backend,
            precision=fc.Precision(BFLOAT16),
            optimizer=fc.optim.SGD(lr=1.0),
        )
        got = values_of(engine)["u"]
        assert {array.dtype for array in got.values()} == {BFLOAT16}
        assert_array_equal(got["base"], weights(1).astype(BFLOAT16))
        # Without a master: nothing is ever added to them.
        assert engine.held().parameters == 8 * (4 + 2) + 14 * 2

    launch(body, 2)


@strategies_in_turn(0)
def test_ignored_arrays_are_left_as_they_are(strategy, window):
    table = np.arange(12.0)[::2]  # of its own dtype, and not contiguous
    steps = np.array(3, np.int32)

    def body(backend):
        mine = np.full((2, 2), backend.rank, np.float64)  # not even the same on all ranks
        words = np.array([["a", None], ["b", 1]], object)
        params = {"w": weights(), "rope": table, "own": mine, "steps": steps, "words": words}
        engine = fc.FSDP(
            [fc.Unit("u", params, ignored=["rope", "own", "st*", "words"])],
            backend,
            strategy=strategy,
            window=window,
            precision=fc.Precision(BFLOAT16),
            optimizer=fc.optim.SGD(lr=1.0),
        )

        def give(unit, params, grads):
            assert list(params) == ["w", "rope", "own", "steps", "words"]
            assert_array_equal(params["words"], words)
            assert list(grads) == ["w"]
            assert params["rope"].dtype == params["own"].dtype == np.float64
            assert params["steps"].shape == ()
            assert np.shares_memory(params["own"], mine)
            assert_array_equal(params["rope"], table)
            with pytest.raises(ValueError, match="read-only"):
                params["own"][:] = 0
            ones(unit, params, grads)

        train(engine, give)
        assert_array_equal(mine, backend.rank)
        assert_array_equal(values_of(engine)["u"]["own"], backend.rank)
        shards = {"no_shard": 1, "hybrid_shard": 2}.get(strategy.name, WORLD)
        assert engine.units[0].shard.size == -(-15 // shards)
        assert engine.held().unsharded == 15 * (4 + 2 + 2)

    launch(body)


@strategies_in_turn(1)
def test_an_engine_of_nothing_but_frozen_units_can_take_steps(strategy, window):
    def body(backend):
        units = [unit for unit in adapted() if unit.name != "adapted"]
        engine = fc.FSDP(
            units, backend, strategy=strategy, window=window, optimizer=fc.optim.SGD(lr=1.0)
        )
        before = values_of(engine)
        with engine.step() as step:
            with step.no_sync():
                one_pass(step, engine.units)
            one_pass(step, engine.units)
            assert step.update(clip=1.0) == 0.0
        for unit, named in values_of(engine).items():
            for name, array in named.items():
                assert_array_equal(array, before[unit][name])
        assert engine.held().gradients == engine.held().optimizer == 0
        assert is_clean(engine)

    launch(body)


@strategies_in_turn(0)
def test_units_that_a_step_does_not_use_have_gradients_of_zero(strategy, window):
    def body(backend, *, explicit):
        units = [fc.Unit(f"u{i}", {"w": weights(i), "b": weights(i, (2,))}) for i in range(3)]
        engine = fc.FSDP(
            units,
            backend,
            strategy=strategy,
            window=window,
            optimizer=fc.optim.AdamW(lr=0.1, weight_decay=0.1),
        )
        for used in (["u0", "u1", "u2"], ["u0", "u2"], ["u1"], ["u2", "u0"]):
            with engine.step() as step:
                one_pass(step, used, ones)
                if explicit:
                    left = [unit.name for unit in engine.units if unit.name not in used]
                    one_pass(step, left, nothing)
                step.update()
        assert is_clean(engine)
        return {u: {n: a.tobytes() for n, a in p.items()} for u, p in values_of(engine).items()}

    assert launch(lambda b: body(b, explicit=False)) == launch(lambda b: body(b, explicit=True))


def test_patterns_choose_parameters_as_the_shell_does():
    params = {name: weights() for name in ("a.w", "a.b", "c.w", "c.b", "d")}
    assert fc.Unit("u", params, frozen="*.w").frozen == {"a.w", "c.w"}
    assert fc.Unit("u", params, frozen=["?", "[ac].b"]).frozen == {"a.b", "c.b", "d"}
    assert set(fc.Unit("u", params, ignored=["c.*"]).ignored) == {"c.w", "c.b"}
    both = fc.Unit("u", params, ignored=["c.*"], frozen=["*.w"])
    assert both.frozen == {"a.w"}  # what is ignored is not there to be frozen
    assert both.trained == ["a.b", "d"]
    for options in ({"frozen": "x*"}, {"ignored": ["a.*", "x*"]}):
        with pytest.raises(
            fc.ArgumentError, match=r"='x\*' matches no parameter of unit 'u'; it has"
        ):
            fc.Unit("u", params, **options)
    with pytest.raises(fc.ArgumentError, match=r"u\.d is ignored, and needs an array"):
        fc.Unit("u", {"d": fc.Spec(3)}, ignored="d")
