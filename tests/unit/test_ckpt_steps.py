"""Directories of steps: their names, which of them count, and why others do not."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from support.ckpt_steps import FILE, commit, contents, described, whole, write

from fsdpcore.checkpoint.format.marker import MARKER_NAME, Marker
from fsdpcore.checkpoint.format.metadata import METADATA_NAME
from fsdpcore.checkpoint.load.finding import find, latest
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.removal import remove_leftovers, remove_step, remove_superseded
from fsdpcore.checkpoint.storage.steps import (
    Skipped,
    StepName,
    committed,
    directories,
    is_leftover,
    new_step,
    read_marker,
    read_step,
    steps,
)
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)

TEN, TWENTY, THIRTY = map(StepName, (10, 20, 30))


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (StepName(0), "step_00000000"),
        (StepName(30, 0), "step_00000030"),
        (StepName(30, 1), "step_00000030.1"),
        (StepName(30, 12), "step_00000030.12"),
        (StepName(99_999_999), "step_99999999"),
        (StepName(100_000_000, 3), "step_100000000.3"),
        (StepName(2**62 - 1), f"step_{2**62 - 1}"),
    ],
)
def test_names(name, text):
    assert name.name == text
    assert StepName.parse(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "step_",
        "step_30",
        "step_0000030",
        "step_000000030",
        "step_00000030.0",
        "step_00000030.01",
        "step_00000030.",
        "step_00000030.1.1",
        "step_00000030.-1",
        "step_-0000030",
        "step_+0000030",
        "step_0000003٣",
        "step_00000030\n",
        " step_00000030",
        "step_00000030.tmp",
        "Step_00000030",
        f"step_{2**62}",
        "step_" + "9" * 30,
    ],
)
def test_other_names_are_no_steps(text):
    assert StepName.parse(text) is None


def test_names_are_ordered_by_step_and_generation(storage):
    for name in ("step_00000020", "step_00000010.10", "step_00000010.9", "step_100000000", "mine"):
        storage.make_directory(name)
    assert directories(storage) == [
        StepName(100_000_000),
        TWENTY,
        StepName(10, 10),
        StepName(10, 9),
    ]


def test_a_new_step_is_newer_than_all_that_is_there(storage):
    assert [new_step(storage, 10) for _ in range(3)] == [TEN, StepName(10, 1), StepName(10, 2)]
    storage.remove_directory(StepName(10, 1).name)
    assert new_step(storage, 10) == StepName(10, 3)
    assert new_step(storage, 9) == StepName(9)


def test_a_new_step_that_another_job_makes_at_the_same_time(tmp_path):
    class Late(LocalStorage):
        def names(self, directory=""):
            return []

    storage = Late(str(tmp_path))
    assert [new_step(storage, 10) for _ in range(3)] == [TEN, StepName(10, 1), StepName(10, 2)]


@pytest.mark.parametrize("step", [-1, 2**62, 1.0, True, "10", None])
def test_what_is_no_step(storage, step):
    with pytest.raises(ArgumentError, match="step"):
        new_step(storage, step)
    assert storage.names() == []


def test_a_committed_step_is_read(storage):
    commit(storage, TEN, {"loss": 1.5})
    assert read_step(storage, TEN) == described(10, TEN.name)
    assert read_marker(storage, TEN).metrics == {"loss": 1.5}


def test_files_that_do_not_belong_do_not_matter(storage):
    commit(storage, TEN)
    storage.put(f"{TEN.name}/rank_7.safetensors", b"")
    storage.put(f"{TEN.name}/notes.txt", b"mine")
    assert read_step(storage, TEN).step == 10


def damage(storage, tmp_path, what):
    """Damage step 20; returns what is to be said about it."""
    folder = tmp_path / TWENTY.name
    marker, metadata, file = folder / MARKER_NAME, folder / METADATA_NAME, folder / FILE
    if what.startswith("no "):
        (folder / what[3:]).unlink()
        return f"it has no {MARKER_NAME}" if what[3:] == MARKER_NAME else "is missing"
    if what == "cut marker":
        marker.write_bytes(marker.read_bytes()[:-10])
        return "cut off"
    if what == "flipped marker":
        data = bytearray(marker.read_bytes())
        data[30] ^= 1
        marker.write_bytes(data)
        return MARKER_NAME
    if what == "giant marker":
        with marker.open("r+b") as stream:
            stream.truncate(1 << 40)
        return "has 1099511627776 bytes"
    if what == "giant metadata":
        with metadata.open("r+b") as stream:
            stream.truncate(1 << 40)
        return "has 1099511627776 bytes"
    if what == "short metadata":
        metadata.write_bytes(metadata.read_bytes()[:-1])
        return "metadata.json has"
    if what == "flipped metadata":
        data = bytearray(metadata.read_bytes())
        data[-5] ^= 4
        metadata.write_bytes(data)
        return "metadata.json is not what was committed"
    if what == "other step":
        shutil.copytree(tmp_path / TEN.name, folder, dirs_exist_ok=True)
        return "step 10"
    if what == "other save":
        data = described(20, "other").to_bytes()
        metadata.write_bytes(data)
        marker.write_bytes(Marker.of(20, TWENTY.name, data).to_bytes())
        return "another save"
    if what == "short file":
        file.write_bytes(file.read_bytes()[:-1])
        return "has 171 bytes, but 172"
    if what == "long file":
        file.write_bytes(file.read_bytes() + b"x")
        return "has 173 bytes, but 172"
    name, kind = what.split(" as ")
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "directory":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(tmp_path / TEN.name / name)
    return name


DAMAGE = [
    f"no {MARKER_NAME}",
    f"no {METADATA_NAME}",
    f"no {FILE}",
    "cut marker",
    "flipped marker",
    "giant marker",
    "giant metadata",
    "short metadata",
    "flipped metadata",
    "other step",
    "other save",
    "short file",
    "long file",
    *(
        f"{name} as {kind}"
        for name in (MARKER_NAME, METADATA_NAME, FILE)
        for kind in ("fifo", "directory", "link")
    ),
]


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_step_is_skipped_with_the_reason(storage, tmp_path, what):
    commit(storage, TEN)
    commit(storage, TWENTY)
    said = damage(storage, tmp_path, what)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_step(storage, TWENTY)
    assert said in str(caught.value)
    found = latest(tmp_path)
    assert (found.step, found.name) == (10, TEN.name)
    (skipped,) = found.skipped
    assert skipped.name == TWENTY.name
    assert said in skipped.reason
    assert skipped.committed == (what not in (f"no {MARKER_NAME}", "cut marker"))


def test_a_link_to_a_step_is_none(storage, tmp_path):
    commit(storage, TEN)
    (tmp_path / TWENTY.name).symlink_to(TEN.name)
    assert latest(tmp_path).step == 10
    assert [each.name for each in latest(tmp_path).skipped] == [TWENTY.name]
    assert steps(tmp_path) == [10]


def test_the_newest_generation_counts(storage, tmp_path):
    for name in (TEN, StepName(10, 1), StepName(10, 2)):
        commit(storage, name)
    assert latest(tmp_path).name == "step_00000010.2"
    storage.remove(f"step_00000010.2/{MARKER_NAME}")
    assert latest(tmp_path).name == "step_00000010.1"
    assert list(committed(storage)) == [StepName(10, 1)]


class Listed(LocalStorage):
    """Counts how often the folder of all steps is listed."""

    times = 0

    def names(self, directory=""):
        self.times += not directory
        return super().names(directory)


def test_the_folder_is_listed_once_however_many_saves_were_not_finished(tmp_path):
    storage = Listed(str(tmp_path))
    for step in range(20, 30):
        storage.make_directory(StepName(step).name)
    commit(storage, TEN)
    storage.times = 0
    assert list(committed(storage)) == [TEN]
    assert storage.times == 1


def test_one_step_is_found(storage):
    for name in (TEN, StepName(10, 1), TWENTY):
        commit(storage, name)
    found, skipped = find(storage, 10)
    assert (found.name, skipped) == (StepName(10, 1), ())
    assert found.metadata.save_id == "step_00000010.1"
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 15"):
        find(storage, 15)


def test_there_is_no_checkpoint(storage, tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint in"):
            latest(path)
        assert steps(path) == []
    with pytest.raises(CheckpointNotFoundError, match="no step_00000010 in"):
        read_step(storage, TEN)


def test_only_unfinished_ones_are_none(storage, tmp_path):
    storage.make_directory(TEN.name)
    write(storage, TEN)
    with pytest.raises(CheckpointNotFoundError, match="step_00000010 was not finished"):
        latest(tmp_path)


def test_only_damaged_ones_are_not_none(storage, tmp_path):
    """Who starts afresh where there is none, must not where there is one."""
    commit(storage, TEN)
    storage.remove(f"{TEN.name}/{FILE}")
    with pytest.raises(CorruptCheckpointError, match=f"{FILE} is missing"):
        latest(tmp_path)


class Refusing(Files):
    """Refuses to open some names."""

    def __init__(self, name, number):
        self.name = name
        self.number = number

    def open(self, path, flags, mode=0o666, *, dir_fd=None):
        if path == self.name:
            raise OSError(self.number, os.strerror(self.number), path)
        return super().open(path, flags, mode, dir_fd=dir_fd)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("name", [TWENTY.name, MARKER_NAME])
def test_what_cannot_be_read_is_not_taken_for_none(storage, tmp_path, name, number):
    commit(storage, TWENTY)
    refusing = LocalStorage(str(tmp_path), Refusing(name, number))
    with pytest.raises(OSError, match=name):
        read_step(refusing, TWENTY)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        latest(refusing)
    assert type(caught.value) is CheckpointError
    assert "move away" not in str(caught.value)
    assert remove_leftovers(refusing).removed == []
    assert whole(storage, TWENTY)


def test_a_step_that_is_replaced_while_it_is_looked_for(storage, tmp_path):
    """Whoever looks has listed step 10 only; then 20 is committed, and 10 removed."""
    commit(storage, TEN)

    class Saving(Files):
        done = False

        def open(self, path, flags, mode=0o666, *, dir_fd=None):
            if path == MARKER_NAME and not self.done:
                self.done = True
                commit(storage, TWENTY)
                remove_step(storage, TEN)
            return super().open(path, flags, mode, dir_fd=dir_fd)

    assert latest(LocalStorage(str(tmp_path), Saving())).step == 20


def test_steps_are_listed(storage, tmp_path):
    for name in (THIRTY, TEN, TWENTY, StepName(20, 1)):
        commit(storage, name)
    storage.make_directory(StepName(40).name)
    storage.remove(f"{THIRTY.name}/{MARKER_NAME}")
    assert steps(tmp_path) == [10, 20]
    assert {name: marker.step for name, marker in committed(storage).items()} == {
        StepName(20, 1): 20,
        TEN: 10,
    }


class Marked:
    """A storage in which every marker is ``data``."""

    def read(self, name, limit):
        return self.data


MARKER = Marker.of(10, "0123", b"{}", {"accuracy_" * 9: 0.5, "loss": 1.25}).to_bytes()


def test_a_marker_that_was_cut_off_is_a_leftover():
    marked = Marked()
    for size in range(len(MARKER) - 1):
        for more in (b"", bytes(len(MARKER) - size)):
            marked.data = MARKER[:size] + more
            assert is_leftover(marked, TEN), marked.data


def test_a_marker_that_was_damaged_is_no_leftover():
    """Most of what such a checkpoint holds can still be saved by hand."""
    marked = Marked()
    for bit in range(8 * len(MARKER)):
        marked.data = bytearray(MARKER)
        marked.data[bit // 8] ^= 1 << bit % 8
        assert not is_leftover(marked, TEN), marked.data


def test_a_marker_of_a_later_version_is_no_leftover(storage, tmp_path):
    commit(storage, TEN)
    path = tmp_path / TEN.name / MARKER_NAME
    path.write_bytes(path.read_bytes().replace(b"checkpoint 1\n", b"checkpoint 2\n"))
    assert remove_leftovers(storage) == ([], [], [])
    assert directories(storage) == [TEN]


def test_leftovers_are_removed(storage):
    commit(storage, TEN)
    storage.make_directory("mine")
    for name in (TWENTY, THIRTY, StepName(30, 1), StepName(40)):
        storage.make_directory(name.name)
        write(storage, name)
    with storage.hold(THIRTY.name):
        removal = remove_leftovers(storage, keep=[StepName(40)])
    assert removal == ([StepName(30, 1), TWENTY], [], [THIRTY])
    assert directories(storage) == [StepName(40), THIRTY, TEN]
    assert "mine" in storage.names()
    assert whole(storage, TEN)


def test_leftovers_that_cannot_be_removed_are_told(storage, tmp_path):
    for name in (TEN, TWENTY, THIRTY):
        storage.make_directory(name.name)
    shutil.rmtree(tmp_path / TWENTY.name)
    (tmp_path / TWENTY.name).symlink_to(tmp_path)
    removed, failed, _ = remove_leftovers(storage)
    assert removed == [THIRTY, TEN]
    assert [each.name for each in failed] == [TWENTY.name]
    assert isinstance(failed[0], Skipped)
    assert tmp_path.exists()


def test_a_step_goes_away(storage, tmp_path):
    commit(storage, TEN)
    commit(storage, TWENTY)
    assert remove_step(storage, TEN)
    assert directories(storage) == [TWENTY]
    assert remove_step(storage, TEN)  # and stays away


def test_a_step_that_is_held_stays(storage):
    commit(storage, TEN)
    with storage.hold(TEN.name):
        assert not remove_step(storage, TEN)
    assert read_step(storage, TEN).step == 10


def test_a_step_with_a_folder_in_it_is_a_leftover_then(storage, tmp_path):
    commit(storage, TEN)
    (tmp_path / TEN.name / "mine").mkdir()
    assert remove_step(storage, TEN)
    assert os.listdir(tmp_path / TEN.name) == ["mine"]
    assert steps(tmp_path) == []


def test_older_generations_are_removed(storage):
    for name in (TEN, StepName(20), StepName(20, 1), StepName(20, 2), StepName(20, 3)):
        commit(storage, name)
    with storage.hold(StepName(20, 1).name):
        assert remove_superseded(storage).removed == [StepName(20, 2), StepName(20)]
    assert directories(storage) == [StepName(20, 3), StepName(20, 1), TEN]


def test_a_generation_that_was_never_committed_supersedes_nothing(storage):
    for name in (TEN, StepName(20), StepName(20, 1)):
        commit(storage, name)
    storage.make_directory(StepName(20, 2).name)
    assert remove_superseded(storage).removed == [StepName(20)]
    assert directories(storage) == [StepName(20, 2), StepName(20, 1), TEN]


def test_the_helper_writes_what_it_says(storage):
    commit(storage, TEN)
    assert storage.read(f"{TEN.name}/{FILE}", 1000) == contents(10, TEN.name)
    assert whole(storage, TEN)
