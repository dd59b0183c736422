"""A checkpoint that one process writes, array by array, from wherever the arrays are."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from xxhash import xxh3_64_intdigest

from fsdpcore.checkpoint.array_sources import ArraySource, Progress
from fsdpcore.checkpoint.committing import Saved, file_name
from fsdpcore.checkpoint.file_layout import FileLayout, lay_out
from fsdpcore.checkpoint.marker import MARKER_NAME, Marker
from fsdpcore.checkpoint.metadata import (
    BLOCK_BYTES,
    CHECKSUM_BYTES,
    METADATA_NAME,
    StoredFile,
    make_metadata,
)
from fsdpcore.checkpoint.plan_save import Written
from fsdpcore.checkpoint.regions import Range, Region
from fsdpcore.checkpoint.selection import Taken
from fsdpcore.checkpoint.steps import (
    StepName,
    committed,
    new_step,
    remove_step,
    remove_superseded,
)
from fsdpcore.checkpoint.storage import Storage
from fsdpcore.checkpoint.streaming import Counting, Gathering, streamed
from fsdpcore.errors import ArgumentError, CheckpointError, in_words


@dataclass(frozen=True)
class About:
    """What a checkpoint says besides its arrays; see ``Metadata``."""

    info: dict[str, Any] = field(default_factory=dict)
    extra: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    ranks: Sequence[Any] | None = None


class StepWriting:
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
        taken: Mapping[str, Taken],
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
        self, files: Sequence[Sequence[Written]], about: About, progress: Progress | None
    ) -> Saved:
        """Write what each file is to have; blocks.

        Raises:
            ArgumentError: the step is there.
            CorruptCheckpointError: the source is damaged.
            CheckpointError: it could not be read, or the step could not be written.
        """
        self._source.check(each.source for each in self._taken.values())
        storage, name = self._storage, None
        try:
            self._check_free()
            storage.prepare()
            name = new_step(storage, self._step)
            with storage.hold(name.name):
                saved = self._write(name, files, about, progress)
        except BaseException as error:
            if name is not None:
                with contextlib.suppress(OSError):
                    remove_step(storage, name)
            if isinstance(error, OSError):
                raise CheckpointError(f"{storage.path}: {in_words(error)}") from error
            raise
        try:
            remove_superseded(storage)
        except OSError as error:
            note = f"an older save of this step could not be removed: {in_words(error)}"
            return replace(saved, notes=(note,))
        return saved

    def _check_free(self) -> None:
        there = any(name.step == self._step for name in committed(self._storage))
        if there and not self._overwrite:
            raise ArgumentError(
                f"{self._storage.path} has a step {self._step} already, which is replaced only "
                "on request (overwrite)"
            )

    def _write(
        self,
        name: StepName,
        files: Sequence[Sequence[Written]],
        about: About,
        progress: Progress | None,
    ) -> Saved:
        storage = self._storage
        layouts = [(rank, self._layout(each, rank)) for rank, each in enumerate(files) if each]
        total = sum(layout.table - layout.data_start for _, layout in layouts)
        counting = Counting(total, progress)
        stored: list[StoredFile] = []
        pieces: list[tuple[str, Region, int, int]] = []
        for rank, layout in layouts:
            for piece, offset in zip(layout.pieces, layout.offsets, strict=True):
                pieces.append((piece.name, piece.region, len(stored), offset))
            sums = self._write_file(f"{name.name}/{file_name(rank)}", layout, counting)
            place = (layout.size, layout.data_start, layout.table)
            stored.append(StoredFile(file_name(rank), *place, *sums))
        metadata = make_metadata(
            save_id=self._save_id,
            step=self._step,
            world_size=max(1, len(files)),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=stored,
            arrays={new: (t.array.dtype.name, t.array.shape) for new, t in self._taken.items()},
            pieces=pieces,
            info=about.info,
            extra=about.extra,
            ranks=about.ranks,
            metrics=about.metrics,
        ).to_bytes()
        storage.put(f"{name.name}/{METADATA_NAME}", metadata)
        # The marker must not survive a crash that the others do not.
        storage.sync(name.name)
        storage.sync()
        marker = Marker.of(self._step, self._save_id, metadata, about.metrics)
        storage.put(f"{name.name}/{MARKER_NAME}", marker.to_bytes())
        storage.sync(name.name)
        return Saved(self._step, name.name, total)

    def _layout(self, pieces: Sequence[Written], rank: int) -> FileLayout:
        return lay_out(pieces, self._save_id, rank)

    def _write_file(self, name: str, layout: FileLayout, counting: Counting) -> tuple[int, int]:
        """Write one file; return the checksums of its header and of its table."""
        wanted = []
        for piece in layout.pieces:
            assert isinstance(piece.region, Range)
            wanted.append((self._taken[piece.name], piece.region.start, piece.region.stop))
        sums = bytearray()
        with self._storage.writer(name) as writer:
            gathering = Gathering(writer.write)
            writer.write(layout.header)
            for data in streamed(self._source, wanted, counting):
                for start in range(0, data.nbytes, BLOCK_BYTES):
                    block = xxh3_64_intdigest(data[start : start + BLOCK_BYTES])
                    sums += block.to_bytes(CHECKSUM_BYTES, "little")
                gathering.write(data)
            gathering.flush()
            writer.write(sums)
        return xxh3_64_intdigest(layout.header), xxh3_64_intdigest(sums)
