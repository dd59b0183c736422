"""Rank 0 looks for the checkpoint to load, and tells the others what it says."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Bytes
from fsdpcore.checkpoint.agree import agree
from fsdpcore.checkpoint.metadata import METADATA_NAME, Metadata
from fsdpcore.checkpoint.steps import (
    Found,
    Skipped,
    candidates,
    directories,
    read_marker,
)
from fsdpcore.checkpoint.storage import Storage
from fsdpcore.collectives import all_gather_v
from fsdpcore.errors import CheckpointNotFoundError, CorruptCheckpointError

_TRIES = 5  # for directories that vanish while they are looked at


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


class Finder:
    """Gives one checkpoint after the other, the newest first; used by one process.

    A context manager: nobody removes the last one given, as far as the storage has locks.

    Args:
        storage: where.
        step: which one; None for any.

    Attributes:
        skipped: what was found to be none so far, the newest first.
    """

    def __init__(self, storage: Storage, step: int | None) -> None:
        self._storage = storage
        self._step = step
        self._tried: set[str] = set()
        self._held = ExitStack()
        self.skipped: list[Skipped] = []

    def __enter__(self) -> Finder:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def skip(self, name: str, reason: str) -> None:
        """Go on to an older one; ``name`` was the last."""
        self.skipped.append(Skipped(name, reason))
        self._held.close()

    def next(self) -> Candidate:
        """Return the newest one that was not given yet; blocks.

        Raises:
            CheckpointNotFoundError: there is none, and never was.
            CorruptCheckpointError: there are some, but none is valid.
            OSError: the folder could not be read.
        """
        for _ in range(_TRIES):
            names = directories(self._storage)
            for each in self._untried():
                try:
                    return self._taken(each)
                except FileNotFoundError:
                    break  # it was removed meanwhile, since a newer one is there
            # A save may have replaced by a new one what was about to be read: look again.
            if directories(self._storage) == names:
                break
        return self._none()

    def _untried(self) -> list[Found]:
        """Return the newest valid one, if any; notes what is skipped on the way to it."""
        known = {each.name for each in self.skipped}
        for each in candidates(self._storage, self._step):
            if isinstance(each, Found):
                if each.name.name not in self._tried:
                    return [each]
            elif each.name not in known:
                self.skipped.append(each)
        return []

    def _taken(self, found: Found) -> Candidate:
        name, metadata = found
        with ExitStack() as stack:
            stack.enter_context(self._storage.hold(name.name))
            marker = read_marker(self._storage, name)
            data = self._storage.read(f"{name.name}/{METADATA_NAME}", marker.metadata_bytes)
            marker.check(data)
            if marker.save_id != metadata.save_id:
                raise FileNotFoundError(f"{name.name} was replaced while it was looked at")
            self._tried.add(name.name)
            self._held = stack.pop_all()
            return Candidate(name.name, data, metadata)

    def _none(self) -> Candidate:
        what = "no checkpoint" if self._step is None else f"no checkpoint of step {self._step}"
        reasons = "".join(f"\n  {each.name}: {each.reason}" for each in self.skipped)
        where = f"in {self._storage.path}"
        if not any(each.committed for each in self.skipped):
            raise CheckpointNotFoundError(f"there is {what} {where}{reasons}")
        raise CorruptCheckpointError(f"there is {what} {where} that could be read{reasons}")


class Shared(NamedTuple):
    """A candidate as all ranks know it."""

    name: str
    metadata: Metadata
    skipped: tuple[Skipped, ...]


def find_together(
    finder: Finder | None, backend: Backend, *, timeout: float, ending: str
) -> Shared:
    """Tell all ranks of the next candidate; a collective, which blocks.

    Args:
        finder: on rank 0; None on the others.
        backend: all ranks.
        timeout: seconds to wait for rank 0.
        ending: of the message, if there is none.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, CheckpointError: there is none, or the
            folder cannot be read; on all ranks.
    """
    error: Exception | None = None
    metadata: Metadata | None = None
    told, row = "", np.empty(0, np.uint8)
    if finder is not None:
        try:
            found = finder.next()
            told = json.dumps([found.name, finder.skipped])
            row, metadata = np.frombuffer(found.data, np.uint8), found.metadata
        except Exception as caught:
            error = caught
    replies = agree(backend, "load", error, told, timeout=timeout, ending=ending)
    data: Bytes = all_gather_v(row, backend, label="metadata", timeout=timeout)
    name, skipped = json.loads(replies[0])
    failed: Exception | None = None
    try:
        metadata = metadata or Metadata.from_bytes(data.tobytes())
    except Exception as caught:
        failed = caught
    agree(backend, f"load of {name}", failed, timeout=timeout, ending=ending)
    assert metadata is not None
    return Shared(name, metadata, tuple(Skipped(*each) for each in skipped))
