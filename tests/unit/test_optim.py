"""The elementwise optimizers against scalar loops written out in Python's float64."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.optimizers import (
    ADAMW,
    ELEMENTWISE,
    random_data,
    reference,
    sampled,
    updated,
)

from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.optim import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    NAdam,
    Optimizer,
    PieceSpec,
    RAdam,
    RMSprop,
    ShardPiece,
    schedules,
)
from fsdpcore.fsdp.optim.bound import BLOCK_ELEMENTS

SIZES = [1, 7, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 2 * BLOCK_ELEMENTS + 77]


# Values


# How an array is cut into blocks is the base class's: for that, one optimizer is all.
@pytest.mark.parametrize(
    ("optimizer", "size"),
    [*((each, SIZES[-1]) for each in ELEMENTWISE), *((ADAMW, size) for size in SIZES[:-1])],
    ids=repr,
)
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 3e-5)])
def test_matches_the_scalar_loop(optimizer: Optimizer, size: int, dtype: Any, rtol: float) -> None:
    param, grads = random_data(size, 5, dtype)
    result, state = updated(optimizer, param, grads)  # the gradients cannot be written
    scalar = reference(optimizer)
    for i in sampled(size):
        expected, moments = scalar(float(param[i]), grads[:, i].tolist(), [optimizer.lr] * 5)
        assert float(result[i]) == pytest.approx(expected, rel=rtol, abs=rtol)
        assert len(moments) == len(optimizer.state_names)
        for name, moment in zip(optimizer.state_names, moments, strict=True):
            assert float(state[name][i]) == pytest.approx(moment, rel=rtol, abs=rtol)


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_lr_of_the_step_replaces_the_configured_one(optimizer: Optimizer) -> None:
    param, grads = random_data(50, 7, np.float64)
    lrs = [0.1, 0.03, 0.0, 0.2, 0.1, 0.1, 0.05]
    result = param.copy()
    state = optimizer.init_state(param.size, param.dtype)
    for step, (grad, lr) in enumerate(zip(grads, lrs, strict=True), start=1):
        optimizer.update(result, grad, state, step=step, lr=lr)
    scalar = reference(optimizer)
    for i in range(param.size):
        expected, _ = scalar(float(param[i]), grads[:, i].tolist(), lrs)
        assert float(result[i]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "scale"),
    [
        *((each, 0.3) for each in ELEMENTWISE),
        *((ADAMW, scale) for scale in (0.0, -2.0, np.float64(0.3), np.float32(0.25))),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_grad_scale_is_the_same_as_a_scaled_gradient(
    optimizer: Optimizer, dtype: Any, scale: Any
) -> None:
    param, grads = random_data(BLOCK_ELEMENTS + 3, 3, dtype)
    scaled, scaled_state = updated(optimizer, param, grads, grad_scale=scale)
    plain, plain_state = updated(optimizer, param, (grads * float(scale)).astype(dtype))
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


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_gradient_changes_nothing_without_decay(optimizer: Optimizer, dtype: Any) -> None:
    param, _ = random_data(100, 0, dtype)
    plain = dataclasses.replace(optimizer, weight_decay=0.0)  # type: ignore[call-arg]
    result, _ = updated(plain, param, np.zeros((2, 100), dtype))
    np.testing.assert_array_equal(result, param)


@pytest.mark.parametrize(
    ("optimizer", "decay"),
    [
        (ADAMW, 0.1),
        (SGD(0.02, weight_decay=0.1), 0.1),
        (SGD(0.02, momentum=0.9, nesterov=True, weight_decay=0.1), 0.19),
        (Lion(0.02, weight_decay=0.1), 0.1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_gradient_only_decays(optimizer: Optimizer, decay: float, dtype: Any) -> None:
    param, _ = random_data(100, 0, dtype)
    result, _ = updated(optimizer, param, np.zeros((1, 100), dtype))
    np.testing.assert_allclose(result, param * (1 - 0.02 * decay), rtol=1e-6)


def test_centered_rmsprop_survives_a_variance_that_rounds_below_zero() -> None:
    """A constant gradient has no variance; rounding may leave less than nothing of it."""
    optimizer = RMSprop(0.01, alpha=0.5, centered=True, eps=1e-3)
    param, _ = random_data(1000, 0, np.float32)
    grads = np.broadcast_to(np.linspace(0.1, 3.0, 1000, dtype=np.float32), (60, 1000))
    result, state = updated(optimizer, param, grads)
    below = state["square_avg"] - state["grad_avg"] * state["grad_avg"]
    assert (below < 0).any(), "choose gradients for which rounding does that"
    assert np.isfinite(result).all()


def test_largest_second_moment_stays() -> None:
    param, grads = np.zeros(1), np.array([[10.0], [0.0], [0.0]])
    _, state = updated(AdamW(betas=(0.9, 0.5), amsgrad=True), param, grads)
    assert state["max_exp_avg_sq"][0] == 50.0
    assert state["exp_avg_sq"][0] == 12.5


# The same policy as PyTorch's, by the names of its arguments.
AS_TORCH: list[tuple[str, Optimizer]] = [
    ("AdamW", AdamW(0.02, betas=(0.8, 0.9), weight_decay=0.1, amsgrad=True)),
    ("Adam", Adam(0.02, betas=(0.8, 0.5), weight_decay=0.1, amsgrad=True)),
    ("NAdam", NAdam(0.02, weight_decay=0.1, momentum_decay=0.1)),
    ("NAdam", NAdam(0.02, weight_decay=0.1, decoupled_weight_decay=True)),
    ("RAdam", RAdam(0.02, betas=(0.8, 0.99), weight_decay=0.1)),
    ("RAdam", RAdam(0.02, weight_decay=0.1, decoupled_weight_decay=True)),
]


@pytest.mark.parametrize(("kind", "optimizer"), AS_TORCH, ids=repr)
def test_torch_takes_the_same_steps(kind: str, optimizer: Optimizer) -> None:
    torch = pytest.importorskip("torch")
    param, grads = random_data(50, 12, np.float64)
    result, _ = updated(optimizer, param, grads)
    options = {f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)}
    options.pop("fused", None)
    theirs = torch.nn.Parameter(torch.tensor(param))
    policy = getattr(torch.optim, kind)([theirs], **options)
    for grad in grads:
        theirs.grad = torch.tensor(grad)
        policy.step()
    # NAdam of PyTorch keeps the product of its momenta in float32.
    np.testing.assert_allclose(result, theirs.detach().numpy(), 1e-6, 1e-8)


# Learning rates


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_schedule_gives_the_rate_of_each_step(optimizer: Optimizer) -> None:
    schedule = schedules.Cosine(0.1, warmup=2, total=5)
    scheduled = dataclasses.replace(optimizer, lr=schedule)
    param, grads = random_data(50, 6, np.float64)
    result, _ = updated(scheduled, param, grads)
    rates = [schedule(step) for step in range(1, 7)]
    assert rates == [scheduled.learning_rate(step) for step in range(1, 7)]
    scalar = reference(optimizer)
    for i in range(param.size):
        expected, _ = scalar(float(param[i]), grads[:, i].tolist(), rates)
        assert float(result[i]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_lr_of_the_step_replaces_the_schedule() -> None:
    scheduled = SGD(schedules.Constant(0.1))
    param = np.ones(3)
    scheduled.update(param, np.ones(3), {}, step=1, lr=0.5)
    np.testing.assert_array_equal(param, 0.5)


def test_learning_rate_of_a_number() -> None:
    assert AdamW(lr=0.25).learning_rate(7) == 0.25
    with pytest.raises(ArgumentError, match="counts from 1"):
        AdamW().learning_rate(0)


# Bits


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_pieces_give_the_same_bits_as_the_whole(
    optimizer: Optimizer, dtype: Any, data: st.DataObject
) -> None:
    size = 2 * BLOCK_ELEMENTS + 77
    edges = st.sampled_from([1, 2, 3, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1])
    cuts = data.draw(st.lists(edges | st.integers(0, size), max_size=6).map(sorted))
    param, grads = random_data(size, 2, dtype)
    whole, whole_state = updated(optimizer, param, grads, grad_scale=0.7)
    pieces = param.copy()
    state = optimizer.init_state(size, dtype)
    for step, grad in enumerate(grads, start=1):
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
            part = {name: array[start:stop] for name, array in state.items()}
            optimizer.update(pieces[start:stop], grad[start:stop], part, step=step, grad_scale=0.7)
    assert pieces.tobytes() == whole.tobytes()
    for name in optimizer.state_names:
        assert state[name].tobytes() == whole_state[name].tobytes()


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_numpy_scalars_do_not_upcast(optimizer: Optimizer) -> None:
    """Under NEP 50 a float64 scalar would make float32 arithmetic float64, with other bits."""
    fields = {f.name: getattr(optimizer, f.name) for f in dataclasses.fields(optimizer)}
    wide = {
        name: np.float64(value) if isinstance(value, float) else value
        for name, value in fields.items()
    }
    if "betas" in wide:
        wide["betas"] = [np.float64(beta) for beta in fields["betas"]]
    param, grads = random_data(1000, 3, np.float32)
    plain, plain_state = updated(optimizer, param, grads, lr=0.01, grad_scale=0.3)
    other = type(optimizer)(**wide)
    assert other == optimizer
    result, state = updated(other, param, grads, lr=np.float64(0.01), grad_scale=np.float64(0.3))
    assert result.dtype == np.float32
    assert result.tobytes() == plain.tobytes()
    for name in optimizer.state_names:
        assert state[name].dtype == np.float32
        assert state[name].tobytes() == plain_state[name].tobytes()


@pytest.mark.parametrize(
    ("optimizer", "narrow"),
    [
        *((each, np.float16) for each in ELEMENTWISE),
        (ADAMW, np.float32),
        (ADAMW, ml_dtypes.bfloat16),
    ],
    ids=repr,
)
def test_update_allocates_at_most_two_blocks(optimizer: Optimizer, narrow: Any) -> None:
    param, grads = random_data(8 * BLOCK_ELEMENTS, 1, np.float32)
    param, grad = param.copy(), grads[0].astype(narrow)
    out = np.zeros(param.size, narrow)
    state = optimizer.init_state(param.size, param.dtype)
    optimizer.update(param, grad, state, step=1, grad_scale=0.5, out=out)
    tracemalloc.start()
    try:
        optimizer.update(param, grad, state, step=2, grad_scale=0.5, out=out)
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
    assert set(Adam().init_state(3, np.float32)) == {"exp_avg", "exp_avg_sq"}
    assert set(Lion().init_state(3, np.float32)) == {"exp_avg"}
    assert set(RMSprop().init_state(3, np.float32)) == {"square_avg"}
    full = RMSprop(momentum=0.9, centered=True).init_state(3, np.float32)
    assert set(full) == {"square_avg", "grad_avg", "momentum_buffer"}
    (total,) = Adagrad(initial_accumulator_value=0.5).init_state(3, np.float32).values()
    np.testing.assert_array_equal(total, np.float32([0.5] * 3))
    for array in ADAMW.init_state(3, "float64").values():
        assert array.dtype == np.float64
        np.testing.assert_array_equal(array, np.zeros(3))


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
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


# Pieces


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_pieces_of_parameters_are_updated_as_ranges_are(optimizer: Optimizer) -> None:
    param, grads = random_data(12, 3, np.float32)
    expected, expected_state = updated(optimizer, param[:9], grads[:, :9], grad_scale=0.5)
    result, out = param.copy(), np.zeros(12, np.float16)
    specs = [PieceSpec("a", (2, 3), 1, 6), PieceSpec("b", (), 0, 0), PieceSpec("c", (7,), 0, 4)]
    states = optimizer.init_pieces(specs, np.float32)
    assert list(states) == ["a", "b", "c"]
    for step, grad in enumerate(grads, start=1):
        cuts = [slice(0, 5), slice(5, 5), slice(5, 9)]
        pieces = [
            ShardPiece(
                *(spec.name, spec.shape, spec.start, spec.stop),
                *(result[cut], grad[cut], states[spec.name], out[cut]),
            )
            for spec, cut in zip(specs, cuts, strict=True)
        ]
        optimizer.update_pieces(pieces, step=step, reduce=_never, grad_scale=0.5)
    assert result[:9].tobytes() == expected.tobytes()
    assert out.tobytes() == np.pad(expected, (0, 3)).astype(np.float16).tobytes()
    assert optimizer.elementwise
    assert optimizer.state_shapes((2, 3)) == dict.fromkeys(optimizer.state_names, (2, 3))
    for name in optimizer.state_names:
        joined = np.concatenate([state[name] for state in states.values()])
        assert joined.tobytes() == expected_state[name].tobytes()


def _never(array: NDArray[Any]) -> None:
    raise AssertionError("an elementwise optimizer sums nothing")


# Errors


def _arguments(optimizer: Optimizer = ADAMW) -> dict[str, Any]:
    return {
        "param": np.ones(4, np.float32),
        "grad": np.ones(4, np.float32),
        "state": optimizer.init_state(4, np.float32),
        "step": 1,
    }


def _read_only() -> NDArray[Any]:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": np.ones(3, np.float32)}, "grad has 3 elements of float32, but param has 4"),
        (
            {"grad": np.ones(4)},
            "grad has 4 elements of float64, but param has 4 of float32; .* narrower",
        ),
        ({"grad": np.ones((2, 2), np.float32)}, r"grad must be 1-D .* got shape \(2, 2\)"),
        ({"grad": np.ones(8, np.float32)[::2]}, "grad must be 1-D and contiguous"),
        ({"grad": [1.0] * 4}, "grad must be a NumPy or CuPy array, got list"),
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
        ({"grad": np.ones(4, np.int32)}, "grad has 4 elements of int32, but param has 4"),
        ({"out": np.ones(3, np.float16)}, "out has 3 elements of float16, but param has 4"),
        ({"out": np.ones(4)}, "out has 4 elements of float64, but param has 4 of float32"),
        ({"out": np.ones(8, np.float16)[::2]}, "out must be 1-D and contiguous"),
        ({"out": _read_only()}, "out is read-only"),
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
        (lambda: SGD(lambda step: 0.1), "lr of SGD must be a number or a fc.optim.Schedule"),  # type: ignore[arg-type]
        (lambda: Adam(eps=0.0), "eps of Adam must be above 0"),
        (lambda: Adam(betas=(0.9, 1.5)), "betas of Adam must be below 1"),
        (lambda: AdamW(fused="yes"), "fused of AdamW must be True, False or 'auto'"),  # type: ignore[arg-type]
        (lambda: Adagrad(lr_decay=-1.0), "lr_decay of Adagrad must be at least 0"),
        (lambda: Adagrad(eps=0), "eps of Adagrad must be above 0"),
        (lambda: Adagrad(initial_accumulator_value=-1), "initial_accumulator_value of Adagrad"),
        (lambda: RMSprop(alpha=1.0), "alpha of RMSprop must be below 1"),
        (lambda: RMSprop(alpha=-0.1), "alpha of RMSprop must be at least 0"),
        (lambda: RMSprop(eps=0.0), "eps of RMSprop must be above 0"),
        (lambda: RMSprop(momentum=-0.1), "momentum of RMSprop must be at least 0"),
        (lambda: RMSprop(centered=1), "centered of RMSprop must be True or False"),  # type: ignore[arg-type]
        (lambda: Adam(amsgrad=1), "amsgrad of Adam must be True or False"),  # type: ignore[arg-type]
        (lambda: NAdam(momentum_decay=-1.0), "momentum_decay of NAdam must be at least 0"),
        (lambda: NAdam(eps=0.0), "eps of NAdam must be above 0"),
        (lambda: RAdam(betas=(0.9, 1.0)), "betas of RAdam must be below 1"),
        (lambda: RAdam(decoupled_weight_decay=1), "decoupled_weight_decay of RAdam must be"),  # type: ignore[arg-type]
        (lambda: Lion(betas=(1.0, 0.9)), "betas of Lion must be below 1"),
        (lambda: Lion(weight_decay=-1), "weight_decay of Lion must be at least 0"),
    ],
)
def test_hyper_parameters_are_checked(make: Callable[[], Optimizer], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_optimizers_are_values() -> None:
    assert AdamW(lr=0.1, betas=[0.9, 0.99]) == AdamW(lr=0.1, betas=(0.9, 0.99))  # type: ignore[arg-type]
    assert hash(SGD(0.1)) == hash(SGD(0.1))
    assert AdamW(lr=0.1) != AdamW(lr=0.2)
    assert AdamW(weight_decay=0.0) != Adam()
    assert repr(Adam(schedules.Constant(0.1))).startswith("Adam(lr=Constant(peak=0.1, warmup=0)")
    assert ADAMW.resolved() == ADAMW


def test_optimizer_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Optimizer(0.1)  # type: ignore[abstract]
