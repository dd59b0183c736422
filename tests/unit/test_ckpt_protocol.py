"""From a new folder to a checkpoint that counts: others who clear, read or fork meanwhile."""

from __future__ import annotations

import ast
import errno
import importlib.util
import os
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ckpt_disk import Disk, DiskFiles, Fault
from support.ckpt_saves import found, save, whole
from support.ckpt_steps import held
from support.fsdp_steps import cause_of, launch

import fsdpcore as fc
from fsdpcore.checkpoint.format.marker import MARKER_NAME
from fsdpcore.checkpoint.format.metadata import BLOCK_BYTES, METADATA_NAME
from fsdpcore.checkpoint.interchange.importing import import_safetensors
from fsdpcore.checkpoint.plan.file_layout import lay_out
from fsdpcore.checkpoint.plan.held import HeldArray, held_piece
from fsdpcore.checkpoint.plan.save_plan import decode_written, plan
from fsdpcore.checkpoint.save.rank_save import RankSave
from fsdpcore.checkpoint.save.step_folder import new_claimed_step
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.removal import remove_leftovers
from fsdpcore.checkpoint.storage.steps import StepName, directories
from fsdpcore.collectives.consensus import LocalAttempt, agree
from fsdpcore.core.errors import ArgumentError, CheckpointError
from fsdpcore.core.geometry.regions import Box, Range

TEN, TWENTY = StepName(10), StepName(20)


# Saves of others at the same time.


@pytest.fixture
def store():
    pytest.importorskip("fsspec")
    from fsdpcore.checkpoint.storage.object_storage import FsspecStorage

    class Gated(FsspecStorage):
        """Metadata of step 10 is written only when that is allowed."""

        reached, allowed = threading.Event(), threading.Event()

        def put(self, name, data):
            if name == f"{TEN.name}/{METADATA_NAME}":
                self.reached.set()
                assert self.allowed.wait(60)
            super().put(name, data)

    made = Gated("memory://protocol-test/run")
    yield made
    for name in directories(made):
        made.remove_directory(name.name)


@pytest.mark.parametrize("step", [20, 10])
def test_without_locks_a_save_leaves_one_that_is_under_way_alone(store, step):
    def body(backend):
        state = {"w": np.arange(8.0)}
        retention = fc.checkpoint.Retention(last=2)
        with fc.checkpoint.AsyncCheckpointer(store, backend) as checkpointer:
            future = checkpointer.save(state, step=10)
            assert store.reached.wait(60)
            fc.checkpoint.save(store, state, backend, step=step, retention=retention)
            assert "rank_0.safetensors" in store.names(TEN.name)
            store.allowed.set()
            return future.wait().name

    assert launch(body, 1) == [TEN.name]
    # The later save of a step replaces the one that was begun before it.
    assert directories(store) == ([StepName(10, 1)] if step == 10 else [TWENTY, TEN])
    for each in (10, step):
        arrays = fc.checkpoint.read(store, step=each)
        np.testing.assert_array_equal(arrays["w"], np.arange(8.0))


def test_without_locks_leftovers_stay_until_somebody_cleans(store):
    store.allowed.set()
    store.prepare()
    store.make_directory(TEN.name)
    store.put(f"{TEN.name}/rank_0.safetensors", b"x")
    save(store, 20, 2)
    assert directories(store) == [TWENTY, TEN]
    assert found(store) == 2


class Losing(LocalStorage):
    """As the description is written, a file changes."""

    def __init__(self, path, damage):
        super().__init__(path)
        self._damage = damage

    def put(self, name, data):
        super().put(name, data)
        if name.endswith(METADATA_NAME):
            self._damage(os.path.dirname(f"{self.path}/{name}"))


DAMAGES = {
    "is gone": lambda folder: os.unlink(f"{folder}/rank_0.safetensors"),
    "bytes instead of": lambda folder: os.truncate(f"{folder}/rank_0.safetensors", 70),
    "metadata.json is gone": lambda folder: os.unlink(f"{folder}/{METADATA_NAME}"),
}


@pytest.mark.parametrize("words", DAMAGES)
def test_nothing_is_committed_of_which_a_file_is_gone(tmp_path, words):
    save(tmp_path, 10, 1)
    storage = Losing(str(tmp_path), DAMAGES[words])
    error = cause_of(lambda backend: save_ones(storage, backend), 2)
    assert isinstance(error, CheckpointError)
    assert words in str(error)
    assert directories(storage) == [TEN]
    path = tmp_path / "x.safetensors"
    fc.checkpoint.export_safetensors(tmp_path, path)
    with pytest.raises(CheckpointError, match=words):
        import_safetensors(path, storage, 20)
    assert directories(storage) == [TEN]
    assert found(tmp_path) == 1


def save_ones(storage, backend):
    return fc.checkpoint.save(storage, {"w": np.ones(4)}, backend, step=20)


# A folder that is cleared before it is held.


class Cleared(LocalStorage):
    """Others clear the first new folders as soon as they are made."""

    def __init__(self, path, times):
        super().__init__(path)
        self.times = times

    def make_directory(self, name):
        super().make_directory(name)
        if self.times:
            self.times -= 1
            assert remove_leftovers(LocalStorage(self.path)).removed


def test_a_folder_that_is_taken_for_a_leftover_is_made_again(tmp_path):
    assert [each.name for each in save(Cleared(str(tmp_path), 3), 10, 1)] == [TEN.name] * 2
    assert found(tmp_path) == 1
    storage = Cleared(str(tmp_path), 3)
    with new_claimed_step(storage, 20) as name:
        assert name == TWENTY
        assert held(storage, name.name)
    assert not held(storage, name.name)
    metadata = fc.checkpoint.flat_shard_metadata({"w": (4,)}, "f4", 1, step=30, save_id="a")
    storage = Cleared(str(tmp_path), 3)
    shards = {"w": np.ones(4, "f4")}
    joining = joining_of(storage, "step_00000030", metadata, 0)
    joining.write([shards["w"]])
    assert joining.commit()


def test_a_folder_that_goes_again_and_again_is_an_error(tmp_path):
    storage = Cleared(str(tmp_path), 1000)
    with pytest.raises(FileExistsError), new_claimed_step(storage, 20):
        pass


# Disks that are full.


class Full(Files):
    def __init__(self, number):
        self.number = number

    def fsync(self, fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(self.number, os.strerror(self.number))
        super().fsync(fd)


def open_below(path):
    links = []
    for each in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{each}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [link for link in links if link.startswith(str(path))]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are not listed")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_file_that_cannot_be_synced_is_closed_and_gone(tmp_path, number):
    storage = LocalStorage(str(tmp_path), Full(number))
    for _ in range(3):
        assert isinstance(cause_of(lambda backend: save_ones(storage, backend)), CheckpointError)
    assert open_below(tmp_path) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
def test_nothing_stays_open_on_a_disk_that_cannot_sync(kind):
    files = DiskFiles(Disk(), Fault(0, kind, ("fsync",), "safetensors", stays=True))
    storage = LocalStorage("/run", files)
    for _ in range(3):
        assert isinstance(cause_of(lambda backend: save_ones(storage, backend)), CheckpointError)
    assert files.hit
    assert files.open_files == []
    assert storage.names() == []


# Readers while the last rank of a save without communication commits.


def joining_of(storage, directory, metadata, rank, patience=60.0):
    return RankSave(storage, directory, metadata, rank, patience=patience)


@pytest.fixture
def metadata():
    return fc.checkpoint.flat_shard_metadata({"w": (8,)}, "f4", 2, step=10, save_id="a")


def parts(offset=0):
    return [np.arange(4, dtype="f4") + 4 * rank + offset for rank in range(2)]


def test_a_commit_waits_for_those_who_read(tmp_path, metadata):
    storage = LocalStorage(str(tmp_path))
    first, last = (joining_of(storage, TEN.name, metadata, rank) for rank in range(2))
    first.write([parts()[0]])
    assert not first.commit()
    done = []
    with ExitStack() as reading:
        last.write([parts()[1]])
        reading.enter_context(storage.hold(TEN.name))
        thread = threading.Thread(target=lambda: done.append(last.commit()))
        thread.start()
        assert MARKER_NAME not in storage.names(TEN.name)
    thread.join()
    assert done == [True]
    np.testing.assert_array_equal(fc.checkpoint.read(tmp_path)["w"], np.arange(8, dtype="f4"))


def test_a_commit_that_came_too_late_can_be_called_again(tmp_path, metadata):
    storage = LocalStorage(str(tmp_path))

    def attempt(rank, values, patience=60.0):
        joining = joining_of(storage, TEN.name, metadata, rank, patience)
        joining.write([values])
        return joining.commit()

    assert not attempt(0, parts()[0])
    with storage.hold(TEN.name):
        for _ in range(2):
            with pytest.raises(CheckpointError, match="others held it"):
                attempt(1, parts()[1], 0.05)
    files = sorted((tmp_path / TEN.name).glob("*.safetensors"))
    before = [os.stat(file).st_ino for file in files]
    for rank in range(2):
        with pytest.raises(ArgumentError, match="and not the same"):
            attempt(rank, parts(1)[rank])
    assert attempt(0, parts()[0])
    assert [os.stat(file).st_ino for file in files] == before
    np.testing.assert_array_equal(fc.checkpoint.read(tmp_path)["w"], np.arange(8, dtype="f4"))
    with pytest.raises(ArgumentError, match="is a committed checkpoint"):
        attempt(1, parts()[1])


def test_a_commit_that_failed_can_be_called_again(tmp_path, metadata):
    first = joining_of(LocalStorage(str(tmp_path)), TEN.name, metadata, 0)
    first.write([parts()[0]])

    class Failing(LocalStorage):
        def put(self, name, data):
            if name.endswith(self.fails):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().put(name, data)

    storage = Failing(str(tmp_path))
    for fails in (METADATA_NAME, MARKER_NAME):
        storage.fails = fails
        last = joining_of(storage, TEN.name, metadata, 1)
        last.write([parts()[1]])
        with pytest.raises(OSError, match="space"):
            last.commit()
    storage.fails = "nothing"
    for left in (METADATA_NAME, MARKER_NAME):  # by a process that was killed
        (tmp_path / TEN.name / left).write_bytes(b"")
        last = joining_of(storage, TEN.name, metadata, 1)
        with pytest.raises(ArgumentError, match="and not the same"):
            last.write([parts(1)[1]])
        last.write([parts()[1]])
    assert last.commit()
    np.testing.assert_array_equal(fc.checkpoint.read(tmp_path)["w"], np.arange(8, dtype="f4"))


# Processes that are forked while a folder is held.

FORKING = """
import os, sys
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
storage = LocalStorage(sys.argv[1])
storage.make_directory("d")
ended, end = os.pipe()
told = []


def held(name):
    with storage.claim(name) as claimed:
        return not claimed


for enter in (storage.hold, storage.claim):
    with enter("d"):
        child = os.fork()
        if not child:
            os.close(end)
            os.read(ended, 1)  # until its parent ends
            os._exit(0)
    told.append(held("d"))
with storage.hold("d"):
    child = os.fork()
    if not child:
        sys.exit()
    os.waitpid(child, 0)
    told.append(held("d"))
print(told)
"""


def test_a_forked_process_keeps_no_lock_and_takes_none_away(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORKING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[False, False, True]\n", "")


# What is told of folders that stay.


def test_what_could_not_be_removed_or_is_held_is_told(tmp_path):
    save(tmp_path, 10, 1)
    for step in (1, 2):
        (tmp_path / StepName(step).name).mkdir()
        (tmp_path / StepName(step).name / "x").write_bytes(b"")

    class Refusing(Files):
        def unlink(self, path, *, dir_fd=None):
            if path == "x":
                raise OSError(errno.EACCES, "refused", path)
            super().unlink(path, dir_fd=dir_fd)

    storage = LocalStorage(str(tmp_path), Refusing())
    retention = fc.checkpoint.Retention(last=1)
    with storage.hold(TEN.name), storage.hold(StepName(2).name):
        saved = save(storage, 20, 2, retention=retention)
    assert saved[0].notes == saved[1].notes
    assert [note.partition(":")[0] for note in saved[0].notes] == [
        f"{StepName(1).name} could not be removed",
        f"{StepName(2).name} was not removed",
        f"{TEN.name} was not removed",
    ]
    assert found(tmp_path) == 2


def test_what_could_not_be_removed_stops_nothing_else(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, 1)

    class Refusing(Files):
        def rmdir(self, path, *, dir_fd=None):
            if path == TEN.name:
                raise OSError(errno.EIO, "refused", path)
            super().rmdir(path, dir_fd=dir_fd)

    storage = LocalStorage(str(tmp_path), Refusing())
    saved = save(storage, 40, 4, retention=fc.checkpoint.Retention(last=1))
    assert [note.partition(":")[0] for note in saved[0].notes] == [
        f"{TEN.name} could not be removed"
    ]
    assert fc.checkpoint.steps(tmp_path) == [40]


# What one process does takes no communication.


def imported(module):
    """All modules of this folder that one imports, directly or not; and what those import."""
    known, todo = set(), [module]
    while todo:
        each = todo.pop()
        if each in known:
            continue
        known.add(each)
        if each.startswith("fsdpcore.checkpoint."):
            tree = ast.parse(Path(importlib.util.find_spec(each).origin).read_text())
            todo += [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    return known


@pytest.mark.parametrize(
    "name",
    [
        "save.step_folder",
        "save.rank_save",
        "interchange.step_writer",
        "interchange.importing",
        "interchange.rewrite",
    ],
)
def test_one_process_needs_no_collectives(name):
    known = imported(f"fsdpcore.checkpoint.{name}")
    assert "fsdpcore.checkpoint.save.step_folder" in known
    talking = {"fsdpcore.checkpoint.save.commit", "fsdpcore.checkpoint.load.shared_reads"}
    assert known.isdisjoint(talking)
    assert not [each for each in known if each.startswith("fsdpcore.collectives")]


# What rank 0 knows of the files of others.

CUTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["float64", "int8", "complex128"]),
        st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=4),
    ),
    unique_by=lambda each: each[0],
    max_size=3,
)
ROW = 20_000


@given(CUTS)
def test_rank_0_knows_the_files_as_their_ranks_lay_them_out(cuts):
    """Of arrays that ranks have rows of, some as boxes."""
    holdings = [[], [], []]
    for name, dtype, rows in cuts:
        shape = (len(rows), ROW)
        for rank, mine in enumerate(holdings):
            regions = [
                Box((row, 0), (row + 1, ROW)) if boxed else Range(row * ROW, (row + 1) * ROW)
                for row, (owner, boxed) in enumerate(rows)
                if owner == rank
            ]
            pieces = tuple(held_piece(region, shape) for region in reversed(regions))
            mine.append(HeldArray(name, dtype, shape, pieces))
    made = plan(holdings)
    table = made.table
    blocks = np.diff(table.blocks(BLOCK_BYTES)[table.begins])
    for file, rank in enumerate(made.writers):
        pieces = decode_written(made.encode(rank), holdings[rank])
        assert pieces == made.of(rank)
        layout = lay_out(pieces[::-1], "id", rank)
        places, at = layout.places, len(layout.header)
        assert places.pieces == pieces
        starts = np.zeros(len(made.writers), np.int64)
        starts[file] = at
        begin, end = table.begins[file : file + 2]
        assert tuple(table.offsets(starts)[begin:end]) == places.offsets
        assert places.table == at + table.data[file]
        assert places.size == places.table + 8 * blocks[file]
    assert sum(len(rows) for _, _, rows in cuts) == len(table)


def test_what_was_just_saved_is_not_read_again_to_remove_others(tmp_path):
    save(tmp_path, 10, 1)
    read = []

    class Told(LocalStorage):
        def read(self, name, limit):
            read.append(name)
            return super().read(name, limit)

    save(Told(str(tmp_path)), 20, 2, retention=fc.checkpoint.Retention(last=1))
    assert f"{TWENTY.name}/{MARKER_NAME}" in read
    assert not [name for name in read if name.endswith(METADATA_NAME)]
    assert fc.checkpoint.steps(tmp_path) == [20]
    assert whole(2).keys() == fc.checkpoint.read(tmp_path).keys()


def test_the_first_error_of_an_attempt_is_kept() -> None:
    attempt = LocalAttempt()
    for error in (ArgumentError("first"), CheckpointError("second")):
        with attempt:
            raise error
    assert attempt.value(lambda: 1, 2) == 2
    assert str(attempt.error) == "first"


def test_an_error_that_ranks_have_agreed_on_says_once_where_it_was() -> None:
    def body(backend: fc.Backend) -> str:
        error: Exception | None = ArgumentError("no") if backend.rank == 0 else None
        for what, ranks in (("inner", 3), ("outer", 2)):
            try:
                agree(backend, what, error if backend.rank < ranks else None)
            except ArgumentError as raised:
                error = raised
        return str(error)

    assert fc.launch(body, world_size=3) == ["outer: inner: no (on rank 0)"] * 3
