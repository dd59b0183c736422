"""From what the ranks have agreed on to a checkpoint that counts: write, tell rank 0, commit."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.checkpoint.agree import agree
from fsdpcore.checkpoint.file_layout import FileLayout, lay_out, nbytes_of
from fsdpcore.checkpoint.marker import MARKER_NAME, Marker
from fsdpcore.checkpoint.metadata import METADATA_NAME, Metadata, StoredFile, make_metadata
from fsdpcore.checkpoint.plan_save import SavePlan, Written
from fsdpcore.checkpoint.regions import Region
from fsdpcore.checkpoint.retention import Retention, prune
from fsdpcore.checkpoint.steps import (
    StepName,
    new_step,
    remove_leftovers,
    remove_step,
    remove_superseded,
)
from fsdpcore.checkpoint.storage import Storage
from fsdpcore.checkpoint.talk import gather_text
from fsdpcore.checkpoint.writing import FileSums, write_file
from fsdpcore.errors import CheckpointError, in_words


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was committed.

    Attributes:
        step: its number.
        name: of its folder, below the path.
        nbytes: of all arrays.
        notes: what went wrong after that, such as an old checkpoint that could not be removed.
    """

    step: int
    name: str
    nbytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A save on which the ranks have agreed, and of which nothing is written.

    Attributes:
        step: its number.
        pieces: what this rank writes.
        sources: the elements of each; views of the state, or copies.
        plan: what all ranks write; on rank 0.
        info, extra, metrics: see ``Metadata``.
        mine: what of the metadata is this rank's own.
    """

    step: int
    pieces: tuple[Written, ...]
    sources: tuple[Array, ...]
    plan: SavePlan | None
    info: dict[str, Any]
    extra: Any
    metrics: dict[str, float]
    mine: Any


class Commit:
    """One save, from an empty folder to the marker; all ranks go through it together.

    Args:
        storage: where.
        backend: the ranks; nobody else may use it meanwhile.
        prepared: what is saved.
        retention: which steps stay.
        timeout: seconds to wait for the slowest rank.
    """

    def __init__(
        self,
        storage: Storage,
        backend: Backend,
        prepared: Prepared,
        retention: Retention | None,
        timeout: float,
    ) -> None:
        self._storage = storage
        self._backend = backend
        self._prepared = prepared
        self._retention = retention
        self._timeout = timeout
        self._what = f"save of step {prepared.step}"
        self._kept = f"What was committed before is still there, in {storage.path}"
        self._name = StepName(prepared.step)
        self._save_id = ""

    def run(self) -> Saved:
        """Write and commit; a collective, blocks.

        Raises:
            CheckpointError: a rank could not; on all ranks.
        """
        with ExitStack() as held:
            self._open(held)
            try:
                return self._write()
            except CheckpointError:
                held.close()  # nobody removes what is held
                if self._backend.rank == 0:
                    with contextlib.suppress(OSError):
                        remove_step(self._storage, self._name)
                raise

    def _open(self, held: ExitStack) -> None:
        """Have rank 0 make the folder, and hold it against those that clear leftovers."""
        told, failed = "", None
        if self._backend.rank == 0:
            try:
                self._storage.prepare()
                remove_leftovers(self._storage)
                self._name = new_step(self._storage, self._prepared.step)
                held.enter_context(self._storage.hold(self._name.name))
                told = json.dumps([self._name.generation, secrets.token_hex(16)])
            except Exception as error:
                failed = error
        generation, self._save_id = json.loads(self._agree(failed, told)[0])
        self._name = StepName(self._prepared.step, generation)

    def _agree(self, failed: Exception | None, told: str) -> list[str]:
        return agree(
            self._backend, self._what, failed, told, timeout=self._timeout, ending=self._kept
        )

    def _write(self) -> Saved:
        failed: Exception | None = None
        summary, notes = "null", []
        try:
            summary = self._write_mine()
        except Exception as error:
            failed = error
        summaries = gather_text(summary, self._backend, timeout=self._timeout)
        if summaries is not None and "null" not in summaries:
            try:
                self._commit(summaries)
                notes = self._clear()
            except Exception as error:
                failed = error
        told = self._agree(failed, json.dumps([self._nbytes(), notes]))
        nbytes, notes = json.loads(told[0])
        return Saved(self._prepared.step, self._name.name, nbytes, tuple(notes))

    def _nbytes(self) -> int:
        plan = self._prepared.plan
        return 0 if plan is None else sum(nbytes_of(p) for each in plan.written for p in each)

    def _layout(self, pieces: Sequence[Written], rank: int) -> FileLayout:
        return lay_out(pieces, self._save_id, rank)

    def _write_mine(self) -> str:
        """Write this rank's file, if it has anything to write; return what rank 0 has to know."""
        prepared, rank = self._prepared, self._backend.rank
        sums = FileSums(0, 0)
        if prepared.pieces:
            directory = self._name.name
            layout = self._layout(prepared.pieces, rank)
            sources = [prepared.sources[index] for index in layout.order]
            name = f"{directory}/{file_name(rank)}"
            try:
                sums = write_file(self._storage, name, layout, sources)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{in_words(error)}; rank 0 has made that folder, do all ranks see it?"
                ) from error
            self._storage.sync(directory)
        return json.dumps([sums.header, sums.table, prepared.mine])

    def _commit(self, summaries: Sequence[str]) -> None:
        """Describe what was written, and mark it as whole."""
        storage, directory = self._storage, self._name.name
        data = self._metadata([json.loads(each) for each in summaries]).to_bytes()
        storage.put(f"{directory}/{METADATA_NAME}", data)
        # The marker must not survive a crash that the others do not.
        storage.sync(directory)
        storage.sync()
        prepared = self._prepared
        marker = Marker.of(prepared.step, self._save_id, data, prepared.metrics)
        storage.put(f"{directory}/{MARKER_NAME}", marker.to_bytes())
        storage.sync(directory)

    def _metadata(self, told: Sequence[Sequence[Any]]) -> Metadata:
        prepared = self._prepared
        assert prepared.plan is not None
        files: list[StoredFile] = []
        pieces: list[tuple[str, Region, int, int]] = []
        for rank, written in enumerate(prepared.plan.written):
            if not written:
                continue
            layout = self._layout(written, rank)
            for piece, offset in zip(layout.pieces, layout.offsets, strict=True):
                pieces.append((piece.name, piece.region, len(files), offset))
            header, table, _ = told[rank]
            place = (layout.size, layout.data_start, layout.table)
            files.append(StoredFile(file_name(rank), *place, header, table))
        return make_metadata(
            save_id=self._save_id,
            step=prepared.step,
            world_size=self._backend.world_size,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            files=files,
            arrays=prepared.plan.arrays,
            pieces=pieces,
            info=prepared.info,
            extra=prepared.extra,
            ranks=[mine for _, _, mine in told],
            metrics=prepared.metrics,
        )

    def _clear(self) -> list[str]:
        """Remove what this checkpoint replaces. That it fails is no reason to give that up."""
        notes = []
        storage = self._storage
        try:
            remove_superseded(storage)
            if self._retention is not None:
                prune(storage, self._retention, protect=(self._name,))
        except Exception as error:
            notes.append(f"old checkpoints could not be removed: {in_words(error)}")
        return notes


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank}.safetensors"
