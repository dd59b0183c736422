"""Sharded training of functions of HIPS autograd is autograd's own training of the whole model."""

from __future__ import annotations

import functools

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.fsdp_steps import STRATEGIES, is_clean, values_of
from support.spmd import run

import fsdpcore as fc
from fsdpcore.adapters import autograd as adapter
from fsdpcore.adapters.function import train_step
from fsdpcore.adapters.layers import Chain

STEPS, BATCH, VOCAB, WIDTH = 20, 10, 7, 9  # odd sizes: nothing divides by 2 or 4
FEW = 6  # steps, where it is the way there that differs, not the numbers
# What is rounding noise stays noise: with the usual eps of 1e-8 Adam makes full steps of it.
LR, EPS = 3e-2, 1e-5


def embed(params, x):
    return params["table"][x]


def mix(params, x):
    """A residual step, after a mean over the positions, whose gradient autograd makes wider."""
    middle = anp.mean(x, axis=1, keepdims=True)
    return x + anp.tanh((x - middle) @ params["w"] * params["gain"] + params["b"])


def head(params, x):
    return anp.sum(x, axis=1) @ params["w"]


def nats(logits, labels):
    """Cross entropy, summed over the rows."""
    below = anp.log(anp.sum(anp.exp(logits), axis=1))
    return anp.sum(below - logits[anp.arange(len(labels)), labels])


FUNCTIONS = {"embed": embed, "mix0": mix, "mix1": mix, "head": head}


def whole_loss(params, x, labels):
    """The same as one function of all parameters."""
    for unit, function in FUNCTIONS.items():
        x = function(params[unit], x)
    return nats(x, labels)


def drawn(rng, dtype, **shapes):
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes.items()}


STARTS = {
    "embed": functools.partial(drawn, table=(VOCAB, WIDTH)),
    "mix0": functools.partial(drawn, w=(WIDTH, WIDTH), gain=(), b=(WIDTH,)),
    "mix1": functools.partial(drawn, w=(WIDTH, WIDTH), gain=(), b=(WIDTH,)),
    "head": functools.partial(drawn, w=(WIDTH, 3)),
}


def batch(number):
    rng = np.random.default_rng((5, number % 3))
    x = rng.integers(VOCAB, size=(BATCH, 4))
    return x, (x < 3).sum(axis=1).clip(1, 3) - 1


@functools.cache
def unsharded(dtype, steps):
    """Losses and parameters by autograd alone: one process, whole batches, Adam written out."""
    rng = np.random.default_rng(2)
    params = {unit: start(rng, dtype) for unit, start in STARTS.items()}
    zeros = {u: {n: np.zeros_like(a) for n, a in named.items()} for u, named in params.items()}
    first, second = (
        zeros,
        {u: {n: a.copy() for n, a in named.items()} for u, named in zeros.items()},
    )
    value_and_grad = autograd.value_and_grad(whole_loss)
    losses = []
    for number in range(1, steps + 1):
        loss, grads = value_and_grad(params, *batch(number))
        losses.append(loss / BATCH)
        for unit, named in params.items():
            for name, p in named.items():
                g = (grads[unit][name] / BATCH).astype(dtype)
                m, v = first[unit][name], second[unit][name]
                m[...] = 0.9 * m + 0.1 * g
                v[...] = 0.999 * v + 0.001 * g * g
                scale = np.sqrt(v / (1 - 0.999**number)) + EPS
                p[...] = p - LR * m / (1 - 0.9**number) / scale
    return losses, params


def train(backend, kind, strategy, dtype=np.float32, steps=STEPS):
    """Losses and parameters of sharded training, and whether nothing is left over."""
    stack = fc.LayerStack(
        [
            (unit, adapter.layer(function, starting(unit, dtype), recompute=kind != "record"))
            for unit, function in FUNCTIONS.items()
        ]
    )
    engine = fc.FSDP(
        stack.units(np.random.default_rng(2)),
        backend,
        strategy=strategy,
        optimizer=fc.optim.Adam(lr=LR, eps=EPS),
    )
    rows = np.array_split(np.arange(BATCH), backend.world_size)[backend.rank]
    judge, differentiate = adapter.loss(nats), adapter.loss_and_grads(whole_loss)
    losses = []
    for number in range(1, steps + 1):
        x, labels = (array[rows] for array in batch(number))
        if kind == "whole":
            loss = train_step(engine, differentiate, x, labels, divisor=BATCH)
        else:
            with engine.step(divisor=BATCH) as step:
                logits, saved = stack.forward(step, x)
                loss, d_logits = judge(logits, labels)
                assert stack.backward(step, saved, d_logits) is None  # integers have no gradient
                step.update()
        losses.append(float(fc.all_reduce(np.float64(loss), backend)) / BATCH)
    return losses, values_of(engine), is_clean(engine)


def starting(unit, dtype):
    return lambda rng: STARTS[unit](rng, dtype)


def assert_as_unsharded(results, dtype=np.float32, steps=STEPS):
    """Sums are made in other orders: losses are equal but for a few roundings.

    Parameters are, but for so many in each step of some elements: where a gradient is near zero,
    its rounding is divided by little more than ``EPS``.
    """
    rounding = float(np.finfo(dtype).eps)
    want_losses, want = unsharded(dtype, steps)
    if steps == STEPS:
        assert want_losses[-1] < want_losses[0] / 2  # it learns, so the comparison says something
    for losses, params, clean in results:
        assert clean
        assert_allclose(losses, want_losses, rtol=16 * rounding)
        for unit, named in want.items():
            for name, array in named.items():
                assert params[unit][name].dtype == dtype
                assert_allclose(params[unit][name], array, rtol=0, atol=steps * 16 * rounding)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("layers", 1), ("layers", 3), ("layers", 4), ("whole", 1), ("whole", 4)],
)
def test_sharded_training_is_autograds_own(kind, world_size):
    args = (kind, fc.Strategy("full_shard"))
    assert_as_unsharded(run(train, transport="sim", world_size=world_size, args=args))


OTHERS = [name for name in STRATEGIES if name != "full_shard"]


# A loss of the whole model has its parameters from ``Step.whole``, which has tests of its own.
@pytest.mark.parametrize(
    ("kind", "strategy"), [*(("layers", name) for name in OTHERS), ("whole", "no_shard")]
)
def test_it_is_so_with_every_strategy(strategy, kind):
    args = (kind, STRATEGIES[strategy], np.float32, FEW)
    assert_as_unsharded(run(train, transport="sim", world_size=4, args=args), steps=FEW)


@pytest.mark.parametrize(
    "strategy", ["until_backward", "shard_grad_op", "shard_optimizer", "no_shard"]
)
def test_a_record_may_be_kept_where_parameters_are(strategy):
    args = ("record", STRATEGIES[strategy])
    assert_as_unsharded(run(train, transport="sim", world_size=2, args=args))


@pytest.mark.parametrize("kind", ["layers", "whole"])
def test_in_double_precision_it_is_so_to_a_finer_rounding(kind):
    args = (kind, fc.Strategy("full_shard"), np.float64)
    results = run(train, transport="sim", world_size=3, args=args)
    assert_as_unsharded(results, np.float64)


def tied_head(params, x):
    """Reads out with the table of the embedding."""
    return anp.sum(x, axis=1) @ params["table"].T


def train_tied(backend, steps):
    """A table in two units, two layers in one, and parameters that are not trained."""
    begin = {unit: start(np.random.default_rng(1), np.float32) for unit, start in STARTS.items()}
    mixes = Chain([(unit, adapter.layer(mix, begin[unit])) for unit in ("mix0", "mix1")])
    layers = {
        "embed": adapter.layer(embed, begin["embed"]),
        "mixes": mixes,
        "head": adapter.layer(tied_head, {"table": fc.Tied("embed", "table")}),
    }
    stack = fc.LayerStack(list(layers.items()))
    rng = np.random.default_rng(0)
    units = [
        fc.Unit(name, layer.init(rng), frozen=("*.gain",) if name == "mixes" else ())
        for name, layer in layers.items()
    ]
    engine = fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=0.1))
    rows = np.array_split(np.arange(BATCH), backend.world_size)[backend.rank]
    x, labels = (array[rows] for array in batch(0))
    for _ in range(steps):
        with engine.step(divisor=BATCH) as step:
            logits, saved = stack.forward(step, x)
            _, d_logits = adapter.loss(nats)(logits, labels)
            stack.backward(step, saved, d_logits)
            step.update()
    return values_of(engine)


def test_tied_and_frozen_parameters_and_layers_in_one_unit():
    params = {unit: start(np.random.default_rng(1), np.float32) for unit, start in STARTS.items()}

    def loss(params, x, labels):
        y = mix(params["mix1"], mix(params["mix0"], params["embed"]["table"][x]))
        return nats(tied_head(params["embed"], y), labels) / BATCH

    for _ in range(5):
        grads = autograd.grad(loss)(params, *batch(0))
        for unit in ("embed", "mix0", "mix1"):
            for name in params[unit].keys() - {"gain"}:
                params[unit][name] = params[unit][name] - np.float32(0.1) * grads[unit][name]
    for found in run(train_tied, transport="sim", world_size=2, args=(5,)):
        assert_allclose(found["embed"]["table"], params["embed"]["table"], atol=2e-6)
        assert_allclose(found["head"]["table"], params["embed"]["table"], atol=2e-6)
        for unit in ("mix0", "mix1"):
            for name, array in params[unit].items():
                assert_allclose(found["mixes"][f"{unit}.{name}"], array, atol=2e-6)


# Memory.


def equal_units(backend, depth, recompute=True, **options):
    """Six units of 100 parameters each."""
    start = functools.partial(drawn, dtype=np.float32, w=(9, 10), b=(10,))

    def square(params, x):
        return anp.tanh(x @ params["w"] + params["b"])[:, :9]

    layers = [(f"u{i}", adapter.layer(square, start, recompute=recompute)) for i in range(6)]
    stack = fc.LayerStack(layers)
    engine = fc.FSDP(
        stack.units(np.random.default_rng(0)),
        backend,
        optimizer=fc.optim.SGD(lr=0.1),
        prefetch=fc.Prefetch(depth, reductions=0),
        window=False,
        **options,
    )
    return stack, engine


def peaks(backend, depth):
    """Most bytes of gathered parameters and gradients at once: in an evaluation, and in a step."""
    stack, engine = equal_units(backend, depth)
    x = np.ones((3, 9), np.float32)
    with engine.evaluation() as step:
        stack.forward(step, x)
    forward = engine.gathered_peak
    with engine.step() as step:
        y, saved = stack.forward(step, x)
        stack.backward(step, saved, y)
        step.update()
    report = engine.report()
    assert report.measured.peak_bytes == report.plan.peak_bytes
    return forward, engine.gathered_peak


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_as_many_units_are_gathered_as_are_prefetched_and_one(depth):
    for forward, whole in run(peaks, transport="sim", world_size=2, args=(depth,)):
        assert forward == (depth + 1) * 400
        assert whole == (depth + 2) * 400  # and the gradients of one


def without_recomputation(backend):
    stack, engine = equal_units(backend, 1, recompute=False)
    with pytest.raises(fc.StateError, match="recompute"), engine.step() as step:
        y, saved = stack.forward(step, np.ones((3, 9), np.float32))
        stack.backward(step, saved, y)
    return is_clean(engine)


def test_a_record_is_refused_where_parameters_are_freed_in_between():
    assert run(without_recomputation, transport="sim", world_size=2) == [True, True]
