"""Local storage: all is written and read, nothing strange is followed, opened or waited for."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.ckpt_disk import Disk, DiskFiles, Fault
from support.ckpt_steps import held

from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.opening import open_storage
from fsdpcore.core.errors import ArgumentError

HOSTILE = [
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../x",
    "d/..",
    "d/../x",
    "d/",
    "/d",
    "d//x",
    "d/e/x",
    "x\0y",
    "d/x\0",
    "\ud800",
    None,
    b"x",
    7,
]


@pytest.fixture
def storage(tmp_path):
    made = LocalStorage(str(tmp_path / "root"))
    made.prepare()
    return made


def filled(storage, name="d/x", data=b"0123456789"):
    if "/" in name and name.split("/")[0] not in storage.names():
        storage.make_directory(name.split("/")[0])
    storage.put(name, data)
    return name


class Stingy(Files):
    """Moves at most ``most`` bytes a call, and takes at most IOV_MAX buffers."""

    def __init__(self, most=3):
        self.most = most

    def _some(self, buffers):
        assert len(buffers) <= os.sysconf("SC_IOV_MAX")
        left = []
        room = self.most
        for each in buffers:
            view = memoryview(each).cast("B")[:room]
            room -= view.nbytes
            left.append(view)
        return left

    def writev(self, fd, buffers):
        return super().writev(fd, self._some(buffers))

    def preadv(self, fd, buffers, offset):
        return super().preadv(fd, self._some(buffers), offset)


def test_what_is_written_is_read(storage):
    storage.make_directory("d")
    with storage.writer("d/x") as writer:
        writer.write(b"01", bytearray(b"234"), memoryview(b"56"))
        writer.write()
        writer.write(b"")
        writer.write(b"789")
        assert writer.written == 10
    assert storage.size("d/x") == 10
    with storage.reader("d/x") as reader:
        one, two, three = bytearray(2), bytearray(0), memoryview(bytearray(5))
        reader.read_into(3, one, two, three)
        assert (reader.size, bytes(one), bytes(three)) == (10, b"34", b"56789")
        reader.read_into(10)
    assert storage.read("d/x", 10) == b"0123456789"
    assert storage.names() == ["d"]
    assert storage.names("d") == ["x"]


def test_short_reads_and_writes_are_continued(tmp_path):
    storage = LocalStorage(str(tmp_path), Stingy())
    data = [bytes([65 + number]) * (number % 5) for number in range(26)]
    with storage.writer("x") as writer:
        writer.write(*data)
        assert writer.written == sum(map(len, data))
    assert (tmp_path / "x").read_bytes() == b"".join(data)
    parts = [bytearray(len(each)) for each in data]
    with storage.reader("x") as reader:
        reader.read_into(0, *parts)
    assert parts == data


def test_more_buffers_than_a_call_takes(tmp_path):
    storage = LocalStorage(str(tmp_path), Stingy(most=1 << 20))
    count = 2 * os.sysconf("SC_IOV_MAX") + 3
    data = [number.to_bytes(4, "little") for number in range(count)]
    with storage.writer("x") as writer:
        writer.write(*data)
    parts = [bytearray(4) for _ in data]
    with storage.reader("x") as reader:
        reader.read_into(0, *parts)
    assert parts == data


def test_buffers_may_have_any_format(storage):
    numbers = memoryview(bytearray(range(48))).cast("d", (2, 3))
    with storage.writer("x") as writer:
        writer.write(numbers)
    back = memoryview(bytearray(48)).cast("d", (3, 2))
    with storage.reader("x") as reader:
        reader.read_into(0, back)
    assert bytes(back) == bytes(range(48))


def test_buffers_of_any_format_that_are_moved_bit_by_bit():
    storage = LocalStorage("/", DiskFiles(Disk(), Fault(0, "short", stays=True)))
    numbers = memoryview(bytearray(range(48))).cast("d", (2, 3))
    with storage.writer("x") as writer:
        writer.write(b"a", numbers)
        assert writer.written == 49
    back = memoryview(bytearray(48)).cast("d", (3, 2))
    with storage.reader("x") as reader:
        reader.read_into(1, back)
    assert bytes(back) == bytes(range(48))


def test_the_end_of_a_file_is_named(storage):
    filled(storage)
    with storage.reader("d/x") as reader, pytest.raises(EOFError, match=r"d/x ends at byte 10; 4 "):
        reader.read_into(8, bytearray(1), bytearray(3))


def test_a_file_that_is_larger_than_the_limit(storage):
    filled(storage)
    with pytest.raises(OSError, match="has 10 bytes, at most 9") as caught:
        storage.read("d/x", 9)
    assert caught.value.errno == errno.EFBIG


def test_a_file_can_be_read_by_several_threads(storage):
    data = os.urandom(1 << 16)
    filled(storage, data=data)
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


def test_names_are_taken_once(storage):
    filled(storage)
    for attempt in (storage.writer, lambda name: storage.put(name, b"")):
        with pytest.raises(FileExistsError):
            attempt("d/x")
    for taken in ("d", "y"):
        if taken == "y":
            storage.put("y", b"")
        with pytest.raises(FileExistsError):
            storage.make_directory(taken)
    assert storage.read("d/x", 10) == b"0123456789"


def test_modes_follow_the_umask(storage, tmp_path):
    old = os.umask(0o027)
    try:
        filled(storage)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "root/d/x").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "root/d").stat().st_mode) == 0o750


def test_nothing_is_there(storage):
    assert storage.names("d") == []
    assert LocalStorage(storage.path + "/none").names() == []
    for attempt in (storage.size, storage.reader, storage.remove, storage.remove_directory):
        with pytest.raises(FileNotFoundError):
            attempt("d")
    with pytest.raises(FileNotFoundError):
        storage.writer("d/x")


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_a_name_is_a_plain_basename(storage, name):
    filled(storage)
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
    if name:
        with pytest.raises(ArgumentError, match="plain basename"):
            storage.names(name)


def odd_files(folder: Path) -> list[str]:
    """Make what is no regular file, and return the names."""
    (folder / "target").write_bytes(b"secret")
    (folder / "inner").mkdir()
    (folder / "to_file").symlink_to("target")
    (folder / "to_dir").symlink_to("inner")
    (folder / "to_nothing").symlink_to("nothing")
    (folder / "to_null").symlink_to("/dev/null")
    os.mkfifo(folder / "fifo")
    return ["inner", "to_file", "to_dir", "to_nothing", "to_null", "fifo"]


def test_only_regular_files_are_opened(storage, tmp_path):
    """That a FIFO makes nobody wait is tested by this one's ending."""
    storage.make_directory("d")
    names = odd_files(tmp_path / "root/d")
    for name in names:
        for attempt in (storage.size, storage.reader, lambda each: storage.read(each, 100)):
            with pytest.raises(OSError, match=name) as caught:
                attempt(f"d/{name}")
            assert not isinstance(caught.value, FileNotFoundError)
        with pytest.raises(FileExistsError):
            storage.writer(f"d/{name}")
    assert not (tmp_path / "root/d/nothing").exists()


def test_a_link_is_no_directory(storage, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"keep")
    (tmp_path / "root/link").symlink_to(outside)
    for attempt in (
        lambda: storage.names("link"),
        lambda: storage.size("link/x"),
        lambda: storage.reader("link/x"),
        lambda: storage.writer("link/y"),
        lambda: storage.remove("link/x"),
        lambda: storage.remove_directory("link"),
        lambda: storage.sync("link"),
        lambda: held(storage, "link"),
    ):
        with pytest.raises(OSError, match="link") as caught:
            attempt()
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    assert os.listdir(outside) == ["x"]


def test_links_are_removed_and_not_followed(storage, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"keep")
    filled(storage)
    (tmp_path / "root/d/dir").symlink_to(outside)
    (tmp_path / "root/d/file").symlink_to(outside / "x")
    os.mkfifo(tmp_path / "root/d/fifo")
    storage.remove("d/file")
    storage.remove_directory("d")
    assert storage.names() == []
    assert (outside / "x").read_bytes() == b"keep"


def test_directories_in_a_directory_are_not_removed(storage, tmp_path):
    filled(storage)
    (tmp_path / "root/d/inner").mkdir()
    (tmp_path / "root/d/inner/y").write_bytes(b"keep")
    with pytest.raises(OSError, match="not empty") as caught:
        storage.remove_directory("d")
    assert caught.value.errno == errno.ENOTEMPTY
    assert (tmp_path / "root/d/inner/y").read_bytes() == b"keep"


def test_the_root_may_be_reached_through_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    storage = LocalStorage(str(tmp_path / "link"))
    storage.prepare()
    filled(storage)
    assert (tmp_path / "real/d/x").exists()


def test_the_root_stays_where_it_was_when_the_process_moves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("runs/a")
    storage.prepare()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    filled(storage)
    assert (tmp_path / "runs/a/d/x").exists()


def test_the_root_is_no_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        LocalStorage(str(tmp_path / "file")).prepare()
    with pytest.raises(OSError, match="file"):
        LocalStorage(str(tmp_path / "file/below")).prepare()
    (tmp_path / "link").symlink_to("nothing")
    with pytest.raises(FileExistsError):
        LocalStorage(str(tmp_path / "link")).prepare()


def test_a_writer_that_is_discarded_leaves_nothing(storage):
    storage.make_directory("d")
    writer = storage.writer("d/x")
    writer.write(b"0")
    writer.discard()
    writer.discard()
    assert storage.names("d") == []

    def fails():
        with storage.writer("d/y") as writer:
            writer.write(b"0")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert storage.names("d") == []


def test_a_writer_that_was_closed_is_not_discarded(storage):
    writer = storage.writer("x")
    writer.write(b"0")
    writer.close()
    writer.close()
    writer.discard()
    assert storage.read("x", 1) == b"0"


@pytest.mark.parametrize("call", ["writev", "fsync"])
@pytest.mark.parametrize("kind", ["ENOSPC", "EIO"])
def test_a_file_that_could_not_be_written_is_gone(call, kind):
    files = DiskFiles(Disk(), Fault(0, kind, (call,), on="x"))
    storage = LocalStorage("/run", files)
    storage.prepare()
    with pytest.raises(OSError, match="/x") as caught:
        storage.put("x", b"0123456789")
    assert caught.value.errno == getattr(errno, kind)
    assert files.hit
    assert storage.names() == []
    assert files.open_files == []


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "EACCES", "short"])
def test_whatever_fails_nothing_stays_open(kind):
    """At every call in turn; and what was not refused is right."""

    def session(files):
        storage = LocalStorage("/a/run", files)
        storage.prepare()
        storage.make_directory("d")
        with storage.hold("d"):
            storage.put("d/x", b"0123456789")
            storage.sync("d")
            assert held(storage, "d")
        assert storage.size("d/x") == 10
        assert storage.read("d/x", 10) == b"0123456789"
        storage.remove("d/x")
        storage.remove_directory("d")
        assert storage.names() == []

    counting = DiskFiles(Disk(), Fault(-1, kind))
    session(counting)
    refused = 0
    for at in range(counting.counted):
        files = DiskFiles(Disk(), Fault(at, kind))
        try:
            session(files)
        except OSError as error:
            assert error.errno == getattr(errno, kind, None)  # noqa: PT017
            refused += 1
        assert files.hit
        assert files.open_files == []
    # Discarding and unlocking pass over errors: closing does the rest.
    assert refused >= (0 if kind == "short" else counting.counted - 4)


def test_no_descriptor_is_left_open(storage):
    before = len(os.listdir("/proc/self/fd"))
    test_what_is_written_is_read(storage)
    with pytest.raises(OSError, match="directory"):
        storage.reader("d")
    with pytest.raises(FileNotFoundError):
        storage.reader("d/none")
    storage.remove_directory("d")
    assert len(os.listdir("/proc/self/fd")) == before


def test_directories_are_made_durable_from_the_top():
    files = DiskFiles(Disk())
    LocalStorage("/a/b/c", files).prepare()
    changes = [each for each in files.log if each.split()[0] in ("mkdir", "fsync")]
    assert changes == [
        "fsync /",
        "mkdir /a",
        "fsync /",
        "mkdir /a/b",
        "fsync /a",
        "mkdir /a/b/c",
        "fsync /a/b",
    ]


class CannotSync(Files):
    def __init__(self, number):
        self.number = number

    def fsync(self, fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(self.number, "cannot")
        super().fsync(fd)


def test_a_file_system_that_cannot_sync_directories(tmp_path):
    storage = LocalStorage(str(tmp_path / "root"), CannotSync(errno.EINVAL))
    storage.prepare()
    filled(storage)
    storage.sync("d")
    failing = LocalStorage(str(tmp_path / "root"), CannotSync(errno.EIO))
    with pytest.raises(OSError, match="cannot"):
        failing.sync("d")


def test_a_directory_is_held_until_all_have_left_it(storage):
    storage.make_directory("d")
    assert storage.locks
    assert not held(storage, "d")
    with storage.hold("d"):
        with storage.hold("d"), storage.claim("d") as claimed:
            assert not claimed
        assert held(storage, "d")
    assert not held(storage, "d")
    with storage.claim("d") as claimed:
        assert claimed
        assert held(storage, "d")
    assert not held(storage, "d")


def test_a_process_that_dies_lets_go(storage):
    storage.make_directory("d")
    source = (
        "import sys; from fsdpcore.checkpoint.storage.local_storage import LocalStorage\n"
        "with LocalStorage(sys.argv[1]).hold('d'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source, storage.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"held\n"
        assert held(storage, "d")
        process.kill()
        process.wait()
    assert not held(storage, "d")


def test_what_was_removed_meanwhile_cannot_be_held(storage):
    storage.make_directory("d")
    caught = []

    class Waiting(Files):
        def flock(self, fd, operation):
            waiting.set()
            super().flock(fd, operation)

    waiting = threading.Event()
    other = LocalStorage(storage.path, Waiting())

    def enter():
        try:
            with other.hold("d"):
                pass
        except FileNotFoundError as error:
            caught.append(error)

    thread = threading.Thread(target=enter)
    with storage.claim("d") as claimed:
        assert claimed
        thread.start()
        waiting.wait()
        storage.remove_directory("d")
    thread.join()
    assert len(caught) == 1


class Late(Files):
    """Lets another process change something before a directory is locked that is open already."""

    def __init__(self, change):
        self.change = change

    def flock(self, fd, operation):
        if operation != fcntl.LOCK_UN:
            self.change()
        super().flock(fd, operation)


@pytest.mark.parametrize("again", [False, True], ids=["removed", "made again"])
@pytest.mark.parametrize("verb", ["hold", "claim"])
def test_a_lock_on_what_was_removed_is_none(storage, verb, again):
    def change():
        os.rmdir(f"{storage.path}/d")
        if again:
            os.mkdir(f"{storage.path}/d")

    storage.make_directory("d")
    late = LocalStorage(storage.path, Late(change))
    with pytest.raises(FileNotFoundError), getattr(late, verb)("d"):
        pass
    assert storage.names() == (["d"] if again else [])
    assert not again or not held(storage, "d")


class CannotLock(Files):
    def flock(self, fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_file_system_without_locks(tmp_path):
    storage = LocalStorage(str(tmp_path), CannotLock())
    storage.make_directory("d")
    with storage.hold("d"), storage.claim("d") as claimed:
        assert claimed


def test_paths_become_storages(tmp_path, storage):
    assert open_storage(storage) is storage
    for path in (tmp_path, str(tmp_path)):
        opened = open_storage(path)
        assert isinstance(opened, LocalStorage)
        assert opened.path == str(tmp_path)
    assert not (tmp_path / "none").exists()
    for path in (None, 3, b"/tmp", "", "a\0b"):
        with pytest.raises(ArgumentError, match="a place for checkpoints"):
            open_storage(path)


def test_locks_are_those_of_flock(storage, tmp_path):
    storage.make_directory("d")
    fd = os.open(tmp_path / "root/d", os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert held(storage, "d")
    finally:
        os.close(fd)
