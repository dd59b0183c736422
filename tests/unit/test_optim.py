"""The optimizers against scalar loops written out in Python's float64."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fsdpcore.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.optim import SGD, AdamW, Optimizer
from fsdpcore.fsdp.optim.base import BLOCK_ELEMENTS

Array = NDArray[Any]
Reference = Callable[[float, Sequence[float], Sequence[float]], tuple[float, list[float]]]

ADAMW = AdamW(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
OPTIMIZERS: list[Optimizer] = [
    ADAMW,
    AdamW(),
    AdamW(betas=(0.0, 0.0), weight_decay=0.0),
    SGD(0.05),
    SGD(0.05, weight_decay=0.1),
    SGD(0.05, momentum=0.9),
    SGD(0.05, momentum=0.9, weight_decay=0.1),
    SGD(0.05, momentum=0.9, nesterov=True),
    SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
]
SIZES = [1, 7, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 2 * BLOCK_ELEMENTS + 77]


def _reference(optimizer: Optimizer) -> Reference:
    """Return the update of one scalar over all steps: (p, gradients, learning rates)."""
    if isinstance(optimizer, AdamW):
        return lambda p, grads, lrs: _adamw(optimizer, p, grads, lrs)
    assert isinstance(optimizer, SGD)
    return lambda p, grads, lrs: _sgd(optimizer, p, grads, lrs)


def _adamw(
    o: AdamW, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        m = o.betas[0] * m + (1 - o.betas[0]) * g
        v = o.betas[1] * v + (1 - o.betas[1]) * g**2
        m_hat = m / (1 - o.betas[0] ** t)
        v_hat = v / (1 - o.betas[1] ** t)
        p = p - lr * o.weight_decay * p - lr * m_hat / (math.sqrt(v_hat) + o.eps)
    return p, [m, v]


def _sgd(
    o: SGD, p: float, grads: Sequence[float], lrs: Sequence[float]
) -> tuple[float, list[float]]:
    b: float | None = None
    for g, lr in zip(grads, lrs, strict=True):
        d = g + o.weight_decay * p
        if o.momentum:
            b = d if b is None else o.momentum * b + d
            d = d + o.momentum * b if o.nesterov else b
        p = p - lr * d
    return p, [] if b is None else [b]


def _data(size: int, steps: int, dtype: Any, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    param = rng.standard_normal(size).astype(dtype)
    grads = rng.standard_normal((steps, size)).astype(dtype)
    return param, grads


def _run(
    optimizer: Optimizer, param: Array, grads: Array, **options: Any
) -> tuple[Array, dict[str, Array]]:
    """Take one step per row of grads on a copy of param; return it and the state."""
    param = param.copy()
    state = optimizer.init_state(param.size, param.dtype)
    for step, grad in enumerate(grads, start=1):
        optimizer.update(param, grad, state, step=step, **options)
    return param, state


def _sample(size: int) -> list[int]:
    """All indices of a small array; of a large one those around the block boundaries."""
    if size < 1000:
        return list(range(size))
    near = [edge + k for edge in range(0, size + 1, BLOCK_ELEMENTS) for k in range(-9, 10)]
    near += [*range(size - 9, size), *range(0, size, 9973)]
    return sorted({i for i in near if 0 <= i < size})


# Values


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 3e-5)])
def test_matches_the_scalar_loop(optimizer: Optimizer, size: int, dtype: Any, rtol: float) -> None:
    param, grads = _data(size, 5, dtype)
    before = grads.copy()
    result, state = _run(optimizer, param, grads)
    reference = _reference(optimizer)
    for i in _sample(size):
        expected, moments = reference(float(param[i]), grads[:, i].tolist(), [optimizer.lr] * 5)
        assert float(result[i]) == pytest.approx(expected, rel=rtol, abs=rtol)
        assert len(moments) == len(optimizer.state_names)
        for name, moment in zip(optimizer.state_names, moments, strict=True):
            assert float(state[name][i]) == pytest.approx(moment, rel=rtol, abs=rtol)
    np.testing.assert_array_equal(grads, before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_lr_of_the_step_replaces_the_configured_one(optimizer: Optimizer) -> None:
    param, grads = _data(50, 4, np.float64)
    lrs = [0.1, 0.03, 0.0, 0.2]
    result = param.copy()
    state = optimizer.init_state(param.size, param.dtype)
    for step, (grad, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        optimizer.update(result, grad, state, step=step, lr=lr)
    reference = _reference(optimizer)
    for i in range(param.size):
        expected, _ = reference(float(param[i]), grads[:, i].tolist(), lrs)
        assert float(result[i]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [0.3, 0.0, -2.0, np.float64(0.3), np.float32(0.25)])
def test_grad_scale_is_the_same_as_a_scaled_gradient(
    optimizer: Optimizer, dtype: Any, scale: Any
) -> None:
    param, grads = _data(BLOCK_ELEMENTS + 3, 3, dtype)
    grads.flags.writeable = False
    scaled, scaled_state = _run(optimizer, param, grads, grad_scale=scale)
    plain, plain_state = _run(optimizer, param, (grads * float(scale)).astype(dtype))
    assert scaled.tobytes() == plain.tobytes()
    for name in optimizer.state_names:
        assert scaled_state[name].tobytes() == plain_state[name].tobytes()


def test_adamw_bias_correction_at_a_late_step() -> None:
    # With a constant gradient from zero state at step 10**6 both corrections are 1.
    param = np.zeros(3)
    state = ADAMW.init_state(3, np.float64)
    ADAMW.update(param, np.full(3, 2.0), state, step=10**6)
    expected = -0.02 * (0.2 * 2.0) / (math.sqrt(0.05 * 4.0) + 1e-6)
    np.testing.assert_allclose(param, expected, rtol=1e-13)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_gradient_only_decays(optimizer: Optimizer, dtype: Any) -> None:
    param, _ = _data(100, 0, dtype)
    assert isinstance(optimizer, (AdamW, SGD))
    decay = optimizer.weight_decay
    result, _ = _run(optimizer, param, np.zeros((1, 100), dtype))
    if isinstance(optimizer, SGD) and optimizer.nesterov:
        decay *= 1 + optimizer.momentum
    np.testing.assert_allclose(result, param * (1 - optimizer.lr * decay), rtol=1e-6)


# Bits


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_pieces_give_the_same_bits_as_the_whole(
    optimizer: Optimizer, dtype: Any, data: st.DataObject
) -> None:
    size = 2 * BLOCK_ELEMENTS + 77
    edges = st.sampled_from([1, 2, 3, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1])
    cuts = data.draw(st.lists(edges | st.integers(0, size), max_size=6).map(sorted))
    param, grads = _data(size, 2, dtype)
    whole, whole_state = _run(optimizer, param, grads, grad_scale=0.7)
    pieces = param.copy()
    state = optimizer.init_state(size, dtype)
    for step, grad in enumerate(grads, start=1):
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
            part = {name: array[start:stop] for name, array in state.items()}
            optimizer.update(pieces[start:stop], grad[start:stop], part, step=step, grad_scale=0.7)
    assert pieces.tobytes() == whole.tobytes()
    for name in optimizer.state_names:
        assert state[name].tobytes() == whole_state[name].tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_numpy_scalars_do_not_upcast(optimizer: Optimizer) -> None:
    """Under NEP 50 a float64 scalar would make float32 arithmetic float64, with other bits."""
    fields = {name: getattr(optimizer, name) for name in optimizer.__dataclass_fields__}
    wide = {
        name: np.float64(value) if isinstance(value, float) else value
        for name, value in fields.items()
    }
    if "betas" in wide:
        wide["betas"] = [np.float64(beta) for beta in fields["betas"]]
    param, grads = _data(1000, 3, np.float32)
    plain, plain_state = _run(optimizer, param, grads, lr=0.01, grad_scale=0.3)
    other = type(optimizer)(**wide)
    assert other == optimizer
    result, state = _run(other, param, grads, lr=np.float64(0.01), grad_scale=np.float64(0.3))
    assert result.dtype == np.float32
    assert result.tobytes() == plain.tobytes()
    for name in optimizer.state_names:
        assert state[name].dtype == np.float32
        assert state[name].tobytes() == plain_state[name].tobytes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_update_allocates_at_most_two_blocks(optimizer: Optimizer) -> None:
    param, grads = _data(8 * BLOCK_ELEMENTS, 1, np.float32)
    state = optimizer.init_state(param.size, param.dtype)
    optimizer.update(param, grads[0], state, step=1, grad_scale=0.5)
    tracemalloc.start()
    try:
        optimizer.update(param, grads[0], state, step=2, grad_scale=0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Views and other Python objects get 64 KiB on top.
    assert peak <= 2 * BLOCK_ELEMENTS * param.itemsize + 64 * 1024


# State


def test_state_arrays() -> None:
    assert set(ADAMW.init_state(3, np.float32)) == {"exp_avg", "exp_avg_sq"}
    assert set(SGD(0.1, momentum=0.9).init_state(3, np.float32)) == {"momentum_buffer"}
    assert SGD(0.1).init_state(3, np.float32) == {}
    for array in ADAMW.init_state(3, "float64").values():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, np.zeros(3))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
def test_empty_shard(optimizer: Optimizer) -> None:
    state = optimizer.init_state(0, np.float32)
    empty = np.zeros(0, np.float32)
    optimizer.update(empty, empty.copy(), state, step=1, grad_scale=0.5)
    assert all(array.size == 0 for array in state.values())


@pytest.mark.parametrize(
    ("size", "dtype", "message"),
    [
        (-1, np.float32, "size must be at least 0"),
        (1.0, np.float32, "size must be an integer"),
        (3, np.float16, "float32 master shard"),
        (3, np.int32, "must be float32 or float64, got int32"),
    ],
)
def test_init_state_refuses(size: Any, dtype: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ADAMW.init_state(size, dtype)


# Errors


def _arguments(optimizer: Optimizer = ADAMW) -> dict[str, Any]:
    return {
        "param": np.ones(4, np.float32),
        "grad": np.ones(4, np.float32),
        "state": optimizer.init_state(4, np.float32),
        "step": 1,
    }


def _read_only() -> Array:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": np.ones(3, np.float32)}, "grad has 3 elements of float32, but param has 4"),
        ({"grad": np.ones(4)}, "grad has 4 elements of float64, but param has 4 of float32"),
        ({"grad": np.ones((2, 2), np.float32)}, r"grad must be 1-D .* got shape \(2, 2\)"),
        ({"grad": np.ones(8, np.float32)[::2]}, "grad must be 1-D and contiguous"),
        ({"grad": [1.0] * 4}, "grad must be a NumPy array, got list"),
        ({"param": np.ones(4, np.float16)}, "param must be float32 or float64, got float16"),
        ({"param": np.ones(4, ">f4")}, "param must be float32 or float64, got >f4"),
        ({"param": _read_only()}, "param is read-only"),
        ({"state": {}}, r"AdamW needs the state arrays \['exp_avg', 'exp_avg_sq'\], got \[\]"),
        ({"state": SGD(0.1, momentum=0.5).init_state(4, "f4")}, r"got \['momentum_buffer'\]"),
        ({"state": ADAMW.init_state(5, "f4")}, r"state\['exp_avg'\] has 5 elements of float32"),
        ({"state": ADAMW.init_state(4, "f8")}, r"state\['exp_avg'\] has 4 elements of float64"),
        (
            {"state": {"exp_avg": _read_only(), "exp_avg_sq": np.ones(4, np.float32)}},
            r"state\['exp_avg'\] is read-only",
        ),
        ({"step": 0}, r"step \(which counts from 1\) must be at least 1, got 0"),
        ({"step": 1.0}, "must be an integer, got 1.0"),
        ({"lr": -0.1}, "lr must be at least 0, got -0.1"),
        ({"lr": "0.1"}, "lr must be a real number, got '0.1'"),
        ({"lr": 10**400}, "lr must be finite"),
        ({"grad_scale": math.nan}, "grad_scale must be finite, got nan"),
        ({"grad_scale": None}, "grad_scale must be a real number, got None"),
    ],
)
def test_update_refuses_and_writes_nothing(change: dict[str, Any], message: str) -> None:
    arguments = _arguments() | change
    untouched = {"param": np.copy(arguments["param"])} | {
        name: array.copy() for name, array in arguments["state"].items()
    }
    with pytest.raises(ArgumentError, match=message):
        ADAMW.update(**arguments)
    for name, array in untouched.items():
        now = arguments["param"] if name == "param" else arguments["state"][name]
        np.testing.assert_array_equal(now, array)


def test_update_refuses_shared_memory() -> None:
    flat = np.ones(7, np.float32)
    arguments = _arguments() | {"param": flat[:4], "grad": flat[3:]}
    with pytest.raises(ArgumentError, match="param and grad share memory"):
        ADAMW.update(**arguments)
    moment = np.zeros(4, np.float32)
    arguments = _arguments() | {"state": {"exp_avg": moment, "exp_avg_sq": moment}}
    with pytest.raises(ArgumentError, match="share memory"):
        ADAMW.update(**arguments)


def test_neighbouring_slices_do_not_share_memory() -> None:
    flat = np.ones(8, np.float32)
    arguments = _arguments() | {"param": flat[:4], "grad": flat[4:]}
    ADAMW.update(**arguments)
    assert (flat[:4] < 1.0).all()
    np.testing.assert_array_equal(flat[4:], 1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(lr=-1.0), "lr of AdamW must be at least 0, got -1"),
        (lambda: AdamW(lr=math.inf), "lr of AdamW must be finite"),
        (lambda: AdamW(lr=None), "lr of AdamW must be a real number, got None"),  # type: ignore[arg-type]
        (lambda: AdamW(lr=True), "lr of AdamW must be a real number, got True"),
        (lambda: AdamW(betas=(0.9, 1.0)), "betas of AdamW must be below 1"),
        (lambda: AdamW(betas=(-0.1, 0.9)), r"betas\[0\] of AdamW must be at least 0"),
        (lambda: AdamW(betas=(0.9,)), "betas of AdamW must be two numbers"),  # type: ignore[arg-type]
        (lambda: AdamW(betas=0.9), "betas of AdamW must be two numbers"),  # type: ignore[arg-type]
        (lambda: AdamW(eps=-1e-8), "eps of AdamW must be at least 0"),
        (lambda: AdamW(eps=0.0), "eps of AdamW must be above 0"),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay of AdamW must be at least 0"),
        (lambda: SGD(-0.1), "lr of SGD must be at least 0"),
        (lambda: SGD(0.1, momentum=-0.5), "momentum of SGD must be at least 0"),
        (lambda: SGD(0.1, nesterov=True), "nesterov of SGD needs a momentum above 0"),
        (lambda: SGD(0.1, 0.9, nesterov=1), "nesterov of SGD must be True or False"),  # type: ignore[arg-type]
        (lambda: SGD(0.1, weight_decay=math.nan), "weight_decay of SGD must be finite"),
    ],
)
def test_hyper_parameters_are_checked(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_optimizers_are_values() -> None:
    assert AdamW(lr=0.1, betas=[0.9, 0.99]) == AdamW(lr=0.1, betas=(0.9, 0.99))  # type: ignore[arg-type]
    assert hash(SGD(0.1)) == hash(SGD(0.1))
    assert AdamW(lr=0.1) != AdamW(lr=0.2)


def test_optimizer_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Optimizer(0.1)  # type: ignore[abstract]
