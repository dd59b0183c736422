"""Sharded training of functions of JAX is JAX's own training of the whole model."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import STRATEGIES, is_clean, launch, values_of
from support.jax_bits import with_64_bits
from support.spmd import run

import fsdpcore as fc
from fsdpcore.adapters import jax as adapter

STEPS, BATCH, VOCAB, WIDTH = 20, 12, 7, 9  # odd sizes: no unit divides by 2 or 4
FEW = 6  # steps, where it is the way there that differs, not the numbers
# What is rounding noise stays noise: with the usual eps of 1e-8 Adam makes full steps of it.
LR, EPS = 3e-2, 1e-5


def embed(params, x):
    return params["table"][x].mean(axis=1)


def mix(params, x):
    """A residual step."""
    return x + jnp.tanh(x @ params["w"] * params["gain"] + params["b"])


def head(params, x):
    return x @ params["w"]


def nats(logits, labels):
    """Cross entropy, summed over the rows."""
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].sum()


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


def initial(dtype):
    rng = np.random.default_rng(2)
    return {unit: start(rng, dtype) for unit, start in STARTS.items()}


def batch(number):
    rng = np.random.default_rng((5, number % 3))
    x = rng.integers(VOCAB, size=(BATCH, 4))
    return x, (x < 3).sum(axis=1).clip(1, 3) - 1


def bits(dtype):
    return with_64_bits() if dtype is np.float64 else contextlib.nullcontext()


value_and_grad = jax.jit(jax.value_and_grad(whole_loss))


@functools.cache
def unsharded(dtype, steps=STEPS):
    """Losses and parameters by JAX alone: one process, whole batches, Adam written out."""
    params = initial(dtype)
    first = {u: {n: np.zeros_like(a) for n, a in named.items()} for u, named in params.items()}
    second = {u: {n: a.copy() for n, a in named.items()} for u, named in first.items()}
    losses = []
    for number in range(1, steps + 1):
        with bits(dtype):
            loss, grads = value_and_grad(params, *batch(number))
        losses.append(float(loss) / BATCH)
        for unit, named in params.items():
            for name, p in named.items():
                g = (np.asarray(grads[unit][name]) / BATCH).astype(dtype)
                m, v = first[unit][name], second[unit][name]
                m[...] = 0.9 * m + 0.1 * g
                v[...] = 0.999 * v + 0.001 * g * g
                scale = np.sqrt(v / (1 - 0.999**number)) + EPS
                p[...] = p - LR * m / (1 - 0.9**number) / scale
    return losses, params


@functools.cache
def layers(kind):
    """They have no state: all ranks and tests may share them, and what JAX has compiled."""
    return [
        (unit, adapter.layer(function, {}, recompute=kind != "record"))
        for unit, function in FUNCTIONS.items()
    ]


judge, differentiate = adapter.loss(nats), adapter.loss_and_grads(whole_loss)


def train(backend, kind, strategy, dtype=np.float32, steps=STEPS):
    """Losses and parameters of sharded training, and whether nothing is left over."""
    engine = fc.FSDP(
        [fc.Unit(unit, params) for unit, params in initial(dtype).items()],
        backend,
        strategy=strategy,
        optimizer=fc.optim.Adam(lr=LR, eps=EPS),
    )
    stack = fc.LayerStack(layers(kind))
    rows = np.array_split(np.arange(BATCH), backend.world_size)[backend.rank]
    losses = []
    with bits(dtype):
        for number in range(1, steps + 1):
            x, labels = (array[rows] for array in batch(number))
            if kind == "whole":
                loss = fc.train_step(engine, differentiate, x, labels, divisor=BATCH)
            else:
                with engine.step(divisor=BATCH) as step:
                    logits, saved = stack.forward(step, x)
                    loss, d_logits = judge(logits, labels)
                    assert stack.backward(step, saved, d_logits) is None  # of integers
                    step.update()
            losses.append(float(fc.all_reduce(np.float64(loss), backend)) / BATCH)
    return losses, values_of(engine), is_clean(engine)


def assert_as_unsharded(results, dtype=np.float32, tolerance=2e-5, steps=STEPS):
    want_losses, want = unsharded(dtype, steps)
    if steps == STEPS:
        assert want_losses[-1] < want_losses[0] / 2  # it learns, so the comparison says something
    for losses, params, clean in results:
        assert clean
        assert_allclose(losses, want_losses, rtol=tolerance)
        for unit, named in want.items():
            for name, array in named.items():
                assert params[unit][name].dtype == dtype
                assert_allclose(params[unit][name], array, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [("layers", 3), ("record", 4), ("whole", 2)],
)
def test_sharded_training_is_jaxs_own(world_size, kind):
    args = (kind, fc.Strategy("full_shard"))
    assert_as_unsharded(run(train, transport="sim", world_size=world_size, args=args))


OTHERS = [name for name in STRATEGIES if name != "full_shard"]


# A loss of the whole model has its parameters from ``Step.whole``, which has tests of its own.
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *(zip(("layers", "record") * len(OTHERS), OTHERS, strict=False)),
        ("whole", "no_shard"),
    ],
)
def test_it_is_so_with_every_strategy(strategy, kind):
    args = (kind, STRATEGIES[strategy], np.float32, FEW)
    assert_as_unsharded(run(train, transport="sim", world_size=4, args=args), steps=FEW)


@pytest.mark.parametrize("kind", ["layers", "whole"])
def test_in_double_precision_it_is_so_to_its_rounding(kind):
    args = (kind, fc.Strategy("full_shard"), np.float64, FEW)
    results = run(train, transport="sim", world_size=4, args=args)
    assert_as_unsharded(results, np.float64, 1e-12, FEW)


def train_and_look(backend, kind, strategy):
    """Train, and see whether JAX has the engine's memory as parameters."""
    seen = {}

    def look(params, x):
        seen.update({name: array.unsafe_buffer_pointer() for name, array in params.items()})
        return x

    engine = fc.FSDP(
        [fc.Unit("u", {"w": np.ones((5, 3), np.float32), "b": np.ones(3, np.float32)})], backend
    )
    layer = adapter.layer(look, {}, jit=False)
    with engine.evaluation() as step, step.forward("u") as params:
        layer.forward(params, np.ones(2, np.float32))
        same = {name: seen[name] == params[name].ctypes.data for name in params}
    return train(backend, kind, strategy), same


# Parameters of all kinds.


def special_loss(params, x, labels):
    x = mix(params["mix"], embed(params["embed"], x))
    return nats((x @ params["head"]["table"].T)[:, params["head"]["order"]], labels)


def last(params, x):
    return (x @ params["table"].T)[:, params["order"]]


def special(backend, kind):
    """A frozen gain, a tied table, an ignored array of integers."""
    start = initial(np.float32)
    units = [
        fc.Unit("embed", start["embed"]),
        fc.Unit("mix", start["mix0"], frozen="gain"),
        fc.Unit(
            "head",
            {"table": fc.Tied("embed", "table"), "order": np.array([2, 0, 1])},
            ignored="order",
        ),
    ]
    engine = fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=0.1))
    rows = np.array_split(np.arange(BATCH), backend.world_size)[backend.rank]
    named = [("embed", embed), ("mix", mix), ("head", last)]
    stack = fc.LayerStack([(name, adapter.layer(function, {})) for name, function in named])
    compute = adapter.loss_and_grads(special_loss)
    for number in range(3):
        x, labels = (array[rows] for array in batch(number))
        if kind == "whole":
            fc.train_step(engine, compute, x, labels, divisor=BATCH)
        else:
            with engine.step(divisor=BATCH) as step:
                logits, saved = stack.forward(step, x)
                stack.backward(step, saved, judge(logits, labels)[1])
                step.update()
    with engine.full_params() as params:
        return {name: array.copy() for name, array in params.items()}


@functools.cache
def special_unsharded():
    """The same three steps by JAX alone: the table, and what else is trained."""
    start = initial(np.float32)
    table, free = start["embed"]["table"], {n: start["mix0"][n] for n in ("w", "b")}
    gain, order = start["mix0"]["gain"], np.array([2, 0, 1])

    @jax.jit
    @jax.grad
    def gradients(trained, x, labels):
        table, free = trained
        head = {"table": table, "order": order}
        units = {"embed": {"table": table}, "mix": {**free, "gain": gain}, "head": head}
        return special_loss(units, x, labels)

    for number in range(3):
        found = gradients((table, free), *batch(number))
        d_table, d_free = jax.tree_util.tree_map(np.asarray, found)
        table = table - 0.1 * d_table / BATCH
        free = {name: free[name] - 0.1 * d_free[name] / BATCH for name in free}
    return table, free


@pytest.mark.parametrize("kind", ["layers", "whole"])
def test_tied_frozen_and_ignored_parameters(kind):
    table, free = special_unsharded()
    for params in run(special, transport="sim", world_size=2, args=(kind,)):
        assert_allclose(params["embed.table"], table, atol=2e-6)
        assert_allclose(params["mix.w"], free["w"], atol=2e-6)
        assert_allclose(params["mix.b"], free["b"], atol=2e-6)
        assert_array_equal(params["mix.gain"], initial(np.float32)["mix0"]["gain"])
        assert_array_equal(params["head.order"], [2, 0, 1])


def test_layers_of_jax_and_of_numpy_follow_each_other():
    """What a layer of JAX returns for NumPy's arrays is NumPy's."""

    class Double:
        def init(self, rng):
            return {"unused": np.zeros(1, np.float32)}

        def forward(self, params, x):
            assert type(x) is np.ndarray
            return x * 2, None

        def backward(self, params, saved, dy, grads):
            assert type(dy) is np.ndarray
            return dy * 2

    def body(backend):
        start = initial(np.float32)["mix0"]
        chain = fc.Chain([("mix", adapter.layer(mix, start)), ("double", Double())])
        stack = fc.LayerStack([("a", Double()), ("b", chain)])
        engine = fc.FSDP(
            stack.units(np.random.default_rng(0)), backend, optimizer=fc.optim.SGD(lr=1.0)
        )
        x = np.linspace(-1, 1, 2 * WIDTH, dtype=np.float32).reshape(2, WIDTH)
        with engine.step() as step:
            y, saved = stack.forward(step, x)
            dx = stack.backward(step, saved, np.ones_like(y))
            step.update()

        @jax.jit
        def compute(params, x, dy):
            y, pull = jax.vjp(lambda params, x: mix(params, x * 2) * 2, params, x)
            return y, *pull(dy)

        want, d_params, want_dx = compute(start, x, np.ones_like(y))
        assert_allclose(y, want, atol=1e-6)
        assert_allclose(dx, want_dx, atol=1e-5)
        assert_allclose(values_of(engine)["b"]["mix.w"], start["w"] - d_params["w"], atol=1e-5)

    launch(body, 2)


def squares(y):
    return (y * y).sum()


def low_precision(backend):
    """One step with parameters and gradients in bfloat16."""
    engine = fc.FSDP(
        [fc.Unit("mix", initial(np.float32)["mix0"])],
        backend,
        optimizer=fc.optim.SGD(lr=0.1),
        precision=fc.Precision(param_dtype="bfloat16"),
    )
    stack = fc.LayerStack([("mix", dict(layers("layers"))["mix0"])])
    with engine.step(divisor=BATCH * backend.world_size) as step:
        y, saved = stack.forward(step, features())
        _, dy = adapter.loss(squares)(y)
        assert dy.dtype == y.dtype == "bfloat16"
        assert stack.backward(step, saved, dy).dtype == "bfloat16"
        step.update()
    with engine.full_params() as params:
        return {name: array.copy() for name, array in params.items()}


def features():
    rows = np.random.default_rng(8).normal(size=(BATCH, WIDTH))
    return rows.astype("bfloat16")


def test_parameters_may_be_of_16_bits():
    start = initial(np.float32)["mix0"]
    narrow = {name: array.astype("bfloat16") for name, array in start.items()}
    grads = jax.jit(jax.grad(lambda params, x: squares(mix(params, x))))(narrow, features())
    for params in run(low_precision, transport="sim", world_size=2):
        for name, array in start.items():
            want = array - 0.1 * np.asarray(grads[name], np.float32) / BATCH
            assert_allclose(params[f"mix.{name}"], want, atol=2e-3)


# Memory.


def peaks(backend, depth):
    """Most bytes of gathered parameters and gradients at once: in an evaluation, and in a step.

    The model has six units of 100 parameters each.
    """
    start = functools.partial(drawn, dtype=np.float32, w=(9, 10), b=(10,))

    def square(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])[:, :9]

    stack = fc.LayerStack([(f"u{i}", adapter.layer(square, start)) for i in range(6)])
    engine = fc.FSDP(
        stack.units(np.random.default_rng(0)),
        backend,
        optimizer=fc.optim.SGD(lr=0.1),
        prefetch=fc.Prefetch(depth, reductions=0),
        window=False,
    )
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
    for forward, whole in run(peaks, transport="sim", world_size=2, args=(depth,), hosts=2):
        assert forward == (depth + 1) * 400
        assert whole == (depth + 2) * 400  # and the gradients of one
