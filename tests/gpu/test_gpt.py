"""The example's GPT on a GPU against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_ranks import Together, alone
from support.gpu_training import gpt, options

import fsdpcore as fc

STEPS = 50
# Of float32's losses, in bits per byte, in every step; of bfloat16's last ones, relative.
CLOSE, HALF_CLOSE = 1e-4, 0.02


@pytest.fixture(scope="module")
def on_host() -> list[float]:
    """The losses in float32 on the CPU."""
    return _on_host()


def _on_host(**changed: Any) -> list[float]:
    args = (options(**changed), STEPS)
    (losses,) = fc.launch(gpt, world_size=1, transport="sim", args=args, timeout=60, blas_threads=1)
    return list(losses)


def _check_close(losses: list[float], expected: list[float], tolerance: float = CLOSE) -> None:
    assert len(losses) == STEPS + 1
    far = [abs(mine - theirs) for mine, theirs in zip(losses, expected, strict=True)]
    assert max(far) <= tolerance, f"furthest in step {far.index(max(far))}: {max(far):.3g}"


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
def test_float32_goes_the_way_of_the_cpu(on_host: list[float], strategy: str) -> None:
    _check_close(alone(gpt, options(strategy=strategy), STEPS), on_host)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_ends_where_float32_does(on_host: list[float], precision: str) -> None:
    losses = alone(gpt, options(precision=precision), STEPS)
    assert losses[-1] < 0.8 * losses[0], "it did not learn"
    assert losses[-2] == pytest.approx(on_host[-2], rel=HALF_CLOSE)
    assert losses[-1] == pytest.approx(on_host[-1], rel=HALF_CLOSE)


def test_without_anything_in_the_background_it_is_the_same() -> None:
    with_it, without = (alone(gpt, options(prefetch=number), STEPS) for number in (2, 0))
    assert with_it == without


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_two_ranks_go_the_way_of_the_cpu(
    two_ranks: Together, on_host: list[float], strategy: str
) -> None:
    for losses in two_ranks.run(gpt, 2, options(strategy=strategy), STEPS):
        _check_close(losses, on_host)
