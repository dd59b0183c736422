"""The examples that train a framework's model: on 3 ranks, stopped, and resumed on 2.

All end as the framework alone does, unsharded, but for the order of sums.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from support.spmd import run

STEPS, HALF = 4, 2
NAMES = ["cnn_numpy", "transformer_jax", "batchnorm_equinox", "module_torch"]


def results(main: Any, folder: Path) -> list[Any]:
    """What comes out in every way: a list over ways, of what each rank returned."""

    def on(ranks: int, *args: Any) -> Any:
        return run(main, transport="sim", world_size=ranks, args=args, blas_threads=1)

    found = on(3, "", STEPS)
    on(3, str(folder), HALF)
    return [found, on(2, str(folder), STEPS)]


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_on_a_screen(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    lines = [line for line in path.read_text().partition("BATCH")[2].splitlines() if line.strip()]
    assert len(lines) <= 75


def test_a_cnn_in_numpy(tmp_path):
    example = importlib.import_module("cnn_numpy")
    layers = {"conv0": example.Conv(1, 16), "conv1": example.Conv(16, 32), "out": example.Out()}
    rng = np.random.default_rng(0)
    params = {name: layer.init(rng) for name, layer in layers.items()}
    digits = example.load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    moments = {(u, n): np.zeros((2, *p.shape), "f") for u in params for n, p in params[u].items()}
    for step in range(STEPS):
        rows = np.random.default_rng(step).choice(example.TRAIN, example.BATCH, replace=False)
        x, saved, grads = images[rows], {}, {name: {} for name in layers}
        for name, layer in layers.items():
            x, saved[name] = layer.forward(params[name], x)
        _, dy = example.cross_entropy(x, digits.target[rows])
        for name in reversed(layers):
            dy = layers[name].backward(params[name], saved[name], dy, grads[name])
        every = [g for named in grads.values() for g in named.values()]
        norm = math.sqrt(sum(float((g**2).sum()) for g in every))
        scale = min(1 / example.BATCH, 1 / norm)
        for (unit, name), (m, v) in moments.items():
            g = grads[unit][name] * np.float32(scale)
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            root = np.sqrt(v / (1 - 0.999 ** (step + 1))) + 1e-8
            decayed = params[unit][name] * (1 - 5e-3 * 0.01)
            params[unit][name] = decayed - 5e-3 * m / (1 - 0.9 ** (step + 1)) / root
    for ranks in results(example.main, tmp_path / "cnn"):
        for found in ranks:
            for unit, named in params.items():
                for name, want in named.items():
                    assert_allclose(found[f"{unit}.{name}"], want, atol=2e-5)


def test_a_transformer_of_jax(tmp_path, monkeypatch):
    import jax
    import optax

    example = importlib.import_module("transformer_jax")
    monkeypatch.setattr(example, "BLOCKS", 1)  # half of it is compiled in half the time

    @jax.jit
    def step_of(params, state, rows, key):
        grads = jax.grad(example.loss_fn)(params, rows, key, np.arange(example.BATCH))
        grads = jax.tree.map(lambda g: g / example.BATCH / example.LENGTH, grads)
        scale = jax.numpy.minimum(1.0, 1.0 / optax.tree.norm(grads))
        updates, state = example.ADAMW.transformation.update(
            jax.tree.map(lambda g: g * scale, grads), state, params
        )
        return optax.apply_updates(params, updates), state

    want = example.start()
    state = example.ADAMW.transformation.init(want)
    for step in range(STEPS):
        want, state = step_of(want, state, *example.batch(step))
    for ranks in results(example.main, tmp_path / "transformer"):
        for found in ranks:
            jax.tree.map(lambda one, other: assert_allclose(one, other, atol=2e-5), found, want)


def test_a_module_of_equinox_with_running_statistics(tmp_path):
    import equinox as eqx
    import jax

    example = importlib.import_module("batchnorm_equinox")
    gradient = eqx.filter_jit(eqx.filter_grad(example.loss_fn, has_aux=True))
    model, state = eqx.nn.make_with_state(example.start)()
    moments, ema = example.SGD.transformation.init(eqx.filter(model, eqx.is_array)), None
    for step in range(STEPS):
        x, kinds = example.batch(step)
        parts = zip(np.split(x, example.PARTS), np.split(kinds, example.PARTS), strict=True)
        grads, states = zip(*(gradient(model, *part, state) for part in parts), strict=True)
        grads = jax.tree.map(lambda *each: sum(each) / example.BATCH, *grads)
        state = jax.tree.map(
            lambda *each: sum(each) / len(each) if each[0].ndim else each[0], *states
        )
        updates, moments = example.SGD.transformation.update(grads, moments)
        model = eqx.apply_updates(model, updates)
        now = eqx.filter(model, eqx.is_array)
        ema = now if step == 0 else jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, ema, now)
    for ranks in results(example.main, tmp_path / "equinox"):
        for found, statistics in ranks:
            arrays = [leaf for leaf in jax.tree.leaves(found) if isinstance(leaf, np.ndarray)]
            pairs = zip(arrays, jax.tree.leaves(ema), strict=True)
            for one, want in (
                *pairs,
                *zip(*map(jax.tree.leaves, (statistics, state)), strict=True),
            ):
                assert_allclose(one, want, atol=2e-6)
            assert jax.tree.leaves(statistics)[0] == STEPS


def test_a_module_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    example = importlib.import_module("module_torch")
    want = {name: p.detach().clone() for name, p in example.MODEL.named_parameters()}
    optimizer = torch.optim.AdamW(want.values(), weight_decay=0.1)
    for step in range(STEPS):
        x, kinds = map(torch.from_numpy, example.batch(step))
        for tensor in want.values():
            tensor.requires_grad_()
        logits = torch.func.functional_call(example.MODEL, want, (x,))
        torch.nn.functional.cross_entropy(logits, kinds).backward()
        norm = torch.sqrt(sum((each.grad**2).sum() for each in want.values()))
        for each in want.values():
            each.grad *= torch.clamp(1 / norm, max=1.0)
        now = step + 1
        progress = (now - 5) / 95
        rate = now / 5 if now < 5 else 0.5 * (1 + math.cos(math.pi * progress))
        optimizer.param_groups[0]["lr"] = 0.01 * rate
        optimizer.step()
        optimizer.zero_grad()
    for ranks in results(example.main, tmp_path / "torch"):
        for found in ranks:
            for name, tensor in want.items():
                assert_allclose(found[name], tensor.detach().numpy(), atol=2e-5)
