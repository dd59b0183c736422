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
from support.ckpt_resume import on_other_ranks, stopped_and_whole
from support.spmd import run

import fsdpcore as fc
from fsdpcore.checkpoint import PerRank, load, save
from fsdpcore.checkpoint.plan import contents


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
        return value.randn(), value.randint(0, 2**30, 700).tolist()
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
        given["python"].gauss(0, 1)  # of which it keeps a second number,
        given["old"].randn()  # as this does
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
        expected["old"].randn()
        assert words(loaded.state) == words(expected)

    on(2, main)


NUMBERS = [
    np.float32(0.1),
    np.array(0x7FC12345, np.uint32).view(np.float32)[()],
    np.float64(-math.inf),
    np.complex64(complex(-0.0, math.nan)),
    np.complex128(1 + 2j),
    np.int64(-(2**63)),
    np.uint8(255),
    np.bool_(True),
    ml_dtypes.bfloat16(1.5),
    ml_dtypes.float8_e4m3fn(448),
]


def test_numbers_of_numpy_are_plain_values(tmp_path: Path) -> None:
    given = {
        "all": NUMBERS,
        "one": np.float32(2.5),
        "n": np.int64(7),
        "plain": 0.5,
        "a": np.ones(2),
    }
    zeros = [each.dtype.type(0) for each in NUMBERS]

    def main(backend: fc.Backend) -> None:
        save(tmp_path, given, backend, step=1)
        targets: list[tuple[Any, ...]] = [([], None, None, None), ([1.0], 0.0, 0, np.float32(0))]
        for targeted in [*targets, (zeros, np.int8(0), np.float64(0), 0.0), (zeros[:2], 0, 0, 0)]:
            target = dict(zip(given, targeted, strict=False)) | {"a": np.zeros(2)}
            kept = list(target["all"])
            assert words(load(tmp_path, target, backend).state) == words(given)
            assert target["all"] == kept
        whole = load(tmp_path, {"one": np.zeros((), np.float32)}, backend, names="one")
        assert whole.state["one"].tobytes() == given["one"].tobytes()

    on(2, main)
    (folder,) = tmp_path.iterdir()
    assert "one" not in fc.checkpoint.read(folder)


def test_numbers_of_numpy_that_were_saved_as_arrays(tmp_path: Path, monkeypatch: Any) -> None:
    usual = contents._Taker._container

    def before(taker: Any, value: Any, path: Any) -> Any:
        if not isinstance(value, np.generic):
            return usual(taker, value, path)
        taker._add(path, np.asarray(value), alike=True)
        return ["array", "scalar"]

    both: dict[str, Any] = {"h": [1.0, NUMBERS[0]], "x": NUMBERS[1]}

    def main(backend: fc.Backend) -> None:
        for step, old in enumerate([both, {"x": NUMBERS[1]}]):
            with monkeypatch.context() as patch:
                patch.setattr(contents._Taker, "_container", before)
                save(tmp_path, old, backend, step=step)
            for target in {"h": [], "x": np.float32(0)}, {"h": [0.0, np.float32(1)], "x": None}:
                mine = {name: target[name] for name in old}
                loaded = load(tmp_path, mine, backend, step=step).state
                assert loaded.keys() == old.keys()
                assert np.asarray(loaded["x"]).tobytes() == NUMBERS[1].tobytes()
                assert words(loaded.get("h")) == words(old.get("h"))

    on(1, main)


@pytest.mark.parametrize("transport", ["sim", "zmq"])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, transport: str) -> None:
    folder = str(tmp_path / "run")
    jobs = run(stopped_and_whole, transport=transport, world_size=2, args=(folder,))
    for stopped, whole, _ in jobs:
        assert stopped == whole
    assert jobs[0][0]["dropout"] != jobs[1][0]["dropout"]
    # On other ranks: what was equal is so, and each generator draws what no other does.
    ranks = run(on_other_ranks, transport=transport, world_size=3, args=(folder,))
    own = [words.pop("dropout") for words in ranks]
    assert own[:2] == [at_three.pop("dropout") for *_, at_three in jobs]
    assert len({*own}) == 3
    assert all(words == jobs[0][2] for words in ranks)


# What does not fit.


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("epoch", lambda rank: {"epoch": 3 + rank // 2}),
        ("losses/0", lambda rank: {"losses": [np.float32(rank // 2)]}),
        ("ema/deep/1", lambda rank: {"ema": {"deep": [0, np.full(2, rank // 2)]}}),
        ("ema/deep", lambda rank: {"ema": {"deep": 2.0} if rank // 2 else {}}),
        ("rng", lambda rank: {"rng": np.random.default_rng(rank // 2)}),
        ("list/0", lambda rank: {"list": [True if rank // 2 else 1]}),
        ("stream", lambda rank: {"stream": Stream(rank // 2, [])}),
        ("stream/window", lambda rank: {"stream": Stream(1, [float(rank // 2)])}),
        ("w", lambda rank: {"own": PerRank(1), "w": np.full(2, rank // 2)}),
        ("zero", lambda rank: {"zero": np.array(-0.0 if rank // 2 else 0.0)}),
    ],
)
def test_what_differs_between_ranks_is_refused(tmp_path: Path, name: str, make: Any) -> None:
    def saved(backend: fc.Backend) -> None:
        # Ranks are told by their numbers in the job.
        save(tmp_path, make(backend.rank), backend.sub([2, 1, 0]), step=1)

    text = same_error(3, fc.MismatchError, saved)
    assert repr(name) in text
    assert "rank 2" in text
    assert "PerRank" in text
    assert ("all_reduce" in text) == (name in ("ema/deep/1", "stream/window", "w", "zero"))
    assert ("differs between rank 2 and ranks 1, 0" in text) == (
        "all_reduce" in text or name in ("rng", "stream")
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("a/1", {"a": {1: 2, "1": 3}}),
        ("a/b", {"a/b": 2, "a": {"b": 3}}),
        ("a/b", {"a/b": PerRank(2, default=0), "a": {"b": PerRank(3, default=0)}}),
    ],
)
def test_entries_of_one_name_are_refused(tmp_path: Path, name: str, entries: Any) -> None:
    text = same_error(2, fc.ArgumentError, lambda b: save(tmp_path, entries, b, step=1))
    assert f"two entries of the state would be called {name!r}" in text


def test_each_ranks_own_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    def own(rank: int) -> Any:
        return {"rng": np.random.default_rng(rank), "name": f"rank {rank}", "a": np.full(rank, 9)}

    def main(backend: fc.Backend) -> None:
        state = {
            "own": PerRank(own(backend.rank)),
            "rng": PerRank(np.random.default_rng(backend.rank)),
        }
        save(tmp_path, state, backend, step=1)

    on(3, main)

    def fewer(backend: fc.Backend) -> None:
        target = {"own": PerRank(own(backend.rank)), "rng": PerRank(None)}
        target["own"].value["a"][...] = 0
        target["own"].value["name"] = ""
        state = load(tmp_path, target, backend).state
        assert words(state["own"]) == words(own(backend.rank))
        assert words(state["rng"]) == words(np.random.default_rng(backend.rank))

    on(2, fewer)

    def more(backend: fc.Backend) -> None:
        rank = backend.rank
        rng = np.random.default_rng(99)
        target = {"own": PerRank(own(min(rank, 2)), default="none"), "rng": PerRank(rng)}
        state = load(tmp_path, target, backend).state
        assert (state["own"] == "none") == (rank > 2)
        bits = np.random.PCG64(rank % 3)
        fresh = np.random.Generator(bits.jumped() if rank > 2 else bits)
        assert state["rng"] is rng
        assert words(rng) == words(fresh)
        every = load(tmp_path, {"own": PerRank(every=True), "rng": PerRank(None)}, backend).state
        assert [words(each) for each in every["own"]] == [words(own(each)) for each in range(3)]

    on(4, more)
    fewer_keys = {"own": PerRank({"rng": None, "name": ""}), "rng": PerRank(None)}
    text = same_error(1, fc.ArgumentError, lambda backend: load(tmp_path, fewer_keys, backend))
    assert "'own' has more in the checkpoint, 'own/rank_0/a'" in text
    on(1, lambda backend: load(tmp_path, fewer_keys, backend, strict=False))
    text = same_error(
        4,
        fc.ArgumentError,
        lambda backend: load(tmp_path, {"own": PerRank(None), "rng": PerRank(None)}, backend),
    )
    assert "'own' was saved by 3 ranks, each its own, and rank 3 has none" in text
    unmarked = {"own": None, "rng": PerRank(None)}
    text = same_error(3, fc.ArgumentError, lambda backend: load(tmp_path, unmarked, backend))
    assert "'own' is a value of each rank's own" in text
    assert "write PerRank() in its place" in text


MISFITS: dict[str, tuple[Any, str]] = {
    "a number": (3, "'rng' is a random generator, Generator, in the checkpoint"),
    "another kind": (random.Random(), "'rng' is a Random, but what was saved is a Generator"),
    "other bits": (np.random.Generator(np.random.MT19937()), "is a MT19937"),
    "an object": (Stream(1, []), "'rng' is a random generator"),
    "per rank": (PerRank(None), "without PerRank"),
    "an array": (np.zeros(2), "missing in the checkpoint are 'rng'"),
}


def test_nothing_is_changed_if_anything_does_not_fit(tmp_path: Path) -> None:
    def main(backend: fc.Backend) -> None:
        save(tmp_path, state_at(backend, 2), backend)
        target = state_at(backend, 1)
        del target["rng"]
        for bad, text in MISFITS.values():
            rng = bad if backend.rank == 1 else np.random.default_rng(1)
            with pytest.raises(fc.ArgumentError) as found:
                load(tmp_path, {**target, "rng": rng}, backend)
            assert text in str(found.value)
            assert "Nothing was changed on any rank" in str(found.value)
            assert backend.rank == 1 or words(rng) == words(np.random.default_rng(1))
        expected = state_at(backend, 1)
        del expected["rng"]
        assert words(target) == words(expected)

    on(2, main)
