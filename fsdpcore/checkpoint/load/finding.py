"""Where the checkpoint is that is to be read: the newest valid one, or the one that is named."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.storage.opening import StoragePath, open_storage
from fsdpcore.checkpoint.storage.ranking import Best, Step
from fsdpcore.checkpoint.storage.steps import (
    FoundStep,
    Skipped,
    StepName,
    Which,
    candidates,
    check_step,
    directories,
    metrics_in,
    read_marker,
)
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    in_words,
)

_TRIES = 5  # for directories that come and go while they are looked at
_SHOWN = 8  # directories in a message
_SLASHES = re.compile(r"/+$")


@dataclass(frozen=True)
class Latest:
    """The newest valid checkpoint.

    Attributes:
        step: of the training.
        name: of its directory.
        skipped: newer directories that are no valid checkpoints, the newest first.
    """

    step: int
    name: str
    skipped: tuple[Skipped, ...]


class Candidate(NamedTuple):
    """A checkpoint of which all but the payload is known to be whole.

    Attributes:
        name: of its directory.
        data: the bytes of its metadata.
        metadata: what they say.
    """

    name: str
    data: bytes
    metadata: Metadata


def locate(path: StoragePath, step: int | None = None) -> tuple[Storage, StepName | None]:
    """Return the storage of a path, and the step that it names if it is a step's folder.

    Raises:
        ArgumentError: the path names another step than ``step``.
    """
    if step is not None:
        step = as_int(step, "step", minimum=0)
    if isinstance(path, Storage):
        return path, None
    storage = open_storage(path)  # which refuses what is no path
    text = os.fspath(path)
    root, _, base = _SLASHES.sub("", text).rpartition("/")
    name = StepName.parse(base)
    if name is None:
        return storage, None
    if step is not None and step != name.step:
        raise ArgumentError(f"{text} is the folder of step {name.step}, not of step {step}")
    above = root or ("/" if text.startswith("/") else ".")
    return open_storage(above), name


def chosen_step(path: StoragePath, step: Step) -> tuple[Storage, Which]:
    """Return the storage of a path, and which checkpoint is wanted of it.

    Raises:
        ArgumentError: ``step`` is none, or the path names another one.
    """
    if isinstance(step, str) and step != "latest":
        best = Best.parse(step)
        storage, name = locate(path)
        if name is not None:
            raise ArgumentError(f"{name.name} is the folder of one step, but step is {step!r}")
        return storage, best
    step = None if isinstance(step, str) else step
    number = None if step is None else check_step(step)  # an int, of whatever type it was
    storage, name = locate(path, number)
    return storage, number if name is None else name


def goes_on(which: Which) -> bool:
    """Whether another checkpoint will do where one is damaged."""
    return which is None or isinstance(which, Best)


def latest(path: StoragePath) -> Latest:
    """Return the newest valid checkpoint, all but the contents of its files checked; blocks.

    Args:
        path: a folder of steps; or that of one, which is looked at alone.

    Raises:
        CheckpointNotFoundError: there is none, and never was.
        CorruptCheckpointError: there are some, but all are damaged.
        CheckpointError: a directory that may be the newest valid one could not be read.
        OSError: the folder could not be read.

    Example::

        print(fc.checkpoint.latest("run").step)
    """
    storage, which = chosen_step(path, None)
    found, skipped = find(storage, which)
    return Latest(found.name.step, found.name.name, skipped)


def find(
    storage: Storage, which: Which = None, refused: Sequence[Skipped] = ()
) -> tuple[FoundStep, tuple[Skipped, ...]]:
    """Return the newest checkpoint, and what was skipped, the newest first; blocks.

    Where any is wanted, one that cannot be read at the moment is not passed over: it may be newer.

    Args:
        storage: where.
        which: to look at.
        refused: what the caller has found to be no valid checkpoint.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, CheckpointError, OSError: as ``latest``.
    """
    known = {each.name for each in refused}
    skipped: list[Skipped] = []
    for _ in range(_TRIES):
        names = directories(storage)
        skipped = list(refused)
        for each in candidates(storage, which):
            if isinstance(each, FoundStep):
                if each.name.name not in known:
                    return each, tuple(sorted(skipped, key=_age))
            elif each.name not in known:
                skipped.append(each)
                if each.kind == "unreachable" and which is None:
                    break
        # A save may have replaced by a new one what was about to be read: look again.
        if directories(storage) == names:
            break
    raise _none_found(storage, which, sorted(skipped, key=_age))


def _age(skipped: Skipped) -> tuple[int, int]:
    name = StepName.parse(skipped.name)
    assert name is not None
    return -name.step, -name.generation


def _none_found(storage: Storage, which: Which, skipped: Sequence[Skipped]) -> CheckpointError:
    where, what = storage.path, "no checkpoint"
    if isinstance(which, Best):
        what = f"{what} with the metric {which.metric!r:.80}"
        there = sorted({name for each in metrics_in(storage).values() for name in each})
        where += f", where the metrics are {', '.join(there)}" if there else ""
    elif which is not None:
        what = f"no {which.name}" if isinstance(which, StepName) else f"{what} of step {which}"
    more = len(skipped) - _SHOWN
    reasons = "".join(f"\n  {each.name}: {each.reason}" for each in skipped[:_SHOWN])
    reasons += f"\n  and {more} more" if more > 0 else ""
    unreachable = [each.name for each in skipped if each.kind == "unreachable"]
    damaged = [each.name for each in skipped if each.kind == "damaged"]
    if unreachable and which is None:
        return CheckpointError(
            f"{unreachable[0]} in {where} could not be read, and may be the newest checkpoint; "
            f"try again, or name an older step{reasons}"
        )
    if unreachable:
        return CheckpointError(f"there is {what} in {where} that could be read{reasons}")
    if not damaged:
        return CheckpointNotFoundError(f"there is {what} in {where}{reasons}")
    away = ", ".join(damaged[:_SHOWN])
    if len(damaged) > _SHOWN:
        away += f" and {len(damaged) - _SHOWN} more"
    advice = "" if which is not None else f"; to start afresh, move away {away}"
    return CorruptCheckpointError(f"there is {what} in {where} that is valid{advice}{reasons}")


class Finder:
    """Gives one checkpoint after the other, the newest first; used by one process.

    A context manager: nobody removes the last one given, as far as the storage has locks.

    Args:
        storage: where.
        which: to look at.

    Attributes:
        skipped: what was found to be none so far, the newest first.
    """

    def __init__(self, storage: Storage, which: Which) -> None:
        self._storage = storage
        self._which = which
        self._refused: list[Skipped] = []
        self._held = ExitStack()
        self.skipped: tuple[Skipped, ...] = ()

    def __enter__(self) -> Finder:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def skip(self, name: str, reason: str) -> None:
        """Go on to an older one; ``name`` was the last."""
        self._refused.append(Skipped(name, reason))
        self._held.close()

    def next(self) -> Candidate:
        """Return the newest one that was not skipped; blocks.

        Raises:
            CheckpointNotFoundError: there is none, and never was.
            CorruptCheckpointError: there are some, but all are damaged.
            CheckpointError: one that may be the newest could not be read, or they come and go too
                fast.
            OSError: the folder could not be read.
        """
        trouble = ""
        for _ in range(_TRIES):
            found, self.skipped = find(self._storage, self._which, self._refused)
            try:
                return self._taken(found)
            except (CheckpointError, FileNotFoundError, EOFError) as error:
                trouble = in_words(error)  # it was valid: removed since, or replaced
        raise CheckpointError(
            f"the checkpoints in {self._storage.path} were replaced while they were looked at, "
            f"{_TRIES} times: {trouble}"
        )

    def _taken(self, found: FoundStep) -> Candidate:
        name = found.name
        with ExitStack() as stack:
            stack.enter_context(self._storage.hold(name.name))
            # A removal begins with the marker: while it is the same, so is all that it proves.
            if read_marker(self._storage, name) != found.marker:
                raise FileNotFoundError(f"{name.name} was replaced while it was looked at")
            self._held = stack.pop_all()
            return Candidate(name.name, found.data, found.metadata)
