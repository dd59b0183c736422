"""Which checkpoint is taken: where one cannot be read, is replaced meanwhile, or named by path."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ckpt_make import make_checkpoint
from support.ckpt_steps import commit, write
from support.fsdp_steps import launch

import fsdpcore as fc
from fsdpcore.checkpoint import latest, load, read
from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.load.finding import Finder, find
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.checkpoint.storage.removal import remove_step
from fsdpcore.checkpoint.storage.steps import StepName, candidates
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)

TEN, TWENTY = StepName(10), StepName(20)


class Refusing(Files):
    """Refuses to open files whose name is one of some, in one folder or in all."""

    def __init__(self, *names: str, error: int = errno.EACCES) -> None:
        self.names = names
        self.error = error

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
        if path in self.names:
            raise OSError(self.error, os.strerror(self.error), path)
        return super().open(path, flags, mode, dir_fd=dir_fd)


def loaded(path: Any, step: Any = None) -> Any:
    """Load on two ranks; what both say, with the array that they have then."""

    def body(backend: fc.Backend) -> Any:
        target = {"w": np.zeros(4)}
        try:
            found = load(path, target, backend, step=step)
        except fc.FsdpcoreError as error:
            return type(error), str(error)
        return found.name, target["w"].tolist()

    first, second = launch(body, 2)
    assert first == second
    return first


def make(root: Path, *names: StepName) -> None:
    for mark, name in enumerate(names, 1):
        given = {"w": np.full(4, float(mark))}
        make_checkpoint(root, given, step=name.step, name=name.name)


# What cannot be read.


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_newest_step_that_cannot_be_read_is_not_passed_over(tmp_path: Path, error: int) -> None:
    make(tmp_path, TEN, TWENTY)
    storage = LocalStorage(str(tmp_path), Refusing(TWENTY.name, error=error))
    with pytest.raises(CheckpointError, match=r"step_00000020 .*name an older step") as caught:
        latest(storage)
    assert type(caught.value) is CheckpointError
    with pytest.raises(CheckpointError, match="name an older step") as caught:
        read(storage)
    assert type(caught.value) is CheckpointError
    kind, text = loaded(storage)
    assert kind is CheckpointError
    assert os.strerror(error) in text
    assert "Nothing was changed" in text
    assert read(storage, step=10)["w"].tolist() == [1.0] * 4
    assert loaded(storage, 10) == (TEN.name, [1.0] * 4)
    kind, text = loaded(storage, 20)
    assert kind is CheckpointError
    assert "name an older step" not in text


def test_one_that_cannot_be_read_behind_the_newest_valid_one_does_not_matter(
    tmp_path: Path,
) -> None:
    make(tmp_path, TEN, TWENTY)
    storage = LocalStorage(str(tmp_path), Refusing(TEN.name))
    assert latest(storage).name == TWENTY.name
    assert loaded(storage) == (TWENTY.name, [2.0] * 4)


def test_an_older_save_of_a_step_that_is_named_may_be_taken(tmp_path: Path) -> None:
    make(tmp_path, TEN, StepName(10, 1))
    storage = LocalStorage(str(tmp_path), Refusing("step_00000010.1"))
    found, skipped = find(storage, 10)
    assert (found.name, [each.kind for each in skipped]) == (TEN, ["unreachable"])


def test_what_is_skipped_says_of_which_kind_it_is(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    make(tmp_path, TEN, TWENTY)
    storage.make_directory("step_00000030")
    write(storage, StepName(30))
    (tmp_path / TWENTY.name / "metadata.json").unlink()
    refusing = LocalStorage(str(tmp_path), Refusing(TEN.name))
    kinds = {each.name: each.kind for each in candidates(refusing)}
    assert kinds == {
        "step_00000030": "unfinished",
        TWENTY.name: "damaged",
        TEN.name: "unreachable",
    }


def test_only_what_is_damaged_is_to_be_moved_away(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    make(tmp_path, TEN)
    (tmp_path / TEN.name / "metadata.json").unlink()
    storage.make_directory(TWENTY.name)
    write(storage, TWENTY)
    for action in (lambda: latest(tmp_path), lambda: read(tmp_path)):
        with pytest.raises(CorruptCheckpointError, match="move away step_00000010\n"):
            action()
    with pytest.raises(CorruptCheckpointError) as caught:
        read(tmp_path, step=10)
    assert "move away" not in str(caught.value)


# What is replaced.


class Unlocked(LocalStorage):
    """A storage without locks; saves step 30 again, whenever it is about to be read."""

    locks = False

    def __init__(self, path: str, times: int) -> None:
        super().__init__(path)
        self.times = times
        self.plain = LocalStorage(path)

    @contextmanager
    def hold(self, directory: str) -> Iterator[None]:
        if self.times:
            self.times -= 1
            old = StepName.parse(directory)
            assert old is not None
            commit(self.plain, StepName(30, old.generation + 1))
            assert remove_step(self.plain, old)
        yield


def test_a_step_that_is_replaced_while_it_is_looked_at_is_found(tmp_path: Path) -> None:
    commit(LocalStorage(str(tmp_path)), StepName(30))
    with Finder(Unlocked(str(tmp_path), 2), None) as finder:
        found = finder.next()
    assert (found.name, found.metadata.save_id) == ("step_00000030.2", "step_00000030.2")
    assert finder.skipped == ()


def test_steps_that_are_replaced_all_the_time_are_an_error_at_last(tmp_path: Path) -> None:
    commit(LocalStorage(str(tmp_path)), StepName(30))
    with (
        Finder(Unlocked(str(tmp_path), 1000), None) as finder,
        pytest.raises(CheckpointError, match="were replaced while they were looked at") as caught,
    ):
        finder.next()
    assert type(caught.value) is CheckpointError


class Swapping(LocalStorage):
    """A storage without locks; another save takes the name of step 30 as it is about to be read."""

    locks = False
    swapped = False

    @contextmanager
    def hold(self, directory: str) -> Iterator[None]:
        if not self.swapped:
            self.swapped = True
            plain = LocalStorage(self.path)
            assert remove_step(plain, StepName(30))
            commit(plain, StepName(30), save_id="another")
        yield


def test_a_save_that_takes_the_name_of_another_is_not_mixed_up_with_it(tmp_path: Path) -> None:
    commit(LocalStorage(str(tmp_path)), StepName(30))
    with Finder(Swapping(str(tmp_path)), None) as finder:
        found = finder.next()
    assert (found.name, found.metadata.save_id) == ("step_00000030", "another")
    assert Metadata.from_bytes(found.data).save_id == "another"
    assert finder.skipped == ()


# What is named.


def test_the_folder_of_a_step_is_that_step(tmp_path: Path) -> None:
    make(tmp_path, TEN, StepName(10, 1), TWENTY)
    for name, mark in ((TEN.name, 1.0), ("step_00000010.1", 2.0)):
        for path in (tmp_path / name, f"{tmp_path / name}/"):
            assert (latest(path).step, latest(path).name) == (10, name)
            assert read(path)["w"].tolist() == [mark] * 4
            assert read(path, step=10)["w"].tolist() == [mark] * 4
            assert loaded(path) == (name, [mark] * 4)
            assert loaded(path, 10) == (name, [mark] * 4)


def test_the_folder_of_a_step_is_no_other_step(tmp_path: Path) -> None:
    make(tmp_path, TEN, TWENTY)
    with pytest.raises(ArgumentError, match="the folder of step 10, not of step 20"):
        read(tmp_path / TEN.name, step=20)
    assert loaded(tmp_path / TEN.name, 20)[0] is ArgumentError
    with pytest.raises(CheckpointNotFoundError, match="no step_00000015 in"):
        latest(tmp_path / "step_00000015")
    # Nor is an older one taken in the place of it.
    (tmp_path / TWENTY.name / "metadata.json").unlink()
    for action in (latest, read):
        with pytest.raises(CorruptCheckpointError, match="metadata"):
            action(tmp_path / TWENTY.name)
    assert loaded(tmp_path / TWENTY.name)[0] is CorruptCheckpointError


def test_ranks_that_name_different_steps_are_told(tmp_path: Path) -> None:
    make(tmp_path, TEN, TWENTY)

    def body(backend: fc.Backend) -> None:
        path = tmp_path / (TEN, TWENTY)[backend.rank].name
        with pytest.raises(ArgumentError, match="ranks differ in step"):
            load(path, {"w": np.zeros(4)}, backend)

    launch(body, 2)


def test_a_step_may_be_an_integer_of_numpy(tmp_path: Path) -> None:
    make(tmp_path, TEN, TWENTY)
    assert loaded(tmp_path, np.int64(10)) == (TEN.name, [1.0] * 4)
    assert read(tmp_path, step=np.int64(10))["w"].tolist() == [1.0] * 4
    assert loaded(tmp_path, 1 << 63)[0] is ArgumentError
    assert loaded(tmp_path, True)[0] is ArgumentError


# What is being written, or was left.


class Committing(LocalStorage):
    """Shows a commit marker as it is at the first read: cut off. It is whole at the next one."""

    def __init__(self, path: str, at: int) -> None:
        super().__init__(path)
        self.at = at
        self.reads = 0

    def read(self, name: str, limit: int) -> bytes:
        data = super().read(name, limit)
        if not name.endswith("COMMIT"):
            return data
        self.reads += 1
        return data[: self.at] if self.reads == 1 else data


@pytest.mark.parametrize("at", [0, 1, 30, 100, 200, -70, -2, -1])
def test_a_marker_that_is_being_written_is_not_damaged(tmp_path: Path, at: int) -> None:
    make(tmp_path, TEN)
    (found,) = candidates(Committing(str(tmp_path), at))
    assert getattr(found, "kind", "unfinished") == "unfinished"
    make(tmp_path, StepName(5))
    assert latest(Committing(str(tmp_path), at)).name in (StepName(5).name, TEN.name)
    # It would be another error if it were damaged.
    with Finder(Committing(str(tmp_path), at), 10) as finder, suppress(CheckpointNotFoundError):
        assert finder.next().name == TEN.name


class Counted(LocalStorage):
    """Counts how often the folder itself is listed."""

    listed = 0

    def names(self, directory: str = "") -> list[str]:
        self.listed += not directory
        return super().names(directory)


def test_many_unfinished_steps_are_listed_once_and_said_in_short(tmp_path: Path) -> None:
    for step in range(300):
        (tmp_path / StepName(step).name).mkdir()
    storage = Counted(str(tmp_path))
    assert len(list(candidates(storage))) == 300
    assert storage.listed == 1
    with pytest.raises(CheckpointNotFoundError) as caught:
        latest(storage)
    assert storage.listed <= 4
    text = str(caught.value)
    assert text.endswith(
        "step_00000292 was not finished: it has no COMMIT, or one that is cut off\n  and 292 more"
    )
    assert text.count("was not finished") == 8


def test_of_many_damaged_steps_eight_are_named(tmp_path: Path) -> None:
    make(tmp_path, *map(StepName, range(1, 11)))
    for folder in tmp_path.iterdir():
        (folder / "metadata.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="step_00000003 and 2 more\n") as caught:
        latest(tmp_path)
    assert "step_00000002" not in str(caught.value)
