"""PyTorch's distributed checkpoints, read without it; its own reader is the oracle where it is."""

from __future__ import annotations

import copyreg
import importlib.util
import io
import os
import pickle
import shutil
import sys
import types
import zipfile
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.ckpt_gpus import moved, on_gpus
from support.ckpt_regions import boxes, mask, regions, shapes
from support.dcp_make import DATA, OBJECTS, arrays
from support.fsdp_steps import launch
from support.jobs import finished, python
from typer.testing import CliRunner

import fsdpcore as fc
from fsdpcore.checkpoint import diff, export_safetensors, import_dcp, load_dcp, read, read_dcp
from fsdpcore.checkpoint.interchange import foreign_files
from fsdpcore.checkpoint.interchange.array_sources import FillTarget
from fsdpcore.checkpoint.interchange.dcp.source import DcpSource
from fsdpcore.checkpoint.interchange.dcp.tensors import read_tensor
from fsdpcore.commands.main import app
from fsdpcore.core.errors import ArgumentError, CheckpointError, CorruptCheckpointError
from fsdpcore.core.geometry.regions import Box, Range

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def check_same(found, wanted):
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(DATA, tmp_path / "dcp"))


# What is read.


def test_whole_tensors():
    check_same(read_dcp(DATA), arrays())
    half = read_dcp(DATA, ["*.rows", "*.columns"], dtype="bfloat16")
    rows = arrays()["model.rows"].astype(ml_dtypes.bfloat16)
    check_same(half, {"model.rows": rows, "model.columns": arrays()["model.columns"]})
    assert {*DcpSource(DATA).skipped} == OBJECTS


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_region(data):
    source = DcpSource(DATA)
    name = data.draw(st.sampled_from(list(source.arrays)))
    array = arrays()[name]
    region = data.draw(regions(array.shape).filter(lambda each: each.size))
    memory = np.zeros(region.shape if isinstance(region, Box) else region.size, array.dtype)
    source.fill([FillTarget(name, region, memory)])
    assert memory.tobytes() == array[mask(region, array.shape)].tobytes()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_strides_of_any_kind(data):
    """A box of an array lies in a file in any order of axes, with gaps."""
    shape = data.draw(shapes().filter(lambda each: np.prod(each) > 0))
    array = np.arange(1, np.prod(shape, dtype=int) + 1, dtype=np.int32).reshape(shape)
    box = data.draw(boxes(shape).filter(lambda each: each.size))
    axes = data.draw(st.permutations(range(len(shape))))
    gaps = data.draw(st.tuples(*(st.integers(0, 2) for _ in shape)))
    part = array[tuple(map(slice, box.start, box.stop))]
    stored = np.zeros([n + gaps[axis] for axis, n in enumerate(part.shape)], np.int32)
    stored = stored.transpose(axes).copy().transpose(np.argsort(axes))
    stored[tuple(map(slice, part.shape))] = part
    raw = stored.transpose(axes).tobytes()
    strides = tuple(each // 4 for each in stored.strides)
    region = data.draw(regions(shape).filter(lambda each: each.size))
    memory = np.zeros(region.shape if isinstance(region, Box) else region.size, np.int32)
    offset = data.draw(st.integers(0, 3))
    small = data.draw(st.sampled_from([8, 40, 1 << 20]))

    def read_into(fd, at, buffer, path):
        assert 0 <= at - offset <= at - offset + buffer.nbytes <= len(raw)
        buffer[:] = raw[at - offset : at - offset + buffer.nbytes]

    with (
        mock.patch.object(foreign_files, "read_into", read_into),
        mock.patch.object(foreign_files, "_WINDOW_BYTES", small),
        mock.patch.object(foreign_files, "_GAP_BYTES", small // 2),
    ):
        place = foreign_files.StridedBox(box, offset, strides)
        foreign_files.read_common(0, Path("x"), place, shape, region, memory)
    both = np.where(mask(box, shape) & mask(region, shape), array, 0)
    assert memory.tobytes() == both[mask(region, shape)].tobytes()


# Where it goes.


@pytest.mark.parametrize("ranks", [1, 3])
def test_load_into_an_engine(ranks):
    wanted = arrays()

    def body(backend):
        params = {name: fc.Spec(wanted[f"model.{name}"].shape, "float32") for name in ("rows",)}
        engine = fc.FSDP([fc.Unit("net", params)], backend, optimizer=fc.optim.SGD(lr=1.0))
        with pytest.raises(ArgumentError, match="missing in the checkpoint are"):
            load_dcp(DATA, engine, backend)
        how = {"strip_prefix": "model.", "add_prefix": "net.", "strict": False}
        engine.partially_updated = True  # and so its optimizer stays
        loaded = load_dcp(DATA, engine, backend, **how)
        assert engine.partially_updated
        engine.partially_updated = False
        assert loaded.missing == ()
        assert loaded.objects == tuple(OBJECTS)
        assert set(loaded.unexpected) == {
            *("net.columns", "net.turned", "net.half", "net.eighth", "net.optim.scalar")
        }
        return engine.state_dict(full=True)["net.rows"]

    for found in launch(body, ranks):
        assert found.tobytes() == wanted["model.rows"].tobytes()


def test_load_into_parts_of_arrays(monkeypatch):
    """Boxes and ranges, of the same dtype or rounded on the way, through a small window."""
    monkeypatch.setattr("fsdpcore.checkpoint.interchange.dcp.loading.WINDOW_BYTES", 12)
    wanted = arrays()
    rows = wanted["model.rows"].reshape(-1)

    def body(backend):
        low, high = ((0, 4), (4, 7))[backend.rank]
        start, stop = ((0, 8), (8, 15))[backend.rank]
        box = fc.checkpoint.BoxShard((4, 7), (0, low), np.zeros((4, high - low), np.int32))
        piece = fc.ArrayPiece(start, stop, np.zeros(stop - start, np.float16))
        state = {
            "model.columns": box,
            "model.rows": fc.ShardedArray((5, 3), np.dtype(np.float16), (piece,)),
            "own": np.ones(2),
        }
        if backend.rank == 1:  # which the other rank does not have
            state |= {"other": np.ones(2), "model.half": np.zeros_like(wanted["model.half"])}
        with pytest.raises(ArgumentError, match="cast=True rounds the values"):
            load_dcp(DATA, state, backend, strict=False)
        assert not box.array.any()
        loaded = load_dcp(DATA, state, backend, strict=False, cast=True)
        assert loaded.missing == ("own", "other")
        assert not {"model.rows", "model.half"} & {*loaded.unexpected}
        assert box.array.tolist() == wanted["model.columns"][:, low:high].tolist()
        assert piece.array.tolist() == rows[start:stop].tolist()

    launch(body, 2)


def test_load_into_arrays_of_a_gpu(cupy, monkeypatch):
    """By way of a window, here of few elements."""
    monkeypatch.setattr("fsdpcore.checkpoint.interchange.dcp.loading.WINDOW_BYTES", 16)
    wanted = arrays()

    def body(backend):
        empty = {
            "model.rows": np.zeros((5, 3), np.float64),
            "model.columns": fc.checkpoint.BoxShard((4, 7), (0, 0), np.zeros((4, 7), np.int32)),
        }
        state = {name: moved(each, cupy.asarray) for name, each in empty.items()}
        load_dcp(DATA, state, backend, strict=False, cast=True)
        return {name: moved(each, cupy.asnumpy) for name, each in state.items()}

    (found,) = on_gpus(1, body)
    assert found["model.rows"].tolist() == wanted["model.rows"].tolist()
    assert found["model.columns"].array.tolist() == wanted["model.columns"].tolist()


def test_only_the_files_that_are_needed(folder):
    source = DcpSource(folder)
    (folder / "__1_0.distcp").unlink()
    rows = np.zeros((3, 3), np.float32)
    source.fill([FillTarget("model.rows", Box((0, 0), (3, 3)), rows)])
    assert rows.tolist() == arrays()["model.rows"][:3].tolist()
    with pytest.raises(ArgumentError, match=r"there is no file .*__1_0\.distcp"):
        source.fill([FillTarget("model.rows", Range(9, 10), np.zeros(1, np.float32))])


def test_checkpoints_and_safetensors_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = import_dcp(DATA, "run", 5, world_size=2)
    assert saved.notes == ("'optim.step' are no tensors, and were not read",)
    check_same(read("run"), arrays())
    assert diff(DATA, "run").equal
    done = export_safetensors(DATA, "model.safetensors", names="model.*", strip_prefix="model.")
    assert (done.step, done.name, done.tensors) == (None, "dcp", 5)
    kept = ("rows", "columns", "turned")  # the library has no float8 for NumPy
    export_safetensors(DATA, "few.safetensors", names=[f"model.{each}" for each in kept])
    check_same(
        dict(sorted(load_file("few.safetensors").items())),
        {f"model.{each}": arrays()[f"model.{each}"] for each in sorted(kept)},
    )

    def ckpt(*arguments):
        done = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
        assert done.exit_code == 0, done.output
        return done.stdout

    told = ckpt("import", DATA, "other", "--names", "model.*", "--strip-prefix", "model.")
    assert "note: 'optim.step' are no tensors" in told
    assert list(read("other")) == [name[6:] for name in arrays() if name.startswith("model.")]
    assert "6 tensors" in ckpt("export", DATA, "all.safetensors")
    assert "6 arrays are equal" in ckpt("diff", DATA, "run")


# What is refused.


def patched(folder, old, new, file=".metadata"):
    path = folder / file
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_do_something(folder, tmp_path, protocol):
    done = tmp_path / "done"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(done), protocol))
    with pytest.raises(CorruptCheckpointError, match=r"names 'posix\.system', which"):
        read_dcp(folder)
    archive = torch_archive(pickle.dumps(Evil(done), protocol))
    with pytest.raises(CorruptCheckpointError, match=r"names 'posix\.system', which"):
        opened(archive)
    assert not done.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x04r\xff\xff\xff\xffN.",  # a memo of 4 G entries
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",  # bytes of 2**63
        b"\x80\x04X\xff\xff\xff\x7f.",  # a text of 2 GiB
        b"\x80\x04]\x94h\x00a.",  # a list that contains itself
        b"\x80\x04)" + b"\x85" * 200_000 + b".",  # a tuple in a tuple, very deep
        b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.",  # the same as a key
        b"\x80\x04(((.",
        b"\x80\x04ctorch\nSize\n}b.",  # the state of a class
        b"",
    ],
)
def test_a_pickle_that_would_take_all_memory_or_is_none(folder, program):
    (folder / ".metadata").write_bytes(program)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata is damaged"):
        read_dcp(folder)


def test_every_changed_byte_is_refused_or_changes_nothing(folder):
    """Names apart, which nothing else tells of."""
    wanted = sorted(array.tobytes() for array in arrays().values())
    data = (folder / ".metadata").read_bytes()
    refused = same = 0
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 + (position * 37 + position // 11) % 255
        (folder / ".metadata").write_bytes(changed)
        try:
            found = read_dcp(folder)
        except (ArgumentError, CheckpointError):
            refused += 1
            continue
        same += 1
        values = sorted(array.tobytes() for array in found.values())
        missing = [each for each in wanted if each not in values]
        # A tensor may have become an object that is no tensor, which is told.
        assert len(missing) == len(wanted) - len(values) == 0, position
        assert len(set(found) & set(arrays())) >= len(wanted) - 1
    assert refused > len(data) // 2
    assert same > 100


def test_what_is_not_all_there(folder, tmp_path):
    with pytest.raises(ArgumentError, match=r"has no \.metadata"):
        read_dcp(tmp_path)
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(ArgumentError, match="use_collectives=True"):
        read_dcp(tmp_path)
    file = folder / "__1_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="is at bytes up to"):
        read_dcp(folder)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"no file .*__1_0\.distcp, which has"):
        read_dcp(folder)


def test_what_the_metadata_cannot_mean(folder):
    patched(folder, b"__1_0.distcp", b"../../x/y.pt")
    with pytest.raises(CorruptCheckpointError, match="which is no plain name"):
        read_dcp(folder)
    patched(folder, b"../../x/y.pt", b"__0_0.distcp")
    with pytest.raises(CorruptCheckpointError, match="share bytes of"):
        read_dcp(folder)


class FakeTorch:
    """Classes with the names of PyTorch's, to write any metadata with."""

    META = "torch.distributed.checkpoint.metadata"

    def __init__(self):
        self.modules = {}

    def kind(self, module, name, **more):
        found = type(name, (), {"__module__": module, "__qualname__": name, **more})
        self.modules.setdefault(module, types.ModuleType(module))
        return self.modules[module].__dict__.setdefault(name, found)

    def made(self, name, module=META, **state):
        found = self.kind(module, name)()
        found.__dict__.update(state)
        return found

    def size(self, *extents):
        kind = self.kind("torch", "Size", __reduce__=lambda each: (type(each), (each.extents,)))
        found = kind()
        found.extents = extents
        return found

    def tensor(self, shape, boxes, dtype="float32", module=META):
        state = (self.kind("torch", dtype), None, False)
        new = {"__reduce__": lambda each: (copyreg.__newobj__, (type(each),), state)}
        return self.made(
            "TensorStorageMetadata",
            properties=self.kind(module, "TensorProperties", **new)(),
            size=self.size(*shape),
            chunks=[
                self.made("ChunkStorageMetadata", offsets=self.size(*a), sizes=self.size(*b))
                for a, b in boxes
            ],
        )

    def write(self, folder, tensor, length=1000, **more):
        """A tensor "w", all of whose chunks are in one file, one behind the other."""
        filesystem = "torch.distributed.checkpoint.filesystem"
        items = {}
        for number, chunk in enumerate(tensor.chunks):
            key = self.made("MetadataIndex", fqn="w", offset=chunk.offsets, index=number)
            where = {"relative_path": "a.distcp", "offset": number * length, "length": length}
            items[key] = self.made("_StorageInfo", filesystem, **{**where, **more})
        whole = self.made("Metadata", state_dict_metadata={"w": tensor}, storage_data=items)
        with mock.patch.dict(sys.modules, self.modules):
            (folder / ".metadata").write_bytes(pickle.dumps(whole))
        with (folder / "a.distcp").open("wb") as file:
            file.truncate(1000 * len(items))


OLDER = "torch.distributed._shard.sharded_tensor.metadata"


@pytest.mark.parametrize(
    ("shape", "boxes", "more", "error", "words"),
    [
        ((1 << 40,), [((0,), (1 << 40,))], {}, CorruptCheckpointError, "but only 1000 bytes"),
        ((4,), [((0,), (4,))], {"length": 1 << 45}, CorruptCheckpointError, "bytes up to"),
        ((4,), [((0,), (2,))], {}, CheckpointError, "of 'w', 2 of 4 elements were not saved"),
        ((4,), [((0,), (3,)), ((2,), (2,))], {}, CorruptCheckpointError, "chunks 0 and 1 of 'w'"),
        ((4,), [((0,), (5,))], {}, CorruptCheckpointError, "of an array of shape"),
        ((4,), [((0, 0), (4, 1))], {}, CorruptCheckpointError, "needs 1 of each"),
        ((4,), [((0,), (4,))], {"offset": -1}, CorruptCheckpointError, "1000 bytes at -1"),
        ((4,), [((0,), (4,))], {"relative_path": ".."}, CorruptCheckpointError, "no plain name"),
        (
            *((4,), [((0,), (4,))], {"transform_descriptors": ["zstd"]}),
            *(ArgumentError, "by way of stream extensions"),
        ),
    ],
)
def test_metadata_that_cannot_be_read(tmp_path, shape, boxes, more, error, words):
    torch = FakeTorch()
    torch.write(tmp_path, torch.tensor(shape, boxes), **{"length": 1000, **more})
    with pytest.raises(error, match=words):
        read_dcp(tmp_path)


def test_dtypes_that_there_are_not_and_classes_of_older_versions(tmp_path):
    torch = FakeTorch()
    torch.write(tmp_path, torch.tensor((4,), [((0,), (4,))], "quint8"))
    with pytest.raises(ArgumentError, match=r"'w' has the dtype torch\.quint8, which NumPy"):
        read_dcp(tmp_path)
    data = np.arange(7, dtype=np.float32).tobytes()
    archive = torch_archive(tensor_pickle(7, 1), data)
    torch.write(tmp_path, torch.tensor((2, 3), [((0, 0), (2, 3))], module=OLDER), len(archive))
    (tmp_path / "a.distcp").write_bytes(archive)
    assert read_dcp(tmp_path)["w"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_tensor_that_has_become_something_else(folder):
    patched(folder, b"model.columns\x94h\r", b"model.columns\x94h\x09")  # a BytesStorageMetadata
    with pytest.raises(CorruptCheckpointError, match=r"where 'model\.columns' is, but not what"):
        read_dcp(folder)


# Archives of one tensor.


def torch_archive(data_pkl, data=b"", order=b"little", compress=zipfile.ZIP_STORED):
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", compress) as archive:
        archive.writestr("archive/data.pkl", data_pkl)
        archive.writestr("archive/byteorder", order)
        archive.writestr("archive/data/0", data)
    return memory.getvalue()


def opened(archive):
    return read_tensor(lambda at, count: archive[at : at + count], len(archive), "x")


def tensor_pickle(count=6, start=0, shape="K\x02K\x03\x86", strides="K\x03K\x01\x86"):
    """As torch.save writes it."""
    text = (
        "\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\n"
        f"X\x01\0\0\x000X\x03\0\0\0cpuK{chr(count)}tQK{chr(start)}{shape}{strides}"
        "\x89ccollections\nOrderedDict\n)RtR."
    )
    return text.encode("latin-1")


def test_an_archive():
    found = opened(torch_archive(tensor_pickle(7, 1), bytes(28)))
    assert found[:3] == ("float32", (2, 3), (3, 1))


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (torch_archive(tensor_pickle(6, 1), bytes(24)), "goes beyond its storage of 6"),
        (torch_archive(tensor_pickle(6), bytes(28)), "its storage has 28 bytes"),
        (torch_archive(tensor_pickle(1, 0, strides="K\0K\0\x86"), bytes(4)), "goes beyond"),
        (torch_archive(tensor_pickle(6, 0, strides="K\x01\x85"), bytes(24)), "differ in number"),
        (
            torch_archive(tensor_pickle(), bytes(24), compress=zipfile.ZIP_DEFLATED),
            "is compressed",
        ),
        (torch_archive(tensor_pickle(), bytes(24), order=b"big"), "another byte order"),
        (torch_archive(tensor_pickle()[:-5] + b".", bytes(24)), "ends in the middle"),
        (torch_archive(b"\x80\x02K\x07."), "it is no tensor"),
        (b"PK", "no archive of torch.save"),
        (torch_archive(tensor_pickle(), bytes(24))[:-30], "no archive of torch.save"),
    ],
)
def test_an_archive_that_is_none(archive, words):
    with pytest.raises((CorruptCheckpointError, ArgumentError), match=words):
        opened(archive)


def test_every_changed_byte_of_an_archive(folder):
    archive = torch_archive(tensor_pickle(7, 1), bytes(28))
    for position in range(len(archive)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(archive)
            changed[position] ^= flip
            try:
                found = opened(bytes(changed))
            except (CorruptCheckpointError, ArgumentError):
                continue
            last = sum((n - 1) * each for n, each in zip(*found[1:3], strict=True))
            assert 0 <= found.offset <= found.offset + 4 * (1 + last) <= len(archive)


# Beside PyTorch.


def written(folder, *options):
    """A checkpoint, by PyTorch in processes of its own."""
    there = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    done = finished(python("-m", "support.dcp_make", folder, *options), {"PYTHONPATH": there})
    assert done.code == 0, done.err
    return folder


@needs_torch
@pytest.mark.parametrize("world", [1, 2])
def test_torch_writes_the_same_by_one_process_or_two(tmp_path, world):
    found = read_dcp(written(tmp_path / "made", world))
    check_same(dict(sorted(found.items())), dict(sorted(arrays().items())))


@needs_torch
def test_a_model_under_fsdp2(tmp_path):
    folder = written(tmp_path / "made", 2, "model")
    with np.load(tmp_path / "made.npz") as full:
        check_same(
            dict(sorted(read_dcp(folder).items())), dict(sorted((k, full[k]) for k in full.files))
        )
    assert DcpSource(folder).skipped


@needs_torch
def test_tensors_of_torch_save(tmp_path):
    import torch

    base = torch.arange(60, dtype=torch.int64)
    for tensor in (base[7:31].view(4, 6), base.view(6, 10).T[2:5, 1:], base[3]):
        memory = io.BytesIO()
        torch.save(tensor, memory)
        found = opened(memory.getvalue())
        raw = np.frombuffer(memory.getvalue(), np.uint8)[found.offset :]
        strides = [8 * each for each in found.strides]
        array = np.ndarray(found.shape, np.int64, raw[: raw.size // 8 * 8], 0, strides)
        assert array.tolist() == tensor.tolist()
