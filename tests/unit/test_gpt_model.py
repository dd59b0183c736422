"""The example's GPT against finite differences and direct formulas."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace
from typing import Any

import gpt_model
import numpy as np
import pytest
from numpy.typing import NDArray

from fsdpcore.core.errors import ArgumentError

Array = NDArray[Any]
Params = dict[str, Array]

# Sizes that nothing divides, and one where every extent is one.
ODD = gpt_model.GPTConfig(vocab=19, context=7, width=36, heads=3, layers=2, hidden=101)
TINY = gpt_model.GPTConfig(vocab=2, context=1, width=1, heads=1, layers=1, hidden=1)
CONFIGS = [pytest.param(ODD, id="odd"), pytest.param(TINY, id="ones")]
LAYERS = ["embed", "block0", "head"]


def parameters(layer: Any, rng: np.random.Generator, dtype: Any = np.float64) -> Params:
    """Values of order one everywhere, so that no term of a gradient hides behind a zero."""
    return {
        name: (rng.standard_normal(value.shape) * 0.5 + (name.endswith("gain"))).astype(dtype)
        for name, value in layer.init(rng).items()
    }


def inputs(name: str, config: Any, rng: np.random.Generator, dtype: Any = np.float64) -> Array:
    shape = (2, config.context)
    if name == "embed":
        return rng.integers(config.vocab, size=shape)
    return rng.standard_normal((*shape, config.width)).astype(dtype)


def gradients(params: Params) -> Params:
    return {name: np.zeros_like(value) for name, value in params.items()}


def freeze(params: Params) -> Params:
    for value in params.values():
        value.flags.writeable = False
    return params


def slope(function: Any, value: Array, direction: Array) -> float:
    """The derivative of ``function`` along ``direction``, by a fourth-order central difference."""
    h = 1e-4
    near = function(value + h * direction) - function(value - h * direction)
    far = function(value + 2 * h * direction) - function(value - 2 * h * direction)
    return float((8 * near - far) / (12 * h))


def assert_is_gradient(function: Any, value: Array, gradient: Array, what: str) -> None:
    """Compare with differences along random unit vectors and along some of the axes."""
    rng = np.random.default_rng(5)
    random = rng.standard_normal((4, *value.shape))
    directions = [direction / np.linalg.norm(direction) for direction in random]
    for flat_index in rng.choice(value.size, size=min(8, value.size), replace=False):
        axis = np.zeros(value.shape)
        axis.flat[flat_index] = 1.0
        directions.append(axis)
    # A loss of order 100 has rounding errors of 1e-14, divided by h that is 1e-10.
    tolerance = 1e-9 + 1e-7 * float(np.linalg.norm(gradient))
    for direction in directions:
        expected = slope(function, value, direction)
        got = float(np.sum(gradient * direction))
        assert got == pytest.approx(expected, rel=0, abs=tolerance), what


def model_gradients(layers: Any, params: list[Params], x: Array, y: Array) -> tuple[float, Any]:
    saved = []
    for (_, layer), values in zip(layers, params, strict=True):
        x, kept = layer.forward(values, x)
        saved.append(kept)
    loss, d = gpt_model.cross_entropy(x, y)
    grads = [gradients(values) for values in params]
    for i in reversed(range(len(layers))):
        d = layers[i][1].backward(params[i], saved[i], d, grads[i])
    return loss, grads


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_a_layer_match_central_differences(name: str, config: Any) -> None:
    rng = np.random.default_rng(1)
    layer = dict(gpt_model.build(config))[name]
    params = freeze(parameters(layer, rng))
    x = inputs(name, config, rng)
    y, saved = layer.forward(params, x)
    dy = rng.standard_normal(y.shape)
    grads = gradients(params)
    dx = layer.backward(params, saved, dy, grads)

    for key, value in params.items():

        def loss(changed: Array, key: str = key) -> float:
            return float(np.sum(dy * layer.forward({**params, key: changed}, x)[0]))

        assert_is_gradient(loss, value, grads[key], key)
    assert dx.shape == x.shape
    if name == "embed":
        assert not dx.any()
    else:
        assert_is_gradient(
            lambda changed: float(np.sum(dy * layer.forward(params, changed)[0])), x, dx, "x"
        )


def plain_norm(params: Params, name: str, row: Array) -> Array:
    variance = sum((v - np.mean(row)) ** 2 for v in row) / len(row)
    unit = (row - np.mean(row)) / math.sqrt(variance + 1e-5)
    return np.asarray(unit * params[f"{name}.gain"] + params[f"{name}.bias"])


def plain_block(params: Params, x: Array, heads: int) -> Array:
    """One sequence (T, D) through a block, position by position and head by head."""
    width = x.shape[1]
    size = width // heads
    qkv = [plain_norm(params, "norm1", row) @ params["qkv.w"] + params["qkv.b"] for row in x]
    result = np.zeros_like(x)
    for t, row in enumerate(x):
        mixed = np.zeros(width)
        for h in range(0, width, size):
            query = qkv[t][h : h + size]
            keys = [qkv[s][width + h : width + h + size] for s in range(t + 1)]
            values = [qkv[s][2 * width + h : 2 * width + h + size] for s in range(t + 1)]
            odds = [math.exp(float(query @ key) / math.sqrt(size)) for key in keys]
            for odd, value in zip(odds, values, strict=True):
                mixed[h : h + size] += odd / sum(odds) * value
        middle = row + mixed @ params["proj.w"] + params["proj.b"]
        up = plain_norm(params, "norm2", middle) @ params["up.w"] + params["up.b"]
        cubic = [math.sqrt(2 / math.pi) * (v + 0.044715 * v**3) for v in up]
        active = np.array([v * (1 + math.tanh(u)) / 2 for v, u in zip(up, cubic, strict=True)])
        result[t] = middle + active @ params["down.w"] + params["down.b"]
    return result


@pytest.mark.parametrize("config", CONFIGS)
def test_a_block_computes_the_formulas_of_a_transformer(config: Any) -> None:
    rng = np.random.default_rng(14)
    layer = gpt_model.Block(config)
    params = parameters(layer, rng)
    x = inputs("block0", config, rng)
    expected = [plain_block(params, sequence, config.heads) for sequence in x]
    np.testing.assert_allclose(layer.forward(params, x)[0], expected, rtol=1e-11, atol=1e-11)


def test_gradients_of_the_whole_model_match_central_differences() -> None:
    rng = np.random.default_rng(2)
    layers = gpt_model.build(ODD)
    params = [freeze(parameters(layer, rng)) for _, layer in layers]
    x, y = rng.integers(ODD.vocab, size=(2, 3, ODD.context))
    _, grads = model_gradients(layers, params, x, y)

    for i, (layer_name, _) in enumerate(layers):
        for key, value in params[i].items():

            def loss(changed: Array, i: int = i, key: str = key) -> float:
                moved = [*params[:i], {**params[i], key: changed}, *params[i + 1 :]]
                return model_gradients(layers, moved, x, y)[0]

            assert_is_gradient(loss, value, grads[i][key], f"{layer_name}.{key}")


@pytest.mark.parametrize("name", LAYERS)
def test_a_shorter_sequence_leaves_the_other_positions_without_gradient(name: str) -> None:
    rng = np.random.default_rng(3)
    layer = dict(gpt_model.build(ODD))[name]
    params = parameters(layer, rng)
    x = inputs(name, ODD, rng)
    short = ODD.context - 2
    whole, _ = layer.forward(params, x)
    y, saved = layer.forward(params, x[:, :short])
    np.testing.assert_allclose(y, whole[:, :short], rtol=1e-12, atol=1e-12)
    grads = gradients(params)
    layer.backward(params, saved, np.ones_like(y), grads)
    if name == "embed":
        np.testing.assert_array_equal(grads["position"][:short], 2.0)
        assert not grads["position"][short:].any()


def test_repeated_bytes_add_up_and_absent_ones_stay_zero() -> None:
    rng = np.random.default_rng(4)
    layer = gpt_model.Embedding(ODD)
    params = parameters(layer, rng)
    x = np.array([[3, 3, 5], [5, 3, 0]], np.uint8)
    y, saved = layer.forward(params, x)
    dy = rng.standard_normal(y.shape)
    grads = gradients(params)
    layer.backward(params, saved, dy, grads)
    expected = np.zeros_like(params["byte"])
    for place in np.ndindex(x.shape):
        expected[x[place]] += dy[place]
    np.testing.assert_allclose(grads["byte"], expected, rtol=1e-12, atol=1e-12)


def test_logits_depend_on_no_later_byte() -> None:
    rng = np.random.default_rng(6)
    layers = gpt_model.build(ODD)
    params = [parameters(layer, rng) for _, layer in layers]

    def logits(x: Array) -> Array:
        for (_, layer), values in zip(layers, params, strict=True):
            x, _ = layer.forward(values, x)
        return x

    x = rng.integers(ODD.vocab, size=(1, ODD.context))
    before = logits(x)
    for t in range(ODD.context):
        changed = x.copy()
        changed[0, t] = (changed[0, t] + 1) % ODD.vocab
        after = logits(changed)
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        # Every position from t on attends to t.
        assert (np.abs(after[0, t:] - before[0, t:]).max(axis=-1) > 0).all()


def test_attention_takes_scores_that_overflow_an_exponential() -> None:
    rng = np.random.default_rng(7)
    layer = gpt_model.Block(ODD)
    params = parameters(layer, rng, np.float32)
    params["qkv.w"] *= 100
    y, saved = layer.forward(params, inputs("block0", ODD, rng, np.float32))
    dx = layer.backward(params, saved, np.ones_like(y), gradients(params))
    assert np.isfinite(y).all()
    assert np.isfinite(dx).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_results_have_the_type_of_the_parameters(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(8)
    layer = dict(gpt_model.build(ODD))[name]
    params = parameters(layer, rng, dtype)
    grads = gradients(params)
    y, saved = layer.forward(params, inputs(name, ODD, rng, dtype))
    dx = layer.backward(params, saved, np.ones_like(y), grads)
    assert y.dtype == dx.dtype == dtype
    assert {value.dtype for value in grads.values()} == {np.dtype(dtype)}
    assert gpt_model.cross_entropy(y, np.zeros(y.shape[:-1], int))[1].dtype == dtype


def test_float32_follows_float64() -> None:
    rng = np.random.default_rng(9)
    layers = gpt_model.build(ODD)
    exact = [parameters(layer, rng) for _, layer in layers]
    rounded = [{k: v.astype(np.float32) for k, v in values.items()} for values in exact]
    x, y = rng.integers(ODD.vocab, size=(2, 3, ODD.context))
    loss, grads = model_gradients(layers, exact, x, y)
    loss32, grads32 = model_gradients(layers, rounded, x, y)
    assert loss32 == pytest.approx(loss, rel=1e-5)
    for values, values32 in zip(grads, grads32, strict=True):
        for key, value in values.items():
            error = np.linalg.norm(values32[key] - value) / np.linalg.norm(value)
            # The softmax does not see a shift of all keys: that part of the gradient is zero.
            assert error < 1e-4, key


def test_no_layer_changes_its_input_or_the_gradient_it_is_given() -> None:
    rng = np.random.default_rng(10)
    for name, layer in gpt_model.build(ODD):
        x = inputs(name, ODD, rng)
        params = freeze(parameters(layer, rng))
        y, saved = layer.forward(params, x)
        dy = rng.standard_normal(y.shape)
        x_before, dy_before = x.copy(), dy.copy()
        layer.backward(params, saved, dy, gradients(params))
        np.testing.assert_array_equal(x, x_before)
        np.testing.assert_array_equal(dy, dy_before)


def test_initial_values_keep_the_variance_and_shrink_into_the_residual_stream() -> None:
    config = gpt_model.GPTConfig(width=64, heads=4, layers=8, hidden=100)
    layers = gpt_model.build(config)
    assert [name for name, _ in layers] == ["embed", *(f"block{i}" for i in range(8)), "head"]
    for _, layer in layers:
        params = layer.init(np.random.default_rng(11))
        again = layer.init(np.random.default_rng(11))
        assert list(params) == list(again)
        for key, value in params.items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, again[key])
            if key.endswith((".gain", ".b", ".bias")):
                np.testing.assert_array_equal(value, float(key.endswith(".gain")))
            else:
                inputs = 100 if key == "down.w" else 64
                expected = inputs**-0.5 / (4 if key in ("proj.w", "down.w") else 1)
                assert float(value.std()) == pytest.approx(expected, rel=0.05), key


def test_cross_entropy_matches_the_formula() -> None:
    rng = np.random.default_rng(12)
    logits = rng.standard_normal((2, 3, 19)) * 3
    targets = rng.integers(19, size=(2, 3))
    loss, gradient = gpt_model.cross_entropy(logits, targets)
    expected = np.mean(
        [
            math.log(sum(math.exp(v) for v in logits[place])) - logits[place][targets[place]]
            for place in np.ndindex(2, 3)
        ]
    )
    assert loss == pytest.approx(float(expected), rel=1e-12)
    assert_is_gradient(
        lambda changed: gpt_model.cross_entropy(changed, targets)[0], logits, gradient, "logits"
    )
    assert gpt_model.cross_entropy(np.zeros((4, 256)), np.arange(4))[0] == pytest.approx(
        math.log(256)
    )
    assert math.isfinite(gpt_model.cross_entropy(logits * 1e4, targets)[0])


def test_sampling_at_temperature_zero_follows_the_likeliest_byte() -> None:
    seen: list[bytes] = []

    def successor(x: Array) -> Array:
        seen.append(x.tobytes())
        return np.asarray(np.eye(256, dtype=np.float32)[(x.astype(int) + 1) % 256])

    rng = np.random.default_rng(13)
    assert gpt_model.sample(successor, b"ab", 4, 3, rng, temperature=0.0) == b"cdef"
    assert seen == [b"ab", b"abc", b"bcd", b"cde"]


def test_sampling_draws_from_the_softmax_and_follows_its_generator() -> None:
    def half(x: Array) -> Array:
        logits = np.full((*x.shape, 256), -np.inf, np.float32)
        logits[..., [65, 66]] = math.log(0.2), math.log(0.8)
        return logits

    def draw(seed: int, temperature: float) -> bytes:
        rng = np.random.default_rng(seed)
        return bytes(gpt_model.sample(half, b"x", 2000, 8, rng, temperature=temperature))

    text = draw(1, 1.0)
    assert set(text) == {65, 66}
    assert text.count(b"A") / 2000 == pytest.approx(0.2, abs=0.05)
    # Temperature 1/2 squares the odds: 1 to 16.
    assert draw(1, 0.5).count(b"A") / 2000 == pytest.approx(1 / 17, abs=0.03)
    assert draw(1, 1.0) == text
    assert draw(2, 1.0) != text


def test_memory_is_kept_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, int] = {}

    def mallopt(name: int, value: int) -> int:
        asked[name] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert gpt_model.keep_freed_memory()
    assert set(asked) == {-1, -2, -3}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not gpt_model.keep_freed_memory()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="multiple of heads"):
        gpt_model.GPTConfig(width=10, heads=3)
    with pytest.raises(ArgumentError, match=r"hidden is 0"):
        gpt_model.GPTConfig(hidden=0)
    layer = gpt_model.Embedding(ODD)
    with pytest.raises(ArgumentError, match="context of 7"):
        layer.forward(layer.init(np.random.default_rng(0)), np.zeros((1, 8), np.uint8))
    rng = np.random.default_rng(0)
    with pytest.raises(ArgumentError, match="empty"):
        gpt_model.sample(lambda x: x, b"", 1, 8, rng)
    with pytest.raises(ArgumentError, match="temperature"):
        gpt_model.sample(lambda x: x, b"a", 1, 8, rng, temperature=-1.0)
