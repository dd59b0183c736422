"""Bodies: engines that train, are saved, and loaded elsewhere; what they held, as a host has it."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.fsdp_device import Way, engine_of, one_pass

import fsdpcore as fc

STEPS = 2
"""Of the engine that is saved."""

Bits = dict[str, tuple[str, bytes]]


def way(ranks: int, **options: Any) -> Way:
    return Way(ranks, algorithm="auto", **options)


def all_of(engine: fc.FSDP) -> Bits:
    """Everything that an engine holds; a collective."""
    state = engine.state_dict(full=True)
    return {name: (array.dtype.name, np.asarray(array).tobytes()) for name, array in state.items()}


def train(engine: fc.FSDP, steps: int) -> None:
    noise = np.random.default_rng(engine.backend.rank + engine.steps)
    for _ in range(steps):
        with engine.step() as step:
            one_pass(engine, step, noise)
            step.update(clip=1.0)


def save(backend: fc.Backend, made: Way, path: Any) -> Bits:
    engine = engine_of(backend, made)
    train(engine, STEPS)
    fc.checkpoint.save(path, engine, backend)
    return all_of(engine)


def save_in_background(backend: fc.Backend, made: Way, path: Any) -> Bits:
    engine = engine_of(backend, made)
    train(engine, STEPS)
    then = all_of(engine)
    with fc.checkpoint.AsyncCheckpointer(path, backend) as checkpointer:
        future = checkpointer.save(engine)
        train(engine, 2)
        assert future.wait().step == STEPS
    assert all_of(engine) != then
    return then


def load(backend: fc.Backend, made: Way, path: Any) -> Bits:
    engine = engine_of(backend, made)
    train(engine, 1)  # so that there is something to overwrite
    loaded = fc.checkpoint.load(path, engine, backend)
    assert (loaded.missing, loaded.unexpected, loaded.uncovered) == ((), (), ())
    assert (engine.steps, engine.partially_updated) == (STEPS, False)
    found = all_of(engine)
    train(engine, 1)  # it goes on
    return found
