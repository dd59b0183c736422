"""``load`` as its users see it: engines, mappings, what fits and what does not, what is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.arrays import array_of
from support.ckpt_make import make_checkpoint

import fsdpcore as fc
from fsdpcore.checkpoint import BoxShard, read
from fsdpcore.checkpoint.format.generators import states_of
from fsdpcore.checkpoint.load.load import Loaded, load
from fsdpcore.checkpoint.memory.overlaps import check_disjoint
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateError,
)

Array = NDArray[Any]
INFO = {"format": 1, "step": 7, "loss_scale": None, "ties": {}}


def on(ranks: int, main: Callable[[fc.Backend], Any]) -> list[Any]:
    return fc.launch(main, world_size=ranks, transport="sim")


def same_error(ranks: int, kind: type[Exception], main: Callable[[fc.Backend], Any]) -> str:
    """Run it on ranks that all have to raise the same; return the message."""

    def caught(backend: fc.Backend) -> str:
        with pytest.raises(kind) as found:
            main(backend)
        backend.barrier()  # it is still usable
        return str(found.value)

    texts = on(ranks, caught)
    assert len(set(texts)) == 1
    return str(texts[0])


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def arrays(salt: str = "") -> dict[str, Array]:
    return {
        "w": array_of(0, (40, 30), np.float32, salt),
        "b": array_of(1, (30,), np.float32, salt),
        "optimizer/exp_avg/w": array_of(2, (40, 30), np.float32, salt),
    }


def empty_like(given: dict[str, Array]) -> dict[str, Array]:
    return {name: np.zeros_like(array) for name, array in given.items()}


# What fits.


def test_a_mapping_is_filled_in_place_and_told_what_was_saved_with_it(tmp_path: Path) -> None:
    given = arrays()
    make_checkpoint(tmp_path, given, extra={"at": 3}, metrics={"loss": 0.5}, info=INFO)

    def main(backend: fc.Backend) -> Loaded:
        target = empty_like(given)
        loaded = load(tmp_path, target, backend)
        for name, array in given.items():
            assert np.array_equal(target[name], array)
        return loaded

    for loaded in on(2, main):
        assert (loaded.step, loaded.name) == (30, "step_00000030")
        assert (loaded.extra, loaded.metrics, loaded.info) == ({"at": 3}, {"loss": 0.5}, INFO)
        assert loaded.missing == loaded.unexpected == loaded.uncovered == loaded.skipped == ()
        assert loaded.bytes_read == loaded.bytes_needed == sum(a.nbytes for a in given.values())
        assert loaded.bytes_beside > 0


def test_ranks_may_want_different_arrays(tmp_path: Path) -> None:
    given = arrays()
    make_checkpoint(tmp_path, given)

    def main(backend: fc.Backend) -> None:
        name = sorted(given)[backend.rank]
        target = {name: np.zeros_like(given[name])}
        loaded = load(tmp_path, target, backend)
        assert loaded.unexpected == ()
        assert np.array_equal(target[name], given[name])

    on(3, main)


def test_patterns_choose_what_is_loaded(tmp_path: Path) -> None:
    given = arrays()
    make_checkpoint(tmp_path, given)

    def main(backend: fc.Backend) -> None:
        target = empty_like(given)
        load(tmp_path, target, backend, names=["b", "optimizer/*"])
        assert not target["w"].any()
        assert np.array_equal(target["b"], given["b"])
        assert target["optimizer/exp_avg/w"].any()

    on(2, main)
    text = same_error(
        2, ArgumentError, lambda b: load(tmp_path, empty_like(given), b, names="nothing.*")
    )
    assert "nothing.*" in text


def test_what_does_not_fit_is_an_error_on_all_ranks_before_anything_is_written(
    tmp_path: Path,
) -> None:
    given = arrays()
    make_checkpoint(tmp_path, given)
    wrong = {
        "missing": ("extra", np.zeros(3)),
        "shape": ("w", np.zeros((30, 40), np.float32)),
        "dtype": ("w", np.zeros((40, 30), np.float64)),
    }
    for word, (name, array) in wrong.items():

        def main(backend: fc.Backend, name: str = name, array: Array = array) -> None:
            target = empty_like(given)
            if backend.rank == 1 or name not in target:
                target[name] = array.copy()
            try:
                load(tmp_path, target, backend)
            finally:
                assert not any(each.any() for each in target.values())

        text = same_error(2, ArgumentError, main)
        assert word in text
        assert name in text
        assert "Nothing was changed" in text
    text = same_error(2, ArgumentError, lambda b: load(tmp_path, {"b": np.zeros(30, "f4")}, b))
    assert "unexpected" in text


def test_read_only_arrays_and_other_things_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {"w": np.zeros((), np.float32)})
    frozen = np.zeros((), np.float32)
    frozen.flags.writeable = False
    for value, word in ((frozen, "read-only"), (object(), "object"), ([1.0], "is a list")):
        text = same_error(
            2,
            ArgumentError,
            lambda backend, value=value: load(tmp_path, {"w": value}, backend),
        )
        assert word in text


def test_not_strict_loads_what_fits_and_says_what_does_not(tmp_path: Path) -> None:
    given = arrays()
    cuts = {
        "w": [(0, ("range", 0, 1000))],
        "b": [(0, ("range", 0, 30))],
        "optimizer/exp_avg/w": [(0, ("range", 0, 1200))],
    }
    make_checkpoint(tmp_path, given, cuts)

    def main(backend: fc.Backend) -> None:
        target = {"w": np.full((40, 30), 9, np.float32), "other": np.full(2, 9.0)}
        rows = BoxShard((40, 30), (20 * backend.rank, 0), target["w"][20 * backend.rank :][:20])
        loaded = load(tmp_path, {**target, "w": rows}, backend, strict=False)
        assert loaded.missing == ("other",)
        assert loaded.unexpected == ("b", "optimizer/exp_avg/w")
        assert loaded.uncovered == ("w",)
        expected = np.full((40, 30), 9, np.float32)
        mine = slice(0, 600) if backend.rank == 0 else slice(600, 1000)
        expected.reshape(-1)[mine] = given["w"].reshape(-1)[mine]
        assert np.array_equal(target["w"], expected)
        assert (target["other"] == 9).all()
        assert load(
            tmp_path, {**target, "w": rows}, backend, strict=False, optimizer=False
        ).unexpected == ("b",)

    on(2, main)
    text = same_error(2, CheckpointError, lambda b: load(tmp_path, empty_like(given), b))
    assert "not all elements" in text


def test_cast_rounds_to_the_dtypes_of_the_target(tmp_path: Path) -> None:
    given = {"w": array_of(0, (300, 200)), "n": np.arange(7, dtype=np.int32)}
    given["w"][0, 0] = 1e30
    make_checkpoint(tmp_path, given)

    def main(backend: fc.Backend) -> None:
        start = 150 * backend.rank
        half = BoxShard((300, 200), (start, 0), np.zeros((150, 200), np.float16))
        big_endian = np.zeros(7, ">i8")
        load(tmp_path, {"w": half, "n": big_endian}, backend, cast=True)
        with np.errstate(over="ignore"):
            expected = given["w"][start : start + 150].astype(np.float16)
        assert half.array.tobytes() == expected.tobytes()
        assert big_endian.tolist() == list(range(7))

    on(2, main)
    wrong = {"w": np.zeros((300, 200), np.int32), "n": np.zeros(7, np.int32)}
    text = same_error(2, ArgumentError, lambda b: load(tmp_path, wrong, b, cast=True))
    assert "cannot be rounded" in text


def test_another_byte_order_is_the_same_dtype(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {"w": np.arange(50, dtype=np.int32)})
    target = np.zeros(50, ">i4")
    on(1, lambda backend: load(tmp_path, {"w": target}, backend))
    assert target.tolist() == list(range(50))


def test_ranks_that_want_different_things_are_told(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arrays())
    text = same_error(
        2,
        ArgumentError,
        lambda b: load(tmp_path, empty_like(arrays()), b, strict=b.rank == 0),
    )
    assert "differ" in text


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, arrays())
    for options in ({"step": -1}, {"step": True}, {"threads": 0}, {"names": 3}, {"names": []}):
        same_error(
            2,
            ArgumentError,
            lambda b, options=options: load(tmp_path, empty_like(arrays()), b, **options),
        )
    with pytest.raises(ArgumentError, match="backend"):
        load(tmp_path, arrays(), None)  # type: ignore[arg-type]


# Which checkpoint.


def test_the_newest_step_or_the_one_that_is_named(tmp_path: Path) -> None:
    for step in (10, 20):
        make_checkpoint(tmp_path, {"w": np.full(5, step)}, step=step)

    def main(backend: fc.Backend) -> None:
        target = np.zeros(5, np.int64)
        assert load(tmp_path, {"w": target}, backend).step == 20
        assert load(tmp_path, {"w": target}, backend, step=10).step == 10
        assert target.tolist() == [10] * 5

    on(2, main)
    same_error(
        2,
        CheckpointNotFoundError,
        lambda b: load(tmp_path, {"w": np.zeros(5, np.int64)}, b, step=15),
    )
    same_error(2, CheckpointNotFoundError, lambda b: load(tmp_path / "none", {}, b))


def test_a_damaged_block_makes_all_ranks_load_the_step_before(tmp_path: Path) -> None:
    for step in (10, 20):
        given = {"w": np.full((400, 300), step, np.float32)}
        rows = [(0, ("box", (0, 0), (200, 300))), (1, ("box", (200, 0), (400, 300)))]
        folder = make_checkpoint(tmp_path, given, {"w": rows}, step=step)
    file = folder / "rank_1.safetensors"
    damage(file, file.stat().st_size - 1000)

    def main(backend: fc.Backend) -> None:
        target = np.zeros((200, 300), np.float32)
        shard = BoxShard((400, 300), (200 * backend.rank, 0), target)
        loaded = load(tmp_path, {"w": shard}, backend)
        assert loaded.step == 10
        assert (target == 10).all()
        (skipped,) = loaded.skipped
        assert skipped.name == folder.name
        for word in ("rank_1.safetensors", "'w'", "bytes ["):
            assert word in skipped.reason

    on(2, main)

    def at_once(backend: fc.Backend) -> None:
        load(tmp_path, {"w": np.zeros((400, 300), np.float32)}, backend, step=20)

    text = same_error(2, CorruptCheckpointError, at_once)
    assert "rank_1.safetensors" in text
    assert "half overwritten" in text


@pytest.mark.parametrize("where", ["header", "table", "cut", "gone", "shared"])
def test_whatever_is_damaged_is_noticed(tmp_path: Path, where: str) -> None:
    given = {"w": array_of(0, (256, 300))}
    folder = make_checkpoint(tmp_path, given)
    file = folder / "rank_0.safetensors"
    size = file.stat().st_size
    if where == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif where == "gone":
        file.unlink()
    else:
        damage(file, {"header": 9, "table": size - 1, "shared": size // 2}[where])

    def main(backend: fc.Backend) -> None:
        width = 100
        columns = BoxShard((256, 300), (0, width * backend.rank), np.zeros((256, width), "f4"))
        load(tmp_path, {"w": columns}, backend)

    text = same_error(3, CorruptCheckpointError, main)
    assert "rank_0.safetensors" in text
    with pytest.raises(CorruptCheckpointError, match=r"rank_0.safetensors"):
        read(tmp_path)


# Engines.


class Engine:
    """What load needs of an engine, over plain arrays."""

    tensor = None

    def __init__(self, state: dict[str, Any], ties: dict[str, str] | None = None) -> None:
        self.state = state
        self.info = {**INFO, "ties": ties or {}}
        self.partially_updated = False
        self.leaves: Exception | None = None
        self.loaded: Any = None
        self.seen: bool | None = None

    def state_dict(self, *, optimizer: bool = True) -> Any:
        raise NotImplementedError

    @contextmanager
    def writing_state(self, *, optimizer: bool = True) -> Any:
        names = [n for n in self.state if optimizer or not n.startswith("optimizer/")]
        yield fc.EngineState({name: self.state[name] for name in names}, self.info)
        self.seen = self.partially_updated
        if self.leaves is not None:
            raise self.leaves

    def load_info(self, info: Any) -> None:
        self.loaded = info


def test_an_engine_takes_over_arrays_and_progress(tmp_path: Path) -> None:
    given = arrays()
    make_checkpoint(tmp_path, given, info=INFO)

    def main(backend: fc.Backend) -> None:
        engine = Engine(empty_like(given))
        engine.partially_updated = True
        load(tmp_path, engine, backend)
        assert engine.loaded == INFO
        assert engine.seen
        assert not engine.partially_updated
        assert all(np.array_equal(engine.state[name], given[name]) for name in given)
        engine = Engine(empty_like(given))
        load(tmp_path, engine, backend, optimizer=False)
        assert engine.loaded is None
        assert not engine.state["optimizer/exp_avg/w"].any()
        engine.partially_updated = True
        load(tmp_path, engine, backend, names="w")
        assert engine.partially_updated  # some of it is as it was
        assert engine.loaded is None

    on(2, main)


def test_an_engine_that_is_half_loaded_is_torn(tmp_path: Path) -> None:
    given = arrays()
    folder = make_checkpoint(tmp_path, given, info=INFO)
    file = folder / "rank_0.safetensors"
    damage(file, file.stat().st_size - 100)
    engines = {}

    def main(backend: fc.Backend) -> None:
        engines[backend.rank] = engine = Engine(empty_like(given))
        load(tmp_path, engine, backend)

    text = same_error(2, CorruptCheckpointError, main)
    assert "half overwritten" in text
    assert all(engine.partially_updated and engine.loaded is None for engine in engines.values())


def test_a_load_that_fails_before_it_begins_leaves_the_engine_whole(tmp_path: Path) -> None:
    given = arrays()
    make_checkpoint(tmp_path, given, info={"format": 99})
    engines = {}

    def main(backend: fc.Backend) -> None:
        engines[backend.rank] = engine = Engine(empty_like(given))
        load(tmp_path, engine, backend)

    assert "format" in same_error(2, ArgumentError, main)
    assert not any(engine.partially_updated for engine in engines.values())


def damaged_newest(root: Path, older: dict[str, Array], newer: dict[str, Array]) -> None:
    """Steps 10 and 20; of "a" in 20 a bit is flipped, "b" can be read."""
    make_checkpoint(root, older, step=10, info=INFO)
    cuts = {name: [(at, ("range", 0, newer[name].size))] for at, name in enumerate(sorted(newer))}
    folder = make_checkpoint(root, newer, cuts, step=20, info=INFO)
    data = (folder / "rank_0.safetensors").read_bytes()
    damage(folder / "rank_0.safetensors", data.index(newer["a"].tobytes()))


@pytest.mark.parametrize("kind", ["missing", "uncovered"])
def test_two_steps_are_never_mixed(tmp_path: Path, kind: str) -> None:
    """The newest is damaged; the one before lacks what has been read of the newest."""
    newer = {"a": np.full(4, 2.0), "b": np.full(4, 2.0)}
    older = {"a": np.full(4, 1.0)}
    damaged_newest(tmp_path, older, newer)
    if kind == "uncovered":
        shutil.rmtree(tmp_path / "step_00000010")
        cuts = {"a": [(0, ("range", 0, 4))], "b": [(0, ("range", 0, 3))]}
        make_checkpoint(tmp_path, {**older, "b": np.ones(4)}, cuts, step=10, info=INFO)
    engines = {}

    def main(backend: fc.Backend) -> None:
        # Only rank 1 has an array that step 10 lacks.
        mine = newer if backend.rank else older
        engines[backend.rank] = engine = Engine(empty_like(mine))
        load(tmp_path, engine, backend, strict=False, threads=1)

    text = same_error(2, CheckpointError, main)
    assert "half overwritten" in text
    assert "'b'" in text
    assert all(engine.partially_updated and engine.loaded is None for engine in engines.values())


def test_what_no_step_has_is_no_obstacle_to_an_older_one(tmp_path: Path) -> None:
    damaged_newest(tmp_path, {"a": np.full(4, 1.0)}, {"a": np.full(4, 2.0)})

    def main(backend: fc.Backend) -> None:
        engine = Engine({"a": np.zeros(4), "new": np.full(3, 7.0)})
        loaded = load(tmp_path, engine, backend, strict=False)
        assert (loaded.step, loaded.missing) == (10, ("new",))
        assert engine.state["a"].tolist() == [1.0] * 4
        assert engine.state["new"].tolist() == [7.0] * 3
        assert not engine.partially_updated

    on(2, main)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_an_engine_takes_parameters_that_no_engine_saved(tmp_path: Path, optimizer: str) -> None:
    make_checkpoint(tmp_path, {"u.w": np.full(6, 5.0, np.float32)})

    def main(backend: fc.Backend, **options: bool) -> None:
        made = getattr(fc.optim, optimizer)(lr=1e-3)
        unit = fc.Unit("u", {"w": np.ones(6, np.float32)})
        engine = fc.FSDP([unit], backend, optimizer=made)
        load(tmp_path, engine, backend, **options)
        with engine.full_params() as params:
            assert params["u.w"].tolist() == [5.0] * 6

    text = same_error(2, ArgumentError, main)
    assert "not saved from an engine" in text
    assert "optimizer=False" in text
    assert "load_full" not in text
    assert ("missing" in text) == (optimizer == "AdamW")
    on(2, lambda backend: main(backend, optimizer=False))


def test_an_engine_that_cannot_keep_what_was_loaded(tmp_path: Path) -> None:
    given = arrays()
    make_checkpoint(tmp_path, given, info=INFO)
    engines = {}

    def main(backend: fc.Backend) -> None:
        engines[backend.rank] = engine = Engine(empty_like(given))
        engine.leaves = OSError(28, "no space") if backend.rank == 1 else None
        load(tmp_path, engine, backend)

    assert "no space" in same_error(2, CheckpointError, main)
    assert all(engine.partially_updated for engine in engines.values())


def test_an_engine_inside_of_a_step_is_refused_on_all_ranks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {"u.w": np.zeros(3, np.float32)}, info=INFO)

    def main(backend: fc.Backend) -> None:
        engine = fc.FSDP([fc.Unit("u", {"w": np.ones(3, np.float32)})], backend)
        with engine.evaluation():
            load(tmp_path, engine, backend)

    assert "step" in same_error(2, StateError, main)


@pytest.mark.parametrize(
    ("stored", "saved_ties", "wanted", "ties"),
    [
        (["a"], {"b": "a"}, ["a", "b"], {}),
        (["a"], {"b": "a"}, ["b"], {"a": "b"}),
        (["a"], {"b": "a", "c": "a"}, ["c"], {"b": "c", "a": "c"}),
        (["b"], {}, ["a"], {"b": "a"}),
    ],
)
@pytest.mark.parametrize("entry", ["", "model/"])
def test_parameters_that_were_tied_differently_are_found(
    tmp_path: Path,
    entry: str,
    stored: list[str],
    saved_ties: dict[str, str],
    wanted: list[str],
    ties: dict[str, str],
) -> None:
    def both(names: list[str]) -> list[str]:
        return [prefix + name for prefix in ("", "optimizer/exp_avg/") for name in names]

    inside = [entry + name for name in stored]  # how arrays of an entry are called
    given = {name: array_of(n, (5,)) for n, name in enumerate(both(inside))}
    info: dict[str, Any] = {**INFO, "ties": saved_ties}
    info = {"state": {"model": ["engine", info]}} if entry else info
    make_checkpoint(tmp_path, given, info=info)

    def main(backend: fc.Backend) -> None:
        engine: Any = Engine({name: np.zeros(5, np.float32) for name in both(wanted)}, ties)
        load(tmp_path, {"model": engine} if entry else engine, backend)
        for name, array in engine.state.items():
            (source,) = (n for n in given if n.startswith("opt") == name.startswith("opt"))
            assert np.array_equal(array, given[source]), name

    on(2, main)


# Random generators.


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    saved = [np.random.default_rng(rank) for rank in range(2)]
    ranks = [{"generators": states_of({"data": each})} for each in saved]
    make_checkpoint(tmp_path, {"w": np.zeros(1)}, world_size=2, ranks=ranks)
    expected = [each.integers(1 << 60, size=4).tolist() for each in saved]

    def main(backend: fc.Backend) -> list[int]:
        generator = np.random.default_rng(99)
        load(tmp_path, {"w": np.zeros(1)}, backend, generators={"data": generator})
        drawn: list[int] = generator.integers(1 << 60, size=4).tolist()
        return drawn

    assert on(2, main) == expected
    three = on(3, main)
    assert three[:2] == expected
    assert three[2] not in expected

    def unknown(backend: fc.Backend) -> None:
        other = {"other": np.random.default_rng(1)}
        load(tmp_path, {"w": np.zeros(1)}, backend, generators=other)

    assert "other" in same_error(2, ArgumentError, unknown)


# Without ranks.


def test_read_gives_whole_arrays(tmp_path: Path) -> None:
    given = {**arrays(), "n": np.arange(5), "s": np.array(2.5), "none": np.zeros((0, 3))}
    cuts = {
        name: [(0, ("range", 0, array.size // 2)), (1, ("range", array.size // 2, array.size))]
        for name, array in given.items()
        if array.size > 1
    }
    make_checkpoint(tmp_path, given, {"s": [(0, ("range", 0, 1))], "none": [], **cuts})
    found = read(tmp_path)
    assert list(found) == list(given)
    for name, array in given.items():
        assert found[name].tobytes() == array.tobytes()
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
    half = read(tmp_path, ["w", "n"], dtype=np.float16)
    assert half["w"].tobytes() == given["w"].astype(np.float16).tobytes()
    assert half["n"].dtype == given["n"].dtype
    with pytest.raises(
        ArgumentError, match=r"fits 'nope.\*'.* \(did you mean 'none'\?\); it has 'w'"
    ):
        read(tmp_path, "nope.*")
    with pytest.raises(CheckpointNotFoundError):
        read(tmp_path, step=3)


def test_read_falls_back_to_an_older_step(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = make_checkpoint(tmp_path, {"w": np.full(1000, step)}, step=step)
    file = folder / "rank_0.safetensors"
    damage(file, file.stat().st_size - 20)
    assert (read(tmp_path)["w"] == 1).all()
    with pytest.raises(CorruptCheckpointError):
        read(tmp_path, step=2)


def test_read_refuses_what_is_not_all_there(tmp_path: Path) -> None:
    cuts = {"w": [(0, ("range", 3, 9))], "v": []}
    make_checkpoint(tmp_path, {"w": np.zeros(10), "v": np.zeros(4)}, cuts)
    for name in ("w", "v"):
        with pytest.raises(CheckpointError, match=f"'{name}'"):
            read(tmp_path, name)


# What shares memory.


def _aliased() -> dict[str, tuple[dict[str, Any], str]]:
    one = np.zeros((4, 6), np.float32)
    stuck = np.lib.stride_tricks.as_strided(one, (4, 6), (24, 0))
    windows = np.lib.stride_tricks.as_strided(one, (4, 6), (4, 4))
    flat = one.reshape(-1)
    pieces = (fc.ArrayPiece(0, 2, flat[0:2]), fc.ArrayPiece(2, 4, flat[1:3]))
    wide = np.zeros((8, 12), np.float32)
    return {
        "the same": ({"x": one, "y": one}, "'x' and 'y' share memory"),
        "a part": ({"x": wide[:4, :6], "y": wide[3:7, 5:11]}, "'x' and 'y' share memory"),
        "a transpose": ({"x": wide[:4, :6], "y": wide[:6, :4].T}, "'x' and 'y' share memory"),
        "pieces": (
            {"x": fc.ShardedArray((4, 6), np.dtype("f4"), pieces)},
            "pieces of 'x' share memory",
        ),
        "stride 0": ({"x": stuck}, "elements of 'x' share memory"),
        "windows": ({"x": windows}, "elements of 'x' share memory"),
    }


@pytest.mark.parametrize("which", list(_aliased()))
def test_targets_that_share_memory_are_refused_before_anything_is_read(
    tmp_path: Path, which: str
) -> None:
    folder = make_checkpoint(tmp_path, {n: array_of(3, (4, 6), np.float32) for n in "xy"})
    damage(folder / "metadata.json", 5)  # nobody gets as far as that

    def main(backend: fc.Backend) -> None:
        target, _ = _aliased()[which]
        if backend.rank == 0:
            target = {name: np.zeros((4, 6), np.float32) for name in "xy"}
        load(tmp_path, target, backend, strict=False)

    text = same_error(2, ArgumentError, main)
    assert _aliased()[which][1] in text
    assert "Nothing was changed" in text
    assert "on rank 1" in text


def test_a_part_is_found_behind_one_that_lies_within_the_same_bounds() -> None:
    flat = np.zeros(24)
    with pytest.raises(ArgumentError, match="'x' and 'z' share memory"):
        check_disjoint({"x": flat[::2], "y": flat[1:2], "z": flat[20:21]})
    check_disjoint({"x": flat[::2], "y": flat[1:2], "z": flat[21:22]})


def test_columns_tiles_and_reversed_rows_of_one_matrix_may_be_targets(tmp_path: Path) -> None:
    given = {f"c{n}": array_of(n, (3, 2), np.float32) for n in range(200)}
    make_checkpoint(tmp_path, given)
    matrix = np.zeros((6, 220), np.float32)
    target = {f"c{n}": matrix[::2, 2 * n : 2 * n + 2] for n in range(100)}
    target |= {f"c{n}": matrix[5::-2, 2 * n - 200 : 2 * n - 198] for n in range(100, 190)}
    # In other strides than those: all are compared one by one.
    target |= {f"c{n}": matrix[1:4, 2 * n - 180 : 2 * n - 178] for n in range(190, 200)}
    on(1, lambda backend: load(tmp_path, target, backend))
    for name, array in given.items():
        assert np.array_equal(target[name], array), name


def test_an_axis_that_was_added_may_have_any_stride(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {"w": np.arange(4.0).reshape(1, 2, 2)})
    target = np.zeros((2, 4))
    added = target[np.newaxis, :, ::2]
    assert added.strides[0] == 0

    def main(backend: fc.Backend) -> None:
        load(tmp_path, {"w": added}, backend)

    on(1, main)
    assert np.array_equal(target, [[0, 0, 1, 0], [2, 0, 3, 0]])


def test_tied_parameters_may_share_an_array(tmp_path: Path) -> None:
    value = array_of(0, (5,), np.float32)
    names = ["a", "b", "optimizer/exp_avg/a", "optimizer/exp_avg/b"]
    make_checkpoint(tmp_path, dict.fromkeys(names, value), info=INFO)

    def main(backend: fc.Backend) -> None:
        own, moment = np.zeros((2, 5), np.float32)
        engine = Engine(dict(zip(names, (own, own, moment, moment), strict=True)), {"b": "a"})
        load(tmp_path, engine, backend)
        assert np.array_equal(own, value)
        assert np.array_equal(moment, value)

    on(2, main)


@pytest.mark.parametrize("rank", [{"generators": 5}, {"generators": None}, 5, [1]])
def test_generators_that_are_no_mapping_were_not_saved(tmp_path: Path, rank: Any) -> None:
    make_checkpoint(tmp_path, arrays(), ranks=[rank])
    mine = {"data": np.random.default_rng(1)}
    before = states_of(mine)

    def main(backend: fc.Backend) -> None:
        load(tmp_path, empty_like(arrays()), backend, generators=mine)

    assert "no state was saved of the generators 'data'" in same_error(1, ArgumentError, main)
    on(1, lambda b: load(tmp_path, empty_like(arrays()), b, generators=mine, strict=False))
    assert states_of(mine) == before


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("bad", [{"threads": 0}, {"strict": False}, {"names": 3}], ids=repr)
def test_arguments_are_compared_before_ranks_wait_for_each_other(
    tmp_path: Path, size: int, bad: dict[str, Any]
) -> None:
    """An engine in a window waits for those it shares that with, before it is written."""
    strategy = fc.Strategy("hybrid_shard", shard_group_size=size)

    def main(backend: fc.Backend) -> None:
        engine = fc.FSDP([fc.Unit("u", {"w": np.ones(9)})], backend, strategy=strategy)
        fc.checkpoint.save(tmp_path, engine, backend)
        with engine.gathered():
            assert engine.windowed
        load(tmp_path, engine, backend, **(bad if backend.rank == 1 else {}))

    assert "load: " in same_error(4, ArgumentError, main)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_arrays_of_all_shapes_come_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.full(shape, 2.5, np.float32)

    def body(backend):
        fc.checkpoint.save(tmp_path, {"a": values}, backend, step=1)
        found = np.zeros_like(values)
        fc.checkpoint.load(tmp_path, {"a": found}, backend)
        return found

    for found in fc.launch(body, world_size=2):
        np.testing.assert_array_equal(found, values)
