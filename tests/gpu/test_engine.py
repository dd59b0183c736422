"""The engine on a GPU under every strategy: the same bits as on the host where sums are exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.gpu_ranks import Together, alone
from support.gpu_training import Setup, exact, exact_each, strategies

import fsdpcore as fc

SETUPS = [
    *(Setup(strategy) for strategy in strategies(1)),
    Setup(prefetch=0),
    Setup(clip=1e6),
    Setup(parts=3),
    Setup(parts=3, deferred=True),
    Setup("shard_grad_op", parts=2, deferred=True),
    Setup(precision="bf16"),
    Setup(precision="bf16, reduced so"),
    Setup(precision="fp16"),
    Setup("no_shard", precision="bf16", clip=1e6),
    Setup("shard_grad_op", precision="fp16", parts=2),
]
TOGETHER = [
    *(Setup(strategy, clip=1e6) for strategy in strategies(2)),
    Setup(parts=2, deferred=True),
    Setup(precision="bf16"),
    Setup("no_shard", precision="fp16"),
]


def _on_host(setup: Setup, ranks: int) -> list[Any]:
    plain = replace(setup, offload=False)
    return fc.launch(
        exact, world_size=ranks, transport="sim", args=(plain,), timeout=30, deterministic=True
    )


def _check(found: Any, expected: Any) -> None:
    for mine, theirs, what in zip(found[:2], expected[:2], ("state", "seen"), strict=True):
        assert set(mine) == set(theirs)
        for name, array in theirs.items():
            np.testing.assert_array_equal(mine[name], array, err_msg=f"{what}: {name}", strict=True)
    for norm, known in zip(found[2], expected[2], strict=True):
        assert (norm is None) == (known is None)
        assert norm is None or norm == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_one_rank(setup: Setup) -> None:
    _check(alone(exact, setup), _on_host(setup, 1)[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_offloaded_to_pinned_memory_is_the_same(precision: str) -> None:
    setup = Setup(precision=precision, offload=True)
    _check(alone(exact, setup), _on_host(setup, 1)[0])


@pytest.fixture(scope="module")
def together(two_ranks: Together) -> list[list[Any]]:
    """What both ranks found with each setup, in one job: making communicators takes long."""
    return two_ranks.run(exact_each, 2, TOGETHER, deterministic=True)


@pytest.mark.parametrize("number", range(len(TOGETHER)), ids=[str(setup) for setup in TOGETHER])
def test_two_ranks(together: list[list[Any]], number: int) -> None:
    expected = _on_host(TOGETHER[number], 2)
    for rank, found in enumerate(together):
        _check(found[number], expected[rank])


def test_three_ranks(three_ranks: Together) -> None:
    found = three_ranks.run(exact, 3, TOGETHER[0])
    for mine, theirs in zip(found, _on_host(TOGETHER[0], 3), strict=True):
        _check(mine, theirs)
