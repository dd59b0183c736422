"""Optimizers of optax and PyTorch over shards: what is taken, what is refused, and what comes out.

The oracle is the library itself, with whole parameters of their own shapes.
"""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import launch
from support.spmd import run

import fsdpcore as fc

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"a": {"w": (7, 5), "b": (5,)}, "c": [(3,), ()]}
    return jax.tree.map(
        lambda shape: np.asarray(rng.normal(size=shape) * scale, np.float32),
        shapes,
        is_leaf=lambda each: isinstance(each, tuple),
    )


def _sums():
    """Keeps sums over elements, which change no parameter."""

    def update(grads, state, params=None):
        return grads, grads.reshape(-1).cumsum().reshape(grads.shape)

    return optax.GradientTransformation(lambda params: params * 0, update)


REFUSED = {
    "norm": lambda: optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(1e-9)),
    "later": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_block_rms(1e6), optax.sgd(1e-9)), 20
    ),
    "trust": lambda: optax.lamb(1e-3),
    "mask": lambda: optax.adamw(
        1e-3, weight_decay=1e-7, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "factored": lambda: optax.adafactor(1e-3),
    "sums": lambda: optax.chain(_sums(), optax.sgd(1e-3)),
    "center": lambda: optax.chain(optax.centralize(), optax.sgd(1e-9)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused_with_the_reason(name):
    with pytest.raises(fc.ConfigError) as caught:
        fc.optim.ParamGroups.of({"*": REFUSED[name]()})
    text = str(caught.value)
    assert "is not elementwise: step " in text
    assert f" differs in {'its state' if name == 'sums' else 'the'} " in text
    assert "step.update(clip=...)" in text


@pytest.mark.parametrize("name", ["noise", "loss", "shape"])
def test_what_cannot_be_tried_is_refused_with_the_likely_reasons(name):
    made = {
        "noise": lambda: optax.add_noise(0.1, 0.5, 0),
        "loss": lambda: optax.lbfgs(),
        "shape": lambda: optax.GradientTransformation(
            lambda params: (), lambda grads, state, params=None: (grads * params.shape[1], state)
        ),
    }
    with pytest.raises(fc.ConfigError, match=r"depend on shapes, noise .* loss .* not supported"):
        fc.optim.Optax(made[name]())


@pytest.mark.parametrize("wrong", ["arguments", "numbers"])
def test_what_cannot_be_used_is_refused_with_the_reason(wrong):
    def update(grads, state, params):
        if wrong == "arguments":
            raise TypeError("needs the loss")
        return -grads, state + grads.sum()

    class Own:
        init = staticmethod(lambda params: np.float32(0))

    Own.update = staticmethod(update)
    words = {"arguments": "raised TypeError: needs the loss", "numbers": "numbers in its state"}
    with pytest.raises(fc.ConfigError, match=words[wrong]):
        fc.optim.Optax(Own())


@functools.cache
def transformation():
    """With numbers that are not counts, arrays of half precision, and steps that change nothing."""
    inner = optax.inject_hyperparams(optax.nadamw)(
        learning_rate=optax.cosine_decay_schedule(0.1, 9)
    )
    return optax.MultiSteps(inner, 2)


def grads_of(step):
    return arrays(100 + step)


def engine_of(backend, optimizer, **options):
    return fc.FSDP(arrays(0), backend, optimizer=optimizer, **options)


def trained(backend, folder, optimizer, steps, options):
    engine = engine_of(backend, optimizer(), **options)
    if fc.checkpoint.steps(folder):
        fc.checkpoint.load(folder, engine, backend)
    while engine.steps < steps:
        grads = grads_of(engine.steps)
        fc.train_step(engine, lambda params, grads=grads: (0.0, grads))
    fc.checkpoint.save(folder, engine, backend)
    return engine.full_tree(), engine.state_dict(full=True)


def assert_as(found, want):
    jax.tree.map(lambda one, two: assert_allclose(one, two, rtol=1e-6, atol=2e-7), found, want)


def test_a_transformation_goes_on_as_optax_does_on_any_number_of_ranks(tmp_path):
    want = arrays(0)
    state = transformation().init(want)
    for step in range(7):
        updates, state = transformation().update(grads_of(step), state, want)
        want = optax.apply_updates(want, updates)
    folder = str(tmp_path / "run")
    ways = [(3, 3, "full_shard"), (1, 4, "no_shard"), (2, 7, "shard_grad_op")]
    for ranks, steps, strategy in ways:
        args = folder, transformation, steps, {"strategy": strategy}
        found = run(trained, transport="sim", world_size=ranks, args=args)
    for tree, saved in found:
        assert_as(tree, want)
        for name in ("mu", "nu"):
            theirs = getattr(state.inner_opt_state.inner_state[0], name)
            assert_as(saved[f"optimizer/{name}/a.w"], theirs["a"]["w"])
        assert_as(saved["optimizer/acc_grads/c.0"], state.acc_grads["c"][0])


def test_pieces_of_any_size_are_updated_as_the_whole():
    rng = np.random.default_rng(0)
    size = 150_000
    param, grads = rng.normal(size=size).astype("f"), rng.normal(size=(3, size)).astype("f")
    theirs = optax.adamw(1e-2, mu_dtype="bfloat16")
    ours = fc.optim.Optax(theirs)
    assert ours.state_names == ("mu", "nu")
    found, state = param.copy(), ours.init_state(size, np.float32)
    want, now = param, theirs.init(param)
    for step, grad in enumerate(grads, 1):
        kept = grad.copy()
        for start, stop in [(0, 3), (3, 9000), (9000, 9000), (9000, size)]:
            part = slice(start, stop)
            states = {name: array[part] for name, array in state.items()}
            ours.update(found[part], grad[part], states, step=step, grad_scale=0.5)
        updates, now = jax.jit(theirs.update)(grad * np.float32(0.5), now, want)
        want = optax.apply_updates(want, updates)
        assert_array_equal(grad, kept)
    assert_allclose(found, want, rtol=2e-6, atol=1e-7)
    assert_array_equal(state["mu"], np.asarray(now[0].mu, np.float32))


def test_ranks_compare_what_an_optimizer_does_and_lr_is_its_own():
    one, same, other = (repr(fc.optim.Optax(optax.sgd(lr))) for lr in (0.1, 0.1, 0.2))
    assert one == same != other
    sgd = fc.optim.Optax(optax.sgd(0.1))

    def body(backend):
        engine = engine_of(backend, sgd)
        with pytest.raises(fc.ArgumentError, match="which is in its transformation; give that a"):
            fc.train_step(engine, lambda params: (0.0, grads_of(0)), lr=0.3)
        assert not engine.partially_updated
        assert_as(engine.full_tree(), arrays(0))
        double = fc.FSDP({"w": np.ones(3)}, backend, optimizer=sgd)
        with pytest.raises(fc.ArgumentError, match="float64, which JAX would round"):
            fc.train_step(double, lambda params: (0.0, {"w": np.ones(3)}))

    launch(body, 2)
    with pytest.raises(fc.ConfigError, match=r"such as optax\.adamw"):
        fc.optim.Optax(optax.adamw)


@pytest.mark.parametrize(
    ("name", "array", "options"),
    [
        ("NAdam", "exp_avg", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        # A number of its state follows the rate of the step before.
        ("ASGD", "ax", {"weight_decay": 0.1, "t0": 2.0}),
    ],
)
def test_torch_optimizers_go_on_as_they_do_unsharded(tmp_path, name, array, options):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    rates = fc.optim.schedules.Linear(0.1, warmup=2, total=9)
    kind = getattr(torch.optim, name)
    want = jax.tree.map(torch.from_numpy, arrays(0))
    tensors = jax.tree.leaves(want)
    theirs = kind(tensors, **options)
    for step in range(6):
        for tensor, grad in zip(tensors, jax.tree.leaves(grads_of(step)), strict=True):
            tensor.grad = torch.from_numpy(np.asarray(grad))
        theirs.param_groups[0]["lr"] = 0.1 * ((step + 1) / 2 if step < 1 else (9 - step - 1) / 7)
        theirs.step()

    def optimizer():
        return fc.optim.Torch(kind, lr=rates, **options)

    assert optimizer().state_names[0] == array
    one = optimizer()
    assert repr(one) == repr(pickle.loads(pickle.dumps(one)))
    for ranks, steps in [(3, 3), (2, 6)]:
        args = str(tmp_path / "run"), optimizer, steps, {}
        found = run(trained, transport="sim", world_size=ranks, args=args)
    for tree, saved in found:
        assert_as(tree, jax.tree.map(lambda tensor: tensor.numpy(), want))
        assert_as(saved[f"optimizer/{array}/a.w"], theirs.state[want["a"]["w"]][array].numpy())


def test_an_optimizer_that_writes_to_gradients_writes_to_a_copy():
    torch = pytest.importorskip("torch")

    class Doubling(torch.optim.SGD):
        def step(self):
            for each in self.param_groups[0]["params"]:
                each.grad.mul_(2)
            super().step()

    param, grad = np.ones(5, np.float32), np.arange(5, dtype=np.float32)
    fc.optim.Torch(Doubling, lr=0.5).update(param, grad, {}, step=1)
    assert_array_equal(grad, np.arange(5))
    assert_array_equal(param, 1 - np.arange(5))


def test_torch_optimizers_that_are_not_elementwise_are_refused():
    torch = pytest.importorskip("torch")
    for kind, words in [
        (torch.optim.Adafactor, "cannot be used: step 1 with an array of shape"),
        (torch.optim.LBFGS, "missing 1 required positional argument: 'closure'"),
    ]:
        with pytest.raises(fc.ConfigError, match=words):
            fc.optim.Torch(kind)
    for given in (torch.optim.AdamW, torch.optim.SGD([torch.zeros(1)], lr=1.0)):
        with pytest.raises(fc.ConfigError, match=r"given as fc\.optim\.Torch\(torch\.optim\."):
            fc.optim.ParamGroups.of(given)
