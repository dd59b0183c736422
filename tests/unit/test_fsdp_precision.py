"""Parameters computed in 16 bits, gradients reduced in 16 or 32, masters that lose nothing."""

from __future__ import annotations

import itertools

import corpus
import ml_dtypes
import numpy as np
import pytest
from gpt_model import GPTConfig, build, cross_entropy
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import (
    STRATEGIES,
    WORLD,
    by_strategy,
    is_clean,
    launch,
    one_pass,
    strategies_in_turn,
    train,
    values_of,
)

import fsdpcore as fc

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16, FLOAT32, FLOAT64 = map(np.dtype, (np.float16, np.float32, np.float64))
HALVES = [BFLOAT16, FLOAT16]
# The largest relative error of rounding to nearest.
ROUNDOFF = {BFLOAT16: 2.0**-8, FLOAT16: 2.0**-11}
LR = 2.0**-12
half = pytest.mark.parametrize("dtype", HALVES, ids=str)


def initial(master):
    rng = np.random.default_rng(2)
    big = np.array([1e5, -7e4, 3e38, 1e-9, 0.0, -0.0], master)  # some of them inf in float16
    return {
        "w": rng.normal(size=(5, 7)).astype(master),
        "big": big,
        "none": np.zeros((0, 2), master),
    }


def rounded(array, dtype):
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def assert_is_rounded_master(engine, expected, dtype):
    """What is gathered, and this rank's part of what it is a copy of."""
    unit = engine.units[0]
    unit.unshard()
    for name, array in expected.items():
        assert unit.params[name].tobytes() == rounded(array, dtype).tobytes()
        assert unit.params[name].dtype == dtype
        assert unit.params[name].shape == array.shape
    unit.reshard()
    assert unit.shard.dtype == unit.dtype
    for piece in unit.layout.pieces(unit.shard_rank):
        whole = expected[piece.name].reshape(-1)[piece.param_start : piece.param_stop]
        assert_array_equal(unit.shard[piece.shard_start : piece.shard_stop], whole)
    assert not unit.shard[unit.valid_size :].any()


def write_all(unit, values):
    with unit.writing() as shard:
        assert shard.dtype == unit.dtype
        for piece in unit.layout.pieces(unit.shard_rank):
            flat = values[piece.name].reshape(-1)
            shard[piece.shard_start : piece.shard_stop] = flat[piece.param_start : piece.param_stop]


@strategies_in_turn(1)
def test_what_is_gathered_is_the_rounded_master(strategy, window):
    def body(backend):
        for dtype, master in itertools.product(HALVES, (FLOAT32, FLOAT64)):
            values = initial(master)
            engine = fc.FSDP(
                [fc.Unit("u", values)],
                backend,
                strategy=strategy,
                window=window,
                precision=fc.Precision(dtype, FLOAT32),
                optimizer=fc.optim.SGD(lr=LR),
            )
            unit = engine.units[0]
            assert_is_rounded_master(engine, values, dtype)
            for _ in range(3):
                train(engine, lambda u, p, g: g["w"].fill(1))
                values["w"] -= master.type(LR)
            assert_is_rounded_master(engine, values, dtype)
            values = {name: array * 3 + 1 for name, array in values.items() if name != "big"}
            values["big"] = initial(master)["big"][::-1].copy()
            write_all(unit, values)
            assert_is_rounded_master(engine, values, dtype)
            values["w"] = values["w"] / 3
            unit.load({"w": values["w"].astype(FLOAT64)})
            assert_is_rounded_master(engine, values, dtype)
            assert is_clean(engine)

    launch(body)


@half
def test_deferred_parameters_are_made_at_full_precision_and_then_rounded(dtype):
    def body(backend):
        spec = fc.Spec((401, 7), init=fc.initializers.normal(std=0.02))
        whole = fc.FSDP([fc.Unit("u", {"w": spec})], backend, seed=3)
        mixed = fc.FSDP([fc.Unit("u", {"w": spec})], backend, seed=3, precision=fc.Precision(dtype))
        expected = values_of(whole)["u"]
        assert len(np.unique(expected["w"])) > len(np.unique(rounded(expected["w"], dtype)))
        assert_is_rounded_master(mixed, expected, dtype)

    launch(body, 3)


@half
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_bf16_loaded_without_an_fp32_master_the_loss_sticks(dtype, strategy):
    """A complaint about others; here updates too small for 16 bits add up in the master."""
    target, steps = 0.5, 120

    def body(backend):
        engine = fc.FSDP(
            [fc.Unit("u", {"w": np.ones(6, np.float32)})],
            backend,
            strategy=strategy,
            precision=fc.Precision(dtype, FLOAT32),
            optimizer=fc.optim.SGD(lr=LR),
        )

        def slope(unit, params, grads):
            grads["w"] = params["w"].astype(FLOAT32) - np.float32(target)

        for _ in range(steps):
            train(engine, slope)
        return values_of(engine)["u"]["w"].astype(FLOAT32)

    alone = np.ones(1, dtype)
    for _ in range(steps):
        alone -= (dtype.type(LR) * (alone - dtype.type(target))).astype(dtype)
    assert alone[0] == 1  # 16 bits alone do not move at all
    exact = target + (1 - target) * (1 - LR) ** steps
    for w in launch(body, 2):
        assert_allclose(w, exact, rtol=1.5 * ROUNDOFF[dtype])
        assert (w < 1).all()


@half
@pytest.mark.parametrize("reduce", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_gradients_may_have_the_dtype_of_computation_or_of_reduction(dtype, reduce):
    def body(backend):
        engine = fc.FSDP(
            [fc.Unit("u", {"w": np.zeros(7, FLOAT32), "v": np.zeros(3, FLOAT32)})],
            backend,
            precision=fc.Precision(dtype, reduce),
            optimizer=fc.optim.SGD(lr=1.0),
        )
        for given in (dtype, reduce):

            def give(unit, params, grads, given=given):
                assert grads["w"].dtype == grads["v"].dtype == reduce
                grads["w"] = np.arange(7).astype(given)
                np.add(grads["v"], np.ones(3, reduce), out=grads["v"])

            train(engine, give)
        for wrong in {BFLOAT16, FLOAT16, FLOAT32, FLOAT64} - {dtype, reduce}:
            also = f" (or {dtype})" if dtype != reduce else ""
            with pytest.raises(fc.ArgumentError) as caught:
                train(engine, lambda u, p, g, wrong=wrong: g.update(w=np.zeros(7, wrong)))
            assert str(caught.value).startswith(
                f"gradient of u.w must have shape (7,) and dtype {reduce}{also}, "
                f"got (7,) and {wrong}; convert it"
            )
        assert is_clean(engine)
        return values_of(engine)["u"]

    for values in launch(body, 3):
        assert_array_equal(values["w"].astype(FLOAT32), -2 * np.arange(7))
        assert_array_equal(values["v"].astype(FLOAT32), -2)


def test_without_a_reduction_dtype_gradients_have_that_of_the_parameters():
    def body(backend):
        found = []
        for precision in (fc.Precision(), fc.Precision(BFLOAT16), fc.Precision(None, FLOAT16)):
            unit = fc.FSDP([fc.Unit("u", initial(FLOAT32))], backend, precision=precision).units[0]
            found.append((unit.dtypes.master, unit.dtypes.param, unit.dtypes.grad))
        return found

    (found,) = launch(body, 1)
    assert found == [
        (FLOAT32, FLOAT32, FLOAT32),
        (FLOAT32, BFLOAT16, BFLOAT16),
        (FLOAT32, FLOAT32, FLOAT16),
    ]


def gradient(dtype, rank, size=301):
    """Of different sizes on the ranks, so that sums in 16 bits would lose much."""
    values = np.random.default_rng(rank).uniform(0.5, 1, size) * 8.0 ** (rank % 3)
    return values.astype(dtype)


@half
@by_strategy
def test_reductions_in_16_bits_are_made_in_32_and_rounded(strategy, dtype):
    def body(backend):
        engine = fc.FSDP(
            [fc.Unit("u", {"w": np.zeros(301, FLOAT32)})],
            backend,
            strategy=strategy,
            precision=fc.Precision(dtype),
            optimizer=fc.optim.SGD(lr=1.0),
        )
        unit, mine = engine.units[0], gradient(dtype, backend.rank)
        unit.reduce_gradients({"w": mine})
        assert unit.grad_shard.dtype == dtype
        return unit.shard_rank, unit.grad_shard[: unit.valid_size]

    parts = dict(launch(body))
    got = np.concatenate([parts[rank] for rank in sorted(parts)]).astype(FLOAT64)
    given = [gradient(dtype, rank) for rank in range(WORLD)]
    exact = np.mean([array.astype(FLOAT64) for array in given], axis=0)
    roundings = 2 if strategy.name == "hybrid_shard" else 1
    bound = roundings * ROUNDOFF[dtype] * (1 + 1e-3)
    assert (np.abs(got - exact) / exact).max() <= bound
    narrow = given[0]  # sums in 16 bits, which would be worse
    for array in given[1:]:
        narrow = (narrow + array).astype(dtype)
    assert (np.abs(narrow.astype(FLOAT64) / WORLD - exact) / exact).max() > 1.2 * ROUNDOFF[dtype]


@pytest.mark.parametrize(("divisor", "result"), [(None, 60000), (4, 60000), (8, 30000)])
@by_strategy
def test_a_sum_too_large_for_float16_does_no_harm_to_its_mean(strategy, divisor, result):
    """Four times 60000 is more than float16 has."""

    def body(backend):
        engine = fc.FSDP(
            [fc.Unit("u", {"w": np.zeros(6, FLOAT32)})],
            backend,
            strategy=strategy,
            precision=fc.Precision(FLOAT16, FLOAT16),
            optimizer=fc.optim.SGD(lr=1.0),
        )
        with engine.step(divisor=divisor) as step:
            one_pass(step, ["u"], lambda u, p, g: g["w"].fill(60000))
            norm = step.update(clip=1e9)
        assert_allclose(norm, result * 6**0.5, rtol=1e-6)
        with engine.gathered():
            return engine.units[0].params["w"].astype(FLOAT32)

    for w in launch(body):
        assert_array_equal(w, -result)


@pytest.mark.parametrize("passes", ["reduced", "kept", "divided"])
@pytest.mark.parametrize("reduce", [FLOAT16, BFLOAT16, FLOAT32], ids=str)
def test_overflow_is_found_by_the_update_and_warns_nobody(reduce, passes):
    """Sums of microbatches, of kept gradients, and quotients; warnings are errors here."""
    param = reduce if reduce.itemsize == 2 else BFLOAT16
    most = 60000 if reduce == FLOAT16 else 3e38

    def body(backend):
        engine = fc.FSDP(
            [fc.Unit("u", {"w": np.ones(6, FLOAT32)}), fc.Unit("t", {"w": fc.Tied("u", "w")})],
            backend,
            precision=fc.Precision(param, reduce),
            optimizer=fc.optim.SGD(lr=1.0),
        )

        def give(unit, params, grads):
            grads["w"] = np.full(6, most, reduce)

        with engine.step(divisor=0.25 if passes == "divided" else None) as step:
            for last in (False, False, True):
                if last or passes != "kept":
                    one_pass(step, engine.units, give)
                else:
                    with step.no_sync():
                        one_pass(step, engine.units, give)
            step.update(skip_nonfinite=True)
        return step.skipped, engine.steps

    assert launch(body, 3) == [(True, 0)] * 3


@strategies_in_turn(0)
def test_held_memory_counts_every_array_at_its_dtype(strategy, window):
    sizes = (10, 5)  # of the trained parameters, and of the frozen ones: no multiple of anything

    def body(backend):
        params = {"w": np.ones(sizes[0], FLOAT32), "f": np.ones(sizes[1], FLOAT16)}
        engine = fc.FSDP(
            [fc.Unit("u", params, frozen="f")],
            backend,
            strategy=strategy,
            window=window,
            precision=fc.Precision(BFLOAT16, FLOAT32),
            optimizer=fc.optim.AdamW(lr=LR),
        )
        train(engine)
        return engine.held(), engine.units[0].shard_rank, engine.windowed

    shards = {"no_shard": 1, "hybrid_shard": 2}.get(strategy.name, WORLD)
    for held, rank, windowed in launch(body):
        assert windowed is window
        shard, frozen = (-(-size // shards) for size in sizes)
        valid, still = (
            max(0, min(size, (rank + 1) * part) - rank * part)
            for size, part in zip(sizes, (shard, frozen), strict=True)
        )
        kept = strategy.name in ("shard_grad_op", "shard_optimizer")
        copies = shards if kept and not window else 1
        assert held.parameters == shard * 4 + (shard + frozen) * 2 * copies
        reduced, whole = (shard, valid), (shard * shards, sizes[0])
        grads, written = whole if strategy.name == "shard_optimizer" else reduced
        assert held.gradients == grads * 4
        assert held.optimizer == valid * 2 * 4
        spare = [sizes[0], sizes[1]] if copies > 1 else [valid, still]
        padding = (shard * copies - spare[0]) * 2 + (frozen * copies - spare[1]) * 2
        assert held.padding == padding + (shard - valid) * 4 + (grads - written) * 4
        assert held.unsharded == sizes[0] * (4 + 2 + 4 + 8) + sizes[1] * 2
        assert held.buffers == 0


@pytest.mark.parametrize("optimizer", [fc.optim.AdamW(lr=LR), fc.optim.Adafactor(lr=LR)], ids=repr)
def test_a_rank_alone_holds_what_is_called_unsharded(optimizer):
    def body(backend):
        values = {"w": np.ones((5, 3), FLOAT32), "b": np.ones(3, FLOAT32)}
        engine = fc.FSDP(
            [fc.Unit("u", values)], backend, optimizer=optimizer, precision=fc.Precision(FLOAT16)
        )
        train(engine)
        held = engine.held()
        assert held.total - held.buffers - held.spare == held.unsharded

    launch(body, 1)


class Widened:
    """A layer that computes in float32 with whatever parameters it gets."""

    def __init__(self, layer):
        self.layer = layer
        self.init = layer.init

    def forward(self, params, x):
        return self.layer.forward({n: a.astype(FLOAT32) for n, a in params.items()}, x)

    def backward(self, params, saved, dy, grads):
        wide = {n: a.astype(FLOAT32) for n, a in params.items()}
        return self.layer.backward(wide, saved, dy, grads)


def gpt_losses(backend, precision, strategy, steps=40):
    model = GPTConfig(context=16, width=12, heads=2, layers=2, hidden=30)
    text = corpus.load(100_000)[0]
    stack = fc.LayerStack([(name, Widened(layer)) for name, layer in build(model)])
    engine = fc.FSDP(
        stack.units(np.random.default_rng(1)),
        backend,
        strategy=strategy,
        precision=precision,
        optimizer=fc.optim.AdamW(lr=5e-3, eps=1e-5),
    )
    losses = []
    for number in range(steps):
        x, y = corpus.batch(text, step=number, seed=3, batch_size=8, context=model.context)
        mine = slice(backend.rank, None, backend.world_size)
        with engine.step() as step:
            logits, saved = stack.forward(step, x[mine])
            loss, dlogits = cross_entropy(logits, y[mine])
            stack.backward(step, saved, dlogits * np.float32(engine.loss_scale))
            step.update(clip=1.0)
        assert not step.skipped
        losses.append(float(fc.all_reduce(np.float64(loss), backend, op="mean")))
    return losses


@pytest.mark.parametrize(
    ("precision", "strategy"),
    [
        (fc.Precision(BFLOAT16, FLOAT32), STRATEGIES["shard_grad_op"]),
        (fc.Precision(FLOAT16, FLOAT32, fc.LossScale(256.0)), STRATEGIES["full_shard"]),
    ],
)
def test_a_gpt_in_16_bits_learns_as_in_32(precision, strategy):
    wide = launch(lambda backend: gpt_losses(backend, fc.Precision(), strategy), 2)[0]
    half = launch(lambda backend: gpt_losses(backend, precision, strategy), 2)[0]
    assert wide[-1] < 0.8 * wide[0]
    assert_allclose(half, wide, rtol=0.02)
    assert half != wide
