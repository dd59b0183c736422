"""What a save writes, who writes it, and what it refuses."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.ckpt_saves import found, save, state_of
from support.fsdp_steps import cause_of, launch

import fsdpcore as fc
from fsdpcore.checkpoint.plan.dealing import SPLIT_BYTES
from fsdpcore.checkpoint.plan.held import HeldArray, held_piece
from fsdpcore.checkpoint.plan.save_plan import Rows, plan
from fsdpcore.checkpoint.storage.opening import open_storage
from fsdpcore.checkpoint.storage.steps import StepName, read_step
from fsdpcore.core.geometry.regions import Box

MIB = 1 << 20


def saved(path, states, **options):
    """Save what ``states(rank)`` gives, on as many ranks as it has; return the metadata."""

    def body(backend):
        return fc.checkpoint.save(path, states[backend.rank], backend, step=1, **options)

    launch(body, len(states))
    return read_step(open_storage(path), StepName(1))


def bytes_by_file(metadata):
    return [file.table - file.data_start for file in metadata.files]


def pieces_of(metadata, name):
    return metadata.tensors[name].pieces


def test_what_all_ranks_have_is_written_once_and_shared_out(tmp_path):
    state = {"large": np.arange(3 * MIB, dtype=np.float32), "b": np.ones(7), "c": np.ones(5)}
    metadata = saved(tmp_path, [state] * 4)
    sizes = bytes_by_file(metadata)
    assert sum(sizes) == sum(array.nbytes for array in state.values())
    assert max(sizes) - min(sizes) <= 64
    assert len(pieces_of(metadata, "large")) == 4
    for name, array in state.items():
        np.testing.assert_array_equal(fc.checkpoint.read(tmp_path, name)[name], array)


def test_copies_of_shards_are_written_once_and_shared_out(tmp_path):
    rows = np.arange(4 * MIB, dtype=np.float32).reshape(4, MIB)

    def shard(rank):  # two copies of two shards each, as with hybrid_shard
        flat = rows.reshape(-1)
        start = rank % 2 * 2 * MIB
        piece = fc.ArrayPiece(start, start + 2 * MIB, flat[start:][: 2 * MIB])
        return {"w": fc.ShardedArray(rows.shape, rows.dtype, (piece,), rank // 2, 2)}

    metadata = saved(tmp_path, [shard(rank) for rank in range(4)])
    assert bytes_by_file(metadata) == [4 * MIB] * 4
    np.testing.assert_array_equal(fc.checkpoint.read(tmp_path)["w"], rows)


def test_small_arrays_go_to_whoever_has_least(tmp_path):
    own = {"own": fc.checkpoint.BoxShard((1000, 2), (0, 0), np.ones((1000, 2)))}
    small = {f"s{number}": np.ones(100) for number in range(10)}
    states = [{**own, **small}, {**small}, {**small}]
    metadata = saved(tmp_path, states)
    assert bytes_by_file(metadata) == [16000, 4000, 4000]


def held(name, shape):
    """All of an array of bytes, as a rank has it."""
    return HeldArray(name, "uint8", shape, (held_piece(Box((0,) * len(shape), shape), shape),))


def test_of_as_many_rows_as_holders_each_writes_one():
    planned = plan([[held("w", (2, SPLIT_BYTES))]] * 2)
    assert [[each.rows for each in written] for written in planned.written] == [
        [Rows(0, 0, 1)],
        [Rows(0, 1, 2)],
    ]


def test_what_was_shared_out_counts_when_the_others_are_given_to_who_has_least():
    large, small = held("large", (2, SPLIT_BYTES)), held("small", (5,))
    planned = plan([[large, small], [large, small], [small]])
    names = [[each.name for each in written] for written in planned.written]
    assert names == [["large"], ["large"], ["small"]]


def test_a_rank_with_nothing_to_write_writes_no_file(tmp_path):
    metadata = saved(tmp_path, [{"w": np.ones(3)}, {}, {}])
    assert [file.name for file in metadata.files] == ["rank_0.safetensors"]
    assert metadata.world_size == 3


VALUES = {
    "fp64": np.array([math.nan, -0.0, math.inf, 5e-324, -math.inf]),
    "nan payload": np.array([0x7FC12345, 0xFF800001, 0x7F800001], np.uint32).view(np.float32),
    "fp16": np.array([6e-8, 65504, -0.0], np.float16),
    "bf16": np.array([1.5, -0.0, math.inf], ml_dtypes.bfloat16),
    "fp8": np.array([1.5, 448], ml_dtypes.float8_e4m3fn),
    "c64": np.array([1 - 2j, math.nan * 1j], np.complex64),
    "c128": np.array([[1 - 2j, -0.0j]], np.complex128),
    "bool": np.array([[True], [False]]),
    **{
        f"{kind}{bits}": np.array([np.iinfo(f"{kind}{bits}").min, np.iinfo(f"{kind}{bits}").max])
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    "0-d": np.array(3.5),
    "scalar": np.array(3.5, np.float32),
    "empty": np.empty((3, 0, 2), np.int16),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(60.0).reshape(6, 10)[::-2, 1::3],
    "transposed": np.arange(2 * 700 * 300, dtype=np.float32)
    .reshape(2, 700, 300)
    .transpose(2, 0, 1),
    "big-endian": np.arange(5, dtype=">i4"),
    'name with\nnewline, ✓ and \\ "': np.ones(2),
    "__metadata__": np.ones(3),
    "fsdpcore.checksums": np.ones(4),
    "a#0": np.ones(1),
}


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_kind_of_array_comes_back_as_it_was(tmp_path, ranks):
    read_only = {name: np.array(value, copy=True, order="K") for name, value in VALUES.items()}
    for array in read_only.values():
        array.flags.writeable = False
    saved(tmp_path, [read_only] * ranks)
    arrays = fc.checkpoint.read(tmp_path)
    assert arrays.keys() == VALUES.keys()
    for name, value in VALUES.items():
        native = np.asarray(value, np.asarray(value).dtype.newbyteorder("="))
        assert arrays[name].dtype == native.dtype, name
        assert arrays[name].shape == native.shape, name
        assert arrays[name].tobytes() == native.tobytes(), name


def test_the_safetensors_library_reads_the_files(tmp_path):
    save(tmp_path, 4, 9)
    joined = {}
    for file in sorted((tmp_path / "step_00000004").glob("*.safetensors")):
        for name, array in load_file(file).items():
            joined.setdefault(name, []).append(array)
    assert {array.dtype for array in joined["w"]} == {np.dtype(np.float32)}
    assert sum(array.size for array in joined["w"]) == 35
    assert (np.concatenate(joined["w"]) == 9).all()
    assert joined["scalar"][0].shape == ()
    assert [array.shape for array in joined["rows"]] == [(2, 2), (3, 2)]


def test_what_else_is_saved_comes_back(tmp_path):
    extra = {"position": [3, 2**70, None, True, 0.1], "note": "ü\n"}

    def body(backend):
        state = state_of(backend.rank, backend.world_size, 7)
        generators = {"data": np.random.default_rng(backend.rank)}
        fc.checkpoint.save(
            tmp_path,
            state,
            backend,
            step=5,
            extra=extra,
            generators=generators,
            metrics={"loss": 2},
        )
        expected = generators["data"].random(4)
        generators = {"data": np.random.default_rng(99)}
        target = state_of(backend.rank, backend.world_size, 0)
        loaded = fc.checkpoint.load(tmp_path, target, backend, generators=generators)
        np.testing.assert_array_equal(generators["data"].random(4), expected)
        assert (loaded.step, loaded.extra, loaded.metrics) == (5, extra, {"loss": 2.0})

    launch(body, 3)


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    first = save(tmp_path, 5, 1)[0]
    second = save(tmp_path, 5, 2)[0]
    assert (first.name, second.name) == ("step_00000005", "step_00000005.1")
    assert [each.name for each in tmp_path.iterdir()] == [second.name]
    assert found(tmp_path) == 2
    assert first.nbytes == second.nbytes == 35 * 12 + 6 + 8 + 10
    assert save(tmp_path, 5, 3)[0].name == "step_00000005.2"


def test_retention(tmp_path):
    rule = fc.checkpoint.Retention(last=2, every=10)
    for step in range(8, 15):
        save(tmp_path, step, step, retention=rule)
    assert fc.checkpoint.steps(tmp_path) == [10, 13, 14]


def one(**arguments):
    """Save on one rank with these arguments and return what that raises."""

    def body(backend):
        given = {"path": "unused", "state": {"w": np.ones(2)}, "step": 1, **arguments}
        fc.checkpoint.save(given.pop("path"), given.pop("state"), backend, **given)

    return cause_of(body)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": None}, "needs step="),
        ({"step": -1}, "at least 0"),
        ({"step": 2**63}, "2**62"),
        ({"step": True}, "step must be an integer"),
        ({"state": [1]}, "got list"),
        ({"state": fc.FSDP}, "got"),
        ({"state": {"w": [object()]}}, "'w/0' is a builtins.object"),
        ({"state": {"": np.ones(1)}}, "non-empty string"),
        ({"state": {3: np.ones(1)}}, "got 3"),
        ({"state": {"w": np.array(["text"])}}, "'w'"),
        ({"state": {"w": np.array([None])}}, "'w'"),
        ({"state": {"\ud800": np.ones(1)}}, "surrogate"),
        ({"extra": {1: 2}}, "extra"),
        ({"extra": math.nan}, "extra"),
        ({"extra": (1, 2)}, "extra"),
        ({"metrics": {"loss": "low"}}, "metric 'loss'"),
        ({"metrics": {"loss": np.ones(2)}}, "metric 'loss'"),
        ({"metrics": [1]}, "metrics must map"),
        ({"generators": {"g": np.random.RandomState(1)}}, "RandomState"),
        ({"generators": {"\ud800": np.random.default_rng(1)}}, "surrogate"),
        ({"step": 2**62}, "step"),
        ({"state": {"w": np.ma.array([1.0], mask=[True])}}, "MaskedArray"),
        ({"timeout": -1}, "timeout"),
        ({"path": ""}, "path"),
        ({"retention": 3}, "Retention"),
    ],
)
def test_arguments_that_make_no_sense(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = one(**arguments)
    assert isinstance(error, fc.ArgumentError)
    assert words in str(error)
    assert not list(tmp_path.iterdir())


def refused(path, states):
    """Return the one error that all ranks raise."""

    def body(backend):
        with pytest.raises(fc.FsdpcoreError) as caught:
            fc.checkpoint.save(path, states[backend.rank], backend, step=1)
        backend.barrier()
        return type(caught.value), str(caught.value)

    errors = launch(body, len(states))
    assert len(set(errors)) == 1
    assert errors[0][0] is fc.ArgumentError
    return errors[0][1]


def test_ranks_that_disagree_about_an_array(tmp_path):
    box = fc.checkpoint.BoxShard
    assert "shape" in refused(tmp_path, [{"w": np.ones(2)}, {"w": np.ones(3)}])
    assert "float32" in refused(tmp_path, [{"w": np.ones(2)}, {"w": np.ones(2, np.float32)}])
    overlap = [{"w": box((4,), (0,), np.ones(3))}, {"w": box((4,), (2,), np.ones(2))}]
    assert "share elements" in refused(tmp_path, overlap)
    hole = [{"w": box((4,), (0,), np.ones(1))}, {"w": box((4,), (2,), np.ones(2))}]
    assert "1 of its 4" in refused(tmp_path, hole)
    assert "on rank 1" in refused(tmp_path, [{"w": np.ones(2)}, {"w": object()}])
    assert not list(tmp_path.iterdir())


def test_what_one_rank_gives_wrong_all_ranks_are_told(tmp_path):
    for wrong in ({"path": None}, {"timeout": 0}, {"retention": 3}):

        def body(backend, wrong=wrong):
            given = {"path": tmp_path, **(wrong if backend.rank == 1 else {})}
            with pytest.raises(fc.ArgumentError, match=r"\(on rank 1\)"):
                fc.checkpoint.save(given.pop("path"), {"w": np.ones(2)}, backend, step=1, **given)

        launch(body, 3)
    assert not list(tmp_path.iterdir())


def test_equal_extra_in_another_order(tmp_path):
    def body(backend):
        extra = {"a": 1, "b": 2} if backend.rank else {"b": 2, "a": 1}
        fc.checkpoint.save(tmp_path, {"w": np.ones(2)}, backend, step=1, extra=extra)

    launch(body, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fc.checkpoint.BoxShard((3,), None, np.ones(3)),
        lambda: fc.checkpoint.BoxShard((3,), (-1,), np.ones(1)),
        lambda: fc.checkpoint.BoxShard((3,), (0,), [1.0]),
        lambda: fc.checkpoint.BoxShard((3,), (2,), np.ones(2)),
        lambda: fc.ShardedArray((3,), np.float64, 5),
        lambda: fc.ShardedArray((3,), np.float64, ((0, 3),)),
        lambda: fc.ShardedArray((3,), np.float64, ((0, 3, [1.0, 2.0, 3.0]),)),
    ],
)
def test_shards_that_make_no_sense(make):
    with pytest.raises(fc.ArgumentError):
        make()


def test_a_dtype_that_rank_0_does_not_know(tmp_path, monkeypatch):
    from fsdpcore.checkpoint.plan import save_plan

    def unknown(name, error):
        raise error(f"the dtype {name!r} is not known")

    monkeypatch.setattr(save_plan, "named_dtype", unknown)
    assert "'float64' is not known" in refused(tmp_path, [{"w": np.ones(2)}] * 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda rank: {"step": 1, "extra": rank}, "extra differs on rank 0 and rank 1"),
        (lambda rank: {"step": rank}, "step is 0 and 1 on rank 0 and rank 1"),
        (lambda rank: {"step": 1, "metrics": {"l": rank}}, "metric 'l' is 0.0 and 1.0 on rank 0"),
    ],
)
def test_ranks_that_give_different_arguments(tmp_path, arguments, words):
    def body(backend):
        with pytest.raises(fc.MismatchError, match="Nothing was written") as caught:
            fc.checkpoint.save(tmp_path, {"w": np.ones(2)}, backend, **arguments(backend.rank))
        assert words in str(caught.value)

    launch(body, 2)
    assert not list(tmp_path.iterdir())


def test_metrics_are_what_collectives_return(tmp_path):
    def body(backend):
        loss = fc.all_reduce(np.float32(backend.rank), backend, op="mean")
        metrics = {"loss": loss, "steps": 3, "gone": math.nan, "far": np.float64(math.inf)}
        state = {"w": np.ones(2)}
        fc.checkpoint.save(tmp_path, state, backend, step=1, metrics=metrics)
        return fc.checkpoint.load(tmp_path, state, backend).metrics

    assert launch(body, 2) == [{"loss": 0.5, "steps": 3.0}] * 2


def test_a_retention_by_a_metric_that_the_save_lacks(tmp_path):
    def body(backend):
        def save(step, metric, **given):
            rule = fc.checkpoint.Retention(best=1, metric=metric)
            state = {"w": np.ones(2)}
            fc.checkpoint.save(tmp_path, state, backend, step=step, retention=rule, **given)

        save(1, "loss", metrics={"loss": 0.1})
        save(2, "loss", metrics={"loss": math.nan})
        mine = {"loss": 0.5} if backend.rank else {"los": 0.5, "other": 2}
        for metric, given, words in (
            ("los", {"loss": 0.5}, r"'los', .* are 'loss' \(did you mean 'loss'"),
            ("loss", None, "are none"),
            ("loss", mine, "are 'los', 'other' .*on rank 0"),
        ):
            with pytest.raises(fc.ArgumentError, match=words) as caught:
                save(3, metric, metrics=given)
            assert "Nothing was written" in str(caught.value)
        with pytest.raises(fc.ArgumentError, match="'loss' and mode='max'"):
            fc.checkpoint.Retention(best=1, metric="-loss")

    launch(body, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000001", "step_00000002"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_generators_on_other_numbers_of_ranks(tmp_path, ranks):
    def made(rank):
        return {"all": np.random.default_rng(0), "own": np.random.default_rng(10 + rank)}

    def saving(backend):
        generators = made(backend.rank)
        fc.checkpoint.save(tmp_path, {"w": np.ones(2)}, backend, step=1, generators=generators)

    def loading(backend):
        generators = made(50)
        fc.checkpoint.load(tmp_path, {"w": np.ones(2)}, backend, generators=generators)
        return [generators[name].random() for name in ("all", "own")]

    launch(saving, 2)
    drawn = launch(loading, ranks)
    expected = [made(rank)["own"].random() for rank in range(2)]
    assert {shared for shared, _ in drawn} == {np.random.default_rng(0).random()}
    own = [number for _, number in drawn]
    assert own[:2] == expected[:ranks]
    assert len(set(own)) == ranks


def test_a_folder_that_not_all_ranks_see(tmp_path):
    def body(backend):
        path = tmp_path / str(backend.rank)
        with pytest.raises(fc.CheckpointError, match="do all ranks see it"):
            fc.checkpoint.save(path, state_of(backend.rank, 2, 1), backend, step=1)

    launch(body, 2)
    assert not list((tmp_path / "0").iterdir())


def test_the_metadata_is_for_people_too(tmp_path):
    save(tmp_path, 4, 9)
    told = json.loads((tmp_path / "step_00000004" / "metadata.json").read_text())
    assert (told["step"], told["world_size"]) == (4, 2)
    assert told["tensors"]["w"][:2] == ["float32", [5, 7]]


def test_memory_and_object_stores(tmp_path):
    url = f"memory://{tmp_path.name}/run"
    save(url, 3, 1)
    save(url, 3, 2)
    save(url, 4, 3, retention=fc.checkpoint.Retention(last=2))
    assert fc.checkpoint.latest(url).step == 4
    assert found(url) == 3
    assert found(url, 3) == 2


def test_going_back_is_noted(tmp_path):
    rule = fc.checkpoint.Retention(last=2)
    for step in (10, 20):
        assert save(tmp_path, step, step, retention=rule)[0].notes == ()
    notes = save(tmp_path, 15, 15, retention=rule)[0].notes
    assert len(notes) == 1
    assert "later steps, up to 20" in notes[0]


def test_what_was_just_saved_stays_beside_later_steps(tmp_path):
    """In an object store nobody holds it while others are removed."""
    for where in (tmp_path, f"memory://{tmp_path.name}/back"):
        save(where, 20, 2)
        (saved, _) = save(where, 10, 1, retention=fc.checkpoint.Retention(last=1))
        assert len(saved.notes) == 1
        assert fc.checkpoint.steps(where) == [10, 20]
        assert found(where, 10) == 1


def test_thousands_of_arrays(tmp_path):
    count = 600

    def state(rank, sign):
        arrays = {f"layer{number}.w": np.full(3, sign * number) for number in range(count)}
        for number in range(count):
            flat = np.full(2, sign * number, np.int32)
            piece = fc.ArrayPiece(2 * rank, 2 * rank + 2, flat)
            arrays[f"layer{number}.s"] = fc.ShardedArray((2, 2), flat.dtype, (piece,))
        return arrays

    def body(backend):
        fc.checkpoint.save(tmp_path, state(backend.rank, 1), backend, step=1)
        target = state(backend.rank, -1)
        loaded = fc.checkpoint.load(tmp_path, target, backend)
        for number in range(count):
            assert (target[f"layer{number}.w"] == number).all()
            assert (target[f"layer{number}.s"].pieces[0].array == number).all()
        return loaded.bytes_read, loaded.bytes_needed

    results = launch(body, 2)
    read, needed = (sum(each) for each in zip(*results, strict=True))
    assert read <= 1.02 * needed
