"""``clean``: what killed saves have left, removed."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpcore.checkpoint.storage.opening import StoragePath, open_storage
from fsdpcore.checkpoint.storage.removal import remove_leftovers
from fsdpcore.checkpoint.storage.steps import Skipped
from fsdpcore.core.errors import ArgumentError, CheckpointError, in_words


@dataclass(frozen=True)
class Cleaned:
    """What was done.

    Attributes:
        removed: names of folders.
        failed: those that could not be removed, and why.
    """

    removed: tuple[str, ...]
    failed: tuple[Skipped, ...]


def clean(path: StoragePath, *, force: bool = False) -> Cleaned:
    """Remove the folders of saves that never finished; blocks. Checkpoints stay as they are.

    On a file system every save does so by itself, and what somebody is writing is left alone. An
    object store has no locks to tell that, and there no save does so: what killed ones have left
    stays until this is called, by a user who knows that nobody saves.

    Args:
        path: a folder of steps.
        force: nobody is saving there; needed where there are no locks.

    Returns:
        What was removed.

    Raises:
        ArgumentError: there are no locks, and ``force`` is not given.
        CheckpointError: the folder could not be read.

    Example::

        fc.checkpoint.clean("run")
    """
    storage = open_storage(path)
    if not (storage.locks or force):
        raise ArgumentError(
            f"{storage.path} has no locks, so that a save that is under way looks like one that "
            "was killed; if nobody is saving there, say force=True (--force)"
        )
    try:
        found = remove_leftovers(storage)
    except OSError as error:
        raise CheckpointError(f"{storage.path}: {in_words(error)}") from error
    return Cleaned(tuple(name.name for name in found.removed), tuple(found.failed))
