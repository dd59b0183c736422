"""``import_safetensors`` and ``import_dcp``: arrays from files of others, as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import DTypeLike

from fsdpcore.checkpoint.format.strict_json import check_json
from fsdpcore.checkpoint.interchange.array_sources import ProgressCallback
from fsdpcore.checkpoint.interchange.dcp.source import DcpSource
from fsdpcore.checkpoint.interchange.safetensors_source import SafetensorsSource
from fsdpcore.checkpoint.interchange.selection import Renaming, Selection
from fsdpcore.checkpoint.interchange.splitting import by_rank, by_size
from fsdpcore.checkpoint.interchange.step_writer import StepInfo, StepWriter
from fsdpcore.checkpoint.save.step_folder import Saved
from fsdpcore.checkpoint.storage.opening import StoragePath, open_storage
from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ArgumentError
from fsdpcore.core.text import listed


def import_safetensors(
    source: str | os.PathLike[str],
    path: StoragePath,
    step: int = 0,
    *,
    world_size: int | None = None,
    max_file_size: int | None = None,
    names: str | Iterable[str] | None = None,
    rename: Renaming | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    dtype: DTypeLike | None = None,
    extra: Any = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Saved:
    """Make a checkpoint of arrays in safetensors files; blocks.

    It has parameters only: an engine loads it with ``optimizer=False``. Streamed, in less than
    64 MiB beyond what the names of all arrays take.

    Args:
        source: a file; the index of several in the layout of Hugging Face; or a folder with
            either, or with any safetensors files, which have no name in common.
        path: a folder of steps.
        step: of the checkpoint.
        world_size: write files as an engine of so many ranks would; by default one.
        max_file_size: bytes of arrays in a file, instead of ``world_size``.
        names: patterns (of the shell) of the arrays to take; by default all.
        rename: new names by old ones, or a function; see ``Selection``.
        strip_prefix, add_prefix: of names.
        dtype: floating arrays are rounded to it, a real floating one; the others keep theirs.
        extra: see ``save``.
        overwrite: replace the step if there is one.
        progress: called with the bytes that are written and those in all.

    Returns:
        The checkpoint that was written.

    Raises:
        ArgumentError: something makes no sense, there is no such file, a dtype that NumPy does
            not have, or the step is there.
        CorruptCheckpointError: a file is no valid safetensors file, or the index does not fit.
        CheckpointError: something could not be read or written. ``path`` is as it was.

    Example::

        fc.checkpoint.import_safetensors("model.safetensors", "run")
    """
    choice = Selection(
        names, rename=rename, strip_prefix=strip_prefix, add_prefix=add_prefix, dtype=dtype
    )
    how = _Import(path, step, world_size, max_file_size, choice, extra, overwrite, progress)
    return how.run(SafetensorsSource, source)


def import_dcp(
    source: str | os.PathLike[str],
    path: StoragePath,
    step: int = 0,
    *,
    world_size: int | None = None,
    max_file_size: int | None = None,
    names: str | Iterable[str] | None = None,
    rename: Renaming | None = None,
    strip_prefix: str = "",
    add_prefix: str = "",
    dtype: DTypeLike | None = None,
    extra: Any = None,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Saved:
    """Make a checkpoint of the tensors in a distributed one of PyTorch, without PyTorch; blocks.

    What else is in there, such as counters of an optimizer, is not read; a note names it. Streamed,
    in less than 64 MiB beyond what the names of all arrays take. ``load_dcp`` loads without this.

    Args:
        source: a folder with ``.metadata`` and ``.distcp`` files, which PyTorch's
            ``torch.distributed.checkpoint`` writes. No object in there is unpickled.
        path, step, extra, overwrite, progress: as of ``import_safetensors``.
        world_size, max_file_size: as of ``import_safetensors``.
        names, rename, strip_prefix, add_prefix, dtype: as of ``import_safetensors``.

    Returns:
        The checkpoint that was written.

    Raises:
        ArgumentError: something makes no sense, there is no such checkpoint, a tensor has a dtype
            that NumPy does not have or was compressed, or the step is there.
        CorruptCheckpointError: its files make no sense, or do not fit.
        CheckpointError: something could not be read or written, or was not saved in full. ``path``
            is as it was.

    Example::

        fc.checkpoint.import_dcp("folder", "run", strip_prefix="model.")
    """
    choice = Selection(
        names, rename=rename, strip_prefix=strip_prefix, add_prefix=add_prefix, dtype=dtype
    )
    how = _Import(path, step, world_size, max_file_size, choice, extra, overwrite, progress)
    return how.run(DcpSource, source)


@dataclass(frozen=True)
class _Import:
    path: StoragePath
    step: int
    world_size: int | None
    max_file_size: int | None
    choice: Selection
    extra: Any
    overwrite: bool
    progress: ProgressCallback | None

    def run(
        self,
        opened: Callable[[str | os.PathLike[str]], SafetensorsSource | DcpSource],
        source: str | os.PathLike[str],
    ) -> Saved:
        step = as_int(self.step, "step", minimum=0)
        check_json(self.extra, "extra")
        if self.world_size is not None and self.max_file_size is not None:
            raise ArgumentError("give world_size or max_file_size, not both")
        storage = open_storage(self.path)
        found = opened(source)
        taken = self.choice.of(found)
        arrays = {name: each.array for name, each in taken.items()}
        if self.max_file_size is not None:
            files = by_size(arrays, as_int(self.max_file_size, "max_file_size", minimum=1))
        else:
            ranks = (
                1 if self.world_size is None else as_int(self.world_size, "world_size", minimum=1)
            )
            files = by_rank(arrays, ranks)
        writing = StepWriter(storage, step, found, taken, overwrite=self.overwrite)
        saved = writing.run(files, StepInfo(extra=self.extra), self.progress)
        if isinstance(found, DcpSource) and found.skipped:
            note = f"{listed(found.skipped)} are no tensors, and were not read"
            saved = replace(saved, notes=(*saved.notes, note))
        return saved
