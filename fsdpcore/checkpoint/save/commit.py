"""From what the ranks have agreed on to a checkpoint that counts: write, tell rank 0, commit."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdpcore.checkpoint.format.metadata import BLOCK_BYTES, make_metadata
from fsdpcore.checkpoint.format.stored import CHECKSUM_BYTES, StoredFile
from fsdpcore.checkpoint.memory.fetching import fetched
from fsdpcore.checkpoint.plan.file_layout import FileLayout, lay_out
from fsdpcore.checkpoint.plan.save_plan import SavePlan, WrittenPiece
from fsdpcore.checkpoint.save.step_folder import (
    Saved,
    commit,
    file_name,
    new_claimed_step,
    now,
)
from fsdpcore.checkpoint.save.writing import FileSums, write_file
from fsdpcore.checkpoint.storage.removal import remove_claimed, remove_leftovers, remove_superseded
from fsdpcore.checkpoint.storage.retention import Retention, prune
from fsdpcore.checkpoint.storage.steps import StepName, directories
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.collectives.consensus import LocalAttempt, agree
from fsdpcore.collectives.objects import gather_object
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.device import Device
from fsdpcore.core.errors import ArgumentError, CheckpointError, in_words


@dataclass(frozen=True)
class PreparedSave:
    """A save on which the ranks have agreed, and of which nothing is written.

    Attributes:
        step: its number.
        pieces: what this rank writes.
        sources: the elements of each; views of the state, on its device, or copies in NumPy.
        plan: what all ranks write; on rank 0.
        info, extra, metrics: see ``Metadata``.
        rank_state: what of the metadata is this rank's own.
        failed: why this rank cannot write, if that was found after the ranks had agreed.
    """

    step: int
    pieces: tuple[WrittenPiece, ...]
    sources: tuple[Array, ...]
    plan: SavePlan | None
    info: dict[str, Any]
    extra: Any
    metrics: dict[str, float]
    rank_state: Any
    failed: Exception | None = None


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
        prepared: PreparedSave,
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
        self._nbytes = 0
        self._notes: list[str] = []

    def run(self) -> Saved:
        """Write and commit; a collective, blocks.

        Raises:
            CheckpointError: a rank could not; on all ranks.
        """
        with ExitStack() as held:
            self._open(held)
            try:
                return self._write()
            except (ArgumentError, CheckpointError):
                if self._backend.rank == 0:
                    with contextlib.suppress(OSError):
                        remove_claimed(self._storage, self._name)
                raise

    def _open(self, held: ExitStack) -> None:
        """Have rank 0 make the folder, and hold it against those that clear leftovers."""
        names = ""
        with LocalAttempt() as attempt:
            if self._backend.rank == 0:
                self._clear_leftovers()
                made = new_claimed_step(self._storage, self._prepared.step)
                self._name = held.enter_context(made)
                names = json.dumps([self._name.generation, secrets.token_hex(16)])
        generation, self._save_id = json.loads(self._agree(attempt, names)[0])
        self._name = StepName(self._prepared.step, generation)

    def _clear_leftovers(self) -> None:
        # Without locks, another save that is under way looks like one that was killed.
        if self._storage.locks:
            self._notes += remove_leftovers(self._storage).notes()

    def _agree(self, attempt: LocalAttempt, value: str) -> list[str]:
        backend, error = self._backend, attempt.error
        return agree(backend, self._what, error, value, timeout=self._timeout, ending=self._kept)

    def _write(self) -> Saved:
        attempt = LocalAttempt()
        summary = attempt.value(self._write_own, "null")
        summaries = gather_object(summary, self._backend, timeout=self._timeout)
        if summaries is not None and "null" not in summaries:
            with attempt:
                self._commit([json.loads(each) for each in summaries])
                self._clear()
        notes = list(dict.fromkeys(self._notes))  # of one folder the same may be told twice
        replies = self._agree(attempt, json.dumps([self._nbytes, notes]))
        nbytes, notes = json.loads(replies[0])
        return Saved(self._prepared.step, self._name.name, nbytes, tuple(notes))

    def _write_own(self) -> str:
        """Write this rank's file, if it has anything to write; return what rank 0 has to know."""
        prepared, rank = self._prepared, self._backend.rank
        if prepared.failed is not None:
            raise prepared.failed
        sums, data_start = FileSums(0, 0), 0
        if prepared.pieces:
            directory = self._name.name
            layout = lay_out(prepared.pieces, self._save_id, rank)
            data_start = layout.places.data_start
            name = f"{directory}/{file_name(rank)}"
            try:
                sums = write_prepared(self._storage, name, layout, prepared, self._backend.device)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{in_words(error)}; rank 0 has made that folder, do all ranks see it?"
                ) from error
            self._storage.sync(directory)
        return json.dumps([sums.header, sums.table, data_start, prepared.rank_state])

    def _commit(self, summaries: Sequence[Sequence[Any]]) -> None:
        """Describe what was written, and mark it as whole."""
        prepared = self._prepared
        assert prepared.plan is not None
        files = written_files(prepared.plan, summaries)
        self._nbytes = sum(file.table - file.data_start for file in files)
        ranks = [rank_state for *_, rank_state in summaries]
        metadata = make_metadata(
            save_id=self._save_id,
            step=prepared.step,
            world_size=self._backend.world_size,
            created=now(),
            files=files,
            arrays=prepared.plan.arrays,
            pieces=prepared.plan.table,
            info=with_own(prepared.info, ranks),
            extra=prepared.extra,
            ranks=ranks,
            metrics=prepared.metrics,
        )
        commit(self._storage, self._name.name, metadata)

    def _clear(self) -> None:
        """Remove what this checkpoint replaces. That it fails is no reason to give that up."""
        storage = self._storage
        try:
            self._notes += remove_superseded(storage).notes()
            newest = directories(storage)[0].step
            if newest > self._name.step:
                self._notes.append(
                    f"the folder has later steps, up to {newest}: load takes those, and retention "
                    "keeps them; remove them, or use another folder for another run"
                )
            if self._retention is not None:
                self._notes += prune(storage, self._retention, protect=(self._name,)).notes()
        except Exception as error:
            self._notes.append(f"old checkpoints could not be removed: {in_words(error)}")


def write_prepared(
    storage: Storage, name: str, layout: FileLayout, prepared: PreparedSave, device: Device
) -> FileSums:
    """Write a rank's file, wherever its arrays are; blocks. Raises as ``write_file``."""
    ordered = [prepared.sources[index] for index in layout.places.order]
    return write_file(storage, name, layout, fetched(ordered, device))


def with_own(info: dict[str, Any], ranks: Sequence[Any]) -> dict[str, Any]:
    """Return what the metadata says of a state, with what each rank has of its own.

    That is taken out of ``ranks``. It belongs to the state: it stays as it is when the checkpoint
    is written anew for another number of ranks.
    """
    own = [each.pop("state", {}) for each in ranks]
    return {**info, "per_rank": own} if any(own) else info


def written_files(plan: SavePlan, summaries: Sequence[Sequence[Any]]) -> list[StoredFile]:
    """Return the files of a save, from what was planned and what all ranks tell of theirs."""
    data = plan.table.data.tolist()
    blocks = np.diff(plan.table.blocks(BLOCK_BYTES)[plan.table.begins]).tolist()
    files = []
    for rank, nbytes, count in zip(plan.writers, data, blocks, strict=True):
        header, table, data_start, *_ = summaries[rank]
        end = data_start + nbytes
        size = end + count * CHECKSUM_BYTES
        files.append(StoredFile(file_name(rank), size, data_start, end, header, table))
    return files
