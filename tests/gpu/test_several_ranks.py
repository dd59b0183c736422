"""The conformance suite among processes: with a GPU each, or one in common where NCCL lets them.

Ranks that share a GPU take turns on it, so a collective takes milliseconds, and there is less of
everything than in ``test_collectives``.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import agreement, endings, movement, reductions
from support.cases import bodies
from support.device_bodies import EXACT, GROUPS, NATIVE
from support.gpu_ranks import Together

OF_THREE = [reductions.every_shape, movement.ragged_exchange, *GROUPS]

Errors = dict[Any, str]


def _check(errors: Errors, body: Any) -> None:
    assert not errors[body], errors[body]


@pytest.fixture(scope="module")
def exact(two_ranks: Together) -> Errors:
    return two_ranks.run_each([*EXACT, *GROUPS], 2, moved=True, deterministic=True)


@pytest.fixture(scope="module")
def native(two_ranks: Together) -> Errors:
    return two_ranks.run_each(NATIVE, 2, moved=True)


@pytest.fixture(scope="module")
def of_three(three_ranks: Together) -> Errors:
    return three_ranks.run_each(OF_THREE, 3, moved=True, deterministic=True)


@pytest.fixture(scope="module")
def on_own_gpus(own_gpus: Together, gpus: int) -> Errors:
    """On all GPUs that there are, up to eight."""
    every = [reductions.every_dtype_and_op, *EXACT, *GROUPS]
    return own_gpus.run_each(every, min(gpus, 8), moved=True, deterministic=True)


@bodies(*EXACT, *GROUPS)
def test_two_ranks(exact: Errors, body: Any) -> None:
    _check(exact, body)


@bodies(*NATIVE)
def test_two_ranks_natively(native: Errors, body: Any) -> None:
    _check(native, body)


@bodies(*OF_THREE)
def test_three_ranks(of_three: Errors, body: Any) -> None:
    _check(of_three, body)


@bodies(reductions.every_dtype_and_op, *EXACT, *GROUPS)
def test_a_gpu_for_each(on_own_gpus: Errors, body: Any) -> None:
    _check(on_own_gpus, body)


def test_every_dtype_and_op(two_ranks: Together) -> None:
    two_ranks.run_moved(reductions.every_dtype_and_op, 2, 3, 1, deterministic=True)


@bodies(reductions.large_arrays, movement.large_arrays)
def test_large(two_ranks: Together, body: Any) -> None:
    two_ranks.run_moved(body, 2, 1_000_000, deterministic=True)


@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "operation"])
def test_difference(two_ranks: Together, what: str) -> None:
    two_ranks.run_moved(agreement.difference, 2, what)


@pytest.mark.parametrize("call", ["all_reduce", "started"])
def test_aborted(two_ranks: Together, call: str) -> None:
    two_ranks.run_moved(endings.aborted, 2, call)


@bodies(endings.left_at_different_times)
def test_endings(two_ranks: Together, body: Any) -> None:
    two_ranks.run_moved(body, 2)
