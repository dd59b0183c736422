"""A checkpoint that one process writes, array by array, from wherever the arrays are."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdpcore.checkpoint.interchange.array_sources import ArraySource, ProgressCallback
from fsdpcore.checkpoint.interchange.selection import SelectedArray
from fsdpcore.checkpoint.interchange.streaming import ProgressCounter, WriteBuffer, streamed
from fsdpcore.checkpoint.plan.file_layout import FileLayout, lay_out
from fsdpcore.checkpoint.plan.save_plan import WrittenPiece
from fsdpcore.checkpoint.save.step_folder import (
    RankFile,
    Saved,
    commit,
    described,
    file_name,
    new_claimed_step,
)
from fsdpcore.checkpoint.save.writing import FileSums, add_sums
from fsdpcore.checkpoint.storage.removal import remove_claimed, remove_superseded
from fsdpcore.checkpoint.storage.steps import StepName, committed
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.errors import ArgumentError, CheckpointError, in_words


@dataclass(frozen=True)
class StepInfo:
    """What a checkpoint says besides its arrays; see ``Metadata``."""

    info: dict[str, Any] = field(default_factory=dict)
    extra: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    ranks: Sequence[Any] | None = None


class StepWriter:
    """Writes one step; it exists once all of it is there, or never.

    Args:
        storage: where.
        step: which.
        source: of the arrays.
        taken: which arrays, by name.
        overwrite: replace the step if there is one.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        source: ArraySource,
        taken: Mapping[str, SelectedArray],
        *,
        overwrite: bool,
    ) -> None:
        self._storage = storage
        self._step = step
        self._source = source
        self._taken = taken
        self._overwrite = overwrite
        self._save_id = secrets.token_hex(16)

    def run(
        self,
        files: Sequence[Sequence[WrittenPiece]],
        about: StepInfo,
        progress: ProgressCallback | None,
    ) -> Saved:
        """Write what each file is to have; blocks.

        Raises:
            ArgumentError: the step is there.
            CorruptCheckpointError: the source is damaged.
            CheckpointError: it could not be read, or the step could not be written.
        """
        self._source.check(each.source for each in self._taken.values())
        storage = self._storage
        try:
            self._check_free()
            with new_claimed_step(storage, self._step) as name:
                try:
                    saved = self._write(name, files, about, progress)
                except BaseException:
                    with contextlib.suppress(OSError):
                        remove_claimed(storage, name)
                    raise
        except OSError as error:
            raise CheckpointError(f"{storage.path}: {in_words(error)}") from error
        try:
            notes = remove_superseded(storage).notes()
        except OSError as error:
            notes = [f"older saves could not be removed: {in_words(error)}"]
        return replace(saved, notes=tuple(notes))

    def _check_free(self) -> None:
        there = any(name.step == self._step for name in committed(self._storage))
        if there and not self._overwrite:
            raise ArgumentError(
                f"{self._storage.path} has a step {self._step} already; "
                "overwrite=True (--overwrite) replaces it"
            )

    def _write(
        self,
        name: StepName,
        files: Sequence[Sequence[WrittenPiece]],
        about: StepInfo,
        progress: ProgressCallback | None,
    ) -> Saved:
        layouts = [
            (rank, lay_out(each, self._save_id, rank)) for rank, each in enumerate(files) if each
        ]
        total = sum(layout.places.table - layout.places.data_start for _, layout in layouts)
        counting = ProgressCounter(total, progress)
        written = []
        for rank, layout in layouts:
            sums = self._write_file(f"{name.name}/{file_name(rank)}", layout, counting)
            written.append(RankFile(rank, layout.places, sums))
        metadata = described(
            written,
            save_id=self._save_id,
            step=self._step,
            world_size=max(1, len(files)),
            arrays={new: (t.array.dtype.name, t.array.shape) for new, t in self._taken.items()},
            info=about.info,
            extra=about.extra,
            ranks=about.ranks,
            metrics=about.metrics,
        )
        commit(self._storage, name.name, metadata)
        return Saved(self._step, name.name, total)

    def _write_file(self, name: str, layout: FileLayout, counting: ProgressCounter) -> FileSums:
        wanted = [(self._taken[piece.name], piece.region) for piece in layout.places.pieces]
        sums = bytearray()
        with self._storage.writer(name) as writer:
            gathering = WriteBuffer(writer.write)
            writer.write(layout.header)
            for data in streamed(self._source, wanted, counting):
                add_sums(data, sums)
                gathering.write(data)
            gathering.flush()
            writer.write(sums)
        return FileSums.of(layout.header, sums)
