"""Saves in the background without a backend: the copy is what is written, the last one commits."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from support.jobs import finished, python

import fsdpcore as fc
from fsdpcore.checkpoint import AsyncDistributedCheckpointer, flat_shard_metadata, latest, read
from fsdpcore.checkpoint.memory.staging import Staging
from fsdpcore.checkpoint.save import async_distributed
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage

SHAPES = {"w": (40, 5), "b": (7,)}


class Gate(Files):
    """Nothing is written to a file of arrays until it is opened."""

    def __init__(self) -> None:
        self.open_now = threading.Event()
        self.reached = threading.Event()

    def writev(self, fd, buffers):
        self.reached.set()
        assert self.open_now.wait(60)
        return super().writev(fd, buffers)


@pytest.fixture
def gate(monkeypatch):
    """Writes wait for it."""
    gate = Gate()
    opened = async_distributed.open_folder

    def gated(path):
        storage, directory = opened(path)
        return LocalStorage(storage.path, gate), directory

    monkeypatch.setattr(async_distributed, "open_folder", gated)
    yield gate
    gate.open_now.set()


def described(step=30, ranks=1, save_id="one"):
    return flat_shard_metadata(SHAPES, "f4", ranks, step=step, save_id=save_id)


def full(value):
    return {name: np.full(shape, value, "f4") for name, shape in SHAPES.items()}


def part(metadata, rank, value):
    return {
        spec.name: full(value)[spec.name].reshape(-1)[region.start : region.stop].copy()
        for spec in metadata.shards[rank]
        for region in spec.regions
    }


def path_of(tmp_path, step=30):
    return tmp_path / f"step_{step:08d}"


def test_what_is_written_is_what_there_was(tmp_path, gate):
    state = full(7)
    with AsyncDistributedCheckpointer() as saver:
        assert saver.wait() is None
        future = saver.save(state, path_of(tmp_path), 0, 1, described())
        assert gate.reached.wait(60)
        for array in state.values():
            array[...] = 99  # as the next step of training does
        assert not future.done()
        assert not path_of(tmp_path).joinpath("COMMIT").exists()
        gate.open_now.set()
        assert future.wait() is True
        assert saver.wait() is True
    assert latest(tmp_path).step == 30
    assert all((array == 7).all() for array in read(tmp_path).values())
    with pytest.raises(fc.StateError, match="AsyncDistributedCheckpointer was closed"):
        saver.save(state, path_of(tmp_path), 0, 1, described())


def test_ranks_by_themselves_and_the_last_one_commits(tmp_path):
    savers = [AsyncDistributedCheckpointer() for _ in range(3)]
    for step in (10, 20):
        metadata = described(step, 3, f"save-{step}")
        futures = [
            saver.save(part(metadata, rank, step), path_of(tmp_path, step), rank, 3, metadata)
            for rank, saver in enumerate(savers)
        ]
        assert sorted(future.wait() for future in futures) == [False, False, True]
        assert all((array == step).all() for array in read(tmp_path, step=step).values())
    for saver in savers:
        saver.close()
        saver.close()


def test_a_second_save_waits_or_is_refused(tmp_path, gate):
    with AsyncDistributedCheckpointer(busy="raise") as saver:
        first = saver.save(full(1), path_of(tmp_path, 1), 0, 1, described(1))
        assert gate.reached.wait(60)
        with pytest.raises(fc.StateError, match="the save before is still under way"):
            saver.save(full(2), path_of(tmp_path, 2), 0, 1, described(2))
        gate.open_now.set()
        first.wait()
        saver.save(full(2), path_of(tmp_path, 2), 0, 1, described(2))
    gate.open_now.clear()
    with AsyncDistributedCheckpointer() as saver:
        third = saver.save(full(3), path_of(tmp_path, 3), 0, 1, described(3))
        threading.Timer(0.2, gate.open_now.set).start()
        saver.save(full(4), path_of(tmp_path, 4), 0, 1, described(4))
        assert third.done()
    for step in (1, 2, 3, 4):
        assert (read(tmp_path, step=step)["w"] == step).all()
    with pytest.raises(fc.ArgumentError, match="busy"):
        AsyncDistributedCheckpointer(busy="never")


def no_memory(*_):
    raise MemoryError


def test_errors_at_once_and_of_the_background(tmp_path, caplog, monkeypatch):
    with AsyncDistributedCheckpointer() as saver:
        with pytest.raises(fc.ArgumentError, match="the state lacks 'b'"):
            saver.save({"w": full(1)["w"]}, path_of(tmp_path), 0, 1, described())
        assert not path_of(tmp_path).exists()
        saver.save(full(1), path_of(tmp_path), 0, 1, described()).wait()
        # Another save to a checkpoint that was committed is found out when it is written.
        future = saver.save(full(2), path_of(tmp_path), 0, 1, described(save_id="two"))
        with pytest.raises(fc.ArgumentError, match="is a committed checkpoint"):
            future.wait()
        (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
        assert "A checkpoint was not written" in record.message
    saver = AsyncDistributedCheckpointer()
    saver.save(full(3), path_of(tmp_path), 0, 1, replace(described(), save_id="three"))
    with pytest.raises(fc.ArgumentError, match="is a committed checkpoint"):
        saver.close()
    # What ended the block is what is raised, and not what became of the save.
    with pytest.raises(ZeroDivisionError), AsyncDistributedCheckpointer() as saver:
        saver.save(full(3), path_of(tmp_path), 0, 1, described(save_id="three"))
        _ = 1 / 0
    # A failure is still told after a save for which there is no memory has waited for it.
    saver = AsyncDistributedCheckpointer()
    saver.save(full(3), path_of(tmp_path), 0, 1, described(save_id="three"))
    with monkeypatch.context() as patch:
        patch.setattr(Staging, "copy", no_memory)
        with pytest.raises(fc.CheckpointError, match="no memory for a copy"):
            saver.save(full(4), path_of(tmp_path, 4), 0, 1, described(4))
    with pytest.raises(fc.ArgumentError, match="is a committed checkpoint"):
        saver.close()
    assert (read(tmp_path)["w"] == 1).all()


END = """
import numpy as np, sys
from fsdpcore.checkpoint import AsyncDistributedCheckpointer, flat_shard_metadata
metadata = flat_shard_metadata({"w": 1 << 20}, "f4", 1, step=3, save_id="x")
saver = AsyncDistributedCheckpointer()
saver.save({"w": np.ones(1 << 20, "f4")}, sys.argv[1] + "/step_00000003", 0, 1, metadata)
"""


def test_the_end_of_the_process_waits(tmp_path):
    done = finished(python("-c", END, tmp_path))
    assert (done.code, done.err) == (0, "")
    assert (read(tmp_path)["w"] == 1).all()
