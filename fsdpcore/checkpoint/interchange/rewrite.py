"""``rewrite``: a checkpoint written anew for another number of ranks, without any rank."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from fsdpcore.checkpoint.format.nodes import leaves, tag_of
from fsdpcore.checkpoint.format.random_states import jumped
from fsdpcore.checkpoint.interchange.array_sources import ProgressCallback, opened_step
from fsdpcore.checkpoint.interchange.selection import Selection
from fsdpcore.checkpoint.interchange.splitting import Axes, by_axis, by_rank
from fsdpcore.checkpoint.interchange.step_writer import StepInfo, StepWriter
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.opening import StoragePath, open_storage
from fsdpcore.checkpoint.storage.ranking import Step
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError


def rewrite(
    path: StoragePath,
    target: StoragePath,
    world_size: int,
    *,
    axis: Axes | None = None,
    step: Step = None,
    names: str | Iterable[str] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Saved:
    """Write a step anew as an engine of ``world_size`` ranks would have saved it; blocks.

    No load needs this: each takes what was saved on any number of ranks. It is for copies that go
    elsewhere, for one file in place of many (``world_size=1``), and for readers that want a file
    for each rank. Streamed, in less than 64 MiB beyond what the names of all arrays take. ::

        rewrite("run", "copy", 4, axis=1)
        rewrite("run", "copy", 4, axis={"*norm*": None, "*.weight": 1, "*.bias": 0})

    Step, values, extra and metrics stay as they are, and so does what each rank has of its own by
    ``PerRank``: ``load`` gives what it would have given before. Of what ``save`` has as
    ``generators=`` a rank that there was not gets the state that ``load`` would give it; those of
    ranks that there are no more are dropped.

    Args:
        path: a folder of steps, or that of one.
        target: another folder of steps.
        world_size: number of ranks; those that would have nothing get no file.
        axis: cut arrays along this axis, each rank getting ``ceil(extent / world_size)`` of it, the
            last ones what is left; a negative one counts from the end. Arrays that do not have it
            are shared flat, as an engine does it, which is the default for all. Or axes by patterns
            (of the shell) of names, of which the first that fits counts; None, or no pattern, is
            for flat.
        step: which one, see ``load``; by default the newest that is valid.
        names: patterns (of the shell) of the arrays to take; by default all.
        overwrite: replace the step if ``target`` has it.
        threads: that read.
        progress: called with the bytes that are written and those in all.

    Returns:
        The checkpoint that was written.

    Raises:
        ArgumentError: something makes no sense, the step is in ``target``, or arrays do not have
            the axis that they are to be cut along.
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: it is damaged. ``target`` is as it was.
        CheckpointError: it could not be read or written; likewise.

    Example::

        fc.checkpoint.rewrite("run", "copy", 4, axis={"*.weight": 1})
    """
    ranks = as_int(world_size, "world_size", minimum=1)
    storage = open_storage(target)
    with opened_step(path, step, threads) as source:
        if source.what == f"{storage.path}/{source.name}":
            raise ArgumentError(
                f"{storage.path} is where the step is; rewrite it to another folder"
            )
        metadata = source.metadata
        taken = Selection(names).of(source)
        arrays = {name: each.array for name, each in taken.items()}
        files = by_rank(arrays, ranks) if axis is None else by_axis(arrays, ranks, axis)
        info = copy.deepcopy(metadata.info)
        for _, node in leaves(info.get("state", ["engine", info])):
            if tag_of(node) == "engine" and "world_size" in node[1]:
                node[1]["world_size"] = ranks
        rank_states = spread(metadata.ranks, ranks)
        about = StepInfo(info, metadata.extra, metadata.metrics, rank_states)
        writing = StepWriter(storage, metadata.step, source, taken, overwrite=overwrite)
        return writing.run(files, about, progress)


def spread(ranks: Sequence[Any], world_size: int) -> list[Any]:
    """Return what ``world_size`` ranks have of what is saved of each rank: see ``restore``.

    Raises:
        ArgumentError: a generator cannot jump ahead.
    """
    found = []
    for rank in range(world_size):
        state = copy.deepcopy(ranks[rank % len(ranks)])
        jumps = rank // len(ranks)
        if jumps and isinstance(state, dict) and isinstance(state.get("generators"), dict):
            states = state["generators"]
            state["generators"] = {name: _jumped(name, states[name], jumps) for name in states}
        found.append(state)
    return found


def _jumped(name: str, state: Any, jumps: int) -> Any:
    try:
        return jumped("Generator", state, jumps)
    except ArgumentError as error:
        raise ArgumentError(f"generator {name!r} {error}") from error
