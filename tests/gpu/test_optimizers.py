"""Optimizers and norms on a GPU, beside NumPy's on the host.

The bits need not be the same here: the compiler may have its own ways. So this is about whether the
kernels are right at all, and the unit tests about every operation.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.device_updates import fetched, placed, stepped, stepped_whole
from support.optimizers import ADAMW, ELEMENTWISE, random_data

from fsdpcore.bench.device_optimizer import COPY, measure
from fsdpcore.core.buffers import BFLOAT16
from fsdpcore.fsdp.optim import Adafactor, Optimizer
from fsdpcore.fsdp.step.norm import all_finite, local_part
from fsdpcore.fsdp.step.update import _cut
from fsdpcore.fsdp.units.gradients import _add_into, _divide

SIZE = 1_000_003
_DIGITS = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 1e-13}


@pytest.fixture
def cupy() -> Any:
    import cupy

    return cupy


def _alike(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, array in expected.items():
        rtol = _DIGITS[array.dtype.name]
        mine, theirs = (each[name].astype(np.float64) for each in (result, expected))
        np.testing.assert_allclose(mine, theirs, rtol, rtol, err_msg=name)


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_elementwise(optimizer: Optimizer, cupy: Any) -> None:
    param, grads = random_data(SIZE, 3, np.float32)
    given: dict[str, Any] = {"starts": (1, 5, 9, 1), "grad_scale": 0.7, "out": BFLOAT16}
    expected = stepped(np, optimizer, param, list(grads), **given)
    _alike(stepped(cupy, optimizer, param, list(grads), **given), expected)


@pytest.mark.parametrize("starts", [(0, 0, 0, 0), (3, 7, 3, 11), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("grad", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("out", [np.float16, BFLOAT16, np.float32, None], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_dtypes(dtype: Any, out: Any, grad: Any, starts: tuple[int, ...], cupy: Any) -> None:
    if np.dtype(grad).itemsize > np.dtype(dtype).itemsize:
        pytest.skip("gradients are no wider than parameters")
    param, grads = random_data(1003, 2, dtype)
    given: dict[str, Any] = {"starts": starts, "out": out}
    narrow = [each.astype(grad) for each in grads]
    expected = stepped(np, ADAMW, param, narrow, **given)
    _alike(stepped(cupy, ADAMW, param, narrow, **given), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
def test_adafactor(dtype: Any, cupy: Any) -> None:
    rng = np.random.default_rng(3)
    shapes = {"matrix": (300, 700), "vector": (5000,), "batch": (3, 40, 50), "none": (0, 4)}
    params = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    optimizer = Adafactor(0.1, beta1=0.9, weight_decay=0.1)
    expected = stepped_whole(np, optimizer, params, 3, [])
    _alike(stepped_whole(cupy, optimizer, params, 3, []), expected)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.float16, 1.0), (BFLOAT16, 1e30), (np.float32, 1.0), (np.float64, 1e200)],
    ids=str,
)
def test_norms(dtype: Any, scale: float, p: float, cupy: Any) -> None:
    rng = np.random.default_rng(7)
    arrays = [(rng.standard_normal(n) * scale).astype(dtype) for n in (1, 0, 7, SIZE)]
    moved = [placed(cupy, array, start) for start, array in enumerate(arrays)]
    assert local_part(moved, p) == pytest.approx(local_part(arrays, p), rel=1e-11)
    assert all_finite(moved)
    moved[3][77] = math.nan
    assert not all_finite(moved)
    assert not math.isfinite(local_part(moved, p).largest)


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
def test_in_place(dtype: Any, cupy: Any) -> None:
    rng = np.random.default_rng(2)
    first, second = (rng.standard_normal((2, 1003)) * 1e3).astype(dtype)
    mine, theirs = placed(cupy, first, 2), placed(cupy, second, 6)
    for one, other in ((first, second), (mine, theirs)):
        _add_into(one, other)
        _divide(one, 3.0)
        _cut([one], 600.0)
    _alike({"first": fetched(mine)}, {"first": first})


def test_the_bench_runs(cupy: Any) -> None:
    rows = measure(cupy, elements=100_000, rounds=2, iterations=2)
    assert rows[0]["name"] == COPY
    assert rows[0]["share_of_copy"] == 1.0
    assert sum(bool(row.get("target")) for row in rows) == 2
    assert all(row["seconds"] > 0 for row in rows)
