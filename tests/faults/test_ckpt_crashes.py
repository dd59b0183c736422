"""A save that ends at any moment: what is loaded is the checkpoint before, or this one."""

from __future__ import annotations

import contextlib
import errno
import os

import pytest
from support.ckpt_disk import CHANGES, Disk, DiskFiles, Fault, crashes
from support.ckpt_saves import check_mixed, found, mixed_state, save, state_of
from support.fsdp_steps import launch

import fsdpcore as fc
from fsdpcore.checkpoint.storage.local_storage import LocalStorage

KEEP_ONE = fc.checkpoint.Retention(last=1)
KEPT = ("nothing", "everything", 1)

# What is there before, as steps and marks; the save; options of it.
SAVES = {
    "first": ([], (10, 7), {}),
    "next": ([(10, 7)], (20, 8), {}),
    "again": ([(10, 7)], (10, 8), {}),
    "retention": ([(10, 6), (20, 7)], (30, 8), {"retention": KEEP_ONE}),
}


def storage_on(disk: Disk, fault: Fault | None = None) -> LocalStorage:
    return LocalStorage("/run", DiskFiles(disk, fault))


def disk_with(saves) -> Disk:
    disk = Disk()
    for step, mark in saves:
        save(storage_on(disk), step, mark)
    return disk


def names_on(disk: Disk) -> set[str]:
    return set(storage_on(disk).names())


@pytest.mark.parametrize("which", SAVES)
def test_power_loss_at_every_call(which):
    before, (step, mark), options = SAVES[which]
    old = before[-1][1] if before else None
    disk = disk_with(before)
    outcomes = set()

    def action(files):
        save(LocalStorage("/run", files), step, mark, **options)

    for happened, left in crashes(disk, action, kept=KEPT):
        outcome = found(storage_on(left))
        assert outcome in (old, mark), happened
        outcomes.add(outcome)
        if not happened.endswith("everything"):  # which leaves most to clear
            continue
        # The job comes back, and clears what is left of the save that was cut off.
        save(storage_on(left), 40, 9)
        assert found(storage_on(left)) == 9, happened
        if outcome is not None:
            assert found(storage_on(left), step if outcome == mark else before[-1][0]) == outcome
        steps = fc.checkpoint.steps(storage_on(left))
        assert len(steps) == len(names_on(left)), happened
    assert outcomes == {old, mark}


def test_power_loss_of_a_save_of_many_kinds():
    """Arrays, values and each rank's own are of one save, whichever that is."""
    disk = Disk()
    save(storage_on(disk), 10, 7, state=mixed_state)
    outcomes = set()

    def action(files):
        save(LocalStorage("/run", files), 20, 8, state=mixed_state)

    for happened, left in crashes(disk, action, kept=("everything",)):
        outcome = found(storage_on(left))
        assert outcome in (7, 8), happened
        check_mixed(storage_on(left), outcome)
        outcomes.add(outcome)
    assert outcomes == {7, 8}


@pytest.mark.parametrize(
    ("kind", "stays"), [("ENOSPC", False), ("ENOSPC", True), ("EIO", False), ("EACCES", True)]
)
def test_an_error_at_every_call_is_told_to_all_ranks(kind, stays):
    disk = disk_with([(10, 7)])
    files = DiskFiles(disk.copy(), Fault(-1, "", CHANGES))
    save(LocalStorage("/run", files), 20, 8)
    failures = 0
    for at in range(files.counted):
        copy = disk.copy()
        broken = storage_on(copy, Fault(at, kind, CHANGES, stays=stays))
        try:
            saved = save(broken, 20, 8)
        except fc.RankFailedError as failed:
            error = failed.__cause__
            assert isinstance(error, fc.CheckpointError)
            assert os.strerror(getattr(errno, kind)) in str(error)
            assert str(error).startswith("save of step 20: ")
            failures += 1
            # Where nothing works any more, a checkpoint that is whole cannot be removed either.
            assert found(storage_on(copy)) in ((7, 8) if stays else (7,))
        else:  # what failed came after the commit, or could be done without
            assert saved[0].notes == saved[1].notes
            assert found(storage_on(copy)) == 8
    assert failures > files.counted / 2


def test_every_rank_raises_the_same_error():
    disk = disk_with([(10, 7)])
    broken = storage_on(disk, Fault(0, "ENOSPC", ["writev"], on="rank_1", stays=True))

    def body(backend):
        state = state_of(backend.rank, backend.world_size, 8)
        with pytest.raises(fc.CheckpointError) as caught:
            fc.checkpoint.save(broken, state, backend, step=20)
        backend.barrier()  # which is as usable as before
        return str(caught.value)

    texts = launch(body, 3)
    assert len(set(texts)) == 1
    assert "on rank 1" in texts[0]
    assert "No space left on device" in texts[0]
    assert names_on(disk) == {"step_00000010"}
    assert found(storage_on(disk)) == 7


def test_short_reads_and_writes_are_completed():
    disk = Disk()
    save(storage_on(disk, Fault(0, "short", ["writev"], stays=True)), 10, 7)
    assert found(storage_on(disk)) == 7
    assert found(storage_on(disk, Fault(0, "short", ["preadv"], stays=True))) == 7


def test_what_a_failing_disk_reads_is_an_error_and_no_values():
    disk = disk_with([(10, 7), (20, 8)])
    counting = DiskFiles(disk, Fault(-1, "", ["preadv"]))
    found(LocalStorage("/run", counting), 20)
    for at in range(counting.counted):
        with pytest.raises(fc.CheckpointError):
            found(storage_on(disk, Fault(at, "EIO", ["preadv"], stays=True)), 20)
        with contextlib.suppress(fc.CheckpointError):  # the marker may be read a second time
            assert found(storage_on(disk, Fault(at, "EIO", ["preadv"])), 20) == 8
