"""Saves in the background: what was copied is what is written, and every error is told."""

from __future__ import annotations

import logging
import threading
from unittest import mock

import numpy as np
import pytest
from support.ckpt_disk import Disk, DiskFiles, Fault
from support.ckpt_saves import found, save, state_of, whole
from support.fsdp_steps import launch, train
from support.jobs import clean_environ, finished, python

import fsdpcore as fc
from fsdpcore.checkpoint.save import saver
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage


class Gate(Files):
    """Nothing is written to a file of arrays until it is opened."""

    def __init__(self) -> None:
        self.open_now = threading.Event()
        self.reached = threading.Event()

    def writev(self, fd, buffers):
        self.reached.set()
        assert self.open_now.wait(60)
        return super().writev(fd, buffers)


def test_what_is_written_is_what_there_was(tmp_path):
    gate = Gate()
    storage = LocalStorage(str(tmp_path), gate)

    def body(backend):
        state = state_of(backend.rank, backend.world_size, 7)
        extra = {"position": [1]}
        with fc.checkpoint.AsyncCheckpointer(storage, backend) as checkpointer:
            future = checkpointer.save(state, step=3, extra=extra)
            assert gate.reached.wait(60)
            for shard in state.values():  # as the next step of training does
                for part in fc.checkpoint.memory.shards.parts_of(shard):
                    part.array[...] = 99
            extra["position"].append(2)
            fc.all_reduce(np.ones(3), backend)  # and it communicates
            assert not future.done()
            backend.barrier()
            gate.open_now.set()
            first, again = future.wait(), future.wait()
            assert first is again
            assert future.done()
        return first.step

    assert launch(body, 3) == [3, 3, 3]
    assert found(tmp_path) == 7

    def look(backend):
        target = state_of(0, 1, 0)
        assert fc.checkpoint.load(tmp_path, target, backend).extra == {"position": [1]}

    launch(look, 1)


def test_a_second_save_waits_or_is_refused_on_all_ranks(tmp_path):
    gate = Gate()
    storage = LocalStorage(str(tmp_path), gate)

    def refuses(backend):
        state = state_of(backend.rank, backend.world_size, 7)
        with fc.checkpoint.AsyncCheckpointer(storage, backend, busy="raise") as checkpointer:
            future = checkpointer.save(state, step=3)
            assert gate.reached.wait(60)
            with pytest.raises(fc.StateError, match="under way"):
                checkpointer.save(state, step=4)
            backend.barrier()
            gate.open_now.set()
            future.wait()
            backend.barrier()
            checkpointer.save(state, step=5)

    launch(refuses, 2)
    assert fc.checkpoint.steps(tmp_path) == [3, 5]

    def waits(backend):
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            for step in range(6, 12):
                state = state_of(backend.rank, backend.world_size, step)
                checkpointer.save(state, step=step)

    launch(waits, 2)
    for step in range(6, 12):
        assert found(tmp_path, step) == step


def test_ranks_that_want_different_things_while_one_is_busy(tmp_path):
    def body(backend):
        busy = "raise" if backend.rank else "wait"
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend, busy=busy) as checkpointer:
            checkpointer.save({"w": np.ones(2)}, step=1)

    with pytest.raises(fc.RankFailedError, match="save unless busy"):
        launch(body, 2)


def test_an_error_is_told_by_the_future_on_all_ranks_and_the_next_save_works(caplog):
    disk = Disk()
    save(LocalStorage("/run", DiskFiles(disk)), 1, 5)
    broken = LocalStorage("/run", DiskFiles(disk, Fault(0, "ENOSPC", ["writev"], on="rank_1")))

    def body(backend):
        with fc.checkpoint.AsyncCheckpointer(broken, backend) as checkpointer:
            future = checkpointer.save(state_of(backend.rank, 3, 6), step=2)
            texts = []
            for _ in range(2):
                with pytest.raises(fc.CheckpointError, match="No space left") as caught:
                    future.wait()
                texts.append(str(caught.value))
            assert texts[0] == texts[1]
            assert "on rank 1" in texts[0]
            checkpointer.save(state_of(backend.rank, 3, 7), step=3)
        return texts[0]

    assert len(set(launch(body, 3))) == 1
    assert found(LocalStorage("/run", DiskFiles(disk))) == 7
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert all("was not written" in record.message for record in told)
    assert len(told) == 3


def test_an_error_that_nobody_waited_for_is_raised_at_the_end(caplog):
    disk = Disk()
    broken = LocalStorage("/run", DiskFiles(disk, Fault(0, "EIO", ["fsync"], on="rank_0")))

    def body(backend):
        checkpointer = fc.checkpoint.AsyncCheckpointer(broken, backend)
        checkpointer.save(state_of(backend.rank, 2, 6), step=2)
        with pytest.raises(fc.CheckpointError, match="Input/output error"):
            checkpointer.close()
        checkpointer.close()
        with pytest.raises(fc.StateError, match="closed"):
            checkpointer.save(state_of(backend.rank, 2, 6), step=3)

    launch(body, 2)


def test_a_rank_without_memory_for_the_copy_is_told_of_on_all_ranks(tmp_path, monkeypatch, caplog):
    from fsdpcore.checkpoint.memory.staging import Staging

    copy = Staging.copy

    def without_memory(self, sources):
        if sources and sources[0].base is full:
            raise MemoryError("none left")
        return copy(self, sources)

    monkeypatch.setattr(Staging, "copy", without_memory)
    full = np.arange(8.0)

    def body(backend):
        array = full if backend.rank == 1 else np.arange(8.0)
        start = 4 * backend.rank
        state = {"w": fc.checkpoint.BoxShard((8,), (start,), array[start:][:4])}
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            future = checkpointer.save(state, step=1)
            with pytest.raises(fc.CheckpointError, match=r"MemoryError: none left \(on rank 1\)"):
                future.wait()
            other = {"w": np.arange(8.0)}
            checkpointer.save(other, step=2)

    launch(body, 2)
    assert fc.checkpoint.steps(tmp_path) == [2]
    assert [each.name for each in tmp_path.iterdir()] == ["step_00000002"]


def test_bad_arguments_are_raised_at_once_and_harm_nothing(tmp_path):
    def body(backend):
        with pytest.raises(fc.ArgumentError, match="busy"):
            fc.checkpoint.AsyncCheckpointer(tmp_path, backend, busy="never")
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            assert checkpointer.wait() is None
            with pytest.raises(fc.ArgumentError, match="on rank 1"):
                checkpointer.save({"w": np.ones(2) if backend.rank == 0 else object()}, step=1)
            future = checkpointer.save({"w": np.ones(2)}, step=1)
            assert checkpointer.wait() == future.wait()

    launch(body, 2)
    assert fc.checkpoint.steps(tmp_path) == [1]


def test_plans_are_made_anew_when_the_arrays_change_and_only_then(tmp_path, monkeypatch):
    states = [("a", 3), ("a", 3), ("a", 4), ("b", 4), ("b", 4), ("a", 4)]
    planned = mock.Mock(side_effect=saver.plan_table)
    monkeypatch.setattr(saver, "plan_table", planned)

    def body(backend):
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            for step, (name, size) in enumerate(states):
                checkpointer.save({name: np.full(size, step)}, step=step)

    launch(body, 2)
    for step, (name, size) in enumerate(states):
        arrays = fc.checkpoint.read(tmp_path, step=step)
        assert list(arrays) == [name]
        np.testing.assert_array_equal(arrays[name], np.full(size, step))
    assert planned.call_count == 4


def test_plans_are_made_anew_when_the_arrays_of_one_rank_change(tmp_path):
    names = ["a", "a", "b", "a"]

    def body(backend):
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            for step, name in enumerate(names):
                state = {"common": np.full(3, step)}
                if backend.rank == 1:
                    state[name] = np.full(3 + step, step)
                checkpointer.save(state, step=step)

    launch(body, 2, timeout=10)
    for step, name in enumerate(names):
        arrays = fc.checkpoint.read(tmp_path, step=step)
        assert sorted(arrays) == sorted(["common", name])
        np.testing.assert_array_equal(arrays["common"], np.full(3, step))
        np.testing.assert_array_equal(arrays[name], np.full(3 + step, step))


# A script that ends, or is ended by an error, while a save is under way.
SCRIPT = """
import sys
import time
import numpy as np
import fsdpcore as fc
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage

class Slow(Files):
    def writev(self, fd, buffers):
        time.sleep(0.3)
        return super().writev(fd, buffers)

def main(backend):
    checkpointer = fc.checkpoint.AsyncCheckpointer(LocalStorage(sys.argv[1], Slow()), backend)
    future = checkpointer.save({"w": np.arange(5.0)}, step=1)
    assert not future.done()

if __name__ == "__main__":
    fc.launch(main, world_size=2, transport="zmq")
"""


def test_the_end_of_the_process_waits(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = finished(python(path, tmp_path / "run"), clean_environ())
    assert (done.code, done.err) == (0, "")
    np.testing.assert_array_equal(fc.checkpoint.read(tmp_path / "run")["w"], np.arange(5.0))


def add_ones(unit, params, grads):
    grads["w"] = params["w"] + 1


def test_an_engine_is_saved_in_the_background_while_it_trains(tmp_path):
    def body(backend):
        units = [fc.Unit("u", {"w": np.arange(11, dtype=np.float32)})]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW(lr=0.1))
        expected = []
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            for _ in range(3):
                train(engine, add_ones)
                expected.append(engine.state_dict(full=True).arrays["u.w"])
                checkpointer.save(engine)
        return expected

    expected = launch(body, 2)[0]
    assert fc.checkpoint.steps(tmp_path) == [1, 2, 3]
    for step in (1, 2, 3):
        arrays = fc.checkpoint.read(tmp_path, "u.*", step=step)
        assert arrays["u.w"].tobytes() == expected[step - 1].tobytes()


def test_names_of_a_save_are_those_of_the_arrays(tmp_path):
    assert set(whole(1)) == set(state_of(0, 1, 1))
