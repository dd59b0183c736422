"""Checkpoints that are not what was written: no damage goes unnoticed, none is believed."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
from support.ckpt_disk import Disk, DiskFiles
from support.ckpt_saves import found, save, state_of
from support.fsdp_steps import launch

import fsdpcore as fc
from fsdpcore.checkpoint.storage.local_storage import LocalStorage

VALUES = np.array([1.5, -2.5], np.float32)


@pytest.fixture(scope="module")
def disk():
    """A checkpoint of two ranks, in memory, as small as one can be."""
    disk = Disk()
    storage = LocalStorage("/run", DiskFiles(disk))

    def body(backend):
        piece = fc.ArrayPiece(backend.rank, backend.rank + 1, VALUES[backend.rank :][:1])
        state = {"w": fc.ShardedArray((2,), VALUES.dtype, (piece,))}
        fc.checkpoint.save(storage, state, backend, step=3)

    launch(body, 2)
    return disk


def files_of(disk):
    return disk.root.entries["run"].entries["step_00000003"].entries


def assert_whole(disk):
    arrays = fc.checkpoint.read(LocalStorage("/run", DiskFiles(disk)))
    assert arrays.keys() == {"w"}
    assert arrays["w"].tobytes() == VALUES.tobytes()


def assert_refused(disk, what):
    with pytest.raises(fc.CheckpointError):
        fc.checkpoint.read(LocalStorage("/run", DiskFiles(disk)), step=3, threads=1)
        raise AssertionError(f"{what} was not noticed")


NAMES = ["COMMIT", "metadata.json", "rank_0.safetensors", "rank_1.safetensors"]


# One file of arrays is enough: both are read alike.
@pytest.mark.parametrize("name", [name for name in NAMES if "rank_0" not in name])
def test_every_byte_counts(disk, name):
    """Three of its bits: the lowest, the one that makes a letter small, and the highest."""
    assert sorted(files_of(disk)) == NAMES
    data = files_of(disk)[name].data
    for place in range(len(data)):
        for bit in (0, 5, 7):
            data[place] ^= 1 << bit
            assert_refused(disk, f"bit {bit} of byte {place} of {name}")
            data[place] ^= 1 << bit
    assert_whole(disk)


@pytest.mark.parametrize("name", NAMES)
def test_every_length_counts(disk, name):
    node = files_of(disk)[name]
    whole = node.data
    for size in range(len(whole)):
        node.data = whole[:size]
        assert_refused(disk, f"{name} cut to {size} bytes")
    node.data = whole + b"\0"
    assert_refused(disk, f"a byte behind {name}")
    node.data = whole
    assert_whole(disk)


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of two steps on the real disk; returns the folder of the newer one."""
    save(tmp_path, 1, 5)
    save(tmp_path, 2, 6)
    return tmp_path / "step_00000002"


def assert_falls_back(folder, reason):
    """The older step is loaded, on all ranks, and it is said why; the newer one is an error."""

    def body(backend):
        target = state_of(backend.rank, backend.world_size, 0)
        loaded = fc.checkpoint.load(folder.parent, target, backend)
        assert loaded.step == 1
        expected = state_of(backend.rank, backend.world_size, 5)
        for name, shard in fc.checkpoint.memory.shards.checked_state(target).items():
            for mine, theirs in zip(
                fc.checkpoint.memory.shards.parts_of(shard),
                fc.checkpoint.memory.shards.parts_of(expected[name]),
                strict=True,
            ):
                np.testing.assert_array_equal(mine.array, theirs.array)
        with pytest.raises(fc.CheckpointError):
            fc.checkpoint.load(folder.parent, target, backend, step=2)
        return [(each.name, each.reason) for each in loaded.skipped]

    skipped, *others = launch(body, 3)
    assert all(other == skipped for other in others)
    assert [name for name, _ in skipped] == [folder.name]
    assert reason in skipped[0][1], skipped


def swap(folder):
    one, other = folder / "rank_0.safetensors", folder / "rank_1.safetensors"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def take_from_the_other_step(folder):
    shutil.copy(folder.parent / "step_00000001" / "rank_0.safetensors", folder)


def flip_a_value(folder):
    path = folder / "rank_1.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by(make):
    def replace(folder):
        (folder / "rank_1.safetensors").unlink()
        make(folder / "rank_1.safetensors")

    return replace


DAMAGES = {
    "swapped": (swap, ""),
    "mixed": (take_from_the_other_step, "rank_0.safetensors"),
    "missing": (lambda folder: (folder / "rank_1.safetensors").unlink(), "rank_1.safetensors"),
    "no metadata": (lambda folder: (folder / "metadata.json").unlink(), "metadata.json"),
    "no marker": (lambda folder: (folder / "COMMIT").unlink(), "COMMIT"),
    "flipped": (flip_a_value, "rank_1.safetensors"),
    "fifo": (replace_by(os.mkfifo), "rank_1.safetensors"),
    "directory": (replace_by(os.mkdir), "rank_1.safetensors"),
    "link": (replace_by(lambda path: path.symlink_to("rank_0.safetensors")), "rank_1.safetensors"),
    "device": (replace_by(lambda path: path.symlink_to("/dev/zero")), "rank_1.safetensors"),
}


@pytest.mark.parametrize("which", DAMAGES)
def test_damage_on_the_real_disk(folder, which):
    damage, reason = DAMAGES[which]
    damage(folder)
    assert_falls_back(folder, reason)


def test_files_that_do_not_belong_there_are_not_looked_at(folder):
    (folder / "rank_2.safetensors").write_bytes(b"?")
    (folder / ".tmpabc").write_bytes(b"?" * 1000)
    (folder.parent / "step_00000009").mkdir()
    (folder.parent / "notes.txt").write_text("mine")
    assert found(folder.parent) == 6
    latest = fc.checkpoint.latest(folder.parent)
    assert [each.name for each in latest.skipped] == ["step_00000009"]
