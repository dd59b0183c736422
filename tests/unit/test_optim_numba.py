"""The updates that numba compiles, against those of NumPy; and doing without numba."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from support.jobs import finished, python
from support.optimizers import random_data, updated

from fsdpcore.core.errors import MissingDependencyError
from fsdpcore.fsdp.optim import Adam, AdamW, kernels
from fsdpcore.fsdp.optim.bound import BLOCK_ELEMENTS

SIZE = 2 * BLOCK_ELEMENTS + 77

needs_numba = pytest.mark.skipif(
    not kernels.available(), reason="numba is not installed: pip install 'fsdpcore[numba]'"
)
POLICIES: list[dict[str, Any]] = [
    {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"weight_decay": 0.0, "amsgrad": True},
]


@needs_numba
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-13), (np.float32, 1e-5)])
def test_fused_matches_numpy(kind: Any, policy: dict[str, Any], dtype: Any, rtol: float) -> None:
    param, grads = random_data(SIZE, 4, dtype)
    options: dict[str, Any] = {"grad_scale": 0.7}
    expected, expected_state = updated(kind(**policy), param, grads, **options)
    result, state = updated(kind(**policy, fused=True), param, grads, **options)
    np.testing.assert_allclose(result, expected, rtol, rtol)
    for name, array in expected_state.items():
        np.testing.assert_allclose(state[name], array, rtol, rtol)


@needs_numba
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fused_gives_the_same_bits_whole_and_in_pieces(dtype: Any) -> None:
    optimizer = AdamW(**POLICIES[0], fused=True)
    param, grads = random_data(SIZE, 2, dtype)
    whole, whole_state = updated(optimizer, param, grads)
    again, _ = updated(optimizer, param, grads)
    assert again.tobytes() == whole.tobytes()
    edges = [0, 1, 4, 1003, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS + 5, SIZE]
    for start, stop in itertools.pairwise(edges):
        part, state = updated(optimizer, param[start:stop], grads[:, start:stop])
        assert part.tobytes() == whole[start:stop].tobytes()
        for name, array in state.items():
            assert array.tobytes() == whole_state[name][start:stop].tobytes()


@needs_numba
def test_fused_takes_narrow_gradients_and_rounds() -> None:
    param, grads = random_data(100, 2, np.float32)
    narrow, out = grads.astype(np.float16), np.zeros(100, np.float16)
    result, _ = updated(AdamW(fused=True), param, narrow, out=out)
    expected, _ = updated(AdamW(), param, narrow)
    np.testing.assert_allclose(result, expected, 1e-5)
    assert out.tobytes() == result.astype(np.float16).tobytes()


@needs_numba
def test_threads_may_share_the_kernel() -> None:
    """As the ranks of one process do."""
    param, grads = random_data(SIZE, 2, np.float32)
    results: list[Any] = [None] * 4

    def rank(number: int) -> None:
        results[number], _ = updated(AdamW(fused=True), param, grads)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result.tobytes() for result in results}) == 1


def test_auto_takes_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for there in (True, False):
        monkeypatch.setattr(kernels, "available", lambda there=there: there)
        for kind in (Adam, AdamW):
            resolved = kind(lr=0.1, fused="auto").resolved()
            assert resolved == kind(lr=0.1, fused=there)
            assert f"fused={there}" in repr(resolved)
            assert resolved.resolved() == resolved


def test_auto_updates_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    param, grads = random_data(100, 2, np.float32)
    result, _ = updated(AdamW(fused="auto"), param, grads)
    expected, _ = updated(AdamW(), param, grads)
    assert result.tobytes() == expected.tobytes()


def test_fused_without_numba_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)
    with pytest.raises(MissingDependencyError, match=r"AdamW needs numba.*'fsdpcore\[numba\]'"):
        AdamW(fused=True)


def test_numba_is_not_imported_before_it_is_used() -> None:
    program = (
        "import numpy as np, sys; from fsdpcore.fsdp.optim import AdamW, ParamGroups; "
        "ParamGroups.of(AdamW(fused='auto')); o = AdamW(); p = np.ones(3); "
        "o.update(p, np.ones(3), o.init_state(3, float), step=1); print('numba' in sys.modules)"
    )
    done = finished(python("-W", "error", "-c", program))
    assert (done.code, done.out) == (0, "False\n"), done.err
