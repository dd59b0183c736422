"""``export_safetensors``: parameters of a checkpoint as files that other programs read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import DTypeLike

from fsdpcore.checkpoint.format.dtypes import CODES, stored_as
from fsdpcore.checkpoint.format.header import METADATA_KEY, TensorEntry, build_header
from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.checkpoint.interchange.array_sources import ArraySource, ProgressCallback
from fsdpcore.checkpoint.interchange.opening import opened_source
from fsdpcore.checkpoint.interchange.safetensors_files import PartialFile, place_all, sync_directory
from fsdpcore.checkpoint.interchange.selection import Renaming, SelectedArray, Selection
from fsdpcore.checkpoint.interchange.streaming import ProgressCounter, WriteBuffer, streamed
from fsdpcore.checkpoint.storage.opening import StoragePath
from fsdpcore.checkpoint.storage.ranking import Step
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError, CheckpointError, in_words
from fsdpcore.core.geometry.regions import whole

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")

_ABOUT = {"format": "pt"}
"""Without it, or another framework there, the library transformers refuses to load a file."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        step: of the checkpoint; None if it is none of ours.
        name: of its folder.
        files: paths, the index last if there is one.
        tensors: how many.
        nbytes: of all of them.
    """

    step: int | None
    name: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def export_safetensors(
    path: StoragePath,
    target: str | os.PathLike[str],
    *,
    step: Step = None,
    names: str | Iterable[str] | None = None,
    optimizer: bool = False,
    rename: Renaming | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    dtype: DTypeLike | None = None,
    max_shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> Exported:
    """Write the parameters of a step as safetensors; blocks.

    Streamed, in less than 64 MiB beyond what the names of all arrays take; every byte of the
    checkpoint is verified. Files are written under other names first: what is there under the
    names of the result is whole. A parameter that is tied to another one is not written twice.

    Args:
        path: a folder of steps, or that of one; or that of a distributed checkpoint of PyTorch.
        target: the file; with ``max_shard_size`` a folder, made if need be, in which the files
            and their index have the names that Hugging Face's libraries look for.
        step: which one; by default the newest that is valid.
        names: patterns (of the shell) of the arrays to take; by default all.
        optimizer: with the arrays of the optimizer.
        rename: new names by old ones, or a function; see ``Selection``.
        strip_prefix, add_prefix: of names.
        dtype: floating arrays are rounded to it, a real floating one; the others keep theirs.
        max_shard_size: bytes of arrays in a file; a larger array has one for itself. If all fit
            into one, that is ``model.safetensors``, without an index.
        metadata: texts for the header; by default ``{"format": "pt"}``, which transformers needs.
        overwrite: replace what is there.
        threads: that read.
        progress: called with the bytes that are written and those in all.

    Returns:
        The files that were written, and what is in them.

    Raises:
        ArgumentError: something makes no sense, the target is there, or safetensors does not have
            the dtype of an array. Nothing was written.
        CheckpointNotFoundError: there is no such checkpoint.
        CorruptCheckpointError: it is damaged.
        CheckpointError: it could not be read or written.

    Example::

        fc.checkpoint.export_safetensors("run", "model.safetensors", dtype="float16")
    """
    about = dict(_ABOUT if metadata is None else metadata)
    goal = Path(target).absolute()
    limit = None
    if max_shard_size is not None:
        limit = as_int(max_shard_size, "max_shard_size", minimum=1)
    choice = Selection(names, optimizer, rename, strip_prefix, add_prefix, dtype)
    with opened_source(path, step, threads) as source:
        taken = choice.of(source)
        _check_dtypes(taken)
        files = {goal: list(taken)} if limit is None else _shards(goal, taken, limit)
        headers = {file: _header(file, inside, taken, about) for file, inside in files.items()}
        source.check(each.source for each in taken.values())
        try:
            folder = limit is not None
            stale = _stale(goal, folder=folder, overwrite=overwrite)
            written = _write(source, taken, files, headers, stale, progress, folder=folder)
        except OSError as error:
            raise CheckpointError(f"{goal}: {in_words(error)}") from error
        nbytes = sum(each.array.nbytes for each in taken.values())
        return Exported(source.step, source.name, written, len(taken), nbytes)


def _check_dtypes(taken: Mapping[str, SelectedArray]) -> None:
    for name, (_, array) in taken.items():
        if array.dtype not in CODES.values():
            raise ArgumentError(
                f"{short(name)} has dtype {array.dtype}, which safetensors does not have; leave it "
                "out by names"
            )
        if name == METADATA_KEY:
            raise ArgumentError(f"no array in a safetensors file is called {name}; rename it")


def _shards(folder: Path, taken: Mapping[str, SelectedArray], limit: int) -> dict[Path, list[str]]:
    """Spread arrays over files, in their order."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, (_, array) in taken.items():
        if shards[-1] and used + array.nbytes > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += array.nbytes
    if len(shards) == 1:
        return {folder / SINGLE: shards[0]}
    count = len(shards)
    return {
        folder / f"model-{number:05d}-of-{count:05d}.safetensors": inside
        for number, inside in enumerate(shards, 1)
    }


def _header(
    file: Path, inside: list[str], taken: Mapping[str, SelectedArray], about: Mapping[str, str]
) -> bytes:
    """Return a file's header; puts its arrays in order, the largest items first."""
    inside.sort(key=lambda name: (-taken[name].array.dtype.itemsize, name))
    entries = []
    for name in inside:
        array = taken[name].array
        code, _ = stored_as(array.dtype)
        entries.append(TensorEntry(name, code, array.shape, array.nbytes))
    try:
        return build_header(entries, about)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from None


def _stale(goal: Path, *, folder: bool, overwrite: bool) -> list[Path]:
    """Return what a new model replaces, the index first; raises ArgumentError if it may not."""
    if not folder:
        if goal.is_dir():
            raise ArgumentError(f"{goal} is a folder; name a file, or give max_shard_size")
        there = [goal] if os.path.lexists(goal) else []
        stale = []
    else:
        if goal.exists() and not goal.is_dir():
            raise ArgumentError(f"{goal} is no folder, which files of max_shard_size need")
        names = sorted(os.listdir(goal)) if goal.is_dir() else []
        there = [goal / each for each in names if _OURS.fullmatch(each)]
        stale = sorted(there, key=lambda each: each.suffix != ".json")
    if there and not overwrite:
        raise ArgumentError(
            f"{there[0]} is there already; overwrite=True (--overwrite) replaces it"
        )
    return stale


def _write(
    source: ArraySource,
    taken: Mapping[str, SelectedArray],
    files: Mapping[Path, Sequence[str]],
    headers: Mapping[Path, bytes],
    stale: Sequence[Path],
    progress: ProgressCallback | None,
    *,
    folder: bool,
) -> tuple[str, ...]:
    counting = ProgressCounter(sum(each.array.nbytes for each in taken.values()), progress)
    parent = next(iter(files)).parent
    if not parent.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        sync_directory(parent.parent)
    with ExitStack() as stack:
        index = None
        if folder:
            # Open, and so locked, until all is in place: the other files are closed when they are
            # full, as there may be more of them than a process may have open.
            index = stack.enter_context(PartialFile(parent / INDEX))
        partial = []
        for file, inside in files.items():
            writer = stack.enter_context(PartialFile(file))
            partial.append(writer)
            writer.write(headers[file])
            gathering = WriteBuffer(writer.write)
            arrays = [(taken[name], whole(taken[name].array.shape)) for name in inside]
            for data in streamed(source, arrays, counting):
                gathering.write(data)
            gathering.flush()
            if folder:
                writer.finish()
        if index is not None and len(files) > 1:
            index.write(_index(files, taken))
            partial.append(index)
        place_all(partial, stale)
    return tuple(str(each.path) for each in partial)


def _index(files: Mapping[Path, Sequence[str]], taken: Mapping[str, SelectedArray]) -> bytes:
    where = {name: file.name for file, inside in files.items() for name in inside}
    content = {
        "metadata": {"total_size": sum(each.array.nbytes for each in taken.values())},
        "weight_map": {name: where[name] for name in sorted(where)},
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
