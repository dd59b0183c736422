"""``read``: whole arrays of a checkpoint, in one process, without a backend."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.checkpoint.load.finding import Finder, chosen_step, goes_on
from fsdpcore.checkpoint.load.local_reads import read_alone
from fsdpcore.checkpoint.load.reading import FileSet, usual_threads
from fsdpcore.checkpoint.memory.rounding import rounding_dtype
from fsdpcore.checkpoint.memory.shards import parts_of
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.read_plan import WantedPart, is_covered, plan_reads
from fsdpcore.checkpoint.plan.targets import checked_patterns, chosen
from fsdpcore.checkpoint.storage.opening import StoragePath
from fsdpcore.checkpoint.storage.ranking import Step
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.buffers import Array
from fsdpcore.core.checks import as_int, rounds_into
from fsdpcore.core.errors import ArgumentError, CheckpointError, CorruptCheckpointError, in_words
from fsdpcore.core.text import listed, nearest


def read(
    path: StoragePath,
    names: str | Iterable[str] | None = None,
    *,
    step: Step = None,
    dtype: DTypeLike | None = None,
    threads: int | None = None,
) -> dict[str, Array]:
    """Read whole arrays of a checkpoint, however they were sharded; blocks.

    For one process; ``load`` is for several ranks, and for arrays that are there already.

    Args:
        path: where ``save`` put it; or the folder of one step.
        names: patterns (of the shell) of the arrays to read; by default all.
        step: which checkpoint: its number, "latest" or "best:METRIC", see ``load``; by default the
            newest that is valid, its arrays included.
        dtype: floating arrays are rounded to it, a real floating one; the others keep theirs.
        threads: that read, at most 64; by default as many as there are cores, at most 4.

    Returns:
        New arrays by name, in the order of the checkpoint.

    Raises:
        ArgumentError: a pattern fits no name; ``step`` is none, or contradicts the path; or
            ``dtype`` is not floating.
        CheckpointNotFoundError: there is no checkpoint, or not that one.
        CorruptCheckpointError: none is valid, or not that one.
        CheckpointError: it could not be read, or one that may be newer; or it does not have all
            elements of an array.

    Example::

        arrays = fc.checkpoint.read("run", "block0.*")
    """
    storage, which = chosen_step(path, step)
    patterns = checked_patterns(names)
    wanted = rounding_dtype(dtype, "the result of read()")
    count = usual_threads() if threads is None else as_int(threads, "threads", minimum=1)
    with Finder(storage, which) as finder:
        while True:
            try:
                name, _, metadata = finder.next()
            except OSError as error:
                raise CheckpointError(f"{storage.path}: {in_words(error)}") from error
            try:
                catalog = Catalog(metadata)
                return _read(storage, name, catalog, patterns, wanted, count)
            except CorruptCheckpointError as error:
                if not goes_on(which):
                    raise
                finder.skip(name, str(error))


def _read(
    storage: Storage,
    directory: str,
    catalog: Catalog,
    patterns: list[str] | None,
    dtype: np.dtype[np.generic] | None,
    threads: int,
) -> dict[str, Array]:
    every = [tensor.name for tensor in catalog.tensors]
    for pattern in patterns or ():
        if pattern != "*" and not chosen(every, [pattern]):
            near = nearest(pattern.rstrip("*."), every)
            raise ArgumentError(
                f"{directory} has no array whose name fits {pattern!r}{near}; it has "
                f"{listed(every) or 'none'}"
            )
    names = chosen(every, patterns)
    found: dict[str, Array] = {}
    wanted: list[WantedPart] = []
    # Before there is memory for them: a shape may say more than there is, a stored byte can not.
    lacking = [name for name in names if not is_covered(catalog.metadata.tensors[name])]
    if lacking:
        raise CheckpointError(f"{directory}: not all elements were saved of {listed(lacking)}")
    for name in names:
        number = catalog.number[name]
        tensor = catalog.tensors[number]
        rounds = dtype is not None and rounds_into(tensor.dtype, dtype)
        found[name] = np.empty(tensor.shape, dtype if rounds else tensor.dtype)
        wanted += [WantedPart(number, part) for part in parts_of(found[name])]
    plan = plan_reads(catalog, wanted)
    with FileSet(storage, directory, catalog, threads) as files:
        read_alone(files, catalog, plan)
    return found
