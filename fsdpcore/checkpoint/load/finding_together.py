"""Rank 0 looks for the checkpoint to load, and tells the others what it says."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np

from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.load.finding import Finder
from fsdpcore.checkpoint.storage.steps import Skipped
from fsdpcore.collectives import all_gather_v
from fsdpcore.collectives.consensus import LocalAttempt, agree
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Bytes


class SharedCandidate(NamedTuple):
    """A candidate as all ranks know it."""

    name: str
    metadata: Metadata
    skipped: tuple[Skipped, ...]


def find_together(
    finder: Finder | None, backend: Backend, *, timeout: float, ending: str
) -> SharedCandidate:
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
    metadata: Metadata | None = None
    candidate, row = "", np.empty(0, np.uint8)
    with LocalAttempt() as attempt:
        if finder is not None:
            found = finder.next()
            candidate = json.dumps([found.name, finder.skipped])
            row, metadata = np.frombuffer(found.data, np.uint8), found.metadata
    replies = agree(backend, "load", attempt.error, candidate, timeout=timeout, ending=ending)
    data: Bytes = all_gather_v(row, backend, label="metadata", timeout=timeout)
    name, skipped = json.loads(replies[0])
    with LocalAttempt() as attempt:
        metadata = metadata or Metadata.from_bytes(data.tobytes())
    agree(backend, f"load of {name}", attempt.error, timeout=timeout, ending=ending)
    assert metadata is not None
    return SharedCandidate(name, metadata, tuple(Skipped(*each) for each in skipped))
