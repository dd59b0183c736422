"""``verify`` notices every change of a checkpoint, and names all that is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil

import numpy as np
import pytest
import xxhash
from support.ckpt_make import commit, make_checkpoint
from support.ckpt_samples import bits, samples, saved
from support.ckpt_steps import write as write_leftover

from fsdpcore.checkpoint.interchange.verify import Problem, verify
from fsdpcore.checkpoint.load.read import read
from fsdpcore.checkpoint.storage.cleaning import clean
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.steps import StepName
from fsdpcore.core.errors import ArgumentError, CheckpointError, CheckpointNotFoundError

STEP = "step_00000030"
KIB = 1024


@pytest.fixture
def folder(tmp_path):
    """Two files: two pieces of a matrix of ten blocks in each, and something small."""
    arrays = {
        "w": bits(1, (40, 4 * KIB), np.dtype(np.float32)),
        "b": bits(2, (100,), np.dtype(np.int16)),
    }
    size = arrays["w"].size
    cuts = {
        "w": [
            (0, ("range", 0, size // 4)),
            (1, ("range", size // 4, size // 2)),
            (0, ("range", size // 2, size // 4 * 3)),
            (1, ("range", size // 4 * 3, size)),
        ],
        "b": [(0, ("range", 0, 100))],
    }
    return make_checkpoint(tmp_path, arrays, cuts, world_size=2)


def flip(path, *positions):
    data = bytearray(path.read_bytes())
    for position in positions:
        data[position] ^= 0x10
    path.write_bytes(data)


def files_of(found):
    return [each.file for each in found.problems]


def told(folder):
    return json.loads((folder / "metadata.json").read_text("utf-8"))


def test_a_sound_checkpoint(folder):
    calls = []
    found = verify(folder.parent, progress=lambda *call: calls.append(call))
    assert found.valid
    assert (found.step, found.name, found.files) == (30, STEP, 4)
    assert found.nbytes == sum(each.stat().st_size for each in folder.iterdir())
    total = sum(each.stat().st_size for each in folder.glob("rank_*"))
    assert calls == sorted(calls)
    assert (calls[0], calls[-1]) == ((0, total), (total, total))


def test_what_save_writes_is_sound(tmp_path):
    saved(tmp_path, {**samples(), "__metadata__": np.ones(3), "fsdpcore.checksums": np.ones(3)})
    found = verify(tmp_path / STEP, threads=3)
    assert found.problems == ()


@pytest.mark.parametrize("dtype", [np.complex128, np.float32])
def test_as_many_axes_as_numpy_has(tmp_path, dtype):
    """A complex number of two parts takes an axis more in the file."""
    given = {"a": np.arange(6).astype(dtype).reshape(3, *(1,) * 62, 2)}
    assert given["a"].ndim == 64
    saved(tmp_path, given, ranks=1)
    found = verify(tmp_path)
    assert found.valid, found.problems
    assert np.array_equal(read(tmp_path)["a"], given["a"])


def test_every_part_is_covered(tmp_path):
    folder = make_checkpoint(
        tmp_path, {"a": bits(3, (20,), np.dtype(np.uint8)), "s": np.array(1.5)}
    )
    for name in sorted(os.listdir(folder)):
        data = (folder / name).read_bytes()
        for position in range(0, len(data), 3):
            flip(folder / name, position)
            found = verify(folder)
            assert not found.valid, (name, position)
            (folder / name).write_bytes(data)
    assert verify(folder).valid


def test_every_length_is_noticed(tmp_path):
    folder = make_checkpoint(tmp_path, {"a": bits(3, (20,), np.dtype(np.uint8))})
    for name in sorted(os.listdir(folder)):
        data = (folder / name).read_bytes()
        for length in range(0, len(data), 7):
            (folder / name).write_bytes(data[:length])
            assert not verify(folder).valid, (name, length)
        (folder / name).write_bytes(data + b"\0")
        assert not verify(folder).valid, name
        (folder / name).write_bytes(data)


def test_a_file_that_is_cut_off(folder):
    """What is left of it is checked."""
    path, row = folder / "rank_0.safetensors", told(folder)["files"][0]
    data = bytearray(path.read_bytes())
    data[row[2] - 1] ^= 1
    path.write_bytes(data[: row[3]])
    whats = [what for _, what in verify(folder).problems]
    assert whats[0] == f"has {row[3]} bytes, but {row[1]} were saved"
    assert whats[1] == f"the header, bytes [0, {row[2]}), is not what was saved"
    assert whats[-2:] == [
        f"the checksums, bytes [{row[3]}, {row[1]}), are cut off",
        "the data cannot be checked without the checksums",
    ]
    path.write_bytes(b"")
    assert "the header, bytes [0, " in verify(folder).problems[1].what


def test_all_problems_are_named(folder):
    pieces = sorted((piece[0], piece[1]) for piece in told(folder)["tensors"]["w"][2])
    (_, first), _, (_, third), _ = pieces
    block = 64 * KIB
    # All three blocks of a piece, the last one shorter, and the first one of another file.
    flip(folder / "rank_0.safetensors", first + block, first + 2 * block + 5, first + 1)
    flip(folder / "rank_1.safetensors", third + 7)
    (folder / "notes.txt").write_text("mine")
    found = verify(folder)
    whats = dict.fromkeys(found.problems)
    assert Problem("notes.txt", "is no file of this checkpoint") in whats
    assert (
        Problem(
            "rank_0.safetensors",
            f"bytes [{first}, {first + 160 * KIB}), tensor 'w', are not what was saved",
        )
        in whats
    )
    assert (
        Problem(
            "rank_1.safetensors",
            f"bytes [{third}, {third + block}), tensor 'w', are not what was saved",
        )
        in whats
    )
    assert len(found.problems) == 3


def test_header_and_table_and_data_at_once(folder):
    name = "rank_0.safetensors"
    row = told(folder)["files"][0]
    data_start, table = row[2], row[3]
    flip(folder / name, data_start - 1, table - 1, row[1] - 1)
    whats = [each.what for each in verify(folder).problems]
    assert any(each.startswith("the header, bytes [0, ") for each in whats)
    assert any(each.startswith("the checksums, bytes [") for each in whats)
    assert any("tensor 'b', are not what was saved" in each for each in whats)


def test_missing_files_do_not_hide_other_damage(folder):
    (folder / "rank_0.safetensors").unlink()
    flip(folder / "rank_1.safetensors", 5000)
    (folder / "COMMIT").unlink()
    found = verify(folder)
    assert files_of(found) == ["COMMIT", "rank_0.safetensors", "rank_1.safetensors"]


def test_a_file_of_another_save(folder, tmp_path):
    """Of the same step and shapes, and with checksums that fit."""
    arrays = {"a": np.zeros(9)}
    one = make_checkpoint(tmp_path / "one", arrays)
    other = make_checkpoint(tmp_path / "other", arrays)
    name = "rank_0.safetensors"
    data = (one / name).read_bytes().replace(b"step_00000030-test", b"step_00000030-fake")
    (other / name).write_bytes(data)
    described = told(other)
    row = described["files"][0]
    row[4] = xxhash.xxh3_64(data[: row[2]]).hexdigest()
    commit(other, described)
    (problem,) = verify(other).problems
    assert "is of the save 'step_00000030-fake', not of step_00000030-test" in problem.what


@pytest.mark.parametrize(
    ("old", "new"),
    [(b'"F32"', b'"I32"'), (b"[3, 4]", b"[4, 3]"), (b'"a#1"', b'"b#1"'), (b'"a#1"', b'"x"  ')],
)
def test_a_header_that_disagrees_with_the_metadata(tmp_path, old, new):
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    cuts = {"a": [(0, ("box", (0, 0), (3, 4)))]}
    folder = make_checkpoint(tmp_path, {"a": array}, cuts)
    path = folder / "rank_0.safetensors"
    data = path.read_bytes()
    assert data.count(old) == 1
    data = data.replace(old, new)
    path.write_bytes(data)
    described = told(folder)
    row = described["files"][0]
    row[4] = xxhash.xxh3_64(data[: row[2]]).hexdigest()
    commit(folder, described)
    (problem,) = verify(folder).problems
    assert problem.file == path.name
    assert "where the metadata has 'a'" in problem.what


def test_elements_that_were_not_saved(tmp_path):
    cuts = {"a": [(0, ("range", 2, 5))], "b": []}
    make_checkpoint(tmp_path, {"a": np.ones(7), "b": np.ones(2)}, cuts)
    assert [each.what for each in verify(tmp_path).problems] == [
        "4 of the 7 elements of 'a' were not saved",
        "2 of the 2 elements of 'b' were not saved",
    ]


def test_files_that_cannot_be_read(folder, monkeypatch):
    real = LocalStorage.reader

    def reader(self, name):
        if name.endswith("rank_1.safetensors"):
            raise OSError(errno.EIO, "broken")
        return real(self, name)

    monkeypatch.setattr(LocalStorage, "reader", reader)
    (problem,) = verify(folder).problems
    assert problem.file == "rank_1.safetensors"
    assert "broken" in problem.what


def test_no_regular_files(folder):
    (folder / "rank_0.safetensors").unlink()
    os.mkfifo(folder / "rank_0.safetensors")
    shutil.move(folder / "rank_1.safetensors", folder.parent / "elsewhere")
    (folder / "rank_1.safetensors").symlink_to(folder.parent / "elsewhere")
    assert files_of(verify(folder)) == ["rank_0.safetensors", "rank_1.safetensors"]


def test_which_step(tmp_path):
    for step in (1, 2):
        make_checkpoint(tmp_path, {"a": np.ones(3)}, step=step)
    flip(tmp_path / "step_00000002" / "metadata.json", 30)
    storage = LocalStorage(str(tmp_path))
    storage.make_directory("step_00000003")
    write_leftover(storage, StepName(3))
    assert verify(tmp_path, step=1).valid
    # Damaged, but committed once; what was never finished is looked at only if it is named.
    assert (verify(tmp_path).name, verify(tmp_path).valid) == ("step_00000002", False)
    found = verify(tmp_path, step=3)
    assert files_of(found)[0] == "COMMIT"
    assert not found.valid
    for path, step in ((tmp_path, 4), (tmp_path / "step_00000004", None), (tmp_path / "x", None)):
        with pytest.raises(CheckpointNotFoundError, match="there is no"):
            verify(path, step=step)


def test_metadata_that_says_nothing(folder):
    (folder / "metadata.json").write_text("{}")
    found = verify(folder)
    assert files_of(found) == [
        "metadata.json",
        "metadata.json",
        "rank_0.safetensors",
        "rank_1.safetensors",
    ]


# What killed saves left.


def leftover(tmp_path, step=7):
    storage = LocalStorage(str(tmp_path))
    storage.make_directory(StepName(step).name)
    write_leftover(storage, StepName(step))
    return storage


def test_clean(folder, tmp_path):
    flip(folder / "rank_0.safetensors", 5000)
    storage = leftover(tmp_path)
    with storage.hold("step_00000007"):
        assert clean(tmp_path).removed == ()  # somebody writes it
    done = clean(tmp_path)
    assert (done.removed, done.failed) == (("step_00000007",), ())
    assert os.listdir(tmp_path) == [STEP]
    assert clean(tmp_path).removed == ()


def test_clean_without_locks(tmp_path, monkeypatch):
    leftover(tmp_path)
    monkeypatch.setattr(LocalStorage, "locks", False)
    with pytest.raises(ArgumentError, match="has no locks"):
        clean(tmp_path)
    assert os.listdir(tmp_path) == ["step_00000007"]
    assert clean(tmp_path, force=True).removed == ("step_00000007",)


def test_clean_where_nothing_can_be_listed(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        clean(tmp_path / "file")
