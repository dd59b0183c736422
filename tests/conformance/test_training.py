"""The GPT of the examples, sharded: the same on every transport, and the same as unsharded."""

from __future__ import annotations

import functools

import corpus
import numpy as np
import pytest
from gpt_model import GPTConfig, build, cross_entropy
from numpy.testing import assert_allclose, assert_array_equal
from support.spmd import run

import fsdpcore as fc

# Odd sizes everywhere: no unit divides by 2, 3, 4 or 8.
MODEL = GPTConfig(context=24, width=15, heads=3, layers=2, hidden=37)
BATCH = 8
CLIP = 1.3
# A softmax does not feel the bias of its keys: that gradient is pure rounding noise, which Adam
# with its usual eps of 1e-8 blows up to full steps. This one keeps noise noise.
EPS = 1e-5
# Without a window for the parameters, if the transport has one.
APART = {"sim": {"hosts": 2}, "zmq": {"shm": "off"}}


@functools.cache
def text():
    return corpus.load(200_000)[0]


def batch(step):
    return corpus.batch(text(), step=step, seed=3, batch_size=BATCH, context=MODEL.context)


def initial(dtype=np.float32):
    rng = np.random.default_rng(11)
    drawn = {name: layer.init(rng) for name, layer in build(MODEL)}
    return {u: {n: array.astype(dtype) for n, array in p.items()} for u, p in drawn.items()}


def train(backend, steps, algorithm, prefetch=1, parts=1, clip=CLIP):
    """Losses of every step, and in the end all parameters by unit and name.

    A rank goes through its rows in so many ``parts``, whose gradients are added up.
    """
    stack = fc.LayerStack(build(MODEL))
    engine = fc.FSDP(
        stack.units(np.random.default_rng(11)),
        backend,
        optimizer=fc.optim.AdamW(lr=3e-3, eps=EPS),
        algorithm=algorithm,
        prefetch=prefetch,
    )
    mine = np.array_split(np.arange(BATCH), backend.world_size)[backend.rank]
    losses, norms = [], []
    for number in range(steps):
        x, y = batch(number)
        with engine.step(divisor=BATCH) as step:
            summed = 0.0
            for rows in np.array_split(mine, parts):
                logits, saved = stack.forward(step, x[rows])
                loss, dlogits = cross_entropy(logits, y[rows])
                stack.backward(step, saved, dlogits * np.float32(len(rows)))
                summed += loss * len(rows)
            norms.append(step.update(clip=clip))
        total = fc.all_reduce(np.float64(summed), backend, algorithm=algorithm)
        losses.append(float(total) / BATCH)
    params = {}
    for unit in engine.units:
        unit.unshard()
        params[unit.name] = {name: array.copy() for name, array in unit.params.items()}
        unit.reshard()
    return losses, norms, params, engine.held(), engine.gathered_peak


@functools.cache
def trained(transport, world_size, algorithm="auto", prefetch=1, parts=1, steps=12, *, apart=False):
    return run(
        train,
        transport=transport,
        world_size=world_size,
        args=(steps, algorithm, prefetch, parts),
        **(APART[transport] if apart else {}),
    )


@functools.cache
def reference(steps, clip=CLIP, lr=3e-3, decay=0.01, dtype=np.float32):
    """The same training without the engine: one process, whole batch, AdamW written out."""
    layers = build(MODEL)
    params = initial(dtype)
    first = {u: {n: np.zeros_like(a) for n, a in p.items()} for u, p in params.items()}
    second = {u: {n: np.zeros_like(a) for n, a in p.items()} for u, p in params.items()}
    losses, norms = [], []
    for number in range(steps):
        x, y = batch(number)
        grads = {u: {n: np.zeros_like(a) for n, a in p.items()} for u, p in params.items()}
        kept = []
        for name, layer in layers:
            x, saved = layer.forward(params[name], x)
            kept.append(saved)
        loss, dx = cross_entropy(x, y)
        for name, layer in reversed(layers):
            dx = layer.backward(params[name], kept.pop(), dx, grads[name])
        squares = [np.sum(g.astype(np.float64) ** 2) for p in grads.values() for g in p.values()]
        norm = float(np.sqrt(sum(squares)))
        for unit, named in params.items():
            for name, p in named.items():
                g = grads[unit][name] * dtype(min(1.0, clip / norm))
                m, v = first[unit][name], second[unit][name]
                m[...] = 0.9 * m + 0.1 * g
                v[...] = 0.999 * v + 0.001 * g * g
                unbiased = m / (1 - 0.9 ** (number + 1))
                scale = np.sqrt(v / (1 - 0.999 ** (number + 1))) + EPS
                p[...] = p - lr * decay * p - lr * unbiased / scale
        losses.append(loss)
        norms.append(norm)
    return losses, norms, params


def assert_same_parameters(left, right):
    for unit, named in left.items():
        for name, array in named.items():
            assert_array_equal(array, right[unit][name], err_msg=f"{unit}.{name}")


def test_every_rank_has_the_same_losses_and_parameters():
    first, *others = trained("sim", 4)
    for other in others:
        assert other[0] == first[0]
        assert other[1] == first[1]
        assert_same_parameters(other[2], first[2])


@pytest.mark.parametrize(
    ("transport", "algorithm"),
    [("sim", "doubling"), ("zmq", "auto")],
)
def test_losses_are_equal_to_the_last_bit_on_transports_and_algorithms(transport, algorithm):
    expected = trained("sim", 4)[0]
    result = trained(transport, 4, algorithm)[0]
    assert [loss.hex() for loss in result[0]] == [loss.hex() for loss in expected[0]]
    assert_same_parameters(result[2], expected[2])


@pytest.mark.campaign
@pytest.mark.parametrize("algorithm", ["star", "direct", "doubling"])
def test_so_they_are_between_processes(algorithm):
    test_losses_are_equal_to_the_last_bit_on_transports_and_algorithms("zmq", algorithm)


@pytest.mark.parametrize(
    ("transport", "world_size", "parts"), [("sim", 3, 1), ("sim", 2, 2), ("zmq", 3, 1)]
)
def test_a_shared_window_changes_no_bit(transport, world_size, parts):
    together = trained(transport, world_size, parts=parts)[0]
    apart = trained(transport, world_size, parts=parts, apart=True)[0]
    assert apart[3].window == 0
    assert transport != "sim" or together[3].window > 0
    assert together[0] == apart[0]
    assert together[1] == apart[1]
    assert_same_parameters(together[2], apart[2])


def test_prefetch_changes_nothing_but_the_time():
    ahead, without = trained("sim", 4)[0], trained("sim", 4, prefetch=0)[0]
    assert ahead[0] == without[0]
    assert_same_parameters(ahead[2], without[2])


@pytest.mark.parametrize(("world_size", "steps"), [(1, 12), (3, 50), (8, 12)])
def test_sharded_training_follows_unsharded_training(world_size, steps):
    losses, norms, params, *_ = trained("sim", world_size, steps=steps)[0]
    want_losses, want_norms, want_params = reference(steps)
    assert want_losses[-1] < want_losses[0] - 0.2  # it learns, so the comparison means something
    assert min(want_norms) < CLIP < max(want_norms)  # clipping is on and off
    assert_allclose(losses, want_losses, rtol=2e-5)
    assert_allclose(norms, want_norms, rtol=2e-4)
    for unit, named in want_params.items():
        for name, array in named.items():
            assert_allclose(params[unit][name], array, atol=2e-4, err_msg=f"{unit}.{name}")


def test_gradients_of_several_passes_add_up():
    once, twice = trained("sim", 2)[0], trained("sim", 2, parts=2)[0]
    assert_allclose(twice[0], once[0], rtol=2e-5)
    assert_allclose(twice[1], once[1], rtol=2e-4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_holds_one_share_of_everything_between_steps(world_size):
    sizes = [sum(a.size for a in named.values()) for named in initial().values()]
    total = 4 * 4 * sum(sizes)  # parameter, gradient, two moments; four bytes each
    padding = 4 * 2 * len(sizes) * (world_size - 1)  # parameter and gradient, per unit
    for apart in (False, True):
        for _, _, _, held, peak in trained("sim", world_size, apart=apart):
            assert held.unsharded == total
            assert held.buffers == 0
            assert held.spare <= peak
            assert (held.total - held.spare) * world_size <= total + padding * world_size
            assert held.padding <= padding


@pytest.mark.parametrize(("prefetch", "live"), [(0, 2), (1, 4)])
def test_no_more_is_gathered_than_the_units_in_use(prefetch, live):
    largest = max(sum(a.nbytes for a in named.values()) for named in initial().values())
    *_, held, peak = trained("sim", 4, prefetch=prefetch, apart=True)[0]
    # Parameters and full gradients of one unit; in the background the parameters of the next unit
    # and the gradients of the one before.
    assert peak <= live * (largest + 4 * 3)
    assert peak > (live - 1) * largest * 0.5
    assert held.window == 0


def test_in_a_window_parameters_are_not_gathered_at_all():
    named = initial().values()
    largest = max(sum(a.nbytes for a in unit.values()) for unit in named)
    *_, held, peak = trained("sim", 1)[0]
    assert held.window >= held.parameters == sum(a.nbytes for unit in named for a in unit.values())
    assert peak == largest  # the gradients of one unit
