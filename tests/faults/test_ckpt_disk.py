"""Checkpoints are made and removed while the power fails, or a call does, at every call in turn.

Whatever is lost: a step that was committed, and was not to go, is there and whole; one that was
to go is whole or is none.
"""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest
from support.ckpt_disk import CHANGES, Disk, DiskFiles, Fault, PowerLoss, crashes
from support.ckpt_steps import FILE, commit, described, whole, write

from fsdpcore.checkpoint.load.finding import latest
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.removal import remove_leftovers, remove_step, remove_superseded
from fsdpcore.checkpoint.storage.retention import Retention, prune
from fsdpcore.checkpoint.storage.steps import (
    StepName,
    committed,
    directories,
    is_leftover,
    new_step,
    read_step,
)
from fsdpcore.core.errors import CheckpointError, CheckpointNotFoundError

ROOT = "/runs/one"
TEN, TWENTY, THIRTY = map(StepName, (10, 20, 30))


def storage_on(disk, fault=None):
    return LocalStorage(ROOT, DiskFiles(disk, fault))


def disk_with(*names, leftovers=()):
    """A disk with these committed steps and, last, directories without a marker; all synced."""
    disk = Disk()
    storage = storage_on(disk)
    storage.prepare()
    for name in names:
        commit(storage, name, {"loss": float(name.step)})
    for name in leftovers:
        storage.make_directory(name.name)
        write(storage, name)
    return disk.after_power_loss("nothing")


def valid(storage):
    """The steps that look valid; each of them must be whole."""
    found = set()
    for name in directories(storage):
        with suppress(CheckpointError):
            assert read_step(storage, name) == described(name.step, name.name)
            found.add(name)
            assert whole(storage, name), name
    return found


def mended(storage):
    """What the next save does first: nothing that is no checkpoint stays, and it may be saved."""
    before = valid(storage)
    storage.prepare()
    removal = remove_leftovers(storage)
    assert (removal.failed, removal.held) == ([], [])
    assert set(directories(storage)) == before
    made = new_step(storage, 99)
    storage.remove_directory(made.name)
    commit(storage, made)
    assert latest(storage).name == made.name
    return before


# What is done, to which disk, and which steps are to be there afterwards.
REMOVALS = {
    "remove_step": (
        disk_with(TEN, TWENTY, THIRTY),
        lambda storage: remove_step(storage, TWENTY),
        {TEN, THIRTY},
    ),
    "remove_step of the newest": (
        disk_with(TEN, TWENTY),
        lambda storage: remove_step(storage, TWENTY),
        {TEN},
    ),
    "prune": (
        disk_with(TEN, TWENTY, THIRTY),
        lambda storage: prune(storage, Retention(last=1, best=1, metric="loss")),
        {TEN, THIRTY},
    ),
    "remove_leftovers": (
        disk_with(TEN, TWENTY, leftovers=[StepName(20, 1), THIRTY]),
        remove_leftovers,
        {TEN, TWENTY},
    ),
    "remove_superseded": (
        disk_with(TEN, TWENTY, StepName(20, 1)),
        remove_superseded,
        {TEN, StepName(20, 1)},
    ),
    "new_step": (
        disk_with(TEN, TWENTY),
        lambda storage: new_step(storage, 20),
        {TEN, TWENTY},
    ),
}


@pytest.mark.parametrize("what", REMOVALS)
def test_the_power_fails_while_steps_go(what):
    disk, action, staying = REMOVALS[what]
    before = valid(storage_on(disk.copy()))
    ends = set()
    for label, left in crashes(disk, lambda files: action(LocalStorage(ROOT, files))):
        storage = storage_on(left)
        there = valid(storage)
        assert staying <= there <= before, label
        assert latest(storage).name == max(there).name, label
        assert mended(storage) == there
        ends.add(frozenset(there))
    assert ends >= {frozenset(before)}
    done = disk.copy()
    action(storage_on(done))
    assert valid(storage_on(done)) == staying


@pytest.mark.parametrize("what", REMOVALS)
@pytest.mark.parametrize(("kind", "stays"), [("EIO", False), ("short", True), ("EIO", True)])
def test_a_call_fails_while_steps_go(what, kind, stays):
    disk, action, staying = REMOVALS[what]
    before = valid(storage_on(disk.copy()))
    counting = DiskFiles(disk.copy(), Fault(-1, kind))
    action(LocalStorage(ROOT, counting))
    for at in range(counting.counted):
        broken = disk.copy()
        files = DiskFiles(broken, Fault(at, kind, stays=stays))
        with suppress(OSError):
            action(LocalStorage(ROOT, files))
        assert files.hit
        assert files.open_files == []
        for kept in ("everything", at):
            storage = storage_on(broken.after_power_loss(kept))
            assert staying <= valid(storage) <= before


@pytest.mark.parametrize("earlier", [(), (TEN,), (TEN, TWENTY)], ids=str)
def test_the_power_fails_during_a_first_save_or_another(earlier):
    """The earlier ones stay, and the new one is whole as soon as it is there."""
    disk = disk_with(*earlier) if earlier else Disk()

    def save(files):
        storage = LocalStorage(ROOT, files)
        storage.prepare()
        remove_leftovers(storage)
        name = new_step(storage, 20)
        storage.remove_directory(name.name)
        commit(storage, name)

    new = StepName(20, 1) if TWENTY in earlier else TWENTY
    seen = set()
    for label, left in crashes(disk, save):
        storage = storage_on(left)
        there = valid(storage)
        assert set(earlier) <= there <= {*earlier, new}, label
        seen.add(new in there)
        if not there:
            with pytest.raises(CheckpointNotFoundError):
                latest(storage)
        mended(storage)
    assert seen == {False, True}


def test_a_save_that_ended_stays():
    disk = disk_with(TEN)
    commit(storage_on(disk), TWENTY)
    for kept in ("nothing", "everything", *range(20)):
        assert valid(storage_on(disk.after_power_loss(kept))) == {TEN, TWENTY}


def test_the_root_stays_once_something_is_committed_there():
    """Even if a process that had made a part of the path was killed before it was durable."""

    def prepare(files):
        LocalStorage(ROOT, files).prepare()

    for _, left in crashes(Disk(), prepare, kept=["everything"]):
        storage = storage_on(left)
        storage.prepare()
        commit(storage, TEN)
        assert valid(storage_on(left.after_power_loss("nothing"))) == {TEN}


# The model itself: it must lose what a disk may lose, and nothing else.


def written(storage, *, file, directory):
    storage.make_directory("d")
    storage.sync()
    fd = storage._files.open(f"{ROOT}/d", 0)
    new = storage._files.open("x", 0o301, dir_fd=fd)  # O_WRONLY | O_CREAT | O_EXCL
    storage._files.writev(new, [b"a" * 1000, b"b" * 1000])
    if file:
        storage._files.fsync(new)
    if directory:
        storage._files.fsync(fd)


@pytest.mark.parametrize("file", [False, True])
@pytest.mark.parametrize("directory", [False, True])
def test_what_was_not_synced_may_be_lost(file, directory):
    disk = disk_with()
    written(storage_on(disk), file=file, directory=directory)
    seen = set()
    for kept in ("nothing", "everything", *range(200)):
        storage = storage_on(disk.after_power_loss(kept))
        assert storage.names() == ["d"]
        seen.add(storage.read("d/x", 2000) if storage.names("d") else None)
    full = b"a" * 1000 + b"b" * 1000
    assert full in seen
    assert (None in seen) == (not directory)
    assert (len(seen - {None}) > 10) == (not file)
    if file:
        assert seen <= {None, full}


def test_what_was_removed_may_come_back_until_it_is_synced():
    disk = disk_with(TEN)
    storage = storage_on(disk)
    storage.remove(f"{TEN.name}/{FILE}")
    seen = {
        FILE in storage_on(disk.after_power_loss(kept)).names(TEN.name)
        for kept in ("nothing", "everything", *range(20))
    }
    assert seen == {False, True}
    storage.sync(TEN.name)
    for kept in ("nothing", *range(20)):
        assert FILE not in storage_on(disk.after_power_loss(kept)).names(TEN.name)


def test_a_marker_that_is_removed_last_is_found_out():
    """The wrong order of deletion fails the invariant: the tests above can fail."""
    disk = disk_with(TEN, TWENTY)

    def wrong(files):
        storage = LocalStorage(ROOT, files)
        for file in sorted(storage.names(TWENTY.name), reverse=True):
            storage.remove(f"{TWENTY.name}/{file}")
        storage.remove_directory(TWENTY.name)

    def broken():
        for _, left in crashes(disk, wrong):
            storage = storage_on(left)
            if TWENTY in committed(storage) and FILE not in storage.names(TWENTY.name):
                yield left

    assert any(broken())


def test_a_machine_that_is_off_does_nothing():
    disk = disk_with(TEN)
    files = DiskFiles(disk, Fault(3, "crash", CHANGES))
    storage = LocalStorage(ROOT, files)
    with pytest.raises(PowerLoss):
        commit(storage, TWENTY)
    for attempt in (storage.names, storage.sync, lambda: storage.size(f"{TEN.name}/{FILE}")):
        with pytest.raises(PowerLoss):
            attempt()
    storage = storage_on(disk.after_power_loss("nothing"))
    assert valid(storage) == {TEN}
    assert not is_leftover(storage, TEN)


def test_faults_are_counted_where_they_are_meant():
    disk = disk_with()
    storage = storage_on(disk, Fault(1, "ENOSPC", ("writev",), on="/d/"))
    storage.make_directory("d")
    for name in ("x", "d/x", "y"):
        storage.put(name, b"0")
    with pytest.raises(OSError, match="/d/y") as caught:
        storage.put("d/y", b"0")
    assert caught.value.errno == errno.ENOSPC
    storage.put("d/z", b"0")
    assert sorted(storage.names("d")) == ["x", "z"]
