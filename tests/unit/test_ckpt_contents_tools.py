"""Checkpoints of many kinds, from the shell and without ranks; which one is the best; damage."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ckpt_make import make_checkpoint
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.checkpoint import PerRank, load, save
from fsdpcore.commands.main import app

ARRAYS = ("ema/w", "own/rank_0/kept", "own/rank_1/kept", "stream/window")


class Stream:
    """An object with a state."""

    def __init__(self, at: int) -> None:
        self.state = {"at": at, "window": np.arange(float(at))}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["at"] < 0:
            raise ValueError("a negative position")
        self.state = state


def state_at(rank: int, value: int) -> dict[str, Any]:
    return {
        "ema": {"w": np.full((4, 3), float(value))},
        "epoch": value,
        "rng": np.random.default_rng(value),
        "stream": Stream(value),
        "own": PerRank(
            {"rng": np.random.default_rng([value, rank]), "kept": np.full(2, value + rank)}
        ),
    }


def on(ranks: int, main: Any) -> list[Any]:
    return fc.launch(main, world_size=ranks, transport="sim")


def saved(folder: Path, value: int, step: int = 1, **options: Any) -> None:
    on(
        2,
        lambda backend: save(folder, state_at(backend.rank, value), backend, step=step, **options),
    )


def ckpt(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout


def whole(folder: Path, step: Any = None) -> list[Any]:
    """Return all that two ranks find in a checkpoint, in plain values."""

    def main(backend: fc.Backend) -> Any:
        target = dict.fromkeys(["ema", "epoch", "rng", "stream"]) | {"own": PerRank(None)}
        target |= {"stream": Stream(0)}
        state = load(folder, target, backend, step=step).state
        own = state["own"]
        return [
            state["ema"]["w"].tolist(),
            state["epoch"],
            state["rng"].random(3).tolist(),
            state["stream"].state["at"],
            state["stream"].state["window"].tolist(),
            own["rng"].random(3).tolist(),
            own["kept"].tolist(),
        ]

    return on(2, main)


def test_the_tools_carry_all_of_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 3, metrics={"loss": 0.5})
    expected = whole(run)
    assert expected[0][1] == 3
    assert expected[1][-1] == [4, 4]
    assert expected[0][2] == np.random.default_rng(3).random(3).tolist()
    assert expected[1][5] == np.random.default_rng([3, 1]).random(3).tolist()
    ckpt("verify", run)
    shown = json.loads(ckpt("inspect", run, "--step", 1, "--json"))
    assert sorted(each["name"] for each in shown["arrays"]) == sorted(ARRAYS)
    assert shown["values"]["epoch"] == "3"
    assert "random generator" in shown["values"]["rng"]
    assert "epoch: 3" in ckpt("inspect", run, "--step", 1)
    assert "loss=0.5" in ckpt("inspect", run)
    for ranks in (1, 3):
        other = tmp_path / f"for {ranks}"
        ckpt("reshard", run, other, "--ranks", ranks)
        assert whole(other) == expected
        assert "4 arrays are equal" in ckpt("diff", run, other)
        ckpt("verify", other)
    saved(tmp_path / "later", 4)
    lines = ckpt("diff", run, tmp_path / "later", code=1).splitlines()
    different = {line.partition(":")[0] for line in lines if "differ" in line}
    assert different >= {"epoch", "rng", "stream", "own", "ema/w"}
    ckpt("export", run, tmp_path / "out.safetensors")


def test_the_best_step(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: 0.25, 3: 0.25, 4: 0.75}
    for step, loss in losses.items():
        saved(tmp_path, step, step, metrics={"loss": loss, "accuracy": -loss})
    saved(tmp_path, 9, 9)
    assert fc.checkpoint.metrics(tmp_path)[2] == {"loss": 0.25, "accuracy": -0.25}
    assert list(fc.checkpoint.metrics(tmp_path)) == [1, 2, 3, 4, 9]
    assert whole(tmp_path, "latest")[0][1] == 9
    for step, value in (("best:loss", 3), ("best:-loss", 4), ("best:-accuracy", 3)):
        assert whole(tmp_path, step)[0][1] == value
        assert fc.checkpoint.read(tmp_path, "ema/w", step=step)["ema/w"][0, 0] == value
    ckpt("consolidate", tmp_path, tmp_path / "best", "--step", "best:loss")
    assert fc.checkpoint.steps(tmp_path / "best") == [3]
    for file in (tmp_path / "step_00000003").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-100:] = os.urandom(100)
        file.write_bytes(data)
    assert whole(tmp_path, "best:loss")[0][1] == 2  # the next best
    with pytest.raises(fc.CheckpointNotFoundError, match=r"'speed'.*accuracy, loss"):
        fc.checkpoint.read(tmp_path, step="best:speed")
    for wrong in ("best", "best:", "best:-", "newest"):
        with pytest.raises(fc.ArgumentError, match="best:loss"):
            fc.checkpoint.read(tmp_path, step=wrong)


def test_an_object_that_refuses_its_state_is_told_to_all_ranks(tmp_path: Path) -> None:
    saved(tmp_path, 3)

    def main(backend: fc.Backend) -> str:
        target = state_at(backend.rank, 5)
        if backend.rank == 1:
            target["stream"].load_state_dict = lambda state: 1 / 0
        with pytest.raises(fc.CheckpointError) as found:
            load(tmp_path, target, backend)
        backend.barrier()
        return str(found.value)

    (text,) = {*on(2, main)}
    assert "ZeroDivisionError" in text
    assert "half overwritten" in text


def test_not_strict_leaves_what_was_not_saved(tmp_path: Path) -> None:
    saved(tmp_path, 3)

    def main(backend: fc.Backend) -> None:
        target = {"epoch": 1, "more": (2, 3), "ema": {"w": np.zeros((4, 3)), "v": np.ones(1)}}
        with pytest.raises(fc.ArgumentError, match=r"'ema/v', 'more'.*unexpected.*'own'"):
            load(tmp_path, target, backend)
        loaded = load(tmp_path, target, backend, strict=False)
        assert loaded.missing == ("ema/v", "more")
        assert {"rng", "stream", "own"} <= {*loaded.unexpected}
        assert (loaded.state["epoch"], loaded.state["more"]) == (3, (2, 3))
        assert (loaded.state["ema"] is target["ema"], target["ema"]["w"][0, 0]) == (True, 3)
        some = load(tmp_path, {"epoch": 1, "rng": None}, backend, names="epoch")
        assert (some.state, some.unexpected) == ({"epoch": 3, "rng": None}, ())

    on(1, main)


def test_much_that_is_unexpected_is_told_in_groups(tmp_path: Path) -> None:
    def main(backend: fc.Backend) -> None:
        unit = fc.Unit("layer", {"w": np.ones((5, 3))})
        engine = fc.FSDP([unit], backend, optimizer=fc.optim.AdamW(lr=0.1))
        more = {"history": [float(each) for each in range(90)], "rng": {"a": 1, "b": [2] * 9}}
        save(tmp_path, {"engine": engine, **more}, backend, step=1)
        with pytest.raises(fc.ArgumentError) as caught:
            load(tmp_path, {"engine": engine}, backend)
        text = str(caught.value)
        assert "unexpected are 'history/*', 'rng/a', 'rng/b/*' (strict=False" in text
        assert "names='engine/*' loads the parameters alone" in text
        load(tmp_path, {"engine": engine}, backend, names="engine/*")

    on(1, main)


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Holder:
    """An object whose state is what it was given."""

    state: Any

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


REFUSED: dict[str, tuple[Any, str]] = {
    "a set": ({1}, "'x' is a builtins.set"),
    "a subclass": ([1, type("Int", (int,), {})()], "'x/1' is a"),
    "a key": ({1.5: 2}, "'x' has the key 1.5"),
    "a nest": (PerRank({"y": PerRank(1)}), "'x/rank_0/y' is a PerRank inside of a PerRank"),
    "a part": (PerRank(fc.checkpoint.BoxShard((2,), (0,), np.ones(2))), "inside of a PerRank"),
    "an object in a state": (Holder({"s": [Pair(1, 2)]}), "'x/s/0' is a Pair inside of what state"),
    "all of them": (PerRank(every=True), "which only load takes"),
    "too much": ("x" * (17 << 20), "16777216"),
    "too much of its own": (PerRank("x" * (2 << 20)), "1048576"),
    "itself": ((lambda x: x.append(x) or x)([]), "contains itself"),
    "a secret": (random.SystemRandom(), "no state"),
    "surrogates": ("\ud800", "surrogate"),
    "text": (np.array(["text"]), "'x'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, kind: str) -> None:
    value, text = REFUSED[kind]

    def main(backend: fc.Backend) -> None:
        with pytest.raises(fc.ArgumentError) as found:
            save(tmp_path, {"x": value}, backend, step=1)
        assert text in str(found.value)
        assert len(str(found.value)) < 500

    on(1, main)
    assert not list(tmp_path.iterdir())


def test_arrays_of_one_name_are_refused(tmp_path: Path) -> None:
    state = {"a": {"b": np.ones(1)}, "a/b": np.ones(1)}

    def main(backend: fc.Backend) -> None:
        for action in (save, load):
            with pytest.raises(fc.ArgumentError, match="'a/b'"):
                action(tmp_path, state, backend, step=1)

    on(1, main)


GOOD = {
    "state": {
        "a": ["array", "numpy"],
        "b": ["list", 1, ["int", "0x5"], ["map", [[3, ["tuple"]]]], ["object", {"c": None}]],
        "d": ["stateful", {"e": ["float", "nan"]}],
        "f": ["per rank"],
    },
    "per_rank": [{"f": ["generator", "Generator", np.random.default_rng(1).bit_generator.state]}],
}


def damaged() -> list[Any]:
    """Return what the metadata could say, and no save writes."""
    found: list[Any] = []
    nodes = [
        [],
        ["what"],
        ["list", ["int", "x"]],
        ["int", 5],
        ["float", "1"],
        ["array"],
        ["key", 1],
    ]
    nodes += [["array", "pickle"], ["map", 3], ["map", [[1]]], ["map", [[None, 1]]], ["object", []]]
    nodes += [["generator", 1, 2], ["engine", []], ["stateful"], ["stateful", ["what"]], [1]]
    nodes += [["per rank", 1], ["generator", "Generator"]]
    for node in nodes:
        found.append(copy.deepcopy(GOOD))
        found[-1]["state"]["b"] = node
    found += [{**GOOD, "per_rank": each} for each in (5, [5], [{"f": ["what"]}], {})]
    return found


def test_damaged_nodes_are_corrupt_and_nothing_else(tmp_path: Path) -> None:
    def main(backend: fc.Backend) -> None:
        target = dict.fromkeys("abd") | {"f": PerRank(None)}
        make_checkpoint(tmp_path / "good", {"a": np.ones(1)}, info=GOOD)
        state = load(tmp_path / "good", target, backend).state
        assert state["b"] == [1, 5, {3: ()}, {"c": None}]
        assert state["f"].random() == np.random.default_rng(1).random()
        for number, info in enumerate(damaged()):
            make_checkpoint(tmp_path / f"{number}", {"a": np.ones(1)}, info=info)
            with pytest.raises(fc.CorruptCheckpointError):
                load(tmp_path / f"{number}", target, backend)
        states = (None, {}, {"bit_generator": "PCG64"}, {"bit_generator": "default_rng"}, [1])
        for step, each in enumerate(states):
            info = {**GOOD, "per_rank": [{"f": ["generator", "Generator", each]}]}
            make_checkpoint(tmp_path / "bad", {"a": np.ones(1)}, info=info, step=step)
            with pytest.raises(fc.ArgumentError, match="Nothing was changed"):
                load(tmp_path / "bad", target, backend)

    on(1, main)
