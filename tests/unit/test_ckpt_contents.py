"""States of many kinds in one checkpoint: what is saved, what comes back, what is refused."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fsdpcore as fc
from fsdpcore.checkpoint import PerRank, load, save


def on(ranks: int, main: Any) -> list[Any]:
    return fc.launch(main, world_size=ranks, transport="sim")


def same_error(ranks: int, kind: type[Exception], main: Any) -> str:
    """Run it on ranks that all have to raise the same; return the message."""

    def caught(backend: fc.Backend) -> str:
        with pytest.raises(kind) as found:
            main(backend)
        backend.barrier()  # it is still usable
        return str(found.value)

    texts = on(ranks, caught)
    assert len(set(texts)) == 1
    return str(texts[0])


def engine_of(backend: fc.Backend, seed: int = 0, steps: int = 0) -> fc.FSDP:
    numbers = np.random.default_rng(seed)
    units = [
        fc.Unit(f"layer{each}", {"w": numbers.normal(size=(5, 3)), "b": np.zeros(3)})
        for each in range(2)
    ]
    engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW(lr=0.1))
    for _ in range(steps):
        step_of(engine)
    return engine


def step_of(engine: fc.FSDP) -> None:
    """Take a step with gradients that are the parameters themselves."""
    with engine.step() as step:
        for unit in engine.units:
            with step.forward(unit):
                pass
        for unit in reversed(engine.units):
            with step.backward(unit) as (params, grads):
                for name, array in params.items():
                    grads[name] += 2 * array
        step.update()


def bits(engine: fc.FSDP) -> dict[str, bytes]:
    """Return all of an engine."""
    state = engine.state_dict(full=True, to="all")
    return {
        "steps": bytes([engine.steps]),
        **{k: np.asarray(v).tobytes() for k, v in state.items()},
    }


class Stream:
    """An object with a state: a position, a window that grows, and keys that are integers."""

    def __init__(self, at: int, window: list[float]) -> None:
        self.at = at
        self.window = np.array(window)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "window": self.window, "more": {3: (self.at, [None])}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["more"] == {3: (state["at"], [None])}
        self.at, self.window = state["at"], state["window"]


@dataclasses.dataclass(frozen=True)
class Averages:
    """A dataclass with an array and a number."""

    mean: Any
    count: int


def state_at(backend: fc.Backend, value: int) -> dict[str, Any]:
    """Return a state of every kind; all of it depends on ``value``."""
    world, rank = backend.world_size, backend.rank
    return {
        "model": engine_of(backend, value, steps=value),
        "critic": engine_of(backend, 50 + value, steps=value),
        "ema": {"w": np.full((2, 3), value, np.float32), "deep": [np.full((), value, np.int8)]},
        "half": np.full(3, value, ml_dtypes.bfloat16),
        "sharded": fc.checkpoint.BoxShard((world, 2), (rank, 0), np.full((1, 2), value + rank)),
        "averages": Averages(np.full(2, value, np.complex128), value),
        "stream": Stream(value, [0.5] * value),
        "rng": np.random.default_rng(value),
        "old": np.random.RandomState(value),
        "python": random.Random(value),
        "own": PerRank(
            {
                "rng": np.random.Generator(np.random.SFC64(value + rank)),
                "at": value + rank,
                "rest": np.arange(4) * (value + rank),
                "stream": Stream(value + rank, [1.0]),
            }
        ),
        "epoch": value,
        "pair": (value, {"a/b": [value, None, True, "ü", -0.0]}),
        "odd": [value << 3000, math.inf, math.nan, 2.0**-1074],
        "scalar": np.float16(value),
        "nothing": None,
        "empty": {"list": [], "dict": {}},
    }


def words(value: Any) -> Any:
    """Say all that a value is, so that equal words are equal bits; generators by what they draw."""
    if isinstance(value, fc.FSDP):
        return bits(value)
    if isinstance(value, PerRank):
        return words(value.value)
    if isinstance(value, fc.checkpoint.BoxShard):
        return words(value.array)
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, np.random.Generator):
        return value.integers(0, 2**60, 4).tolist()
    if isinstance(value, np.random.RandomState):
        return value.randint(0, 2**30, 700).tolist()
    if isinstance(value, random.Random):
        return value.random(), value.gauss(0, 1)
    if isinstance(value, Stream):
        return words(value.state_dict())
    if isinstance(value, Averages):
        return words(value.mean), value.count
    if isinstance(value, dict):
        return {key: words(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [words(each) for each in value]
    return type(value).__name__, repr(value)


@pytest.mark.parametrize("background", [False, True])
def test_all_kinds_come_back_bit_for_bit(tmp_path: Path, background: bool) -> None:
    def main(backend: fc.Backend) -> None:
        given = state_at(backend, 3)
        given["python"].gauss(0, 1)  # of which it keeps a second number
        if background:
            with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
                checkpointer.save(given)
                given["ema"]["w"] += 1  # after the copy
                given["ema"]["w"] -= 1
                checkpointer.wait()
        else:
            save(tmp_path, given, backend)
        target = state_at(backend, 1)
        kept = dict(target)
        loaded = load(tmp_path, target, backend)
        assert loaded.step == 3
        assert loaded.missing == loaded.unexpected == ()
        assert target == kept  # containers stay as they are, in place is changed what can be
        for name in ("model", "critic", "ema", "half", "sharded", "stream", "rng", "old", "python"):
            assert loaded.state[name] is target[name]
        assert (target["epoch"], loaded.state["epoch"]) == (1, 3)
        assert target["averages"].count == 1
        assert isinstance(loaded.state["averages"], Averages)
        assert loaded.state["averages"].mean is target["averages"].mean
        expected = state_at(backend, 3)
        expected["python"].gauss(0, 1)
        assert words(loaded.state) == words(expected)

    on(2, main)
