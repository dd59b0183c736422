"""Gradients that are narrower than the parameter, and the rounded copy that an update writes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.optimizers import ADAMW, ELEMENTWISE, random_data, updated

from fsdpcore.core.errors import ArgumentError
from fsdpcore.fsdp.optim import Optimizer
from fsdpcore.fsdp.optim.bound import BLOCK_ELEMENTS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIDTHS = [
    (np.float32, np.float16),
    (np.float32, BFLOAT16),
    (np.float64, np.float16),
    (np.float64, BFLOAT16),
    (np.float64, np.float32),
]
SIZE = BLOCK_ELEMENTS + 3


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_narrow_gradient_counts_as_if_it_were_made_wide_before(optimizer: Optimizer) -> None:
    for dtype, narrow, scale in ((*WIDTHS[0], 1.0), *((*width, 0.3) for width in WIDTHS)):
        param, grads = random_data(SIZE, 2, dtype)
        rounded = grads.astype(narrow)
        result, state = updated(optimizer, param, rounded, grad_scale=scale)
        wide = rounded.astype(dtype) * np.dtype(dtype).type(scale)
        expected, expected_state = updated(optimizer, param, wide)
        assert result.tobytes() == expected.tobytes(), (dtype, narrow, scale)
        for name in optimizer.state_names:
            assert state[name].tobytes() == expected_state[name].tobytes(), (dtype, narrow, scale)


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=repr)
def test_out_gets_the_rounded_result(optimizer: Optimizer) -> None:
    for dtype, narrow in (*WIDTHS, (np.float32, np.float32)):
        param, grads = random_data(SIZE, 2, dtype)
        out = np.full(SIZE, 7, narrow)
        result, _ = updated(optimizer, param, grads, out=out)
        expected, _ = updated(optimizer, param, grads)
        assert result.tobytes() == expected.tobytes(), (dtype, narrow)
        assert out.tobytes() == expected.astype(narrow).tobytes(), (dtype, narrow)


@pytest.mark.parametrize("narrow", [np.float16, BFLOAT16])
def test_out_is_infinite_where_the_result_is_too_large(narrow: Any) -> None:
    param = np.array([3.4e38, -3.4e38, 1.0], np.float32)
    out = np.zeros(3, narrow)
    state = ADAMW.init_state(3, np.float32)
    ADAMW.update(param, np.zeros(3, np.float32), state, step=1, lr=0.0, out=out)
    assert out.astype(np.float32).tolist() == [np.inf, -np.inf, 1.0]


def test_out_of_an_empty_shard() -> None:
    param, grads = random_data(0, 1, np.float32)
    result, _ = updated(ADAMW, param, grads.astype(BFLOAT16), out=np.zeros(0, BFLOAT16))
    assert result.size == 0


def test_out_and_gradient_may_not_share_memory_with_anything() -> None:
    shared = np.ones(4, np.float16)
    state = ADAMW.init_state(4, np.float32)
    with pytest.raises(ArgumentError, match="out and grad share memory"):
        ADAMW.update(np.ones(4, np.float32), shared, state, step=1, out=shared)
    param = np.ones(4, np.float32)
    with pytest.raises(ArgumentError, match="param and out share memory"):
        ADAMW.update(param, shared, state, step=1, out=param.view(np.float16)[:4])
