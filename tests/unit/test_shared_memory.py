"""Memory that processes share, seen from one process: what it gives, keeps, and gives back."""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fsdpcore.transports.memory import shared as shared_memory
from fsdpcore.transports.memory.shared import SharedMemory
from fsdpcore.transports.zmq.options import ZmqOptions
from support.jobs import finished, python

import fsdpcore as fc

pytestmark = pytest.mark.skipif(
    not SharedMemory.available, reason="this system has no memfd_create"
)

LINE, PAGE = 64, mmap.PAGESIZE


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory()
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[SharedMemory]:
    made = SharedMemory()
    yield made
    made.close()


def descriptors() -> list[str]:
    """What this process has open of such memory."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if "memfd:fsdpcore" in target:
            found.append(target)
    return found


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def empty(memory: SharedMemory, nbytes: int) -> Any:
    made = memory.empty(nbytes)
    assert made is not None
    return made


# Arrays.


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, PAGE - 1, PAGE, PAGE + 1, 9 << 20])
def test_an_array_of_any_size(memory: SharedMemory, nbytes: int) -> None:
    array = empty(memory, nbytes)
    assert array.shape == (nbytes,)
    assert array.dtype == np.uint8
    assert address(array) % (PAGE if nbytes >= PAGE else LINE) == 0
    array[...] = 7
    assert array.flags.writeable
    assert array.sum() == 7 * nbytes


def test_arrays_that_live_at_the_same_time_do_not_overlap(memory: SharedMemory) -> None:
    arrays = [empty(memory, 37 * number) for number in range(200)]
    for number, array in enumerate(arrays):
        array[...] = number % 251
    for number, array in enumerate(arrays):
        assert (array == number % 251).all()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda a: a[8:16],
    "slice of a slice": lambda a: a[8:][8:][::2],
    "dtype": lambda a: a.view(np.float32).reshape(2, -1)[1:].T,
    "bfloat16": lambda a: a.view(ml_dtypes.bfloat16)[3:],
    "subclass": lambda a: a.view(np.recarray),
    "broadcast": lambda a: np.broadcast_to(a[:1], (5, 1)),
    "memoryview": lambda a: memoryview(a)[4:],
    "array of a memoryview": lambda a: np.asarray(memoryview(a))[4:],
    "frombuffer": lambda a: np.frombuffer(a, np.int16),
    "strided": lambda a: np.lib.stride_tricks.as_strided(a, (3, 3), (1, 1)),
    "ctypes": lambda a: a.ctypes.data_as(ctypes.c_void_p),
    "dlpack": lambda a: np.from_dlpack(a),
    "iterator": lambda a: a.flat,
}


@pytest.fixture
def young() -> Iterator[None]:
    """Only ``gc.collect`` collects, so that what is made last is in the youngest generations.

    Full collections look at all that is alive, which takes longer than the rest of a test.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_view_keeps_the_memory_and_its_end_gives_it_back(
    memory: SharedMemory, young: None
) -> None:
    for name, make in VIEWS.items():
        array = empty(memory, 4096)
        array[...] = 1
        where = address(array)
        view = make(array)
        del array
        gc.collect(0)
        beside = [empty(memory, 4096) for _ in range(5)]
        assert where not in {address(a) for a in beside}, name
        del view
        gc.collect(1)
        assert address(empty(memory, 4096)) == where, name
        del beside


def test_taking_and_dropping_grows_nothing(memory: SharedMemory) -> None:
    sizes = [10, 5000, 1 << 20, 3 << 20, 6 << 20, 77]
    for size in sizes:
        empty(memory, size)
    before = memory._pool.nbytes, len(descriptors())
    for number in range(2000):
        empty(memory, sizes[number % len(sizes)])
    assert (memory._pool.nbytes, len(descriptors())) == before


def test_segments_grow_with_what_is_in_use(memory: SharedMemory) -> None:
    """So that many arrays need few descriptors."""
    arrays = [empty(memory, 1 << 20) for _ in range(200)]
    assert len(memory._segments) <= 8
    assert memory._pool.nbytes < 3 * len(arrays) << 20


def test_threads_take_and_drop_at_the_same_time(memory: SharedMemory) -> None:
    wrong = []

    def work(seed: int) -> None:
        kept: list[Any] = []
        for number in range(400):
            array = empty(memory, 64 + 37 * (number * seed % 50))
            array[...] = seed
            kept.append(array)
            if len(kept) > 10:
                first = kept.pop(number % 10)
                if not (first == seed).all():
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("nbytes", [2.5, "3", None])
def test_a_size_that_is_none_spoils_nothing(memory: SharedMemory, nbytes: Any) -> None:
    before = empty(memory, 100)
    with pytest.raises(TypeError):
        memory.empty(nbytes)
    after = empty(memory, 100)
    assert abs(address(after) - address(before)) >= 100


# Finding arrays from elsewhere.


def test_others_find_an_array_where_it_is(memory: SharedMemory, other: SharedMemory) -> None:
    other.meet(memory.introduce())
    memory.meet(other.introduce())
    for nbytes in (1, 5000, 5 << 20):
        array = empty(memory, nbytes)
        place = memory.locate(array)
        assert place is not None
        number, offset = place
        array[...] = 3
        seen = other.attach(number)[offset : offset + nbytes]
        assert address(seen) != address(array)
        assert (seen == 3).all()
        seen[0] = 9
        assert array[0] == 9
        assert memory.locate(array[nbytes - 1 :]) == (number, offset + nbytes - 1)
        assert other.locate(seen) == place  # what was borrowed can be lent on
        assert address(memory.attach(number)) + offset == address(array)


def test_private_memory_has_no_place(memory: SharedMemory) -> None:
    private = np.zeros(10)
    assert memory.locate(private) is None
    arrays = [empty(memory, 1 << 20) for _ in range(20)]
    assert memory.locate(private) is None
    assert memory.locate(np.zeros(1 << 20)) is None
    window = memory.segment(PAGE)
    assert memory.locate(window.bytes(0, 10)) is None
    window.close()
    del arrays


def test_a_segment_is_zeros_that_others_map_until_it_is_closed(
    memory: SharedMemory, other: SharedMemory
) -> None:
    other.meet(memory.introduce())
    window = memory.segment(10)
    seen = other.open(window.number)
    assert seen.tolist() == [0] * 10
    mine = window.bytes(0, 10)
    mine[3] = 4
    assert seen[3] == 4
    window.close()
    window.close()
    with pytest.raises(OSError, match=r".+"):
        other.open(window.number)
    del mine
    assert seen[3] == 4


@pytest.mark.parametrize("content", [bytes(16), b"\xff" * 16, bytes(64), b"\x01" + bytes(63)])
def test_an_introduction_of_nobody_is_refused(memory: SharedMemory, content: bytes) -> None:
    with pytest.raises(OSError, match=r".+"):
        memory.meet(content)


def test_a_process_number_of_another_container_is_refused(
    memory: SharedMemory, other: SharedMemory
) -> None:
    """The same process number, descriptor and serial, but another draw."""
    number, drawn = shared_memory._INTRODUCTION.unpack(other.introduce())
    with pytest.raises(OSError, match="different containers"):
        memory.meet(shared_memory._INTRODUCTION.pack(number, drawn ^ 1))
    with pytest.raises(OSError, match="different containers"):
        memory.open(number + 1)  # another serial


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_cannot_open_it(memory: SharedMemory) -> None:
    """It has no name but through /proc, which only lets in who may trace the process."""
    segment = memory.segment(10)
    path = f"/proc/{os.getpid()}/fd/{segment.descriptor}"
    code = f"import os; os.setuid({{}}); os.close(os.open({path!r}, os.O_RDWR))"
    for user, error in ((0, ""), (65534, "PermissionError")):
        ran = subprocess.run(
            [sys.executable, "-c", code.format(user)], capture_output=True, text=True, timeout=60
        )
        assert ran.stderr.strip().rpartition("\n")[2].partition(":")[0] == error
    segment.close()


# The end.


def test_closing_gives_everything_back_but_what_is_in_use() -> None:
    gc.collect()
    before = descriptors()
    memory, other = SharedMemory(), SharedMemory()
    other.meet(memory.introduce())
    array = empty(memory, 100)
    array[...] = 5
    place = memory.locate(array)
    assert place is not None
    borrowed = other.attach(place[0])
    memory.close()
    memory.close()
    assert (array == 5).all()
    assert borrowed[place[1]] == 5
    assert memory.locate(array) is None
    assert len(descriptors()) > len(before)
    del array
    other.close()
    del borrowed
    gc.collect()
    assert descriptors() == before


def test_after_the_end_memory_is_private(caplog: pytest.LogCaptureFixture) -> None:
    memory = SharedMemory()
    array = empty(memory, 100)
    memory.close()
    del array
    with caplog.at_level(logging.WARNING, "fsdpcore"):
        assert memory.empty(10) is None
        assert memory.empty(10) is None
    assert len(caplog.records) == 1
    assert "the backend is closed" in caplog.text


# Systems without enough of something.

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_DESCRIPTOR = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
NO_MEMORY = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
FAILURES = [
    ("os.memfd_create", NO_DESCRIPTOR),
    ("os.memfd_create", OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))),
    ("os.ftruncate", NO_SPACE),
    ("os.pwrite", NO_SPACE),
    ("mmap.mmap", NO_MEMORY),
]


def failing(error: OSError) -> Any:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(("call", "error"), FAILURES)
def test_without_memory_arrays_are_private_and_nothing_leaks(
    memory: SharedMemory,
    call: str,
    error: OSError,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = empty(memory, 3 << 20)
    before, size = sorted(descriptors()), memory._pool.nbytes
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "fsdpcore"):
        broken.setattr(call, failing(error))
        for _ in range(5):
            assert memory.empty(3 << 20) is None
        with pytest.raises(OSError, match=os.strerror(error.errno)):
            memory.segment(10)
        assert empty(memory, 10).size == 10  # of what there is
    assert sorted(descriptors()) == before
    assert memory._pool.nbytes == size
    (record,) = caplog.records
    assert "no shared memory for 3145728 bytes, private is used" in record.getMessage()
    assert os.strerror(error.errno) in record.getMessage()
    assert empty(memory, 3 << 20) is not None  # there is again
    assert kept.size == 3 << 20


@pytest.mark.parametrize("nbytes", [1 << 62, sys.maxsize, 1 << 70])
def test_more_than_there_can_be(memory: SharedMemory, nbytes: int) -> None:
    before = sorted(descriptors())
    assert memory.empty(nbytes) is None
    with pytest.raises(OSError, match=r".+"):
        memory.segment(nbytes)
    assert sorted(descriptors()) == before


@pytest.mark.parametrize(("call", "error"), [("os.open", NO_DESCRIPTOR), ("mmap.mmap", NO_MEMORY)])
def test_what_cannot_be_mapped_leaks_nothing(
    memory: SharedMemory,
    other: SharedMemory,
    call: str,
    error: OSError,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other.meet(memory.introduce())
    array = empty(memory, 100)
    place = memory.locate(array)
    assert place is not None
    before = sorted(descriptors())
    with monkeypatch.context() as broken:
        broken.setattr(call, failing(error))
        for action in (other.attach, other.open):
            with pytest.raises(OSError, match=os.strerror(error.errno)):
                action(place[0])
    assert sorted(descriptors()) == before
    assert other.attach(place[0]) is not None


def test_the_option_off_has_no_memory_at_all() -> None:
    none = shared_memory.memory_sharing("off")
    assert not none.available
    assert none.empty(10) is None
    for action in (none.introduce, lambda: none.segment(10)):
        with pytest.raises(OSError, match="shm=off"):
            action()
    none.close()
    with pytest.raises(fc.ConfigError, match="shm must be one of 'auto', 'on', 'off', got 'yes'"):
        ZmqOptions(shm="yes")


# Forked processes: of a process that has no other threads, unlike the one that runs the tests.

FORKED = """
import os
from fsdpcore.transports.memory.shared import SharedMemory
from fsdpcore.transports.zmq.options import ZmqOptions

memory = SharedMemory()
kept = [memory.empty(5000) for _ in range(4)]
dropped = [memory.empty(5000) for _ in range(4)]
for array in kept:
    array[...] = 1
pid = os.fork()
if pid == 0:
    del array
    dropped.clear()
    private = [memory.empty(5000) for _ in range(8)]
    os._exit(0 if private == [None] * 8 else 2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
dropped.clear()
fresh = [memory.empty(5000) for _ in range(6)]
for array in fresh:
    array[...] = 2
assert all((array == 1).all() for array in kept)
assert len({array.ctypes.data for array in [*kept, *fresh]}) == 10
with memory._lock:  # as another thread may, and a child that waited for it would for ever
    pid = os.fork()
    if pid == 0:
        os._exit(0 if memory.empty(10) is None else 2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("well")
"""


def test_a_forked_process_takes_nothing_of_its_parent() -> None:
    """It drops arrays and asks for new ones: the parent's stay as they are."""
    done = finished(python("-c", FORKED))
    assert (done.code, done.out.strip()) == (0, "well"), done.err
