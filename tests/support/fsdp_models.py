"""Models that are trained under every strategy, and the ways in which they are.

``Setup`` is one way; bodies for the ranks are at the top of the module, so that processes find
them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import corpus
import numpy as np
from gpt_model import GPTConfig, build, cross_entropy
from numpy.typing import NDArray

import fsdpcore as fc

Array = NDArray[Any]
Named = dict[str, dict[str, Array]]

# Odd sizes everywhere: no unit divides by 2, 3, 4 or 8.
MODEL = GPTConfig(context=16, width=15, heads=3, layers=2, hidden=37)
BATCH = 8
# A softmax does not feel the bias of its keys: that gradient is rounding noise, which Adam with an
# eps of 1e-8 would blow up to full steps.
LR, EPS, DECAY = 3e-3, 1e-5, 0.01
FULL = fc.Strategy("full_shard")


@dataclass(frozen=True)
class Setup:
    """How the GPT is trained.

    Attributes:
        strategy, prefetch, window, algorithm: of the engine.
        clip: largest L2 norm.
        parts: microbatches of a step.
        deferred: gradients of all microbatches but the last are kept by ``no_sync``.
        compression: what travels quantised.
    """

    strategy: fc.Strategy = FULL
    prefetch: int | fc.Prefetch = 1
    window: bool = True
    clip: float | None = None
    parts: int = 1
    deferred: bool = False
    algorithm: str = "auto"
    compression: fc.Compression | None = None


def divisors(number: int) -> list[int]:
    """All numbers that divide ``number``."""
    return [d for d in range(1, number + 1) if number % d == 0]


def strategies(world_size: int, *, bits: bool = True) -> Iterator[fc.Strategy]:
    """Every strategy for so many ranks.

    With ``bits``, only those whose sums are made in the canonical order of all ranks: groups that
    are whole subtrees of it.
    """
    for after in (True, False, *divisors(world_size)):
        yield fc.Strategy("full_shard", after)
    for shards in divisors(world_size)[:-1]:
        if not (bits and shards & (shards - 1)):
            for after in (True, False, *divisors(shards)[:-1]):
                yield fc.Strategy("hybrid_shard", after, shards)
    yield fc.Strategy("shard_grad_op")
    yield fc.Strategy("shard_optimizer")
    yield fc.Strategy("no_shard")


def named(strategy: fc.Strategy) -> str:
    """A short name for a test."""
    after = strategy.reshard_after_forward
    short = strategy.name.replace("_shard", "")
    return f"{short}{strategy.shard_group_size or ''}" + ("" if after is True else f"-{after}")


@functools.cache
def _text() -> bytes | Array:
    return corpus.load(200_000)[0]


def batch(step: int) -> tuple[Array, Array]:
    """The same inputs and targets on every rank."""
    return corpus.batch(_text(), step=step, seed=3, batch_size=BATCH, context=MODEL.context)


def initial() -> Named:
    """The parameters to begin with, by unit and name."""
    rng = np.random.default_rng(11)
    return {name: dict(layer.init(rng)) for name, layer in build(MODEL)}


def rows_of(rank: int, world_size: int, parts: int) -> list[Array]:
    """The rows of the batch in each microbatch of a rank."""
    return np.array_split(np.array_split(np.arange(BATCH), world_size)[rank], parts)


def train_gpt(backend: Any, steps: int, setup: Setup) -> tuple[list[float], list[Any], Named, bool]:
    """Losses and norms of every step, all parameters in the end, and whether in a window."""
    stack = fc.LayerStack(build(MODEL))
    engine = fc.FSDP(
        [fc.Unit(name, params) for name, params in initial().items()],
        backend,
        strategy=setup.strategy,
        optimizer=fc.optim.AdamW(lr=LR, eps=EPS, weight_decay=DECAY),
        prefetch=setup.prefetch,
        window=setup.window,
        algorithm=setup.algorithm,
        compression=setup.compression,
    )
    losses, norms = [], []
    for number in range(steps):
        x, y = batch(number)
        with engine.step(divisor=BATCH) as step:
            summed = 0.0

            def part(rows: Array, step: Any = step, x: Array = x, y: Array = y) -> float:
                logits, saved = stack.forward(step, x[rows])
                loss, dlogits = cross_entropy(logits, y[rows])
                stack.backward(step, saved, dlogits * np.float32(len(rows)))
                return float(loss) * len(rows)

            *early, last = rows_of(backend.rank, backend.world_size, setup.parts)
            for rows in early:
                if setup.deferred:
                    with step.no_sync():
                        summed += part(rows)
                else:
                    summed += part(rows)
            summed += part(last)
            norms.append(step.update(clip=setup.clip))
        losses.append(float(fc.all_reduce(np.float64(summed), backend)) / BATCH)
    return losses, norms, everything(engine), engine.windowed


def everything(engine: Any) -> Named:
    """Copies of all parameters, by unit and name; a collective."""
    found = {}
    for unit in engine.units:
        with engine.evaluation() as step, step.forward(unit) as params:
            found[unit.name] = {name: array.copy() for name, array in params.items()}
    return found
