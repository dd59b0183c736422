"""How checkpoints go away: whole ones, those that were saved again, what killed saves left."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from fsdpcore.checkpoint.format.marker import MARKER_NAME
from fsdpcore.checkpoint.storage.steps import (
    Skipped,
    StepName,
    directories,
    is_leftover,
    read_marker,
)
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.errors import CheckpointError, in_words


def remove_step(storage: Storage, name: StepName, *, leftover: bool = False) -> bool:
    """Remove a checkpoint, or what there is of one; at no moment is it half there. Blocks.

    Args:
        storage: where.
        name: which one.
        leftover: it goes only if it was not committed until now.

    Returns:
        False if somebody holds it, to write or to read: it is left as it is.

    Raises:
        OSError: something could not be removed. What is left is no checkpoint if the marker went.
    """
    # Another process may have removed it meanwhile.
    with suppress(FileNotFoundError), storage.claim(name.name) as claimed:
        if not claimed:
            return False
        # Whoever held it may have committed it since it was looked at.
        if not leftover or is_leftover(storage, name):
            remove_claimed(storage, name)
    return True


def remove_claimed(storage: Storage, name: StepName) -> None:
    """Remove a step, or what there is of one, that this process has claimed; as ``remove_step``."""
    with suppress(FileNotFoundError):
        storage.remove(f"{name.name}/{MARKER_NAME}")
    # From here on it is no checkpoint, even if the power fails: now the rest can go.
    storage.sync(name.name)
    try:
        storage.remove_directory(name.name)
    except OSError as error:
        # A file that is open elsewhere stays on some network file systems, or a writer that was
        # taken for dead has made another one: it is a leftover for the next save to remove.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


class Removal(NamedTuple):
    """What became of directories that were to go.

    Attributes:
        removed: those that went.
        failed: those that could not be removed, and why.
        held: those that were left because somebody writes or reads them.
    """

    removed: list[StepName]
    failed: list[Skipped]
    held: list[StepName]

    def notes(self) -> list[str]:
        """Say in words what is left."""
        failed = [f"{name} could not be removed: {reason}" for name, reason, _ in self.failed]
        held = [f"{each.name} was not removed: somebody writes or reads it" for each in self.held]
        return failed + held


def remove_steps(storage: Storage, names: Iterable[StepName], *, leftover: bool = False) -> Removal:
    """Remove one after the other, as ``remove_step``; one that cannot go stops nothing. Blocks."""
    removal = Removal([], [], [])
    for name in names:
        try:
            gone = remove_step(storage, name, leftover=leftover)
        except OSError as error:
            removal.failed.append(Skipped(name.name, in_words(error)))
        else:
            (removal.removed if gone else removal.held).append(name)
    return removal


def remove_superseded(storage: Storage) -> Removal:
    """Remove saves of steps that were saved again since, and committed; blocks.

    Raises:
        OSError: the folder could not be read.
    """
    names: list[StepName] = []
    for _, group in groupby(directories(storage), key=lambda name: name.step):
        saves = list(group)  # the newest first
        while len(saves) > 1 and not _committed(storage, saves[0]):
            saves.pop(0)
        names += saves[1:]
    return remove_steps(storage, removable(storage, names))


def removable(storage: Storage, names: Iterable[StepName]) -> list[StepName]:
    """Return those of ``names`` that surely nobody is saving to; blocks.

    Where there are locks these are all, as a removal looks at them. Elsewhere a save that was
    never committed may be under way.
    """
    return [name for name in names if storage.locks or not is_leftover(storage, name)]


def _committed(storage: Storage, name: StepName) -> bool:
    try:
        read_marker(storage, name)
    except CheckpointError:
        return False
    return True


def remove_leftovers(storage: Storage, keep: Collection[StepName] = ()) -> Removal:
    """Remove directories of saves that were never committed and whose writers are gone; blocks.

    Args:
        storage: where. Without locks nobody knows which writers live: there, none may.
        keep: directories of saves that are under way nevertheless.

    Raises:
        OSError: the folder could not be read.
    """
    names, unread = [], []
    for name in directories(storage):
        try:
            if name not in keep and is_leftover(storage, name):
                names.append(name)
        except OSError as error:
            unread.append(Skipped(name.name, in_words(error)))
    removal = remove_steps(storage, names, leftover=True)
    return removal._replace(failed=unread + removal.failed)
