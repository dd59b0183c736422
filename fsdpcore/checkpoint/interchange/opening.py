"""From a path to the arrays that are there: a checkpoint, or files of others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fsdpcore.checkpoint.interchange.array_sources import ArraySource, opened_step
from fsdpcore.checkpoint.interchange.dcp.source import DcpSource, is_dcp
from fsdpcore.checkpoint.interchange.safetensors_source import ENDING, SafetensorsSource
from fsdpcore.checkpoint.storage.opening import StoragePath
from fsdpcore.checkpoint.storage.ranking import Step


@contextmanager
def opened_source(
    path: StoragePath, step: Step = None, threads: int | None = None
) -> Iterator[ArraySource]:
    """Open what is at a path; blocks.

    Args:
        path: a folder of steps, or that of one; a ``.safetensors`` file or ``.json`` index; or the
            folder of a distributed checkpoint of PyTorch.
        step, threads: of a folder of steps, see ``opened_step``.

    Raises:
        ArgumentError, CheckpointError: with all kinds of it, as these sources.
    """
    if isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
        if isinstance(text, str) and text.endswith((ENDING, ".json")) and os.path.isfile(text):
            yield SafetensorsSource(text)
            return
        if step is None and is_dcp(text):
            yield DcpSource(text)
            return
    with opened_step(path, step, threads) as source:
        yield source
