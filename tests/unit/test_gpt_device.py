"""The example's GPT on arrays of a GPU, played by ``fake_cuda``, against NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import gpt_arrays
import gpt_model
import ml_dtypes
import numpy as np
import pytest
import train_gpt
from numpy.typing import NDArray
from support import fake_cuda, nccl_ranks
from support.gpu_training import gpt, options

import fsdpcore as fc

Array = NDArray[Any]
Params = dict[str, Array]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MODEL = gpt_model.GPTConfig(vocab=19, context=7, width=36, heads=3, layers=2, hidden=101)


def parameters(dtype: Any) -> list[Params]:
    rng = np.random.default_rng(1)
    return [
        {name: values_like(value, rng, dtype) for name, value in layer.init(rng).items()}
        for _, layer in gpt_model.build(MODEL)
    ]


def values_like(array: Array, rng: np.random.Generator, dtype: Any) -> Array:
    return (0.3 * rng.standard_normal(array.shape) + array).astype(dtype)


def text() -> Array:
    """Inputs and targets (2, 3, T - 1)."""
    shape = (2, 3, MODEL.context - 1)
    return np.random.default_rng(2).integers(MODEL.vocab, size=shape).astype(np.uint8)


def computed(xp: Any, params: list[Params], grad_dtype: Any) -> tuple[Any, Any, list[Params]]:
    """The loss, logits and gradients, all of them arrays of ``xp``."""
    layers = gpt_model.build(MODEL, xp)
    there = [{name: xp.asarray(value) for name, value in values.items()} for values in params]
    grads = [{n: xp.zeros(a.shape, grad_dtype) for n, a in values.items()} for values in params]
    x, y = (xp.asarray(rows) for rows in text())
    saved = []
    for (_, layer), values in zip(layers, there, strict=True):
        x, kept = layer.forward(values, x)
        saved.append(kept)
    loss, d = gpt_model.cross_entropy(x, y, xp)
    for i in reversed(range(len(layers))):
        d = layers[i][1].backward(there[i], saved[i], d, grads[i])
    return loss, x, grads


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "tolerance"),
    [
        (np.float64, np.float64, 1e-12),
        (np.float32, np.float32, 1e-5),
        (np.float16, np.float32, 5e-3),
        (BFLOAT16, np.float32, 4e-2),
        (BFLOAT16, BFLOAT16, 4e-2),
    ],
    ids=str,
)
def test_a_gpu_computes_what_numpy_does(dtype: Any, grad_dtype: Any, tolerance: float) -> None:
    params = parameters(dtype)
    loss, logits, grads = computed(np, params, grad_dtype)
    with fake_cuda.installed(1) as machine:
        import cupy

        found = computed(cupy, params, grad_dtype)
        assert not machine.calls("get"), "the host waited for the GPU during the passes"
        assert float(found[0]) == pytest.approx(float(loss), rel=tolerance)
        there = [found[1].get(), *(array.get() for values in found[2] for array in values.values())]
        assert machine.calls("get")
    here = [logits, *(array for values in grads for array in values.values())]
    for mine, theirs in zip(there, here, strict=True):
        assert mine.dtype == theirs.dtype
        norm = np.linalg.norm(theirs.astype(np.float64))
        assert np.linalg.norm(mine.astype(np.float64) - theirs) <= tolerance * max(norm, 1e-3)


def test_sampling_asks_for_logits_on_the_host() -> None:
    params = parameters(np.float32)
    texts = []

    def sampled(xp: Any, to_host: Any) -> bytes:
        layers = gpt_model.build(MODEL, xp)
        there = [{name: xp.asarray(value) for name, value in values.items()} for values in params]

        def forward(window: Array) -> Array:
            x = xp.asarray(window)
            for (_, layer), values in zip(layers, there, strict=True):
                x, _ = layer.forward(values, x)
            logits: Array = to_host(x)
            return logits

        rng = np.random.default_rng(3)
        return gpt_model.sample(forward, b"\1\2", 12, MODEL.context, rng, temperature=1.0)

    texts.append(sampled(np, lambda x: x))
    with fake_cuda.installed(1):
        import cupy

        texts.append(sampled(cupy, lambda x: x.get()))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
def test_rows_of_one_index_are_added_up_on_a_gpu(dtype: Any) -> None:
    index = np.array([3, 1, 3, 3, 0, 1], np.uint8)
    rows = np.arange(12).reshape(6, 2).astype(dtype)
    expected = np.zeros((5, 2), np.float32)
    np.add.at(expected, index, rows.astype(np.float32))
    here = np.zeros((5, 2), dtype)
    gpt_arrays.sum_by_index(np, index, rows, out=here)
    with fake_cuda.installed(1):
        import cupy

        out = cupy.zeros((5, 2), dtype)
        gpt_arrays.sum_by_index(cupy, cupy.asarray(index), cupy.asarray(rows), out=out)
        there = out.get()
    np.testing.assert_array_equal(here, expected)
    np.testing.assert_array_equal(there, expected)


@pytest.mark.parametrize(
    ("precision", "strategy", "tolerance"),
    [("fp32", "full_shard", 1e-5), ("bf16", "shard_grad_op", 5e-3)],
)
def test_ranks_with_gpus_train_as_ranks_without(
    precision: str, strategy: str, tolerance: float
) -> None:
    small = gpt_model.GPTConfig(context=8, width=12, heads=2, layers=1, hidden=30)
    chosen = options(small, steps=3, batch=5, precision=precision, strategy=strategy)
    expected = fc.launch(gpt, world_size=2, transport="sim", args=(chosen, 3), timeout=60)
    losses = nccl_ranks.results(lambda backend: gpt(backend, chosen, 3), 2)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(expected[0], rel=tolerance)


def test_a_step_waits_for_the_gpu_twice_and_a_sample_is_that_of_the_host() -> None:
    """For the norm, in whose company the finiteness of the gradients comes, and for the loss."""
    small = gpt_model.GPTConfig(context=8, width=12, heads=2, layers=1, hidden=30)
    chosen = dataclasses.replace(options(small, steps=3, batch=5), sample_bytes=4)

    def body(backend: fc.Backend, waits: Callable[[], int] = lambda: 0) -> tuple[int, str]:
        trainer = train_gpt.Trainer(backend, chosen)
        trainer.step(0)
        before = waits()
        trainer.step(1)
        return waits() - before, trainer.generate()

    ((_, expected),) = fc.launch(body, world_size=1, transport="sim", timeout=60)
    with fake_cuda.installed(1) as machine:
        (outcome,) = nccl_ranks.run_ranks(
            lambda backend: body(backend, lambda: len(machine.calls("get"))), 1
        )
    assert not outcome.error, outcome.text
    assert outcome.result == (2, expected)
