"""Parameters to and from safetensors files; the library of that name is the oracle."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import TensorSpec, safe_open, serialize_file
from safetensors.numpy import save_file
from support.ckpt_disk import Disk, DiskFiles, crashes
from support.ckpt_make import make_checkpoint
from support.ckpt_samples import all_same, bits, by_library, samples, saved
from support.fsdp_states import Layout, engine_of, train
from support.fsdp_states import run as run_engines
from support.jobs import finished, python

import fsdpcore as fc
from fsdpcore.checkpoint.interchange.export import export_safetensors
from fsdpcore.checkpoint.interchange.importing import import_safetensors
from fsdpcore.checkpoint.interchange.rewrite import rewrite
from fsdpcore.checkpoint.interchange.safetensors_files import PartialFile
from fsdpcore.checkpoint.interchange.verify import verify
from fsdpcore.checkpoint.load.load import load
from fsdpcore.checkpoint.load.read import read
from fsdpcore.checkpoint.save.save import save
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from fsdpcore.core.geometry.boxes import BoxShard

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run")
    state = {**samples(), "optimizer/exp_avg/large": np.ones((70_000, 3), np.float32)}
    saved(path, state)
    return path


def files_in(folder):
    return sorted(os.listdir(folder))


def loaded(folder):
    """All arrays of the safetensors files in a folder, by the library."""
    found = {}
    for name in files_in(folder):
        if name.endswith(".safetensors"):
            found |= by_library(folder / name)
    return found


def test_one_file_has_every_bit(run, tmp_path):
    calls = []
    done = export_safetensors(
        run, tmp_path / "x.safetensors", progress=lambda *call: calls.append(call)
    )
    assert all_same(by_library(tmp_path / "x.safetensors"), samples())
    nbytes = sum(array.nbytes for array in samples().values())
    assert (done.step, done.tensors, done.nbytes) == (30, len(samples()), nbytes)
    assert done.files == (str(tmp_path / "x.safetensors"),)
    assert calls[0] == (0, nbytes)
    assert calls[-1] == (nbytes, nbytes)
    assert calls == sorted(calls)
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert files_in(tmp_path) == ["x.safetensors"]


def test_the_folder_of_a_step_and_the_optimizer(run, tmp_path):
    target = tmp_path / "deep" / "x.safetensors"
    export_safetensors(run / "step_00000030", target, optimizer=True, metadata={"a": "ü"})
    assert by_library(target)["optimizer/exp_avg/large"].shape == (70_000, 3)
    with safe_open(target, "np") as file:
        assert file.metadata() == {"a": "ü"}


@pytest.mark.parametrize("limit", [1, 1000, 400_000])
def test_sharded_layout(run, tmp_path, limit):
    done = export_safetensors(run, tmp_path, max_shard_size=limit)
    assert files_in(tmp_path) == sorted(Path(each).name for each in done.files)
    assert all_same(loaded(tmp_path), samples())
    index = json.loads((tmp_path / INDEX).read_text("utf-8"))
    assert index["metadata"] == {"total_size": done.nbytes}
    count = len(done.files) - 1
    assert sorted(set(index["weight_map"].values())) == [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]
    for name in set(index["weight_map"].values()):
        inside = by_library(tmp_path / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(inside)
        assert len(inside) == 1 or sum(array.nbytes for array in inside.values()) <= limit
    again = import_safetensors(tmp_path, tmp_path / "run", 3, world_size=2)
    assert again.name == "step_00000003"
    assert all_same(read(tmp_path / "run"), samples())


def test_what_fits_into_one_shard_has_no_index(run, tmp_path):
    export_safetensors(run, tmp_path, max_shard_size=10**9)
    assert files_in(tmp_path) == ["model.safetensors"]
    assert all_same(by_library(tmp_path / "model.safetensors"), samples())


def test_names_and_new_names(run, tmp_path):
    target = tmp_path / "x.safetensors"
    options = {"strip_prefix": "layer.", "add_prefix": "model.", "rename": {"scalar": "s"}}
    export_safetensors(run, target, names=["layer.*int8", "scalar"], **options)
    assert set(by_library(target)) == {"model.int8", "model.uint8", "s"}
    export_safetensors(run, target, names="scalar", rename=str.upper, overwrite=True)
    assert set(by_library(target)) == {"SCALAR"}
    import_safetensors(target, tmp_path / "run", rename={"SCALAR": "scalar"})
    assert list(read(tmp_path / "run")) == ["scalar"]


def test_dtype(run, tmp_path):
    target = tmp_path / "x.safetensors"
    export_safetensors(run, target, dtype=ml_dtypes.bfloat16)
    found, given = by_library(target), samples()
    for name in ("layer.float32", "layer.float64", "layer.float8_e5m2"):
        with np.errstate(all="ignore"):
            wanted = given[name].astype(ml_dtypes.bfloat16)
        assert found[name].dtype == ml_dtypes.bfloat16
        assert found[name].tobytes() == wanted.tobytes()
    assert found["layer.int32"].tobytes() == given["layer.int32"].tobytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": "nothing*"}, "no array whose name fits 'nothing\\*'"),
        ({"names": "optimizer/*"}, "no array whose name fits"),
        ({"rename": {"absent": "x"}}, "no such array"),
        ({"rename": {"scalar": "none"}}, "would both be called"),
        ({"rename": {"scalar": "__metadata__"}}, "__metadata__"),
        ({"rename": {"scalar": ""}}, "nothing would be left"),
        ({"strip_prefix": "absent"}, "begins with 'absent'"),
        ({"max_shard_size": 0}, "max_shard_size must be at least 1"),
        ({"step": -1}, "step must be at least 0"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(run, tmp_path, options, words):
    with pytest.raises(ArgumentError, match=words):
        export_safetensors(run, tmp_path / "x.safetensors", **options)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_a_dtype_that_nothing_is_rounded_to_is_refused(run, tmp_path, dtype):
    file = tmp_path / "x.safetensors"
    with pytest.raises(ArgumentError, match=f"such as float32, not {dtype}"):
        export_safetensors(run, file, dtype=dtype)
    assert not file.exists()
    export_safetensors(run, file)
    with pytest.raises(ArgumentError, match=f"such as float32, not {dtype}"):
        import_safetensors(file, tmp_path / "other", dtype=dtype)
    assert not (tmp_path / "other").exists()


def test_dtypes_that_safetensors_lacks_are_refused(tmp_path):
    make_checkpoint(tmp_path / "run", {"a": np.ones(3, np.complex128), "b": np.ones(3)})
    with pytest.raises(ArgumentError, match="complex128, which safetensors does not have"):
        export_safetensors(tmp_path / "run", tmp_path / "x.safetensors")
    export_safetensors(tmp_path / "run", tmp_path / "x.safetensors", names="b")
    assert list(by_library(tmp_path / "x.safetensors")) == ["b"]


def test_paths_that_are_no_checkpoint(run, tmp_path):
    target = tmp_path / "x.safetensors"
    for path in (tmp_path / "absent", run / "step_00000031"):
        with pytest.raises(CheckpointNotFoundError):
            export_safetensors(path, target)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 4"):
        export_safetensors(run, target, step=4)
    with pytest.raises(ArgumentError, match="is the folder of step 30, not of step 4"):
        export_safetensors(run / "step_00000030", target, step=4)


def test_nothing_is_replaced_without_a_request(run, tmp_path):
    target = tmp_path / "x.safetensors"
    target.write_bytes(b"mine")
    with pytest.raises(ArgumentError, match="is there already"):
        export_safetensors(run, target)
    with pytest.raises(ArgumentError, match="is a folder"):
        export_safetensors(run, tmp_path)
    with pytest.raises(ArgumentError, match="is no folder"):
        export_safetensors(run, target, max_shard_size=5)
    assert (files_in(tmp_path), target.read_bytes()) == (["x.safetensors"], b"mine")
    export_safetensors(run, target, overwrite=True)
    assert all_same(by_library(target), samples())


def test_a_folder_is_replaced_as_a_whole(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    export_safetensors(run, tmp_path, max_shard_size=1000)
    with pytest.raises(ArgumentError, match="is there already"):
        export_safetensors(run, tmp_path, max_shard_size=10**9)
    export_safetensors(run, tmp_path, max_shard_size=10**9, overwrite=True)
    assert files_in(tmp_path) == ["config.json", "model.safetensors"]
    export_safetensors(run, tmp_path, max_shard_size=300_000, overwrite=True)
    assert "model.safetensors" not in files_in(tmp_path)
    assert all_same(loaded(tmp_path), samples())


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_failure_leaves_what_was_there(run, tmp_path, monkeypatch, limit):
    target = tmp_path if limit else tmp_path / "x.safetensors"
    export_safetensors(run, target, max_shard_size=limit, names="scalar")
    before = {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)}
    real, count = os.write, 0

    def write(fd, data):
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(CheckpointError, match="full"):
        export_safetensors(run, target, max_shard_size=limit, overwrite=True)
    assert {name: (tmp_path / name).read_bytes() for name in files_in(tmp_path)} == before


def test_what_a_killed_export_left_is_written_anew(run, tmp_path):
    (tmp_path / ".x.safetensors.partial").write_bytes(b"x" * 10**7)
    export_safetensors(run, tmp_path / "x.safetensors")
    assert files_in(tmp_path) == ["x.safetensors"]
    assert all_same(by_library(tmp_path / "x.safetensors"), samples())


KILLED = """
import os, sys
from fsdpcore.checkpoint.interchange.export import export_safetensors

left = int(sys.argv[3])

def dying(real):
    def call(*arguments):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return real(*arguments)
    return call

os.write, os.replace = dying(os.write), dying(os.replace)
export_safetensors(sys.argv[1], sys.argv[2], max_shard_size=300_000)
"""


@pytest.mark.parametrize("calls", [0, 3, 4, 5, 6, 7])
def test_a_kill_leaves_no_half_file(run, tmp_path, calls):
    """Of two shards and their index, each is there as a whole or not at all."""
    target = tmp_path / "model"
    done = finished(python("-c", KILLED, run, target, calls))
    assert done.code == 9, done.err
    assert not (target / INDEX).exists()
    there = [each for each in files_in(target) if not each.startswith(".")]
    given = samples()
    for name in there:
        inside = by_library(target / name)
        assert all_same(inside, {key: given[key] for key in inside})
    export_safetensors(run, target, max_shard_size=300_000, overwrite=True)
    assert all_same(loaded(target), given)
    assert not [each for each in files_in(target) if each.startswith(".")]


def test_two_at_a_time_are_refused(run, tmp_path):
    target = tmp_path / "x.safetensors"
    with PartialFile(target), pytest.raises(ArgumentError, match="another process is writing"):
        export_safetensors(run, target)
    assert files_in(tmp_path) == []
    export_safetensors(run, target)
    assert files_in(tmp_path) == ["x.safetensors"]


def test_no_more_files_are_open_the_more_shards_there_are(tmp_path):
    given = {f"a{number:02}": np.full(7, number) for number in range(60)}
    make_checkpoint(tmp_path / "run", given)
    counts = []

    def count(done, total):
        counts.append(len(os.listdir("/proc/self/fd")))

    done = export_safetensors(
        tmp_path / "run", tmp_path / "to", max_shard_size=1, progress=count, threads=1
    )
    assert len(done.files) == 61
    assert max(counts) - min(counts) < 20
    assert all_same(loaded(tmp_path / "to"), given)


def test_two_exports_to_a_folder_are_refused(run, tmp_path):
    """Whether or not they would write the same files at the same time."""

    def again(done, total):
        if not done:
            return  # nothing is open
        with pytest.raises(ArgumentError, match="another process is writing"):
            export_safetensors(run, tmp_path, max_shard_size=500_000, overwrite=True)

    export_safetensors(run, tmp_path, max_shard_size=1000, progress=again)
    assert all_same(loaded(tmp_path), samples())
    assert not [each for each in files_in(tmp_path) if each.startswith(".")]


def test_a_full_file_that_another_process_writes_is_not_placed(run, tmp_path):
    """Its lock ended when it was closed."""
    target = tmp_path / "model"
    others = []

    def other(done, total):
        full = target / ".model-00001-of-00002.safetensors.partial"
        if done == total and full.exists():
            full.write_bytes(b"of somebody else")
            others.append(full)

    with pytest.raises(ArgumentError, match="another process"):
        export_safetensors(run, target, max_shard_size=300_000, progress=other)
    assert files_in(target) == [others[0].name]
    assert others[0].read_bytes() == b"of somebody else"


def test_a_file_with_more_axes_than_numpy_has(tmp_path):
    header = json.dumps({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}})
    data = len(header).to_bytes(8, "little") + header.encode() + b"x"
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ArgumentError, match="has 65 axes"):
        import_safetensors(tmp_path / "x.safetensors", tmp_path / "run")
    assert files_in(tmp_path) == ["x.safetensors"]


def test_damage_is_noticed(tmp_path):
    folder = saved(tmp_path / "run", samples())
    data = bytearray((folder / "rank_1.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "rank_1.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="rank_1"):
        export_safetensors(tmp_path / "run", tmp_path / "x.safetensors")
    assert files_in(tmp_path) == ["run"]


def test_elements_that_were_not_saved(tmp_path):
    cuts = {"a": [(0, ("range", 2, 5))]}
    make_checkpoint(tmp_path / "run", {"a": np.ones(7, np.float32)}, cuts)
    for call in (export_safetensors, lambda *paths: rewrite(*paths, 2)):
        with pytest.raises(CheckpointError, match="4 of 7 elements were not saved"):
            call(tmp_path / "run", tmp_path / "x")
    assert files_in(tmp_path) == ["run"]


def test_memory_is_bounded(tmp_path):
    """80 MB by way of far less: in column shards, cast, and to two shards."""
    given = bits(7, (5000, 4000), np.dtype(np.float32))

    def main(backend):
        low, high = (2000 * backend.rank, 2000 * backend.rank + 2000)
        part = BoxShard(given.shape, (0, low), given[:, low:high])
        save(tmp_path / "run", {"w": part}, backend, step=1)

    fc.launch(main, world_size=2, transport="sim")
    tracemalloc.start()
    try:
        export_safetensors(tmp_path / "run", tmp_path / "x.safetensors", threads=2)
        export_safetensors(
            tmp_path / "run", tmp_path / "y.safetensors", threads=2, dtype=np.float64
        )
        import_safetensors(tmp_path / "x.safetensors", tmp_path / "again")
        rewrite(tmp_path / "run", tmp_path / "three", 3, threads=2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 48 << 20
    for array in (by_library(tmp_path / "x.safetensors")["w"], read(tmp_path / "three")["w"]):
        assert array.tobytes() == given.tobytes()
    assert verify(tmp_path / "again").valid


# Import.


def written(path):
    """A file that the library writes, with all that it can write."""
    given = {name: array.astype(array.dtype.newbyteorder("=")) for name, array in samples().items()}
    given = {
        name: np.ascontiguousarray(array).reshape(array.shape) for name, array in given.items()
    }
    plain = {name: array for name, array in given.items() if "float8" not in name}
    save_file({n: a for n, a in plain.items() if "bfloat" not in n}, path / "plain.safetensors")
    codes = {"layer.bfloat16": "bfloat16", "layer.float8_e4m3fn": "float8_e4m3fn"}
    specs = {
        name: TensorSpec(
            dtype=code,
            shape=given[name].shape,
            data_ptr=given[name].ctypes.data,
            data_len=given[name].nbytes,
        )
        for name, code in codes.items()
    }
    serialize_file(specs, path / "short.safetensors")
    return {name: given[name] for name in (*plain, *codes)}


@pytest.mark.parametrize(
    "options", [{}, {"world_size": 3}, {"max_file_size": 100_000}, {"max_file_size": 1 << 30}]
)
def test_a_folder_of_files_of_the_library(tmp_path, options):
    (tmp_path / "model").mkdir()
    given = written(tmp_path / "model")
    done = import_safetensors(tmp_path / "model", tmp_path / "run", 4, extra=[1], **options)
    assert (done.step, done.name) == (4, "step_00000004")
    assert all_same(read(tmp_path / "run"), given)
    assert verify(tmp_path / "run").valid
    sizes = [each.stat().st_size for each in (tmp_path / "run" / done.name).glob("rank_*")]
    assert len(sizes) == {100_000: 5}.get(
        options.get("max_file_size"), options.get("world_size", 1)
    )


def test_an_import_is_loaded_by_ranks(tmp_path):
    (tmp_path / "model").mkdir()
    given = written(tmp_path / "model")
    import_safetensors(tmp_path / "model", tmp_path / "run", 4, max_file_size=90_000)

    def main(backend):
        target = {name: np.empty_like(array) for name, array in given.items()}
        load(tmp_path / "run", target, backend)
        return all_same(target, given)

    assert fc.launch(main, world_size=2, transport="sim") == [True, True]


def test_import_with_names_and_dtype(tmp_path):
    save_file(
        {"model.a": np.full(3, 1e9, np.float32), "model.b": np.arange(3), "c": np.ones(2)},
        tmp_path / "x.safetensors",
    )
    import_safetensors(
        tmp_path / "x.safetensors",
        tmp_path / "run",
        names="model.*",
        strip_prefix="model.",
        add_prefix="net.",
        dtype=np.float16,
    )
    found = read(tmp_path / "run")
    assert list(found) == ["net.b", "net.a"]
    assert found["net.a"].dtype == np.float16
    assert np.isinf(found["net.a"]).all()
    assert found["net.b"].tolist() == [0, 1, 2]


def test_a_step_is_replaced_on_request_only(tmp_path):
    save_file({"a": np.ones(2)}, tmp_path / "x.safetensors")
    import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", 1)
    with pytest.raises(ArgumentError, match="has a step 1 already"):
        import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", 1)
    done = import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", 1, overwrite=True)
    assert files_in(tmp_path / "run") == [done.name] == ["step_00000001.1"]


def test_sources_that_are_none(tmp_path):
    run = tmp_path / "run"
    save_file({"a": np.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "fifo.safetensors").parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "fifo")
    for path, words in (
        (tmp_path / "absent", "there is no file"),
        (tmp_path / "empty", "has no file that ends with"),
        (tmp_path / "fifo", "no regular file"),
    ):
        with pytest.raises(ArgumentError, match=words):
            import_safetensors(path, run)
    with pytest.raises(ArgumentError, match="not both"):
        import_safetensors(tmp_path / "x.safetensors", run, world_size=1, max_file_size=5)
    data = (tmp_path / "x.safetensors").read_bytes()
    for bad in (b"", data[:-1], data + b"x", b"\xff" * 100):
        (tmp_path / "y.safetensors").write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, match=r"y\.safetensors"):
            import_safetensors(tmp_path / "y.safetensors", run)
    assert not run.exists()


def test_an_index_that_does_not_fit(tmp_path):
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    save_file({"a": np.ones(2), "b": np.ones(2)}, model / "x.safetensors")
    save_file({"c": np.ones(2)}, model / "z.safetensors")
    for told, words in (
        ({"a": "x.safetensors"}, "not in the index"),
        ({"a": "x.safetensors", "b": "z.safetensors", "c": "z.safetensors"}, "but it is not"),
        ({"a": "../x.safetensors"}, "no plain name"),
        ({"a": 5}, "no plain name"),
        ([], "no weight_map"),
    ):
        (model / INDEX).write_text(json.dumps({"weight_map": told}))
        for source in (model, model / INDEX):
            with pytest.raises(CorruptCheckpointError, match=words):
                import_safetensors(source, run)
    (model / INDEX).unlink()
    save_file({"c": np.ones(2)}, model / "y.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"is in y\.safetensors and in z\."):
        import_safetensors(model, run)
    assert not run.exists()


def test_import_that_fails_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    save_file({"a": np.ones(2)}, tmp_path / "x.safetensors")
    import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", 1)

    def preadv(*arguments):
        raise OSError(errno.EIO, "broken")

    before = files_in(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("fsdpcore.checkpoint.interchange.foreign_files.read_into", preadv)
        with pytest.raises((CheckpointError, OSError)):
            import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", 2)
    assert files_in(tmp_path / "run") == before


# Rewriting.


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_rewrite_for_other_ranks(tmp_path, ranks):
    state = {**samples(), "optimizer/m/large": np.ones((70_000, 3), np.float32)}
    extra, metrics = {"position": [1, 2]}, {"loss": 0.5}
    saved(tmp_path / "run", state, extra=extra, metrics=metrics)
    done = rewrite(tmp_path / "run", tmp_path / "other", ranks)
    folder = tmp_path / "other" / done.name
    assert len(list(folder.glob("rank_*"))) == ranks
    assert verify(folder).valid
    found = read(tmp_path / "other")
    assert list(found) == list(state)
    assert all_same(
        found,
        {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in state.items()},
    )
    told = json.loads((folder / "metadata.json").read_text("utf-8"))
    assert (told["world_size"], told["extra"], told["metrics"]) == (ranks, extra, metrics)
    # Every rank has an equal share of what is large.
    sizes = [each.stat().st_size for each in folder.glob("rank_*")]
    assert max(sizes) - min(sizes) < 4000


def test_rewrite_keeps_generators_as_a_load_gives_them(tmp_path):
    def main(backend):
        numbers = {"data": np.random.default_rng(backend.rank)}
        save(tmp_path / "run", {"a": np.ones(3)}, backend, step=2, generators=numbers)

    fc.launch(main, world_size=2, transport="sim")
    rewrite(tmp_path / "run", tmp_path / "other", 5)

    def draw(backend, path):
        numbers = {"data": np.random.default_rng(99)}
        load(path, {"a": np.ones(3)}, backend, generators=numbers)
        return numbers["data"].integers(0, 1 << 60, 4).tolist()

    ways = [
        fc.launch(draw, world_size=5, transport="sim", args=(tmp_path / name,))
        for name in ("run", "other")
    ]
    assert ways[0] == ways[1]
    assert len({tuple(each) for each in ways[0]}) == 5


def test_a_rewrite_that_loses_power_is_there_or_not(tmp_path):
    """At every call that changes the disk; the step was there before, with other values."""
    old, new = ({"a": np.full(50, value), "b": np.full(7, value)} for value in (1.0, 2.0))
    disk = Disk()
    for name, state in (("run", new), ("other", old)):
        make_checkpoint(tmp_path / name, state)
        rewrite(tmp_path / name, LocalStorage(f"/{name}", DiskFiles(disk)), 2)
    seen = set()

    def again(files):
        source, target = (LocalStorage(name, files) for name in ("/run", "/other"))
        rewrite(source, target, 2, overwrite=True, threads=1)

    for what, after in crashes(disk, again, kept=("nothing", "everything", 1)):
        found = read(LocalStorage("/other", DiskFiles(after)), threads=1)
        assert all_same(found, old) or all_same(found, new), what
        seen.add(float(found["a"][0]))
    assert seen == {1.0, 2.0}


def test_rewrite_is_refused_where_the_step_is(run, tmp_path):
    with pytest.raises(ArgumentError, match="is where the step is"):
        rewrite(run, run, 2)
    rewrite(run, tmp_path, 2)
    with pytest.raises(ArgumentError, match="has a step 30 already"):
        rewrite(run, tmp_path, 2)
    with pytest.raises(ArgumentError, match="world_size must be at least 1"):
        rewrite(run, tmp_path, 0)


def test_object_stores(tmp_path, run):
    pytest.importorskip("fsspec")
    url = "memory://ckpt-export-test"
    rewrite(run, url, 2)
    assert verify(url).valid
    assert verify(f"{url}/step_00000030").valid
    export_safetensors(f"{url}/step_00000030", tmp_path / "x.safetensors")
    assert all_same(by_library(tmp_path / "x.safetensors"), samples())


# Engines.


def parameters(engine):
    with engine.full_params() as found:
        return {name: array.copy() for name, array in found.items()}


def test_an_engine_takes_parameters_from_elsewhere(tmp_path):
    """Trained on two ranks, by way of safetensors files, into an engine of three."""

    def give(backend, layout):
        engine = engine_of(backend, layout, seed=1)
        train(engine, 2)
        save(tmp_path / "run", engine, backend)
        return parameters(engine)

    def take(backend, layout):
        engine = engine_of(backend, layout, seed=2)
        train(engine, 1)
        load(tmp_path / "again", engine, backend, optimizer=False)
        train(engine, 1)  # the optimizer goes on with what it had
        assert engine.steps == 2
        load(tmp_path / "again", engine, backend, optimizer=False)
        return parameters(engine)

    given = run_engines(Layout(2), give)[0]
    export_safetensors(tmp_path / "run", tmp_path / "hf", max_shard_size=200)
    import_safetensors(tmp_path / "hf", tmp_path / "again", 5, max_file_size=300)
    for taken in run_engines(Layout(3), take):
        assert taken.keys() == given.keys()
        for name, array in given.items():
            assert np.array_equal(taken[name], array), name
