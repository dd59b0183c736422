"""Object stores through fsspec: the same names, errors and commit, without directories or locks."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading

import pytest
from support.ckpt_steps import FILE, commit, held, whole, write

from fsdpcore.checkpoint.format.marker import MARKER_NAME
from fsdpcore.checkpoint.load.finding import find, latest
from fsdpcore.checkpoint.storage.object_storage import FsspecStorage
from fsdpcore.checkpoint.storage.opening import open_storage
from fsdpcore.checkpoint.storage.removal import remove_leftovers, remove_step
from fsdpcore.checkpoint.storage.retention import Retention, prune
from fsdpcore.checkpoint.storage.steps import StepName, directories, new_step, steps
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingDependencyError,
)

fsspec = pytest.importorskip("fsspec")

TEN, TWENTY = StepName(10), StepName(20)
NUMBERS = itertools.count()


def flat_store():
    """fsspec's store in memory, without directories: as object stores are."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Flat(MemoryFileSystem):
        protocol = "flat"
        cachable = False

        def mkdir(self, path, create_parents=True, **options):
            pass

        def makedirs(self, path, exist_ok=False):
            pass

        def rmdir(self, path):
            raise FileExistsError(path)

    return Flat(global_store=False) if _has_own_store() else Flat()


def _has_own_store():
    from inspect import signature

    from fsspec.implementations.memory import MemoryFileSystem

    return "global_store" in signature(MemoryFileSystem.__init__).parameters


@pytest.fixture(params=["memory", "file", "flat"])
def storage(request, tmp_path):
    url = f"memory://run{next(NUMBERS)}/ckpt"
    made = FsspecStorage(f"file://{tmp_path}/run/ckpt" if request.param == "file" else url)
    if request.param == "flat":
        made._system = flat_store()
    made.prepare()
    yield made
    if request.param == "memory":
        made._system.rm(made._root, recursive=True)


def filled(storage, data=b"0123456789"):
    storage.make_directory("d")
    storage.put("d/x", data)


def test_urls_become_storages(tmp_path):
    for url in ("memory://a/b", f"file://{tmp_path}/a"):
        opened = open_storage(url)
        assert isinstance(opened, FsspecStorage)
        assert opened.path == url
        assert not opened.locks
    with pytest.raises(ArgumentError, match="none://x"):
        open_storage("none://x")


def test_what_is_written_is_read(storage):
    storage.make_directory("d")
    with storage.writer("d/x") as writer:
        writer.write(b"01", bytearray(b"234"), memoryview(b"56"))
        writer.write()
        writer.write(b"", memoryview(bytearray(16)).cast("d", (1, 2)), b"789")
        assert writer.written == 26
    writer.close()
    writer.discard()
    assert storage.size("d/x") == 26
    with storage.reader("d/x") as reader:
        one, two, three = bytearray(2), bytearray(0), memoryview(bytearray(16)).cast("d", (2, 1))
        reader.read_into(5, one, two, three)
        assert (reader.size, bytes(one), bytes(three)) == (26, b"56", bytes(16))
        reader.read_into(26)
    assert storage.read("d/x", 26) == b"0123456" + bytes(16) + b"789"
    assert storage.names() == ["d"]
    assert storage.names("d") == ["x"]


def test_large_reads_are_cut_into_requests(storage, monkeypatch):
    monkeypatch.setattr("fsdpcore.checkpoint.storage.object_storage._REQUEST_BYTES", 100)
    data = os.urandom(1000)
    filled(storage, data)
    asked = []
    system, original = storage._system, storage._system.cat_file

    def cat_file(path, start=None, end=None):
        asked.append((start, end))
        return original(path, start=start, end=end)

    monkeypatch.setattr(system, "cat_file", cat_file)
    parts = [bytearray(size) for size in (30, 50, 0, 250, 20, 1)]
    with storage.reader("d/x") as reader:
        reader.read_into(7, *parts)
    assert b"".join(parts) == data[7:358]
    assert asked == [(7, 107), (107, 207), (207, 307), (307, 358)]


def test_the_end_of_an_object_is_named(storage):
    filled(storage)
    with storage.reader("d/x") as reader, pytest.raises(EOFError, match="d/x ends before byte 12"):
        reader.read_into(8, bytearray(1), bytearray(3))
    with pytest.raises(OSError, match="at most 9") as caught:
        storage.read("d/x", 9)
    assert caught.value.errno == errno.EFBIG


def test_names_are_taken_once(storage):
    filled(storage)
    for attempt in (
        lambda: storage.writer("d/x"),
        lambda: storage.put("d/x", b"1"),
        lambda: storage.make_directory("d"),
    ):
        with pytest.raises(FileExistsError):
            attempt()
    assert storage.read("d/x", 10) == b"0123456789"


def test_nothing_is_there(storage):
    assert storage.names("d") == []
    for attempt in (storage.size, storage.reader, storage.remove):
        with pytest.raises(FileNotFoundError):
            attempt("d/x")


@pytest.mark.parametrize("name", ["..", "../x", "/x", "d/../x", "d/e/x", "x\0", "", None], ids=repr)
def test_a_name_is_a_plain_basename(storage, name):
    for attempt in (
        storage.size,
        storage.reader,
        storage.writer,
        storage.remove,
        storage.make_directory,
        storage.remove_directory,
    ):
        with pytest.raises(ArgumentError, match="plain basename"):
            attempt(name)


def test_names_are_no_patterns(storage):
    filled(storage)
    storage.put("d/[x]", b"1")
    storage.put("d/*", b"2")
    storage.remove("d/*")
    assert storage.names("d") == ["[x]", "x"]


def test_a_directory_is_no_file(storage):
    filled(storage)
    for attempt in (storage.size, storage.reader):
        with pytest.raises(IsADirectoryError):
            attempt("d")


def test_links_and_fifos_of_local_files(tmp_path):
    storage = FsspecStorage(f"file://{tmp_path}")
    filled(storage)
    (tmp_path / "d/link").symlink_to("x")
    os.mkfifo(tmp_path / "d/fifo")
    for name in ("d/link", "d/fifo"):
        with pytest.raises(OSError, match=name):
            storage.reader(name)


def test_what_is_discarded_is_gone(storage):
    storage.make_directory("d")
    writer = storage.writer("d/x")
    writer.write(b"0")
    writer.discard()
    writer.discard()
    assert storage.names("d") == []


def test_directories_go(storage):
    filled(storage)
    storage.put("d/y", b"1")
    storage.remove("d/y")
    storage.remove_directory("d")
    assert storage.names() == []
    storage.make_directory("d")
    with storage.hold("d"), storage.claim("d") as claimed:
        assert claimed
    assert not held(storage, "d")


def test_an_object_can_be_read_by_several_threads(storage):
    data = os.urandom(1 << 14)
    filled(storage, data)
    wrong = []
    with storage.reader("d/x") as reader:

        def read(first):
            for start in range(first, len(data), 256 * 4):
                part = bytearray(256)
                reader.read_into(start, part)
                if part != data[start : start + 256]:
                    wrong.append(start)

        threads = [threading.Thread(target=read, args=(256 * each,)) for each in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert wrong == []


def test_errors_of_other_kinds_become_oserror(storage, monkeypatch):
    class StoreError(Exception):
        pass

    def fails(*args, **options):
        raise StoreError("slow down")

    filled(storage)
    reader = storage.reader("d/x")
    for name in ("cat_file", "info", "open", "ls", "exists"):
        monkeypatch.setattr(storage._system, name, fails)
    for attempt in (
        lambda: reader.read_into(0, bytearray(1)),
        lambda: storage.size("d/x"),
        lambda: storage.writer("d/y"),
        lambda: storage.make_directory("e"),
        storage.names,
    ):
        with pytest.raises(OSError, match="StoreError: slow down") as caught:
            attempt()
        assert caught.value.errno == errno.EIO


def test_checkpoints_come_and_go(storage: Storage):
    with pytest.raises(CheckpointNotFoundError):
        latest(storage)
    for step in (10, 20, 30, 40):
        commit(storage, StepName(step), {"loss": float(step)})
    assert (latest(storage).step, steps(storage)) == (40, [10, 20, 30, 40])
    assert prune(storage, Retention(last=1, best=1, metric="loss")).removed == [
        TWENTY,
        StepName(30),
    ]
    assert directories(storage) == [StepName(40), TEN]
    assert remove_step(storage, StepName(40))
    found, skipped = find(storage)
    assert (found.name, skipped) == (TEN, ())
    assert whole(storage, TEN)


def test_an_object_that_is_missing_or_short(storage):
    for name in (TEN, TWENTY):
        commit(storage, name)
    storage.remove(f"{TWENTY.name}/{FILE}")
    assert latest(storage).step == 10
    storage.put(f"{TWENTY.name}/{FILE}", b"short")
    assert "has 5 bytes" in latest(storage).skipped[0].reason
    storage.remove(f"{TEN.name}/{FILE}")
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        latest(storage)


def test_leftovers_are_removed(storage):
    commit(storage, TEN)
    for name in (TWENTY, StepName(30)):
        storage.make_directory(name.name)
        write(storage, name)
    assert remove_leftovers(storage, keep=[StepName(30)]) == ([TWENTY], [], [])
    assert directories(storage) == [StepName(30), TEN]


def test_a_step_again(storage):
    commit(storage, TEN)
    name = new_step(storage, 10)
    assert name == StepName(10, 1)
    assert MARKER_NAME not in storage.names(name.name)


def test_fsspec_is_not_installed(monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "fsspec":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"fsdpcore\[objects\]"):
        open_storage("memory://x")


def test_the_package_for_a_store_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingDependencyError, match="Install s3fs"):
        open_storage("s3://bucket/run")
