"""The example's GPT in 16 bits: its layers, and the trainer's ``--precision``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpt_model
import ml_dtypes
import numpy as np
import pytest
import train_gpt
import typer
from numpy.typing import NDArray

import fsdpcore as fc

Array = NDArray[Any]
Params = dict[str, Array]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MODEL = gpt_model.GPTConfig(context=16, width=24, heads=2, layers=2, hidden=50)
STEPS = 20


def layer_and_values(name: str) -> tuple[Any, Params, Array]:
    """A layer, float32 parameters of order one, and an input of it."""
    rng = np.random.default_rng(1)
    layer = dict(gpt_model.build(MODEL))[name]
    params = {
        key: value + 0.1 * rng.standard_normal(value.shape).astype(np.float32)
        for key, value in layer.init(rng).items()
    }
    if name == "embed":
        return layer, params, rng.integers(256, size=(3, MODEL.context)).astype(np.uint8)
    return layer, params, rng.standard_normal((3, MODEL.context, MODEL.width)).astype(np.float32)


def passes(layer: Any, params: Params, x: Array, grad_dtype: Any) -> tuple[Array, Array, Params]:
    y, saved = layer.forward(params, x)
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    grads = {key: np.zeros(value.shape, grad_dtype) for key, value in params.items()}
    return y, layer.backward(params, saved, dy.astype(y.dtype), grads), grads


@pytest.mark.parametrize("reduced", [True, False], ids=["float32 gradients", "16-bit gradients"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.dtype(np.float16), 4e-3), (BFLOAT16, 3e-2)], ids=str
)
@pytest.mark.parametrize("name", ["embed", "block0", "head"])
def test_a_layer_in_16_bits_follows_float32(
    name: str, dtype: np.dtype[Any], tolerance: float, reduced: bool
) -> None:
    layer, params, x = layer_and_values(name)
    half = {key: value.astype(dtype) for key, value in params.items()}
    x_half = x if name == "embed" else x.astype(dtype)
    # The same values, so that the difference is that of the computation alone.
    rounded = {key: value.astype(np.float32) for key, value in half.items()}
    x_rounded = x if name == "embed" else x_half.astype(np.float32)
    y, dx, grads = passes(layer, rounded, x_rounded, np.float32)
    grad_dtype = np.dtype(np.float32) if reduced else dtype
    y_half, dx_half, grads_half = passes(layer, half, x_half, grad_dtype)

    assert y_half.dtype == dx_half.dtype == dtype
    assert {value.dtype for value in grads_half.values()} == {grad_dtype}
    found = {"y": y_half, "dx": dx_half, **grads_half}
    for key, value in {"y": y, "dx": dx, **grads}.items():
        error = np.linalg.norm(found[key].astype(np.float32) - value)
        # The softmax does not see a shift of all keys: that part of qkv.b has no gradient.
        assert error <= tolerance * np.linalg.norm(value), key


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_the_loss_of_16_bits_is_computed_in_32(dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(3)
    logits = (3 * rng.standard_normal((2, 5, 256))).astype(dtype)
    targets = rng.integers(256, size=(2, 5))
    loss, gradient = gpt_model.cross_entropy(logits, targets)
    expected, exact = gpt_model.cross_entropy(logits.astype(np.float32), targets)
    assert loss == expected
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, exact)


def test_attention_in_float16_takes_scores_that_overflow_an_exponential() -> None:
    layer, params, x = layer_and_values("block0")
    params["qkv.w"] *= 20
    half = {key: value.astype(np.float16) for key, value in params.items()}
    y, dx, grads = passes(layer, half, x.astype(np.float16), np.float32)
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()
    assert all(np.isfinite(value).all() for value in grads.values())


def options(precision: str) -> train_gpt.Options:
    return train_gpt.Options(
        model=MODEL,
        steps=STEPS,
        batch=6,
        lr=6e-3,
        seed=1337,
        strategy=fc.Strategy(),
        prefetch=1,
        algorithm="auto",
        out=Path("unused"),
        precision=precision,
        evaluation_batches=1,
        sample_bytes=3,
    )


def trained(backend: fc.Backend, precision: str) -> tuple[list[float], list[float], int]:
    """Losses of the steps, scales of the loss after them, and the number of updates."""
    trainer = train_gpt.Trainer(backend, options(precision))
    losses, scales, told = [], [], []
    trainer.engine.on_step(told.append)
    for number in range(STEPS):
        losses.append(trainer.step(number))
        scales.append(trainer.engine.loss_scale)
    tokens = trainer.options.batch // backend.world_size * trainer.options.model.context
    assert {figures["tokens"] for figures in told} == {tokens}
    losses.append(trainer.evaluate())
    assert (len(trainer.generate()) > 0) == (backend.rank == 0)
    return losses, scales, trainer.engine.steps


def train(precision: str) -> tuple[list[float], list[float], int]:
    results = fc.launch(trained, world_size=2, transport="sim", args=(precision,), timeout=60)
    assert results[0] == results[1]
    return results[0]


@pytest.fixture(scope="module")
def in_float32() -> list[float]:
    losses, _, _ = train("fp32")
    assert losses[-2] < 0.8 * losses[0]
    return losses


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_16_bits_learns_as_in_32(precision: str, in_float32: list[float]) -> None:
    losses, _, updates = train(precision)
    assert updates == STEPS
    assert losses != in_float32
    assert losses == pytest.approx(in_float32, rel=0.02)


def test_a_step_whose_gradients_overflow_is_made_again(
    monkeypatch: pytest.MonkeyPatch, in_float32: list[float]
) -> None:
    large = fc.Precision(np.float16, np.float32, fc.LossScale(2.0**30))
    monkeypatch.setitem(train_gpt.PRECISIONS, "fp16", large)
    losses, scales, updates = train("fp16")
    assert updates == STEPS
    assert scales[0] < 2.0**30
    assert losses == pytest.approx(in_float32, rel=0.02)


def test_gradients_that_no_scale_makes_fit_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = fc.Precision(np.float16, np.float32, 2.0**40)
    monkeypatch.setitem(train_gpt.PRECISIONS, "fp16", constant)
    with pytest.raises(fc.RankFailedError) as caught:
        train("fp16")
    assert isinstance(caught.value.__cause__, fc.NonFiniteGradientError)
    assert "step 0" in str(caught.value.__cause__)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"'fp8'; choose one of fp32, bf16, fp16"):
        train_gpt.cli(precision="fp8")
