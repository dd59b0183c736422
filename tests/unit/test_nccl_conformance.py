"""Bodies of the conformance suite on the ``nccl`` transport, with the stand-in for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.bodies import agreement, coalescing, endings, layouts, movement, reductions
from support.cases import bodies
from support.device_bodies import EXACT, GROUPS, NATIVE
from support.nccl_ranks import run


@bodies(*EXACT)
def test_canonical(body: Any) -> None:
    run(body, 3, deterministic=True)


@bodies(*GROUPS)
def test_groups(body: Any) -> None:
    run(body, 4, deterministic=True)


@bodies(reductions.every_shape, movement.every_dtype, layouts.every_layout, coalescing.lists)
def test_alone(body: Any) -> None:
    run(body, 1)


def test_every_dtype_and_op() -> None:
    run(reductions.every_dtype_and_op, 2, deterministic=True)


def test_some_dtypes_and_ops_on_more_ranks() -> None:
    run(reductions.every_dtype_and_op, 5, 13, 2, deterministic=True)


@bodies(movement.ragged_gather, movement.ragged_reduction)
def test_ragged_on_more_ranks(body: Any) -> None:
    """The first of five parts is as long as the last, and not as those between."""
    run(body, 5, deterministic=True)


@bodies(*NATIVE)
def test_native(body: Any) -> None:
    run(body, 3)


@pytest.mark.parametrize("what", ["shape", "dtype", "op", "root", "operation"])
def test_difference(what: str) -> None:
    run(agreement.difference, 2, what)


@pytest.mark.parametrize("call", ["all_reduce", "started"])
def test_aborted(call: str) -> None:
    run(endings.aborted, 2, call)


@bodies(endings.left_at_different_times)
def test_endings(body: Any) -> None:
    run(body, 3)


@bodies(reductions.every_shape, movement.every_dtype, layouts.every_layout)
def test_arrays_of_the_host(body: Any) -> None:
    run(body, 2, moved=False)
