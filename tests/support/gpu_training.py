"""Bodies: training on the device of the backend, the host or a GPU, told to be compared.

``exact`` trains with small integers and powers of two, so that every sum has the same bits
whatever computes it in whatever order; ``gpt`` is the example's trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import train_gpt
from gpt_model import GPTConfig
from numpy.typing import NDArray

import fsdpcore as fc

Array = NDArray[Any]
Named = dict[str, Array]

PRECISIONS = {
    "fp32": None,
    "bf16": fc.Precision(ml_dtypes.bfloat16, np.float32),
    "bf16, reduced so": fc.Precision(ml_dtypes.bfloat16, ml_dtypes.bfloat16),
    "fp16": fc.Precision(np.float16, np.float32, fc.LossScale(64.0)),
}
OPTIMIZER = fc.optim.SGD(lr=0.5, momentum=0.5)

# Odd sizes: nothing divides by the number of ranks.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "first": {"w": (7, 5), "b": (5,), "scale": ()},
    "second": {"w": (5, 3), "none": (0, 2)},
    "third": {"w": (1, 11)},
}
_STEPS = 3


@dataclass(frozen=True)
class Setup:
    """How an engine is made, and its steps.

    Attributes:
        strategy, prefetch: of the engine.
        precision: a key of ``PRECISIONS``.
        offload: what nobody uses is not in the memory of the device.
        parts: microbatches of a step.
        deferred: all but the last are kept by ``no_sync``.
        clip: largest norm; one that is not reached.
    """

    strategy: fc.Strategy | str = "full_shard"
    prefetch: int = 1
    precision: str = "fp32"
    offload: bool = False
    parts: int = 1
    deferred: bool = False
    clip: float | None = None


def strategies(ranks: int) -> Iterator[fc.Strategy]:
    """Every strategy among so many ranks."""
    yield fc.Strategy("full_shard")
    yield fc.Strategy("full_shard", reshard_after_forward=False)
    yield fc.Strategy("shard_grad_op")
    yield fc.Strategy("shard_optimizer")
    yield fc.Strategy("no_shard")
    if ranks > 1:
        yield fc.Strategy("hybrid_shard", shard_group_size=1)
        yield fc.Strategy("full_shard", reshard_after_forward=1)


def _integers(*key: int, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(key).integers(-2, 3, shape).astype(np.float32)


def _units() -> list[fc.Unit]:
    return [
        fc.Unit(name, {n: _integers(number, k, shape=s) for k, (n, s) in enumerate(shapes.items())})
        for number, (name, shapes) in enumerate(SHAPES.items())
    ]


def exact(backend: fc.Backend, setup: Setup) -> tuple[Named, Named, list[Any]]:
    """Train; return the whole state in the end, what was seen of parameters, and the norms."""
    device = backend.device
    engine = fc.FSDP(
        _units(),
        backend,
        strategy=setup.strategy,
        optimizer=OPTIMIZER,
        precision=PRECISIONS[setup.precision],
        prefetch=setup.prefetch,
        window=not setup.offload,
        offload=fc.Offload() if setup.offload else None,
    )
    norms: list[Any] = []
    seen: Named = {}
    for number in range(_STEPS):
        with engine.step(divisor=1) as step:
            for part in range(setup.parts):
                if setup.deferred and part < setup.parts - 1:
                    with step.no_sync():
                        _pass(engine, step, backend.rank, number, part, seen)
                else:
                    _pass(engine, step, backend.rank, number, part, seen)
            norms.append(step.update(clip=setup.clip))
    state = engine.state_dict(full=True)
    assert all(isinstance(array, np.ndarray) for array in state.values())
    with engine.full_params() as params:
        for name, array in params.items():
            assert device.owns(array), f"{name} is not on {device}"
    return dict(state), seen, [None if norm is None else float(norm) for norm in norms]


def exact_each(backend: fc.Backend, setups: Sequence[Setup]) -> list[Any]:
    """What ``exact`` returns for each setup, one after the other."""
    return [exact(backend, setup) for setup in setups]


def _pass(engine: fc.FSDP, step: fc.Step, rank: int, number: int, part: int, seen: Named) -> None:
    device, xp = engine.backend.device, engine.backend.device.xp
    for unit in engine.units:
        with step.forward(unit) as params:
            for name, array in params.items():
                assert device.owns(array), f"{name} is not on {device}"
                values = device.to_host(array).astype(np.float32)
                seen[f"{number}/{part}/forward/{unit.name}/{name}"] = values
    for place, unit in reversed(list(enumerate(engine.units))):
        with step.backward(unit) as (params, grads):
            for k, name in enumerate(params):
                shape = SHAPES[unit.name][name]
                if (number + k) % 4 == 3:
                    continue  # a gradient that nobody writes is zero
                values = _integers(rank, number, part, place, k, shape=shape)
                values *= np.float32(engine.loss_scale)
                if k % 2:  # moved where it belongs
                    grads[name] = values.astype(params[name].dtype)
                else:
                    grads[name] = xp.asarray(values).astype(params[name].dtype)
                seen[f"{number}/{part}/backward/{unit.name}/{name}"] = device.to_host(
                    params[name]
                ).astype(np.float32)


SMALL = GPTConfig(context=32, width=48, heads=3, layers=2, hidden=100)


def options(
    model: GPTConfig = SMALL,
    *,
    steps: int = 50,
    batch: int = 8,
    strategy: str = "full_shard",
    precision: str = "fp32",
    prefetch: int = 1,
) -> train_gpt.Options:
    """Options of the example."""
    return train_gpt.Options(
        model=model,
        steps=steps,
        batch=batch,
        lr=6e-3,
        seed=1337,
        strategy=fc.Strategy(strategy),
        prefetch=prefetch,
        algorithm="auto",
        out=Path("unused"),
        precision=precision,
    )


def gpt(backend: fc.Backend, chosen: train_gpt.Options, steps: int) -> list[float]:
    """The losses of the first ``steps`` steps, and of an evaluation, in bits per byte."""
    trainer = train_gpt.Trainer(backend, chosen)
    return [*(trainer.step(number) for number in range(steps)), trainer.evaluate()]
