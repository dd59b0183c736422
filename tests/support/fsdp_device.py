"""Bodies: training whose operations have the same bits on the host and on the stand-in's GPUs.

Gradients are products of parameters and noise; sums over ranks are the engine's.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support import nccl_ranks

import fsdpcore as fc

Array = NDArray[Any]

# Updates and norms are kernels, which the stand-in compiles.
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ to compile the kernels with"
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

PRECISIONS = {
    "": None,
    "bf16": fc.Precision(BFLOAT16, np.float32),
    "bf16 reduced": fc.Precision(BFLOAT16),
    "fp16": fc.Precision(np.float16, np.float32, fc.LossScale(1024.0)),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": fc.optim.SGD(lr=0.1, momentum=0.9),
    "adamw": fc.optim.AdamW(lr=0.01),
    "adafactor": fc.optim.Adafactor(lr=0.01),
    "muon": {"*.w": fc.optim.Muon(lr=0.01), "*": fc.optim.NAdam()},
    "two": {"*.b": fc.optim.Lion(lr=0.001), "*": fc.optim.RMSprop(lr=0.01)},
}
STRATEGIES = [
    fc.Strategy("full_shard"),
    fc.Strategy("full_shard", reshard_after_forward=False),
    fc.Strategy("shard_grad_op"),
    fc.Strategy("no_shard"),
    fc.Strategy("shard_optimizer"),
]
_STEPS = 2


@dataclass(frozen=True)
class Way:
    """How an engine is made, and its steps.

    Attributes:
        ranks: how many.
        strategy, prefetch, window, offload, algorithm: of the engine.
        optimizer, precision: keys of ``OPTIMIZERS`` and ``PRECISIONS``.
        parts: microbatches of a step.
        deferred: all but the last are kept by ``no_sync``.
        clip, clip_value: of the update.
        divisor: of the step.
        whole: all units are gathered at once.
        compression: of the engine.
    """

    ranks: int = 2
    strategy: fc.Strategy = dataclasses.field(default_factory=fc.Strategy)
    prefetch: int | fc.Prefetch = 1
    window: bool = True
    offload: str = ""
    optimizer: str = "adamw"
    precision: str = ""
    parts: int = 1
    deferred: bool = False
    clip: float | None = None
    clip_value: float | None = None
    divisor: float | None = None
    algorithm: str = "direct"
    whole: bool = False
    compression: fc.Compression | None = None

    def __str__(self) -> str:
        changed = [
            f"{field.name} {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in ("ranks", "strategy")
            and getattr(self, field.name) != field.default
        ]
        after = self.strategy.reshard_after_forward
        name = f"{self.strategy.name}{'' if after is True else f' {after}'}"
        return ", ".join([f"{self.ranks} ranks", name, *changed])


def units() -> list[fc.Unit]:
    """Odd sizes, empty and scalar ones; tied, frozen and ignored ones."""
    rng = np.random.default_rng(5)

    def values(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    return [
        fc.Unit(
            "first", {"w": values(13, 11), "b": values(11), "fixed": values(5)}, frozen="fixed"
        ),
        fc.Unit(
            "second",
            {"e": values(7), "none": values(0), "mask": np.arange(5, dtype=np.int32)},
            ignored="mask",
        ),
        fc.Unit(
            "third",
            {
                "w": fc.Spec((29, 3), init=fc.initializers.normal(std=0.5)),
                "b": values(),
                "tied": fc.Tied("first", "b"),
                "half": values(3, 3).astype(np.float16),
            },
            frozen="half",
        ),
    ]


def engine_of(backend: fc.Backend, way: Way) -> fc.FSDP:
    """An engine of these units."""
    return fc.FSDP(
        units(),
        backend,
        strategy=way.strategy,
        optimizer=OPTIMIZERS[way.optimizer],
        precision=PRECISIONS[way.precision],
        prefetch=way.prefetch,
        window=way.window,
        offload=fc.Offload(what=way.offload) if way.offload else None,  # type: ignore[arg-type]
        algorithm=way.algorithm,
        compression=way.compression,
    )


def one_pass(
    engine: fc.FSDP, step: fc.Step, noise: np.random.Generator, whole: bool = False
) -> None:
    """Go forward and back; the parameters that a rank sees decide its gradients."""
    if whole:
        with step.whole() as (params, grads):
            assert all(engine.device.owns(a) for named in params.values() for a in named.values())
            for unit in reversed(engine.units):
                _give(engine, params[unit.name], grads[unit.name], noise)
        return
    for unit in engine.units:
        with step.forward(unit) as params:
            assert all(engine.device.owns(array) for array in params.values())
    for unit in reversed(engine.units):
        with step.backward(unit) as (params, grads):
            _give(engine, params, grads, noise)


def _give(engine: fc.FSDP, params: Any, grads: Any, noise: np.random.Generator) -> None:
    xp, scale = engine.xp, np.float32(engine.loss_scale)
    for number, name in enumerate(grads):
        values = params[name]
        factor = noise.normal(size=values.shape).astype(np.float32) * scale
        product = values * xp.asarray(factor.astype(values.dtype))
        if number % 3 == 2:  # written in place
            grads[name][...] = product
        else:
            grads[name] = product


def trained(backend: fc.Backend, way: Way) -> tuple[dict[str, Any], list[Any], Any]:
    """The whole state after a few steps, the norms, and what was held at most."""
    engine = engine_of(backend, way)
    noise, norms = np.random.default_rng(backend.rank), []
    for _ in range(_STEPS):
        with engine.step(divisor=way.divisor) as step:
            for _ in range(way.parts - 1):
                if way.deferred:
                    with step.no_sync():
                        one_pass(engine, step, noise, way.whole)
                else:
                    one_pass(engine, step, noise, way.whole)
            one_pass(engine, step, noise, way.whole)
            norms.append(step.update(clip=way.clip, clip_value=way.clip_value))
    report, held = engine.report().as_dict(), engine.held()
    assert held.buffers == 0
    state = engine.state_dict(full=True)
    assert all(type(array) is np.ndarray for array in state.values())
    return dict(state), norms, (report, held)


def bits(state: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two states equal."""
    return {name: (array.shape, array.dtype, array.tobytes()) for name, array in state.items()}


def on_host(body: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run ``body(backend, *args)`` on simulated ranks that compute on the host."""
    return fc.launch(body, world_size=ranks, transport="sim", args=args, timeout=60)


def on_gpus(body: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """The same on ranks with a GPU of the stand-in each."""
    return nccl_ranks.results(lambda backend: body(backend, *args), ranks)


def run(body: Callable[[fc.Backend], Any], ranks: int) -> list[Any]:
    """The same of a body that takes the backend only, on the machine that is installed."""
    return nccl_ranks.results_of(body, ranks)
