"""One rank's part of a save without communication, and the commit by whoever finds all parts.

The order is what makes it safe. Before a rank touches anything of its own it takes back its part of
an older attempt, so that nobody can commit that any more. It leaves its new part when its file is
durable. So the parts of one attempt are all there only when all of its files are. Who finds them
commits, alone: writers hold the folder, as readers do, and a commit claims it, for which it waits.
Where the storage knows no locks, the first to make ``metadata.json`` does it; then attempts must
not overlap, ranks of one attempt may.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress

from xxhash import xxh3_64_intdigest

from fsdpcore.checkpoint.format.marker import MARKER_NAME, MAX_MARKER_BYTES, Marker, is_torn
from fsdpcore.checkpoint.format.metadata import METADATA_NAME, Metadata
from fsdpcore.checkpoint.format.rank_part import MAX_PART_BYTES, RankPart, part_name
from fsdpcore.checkpoint.plan.describe import rows_of
from fsdpcore.checkpoint.plan.file_layout import FileLayout, lay_out
from fsdpcore.checkpoint.plan.shard_specs import ShardMetadata
from fsdpcore.checkpoint.save.step_folder import (
    RankFile,
    commit,
    described,
    file_name,
    held_directory,
    now,
)
from fsdpcore.checkpoint.save.writing import FileSums, table_sum, write_file
from fsdpcore.checkpoint.storage.many import for_many
from fsdpcore.checkpoint.storage.storage import Storage
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError, CheckpointError, CorruptCheckpointError

PATIENCE = 60.0
"""Seconds that a commit waits for those who read the folder."""

_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # seconds between two looks at it, which grow
_OWN = re.compile(r"rank_[0-9]+\.(part|safetensors)")


class RankSave:
    """What one rank does.

    Args:
        storage: of the folder above.
        directory: of the checkpoint.
        metadata: of the save.
        rank: which this is.
        patience: seconds that ``commit`` waits for others who hold the folder.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        metadata: ShardMetadata,
        rank: int,
        *,
        patience: float = PATIENCE,
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._metadata = metadata
        self._rank = rank
        self._patience = patience
        self._where = f"{storage.path}/{directory}"

    def write(self, sources: Sequence[Array]) -> None:
        """Write this rank's file and its part; blocks.

        Args:
            sources: the elements of every region of this rank's specs, one after the other.

        Raises:
            ArgumentError: a checkpoint was committed here, or the ``save_id`` was used before, for
                something else.
            CheckpointError: another process writes as the same rank.
            OSError: it could not be written.
        """
        self._storage.prepare()
        with held_directory(self._storage, self._make):
            self._storage.sync()
            if MARKER_NAME in self._storage.names(self._directory):
                self._check_torn()
            if self._written(sources):
                return  # an attempt that came as far as the commit is taken up there
            self._clear()
            try:
                self._write(sources)
            except FileExistsError as error:
                raise CheckpointError(
                    f"{error.filename} has appeared meanwhile: another process saves as rank "
                    f"{self._rank} to {self._where}"
                ) from error

    def commit(self) -> bool:
        """Commit if all ranks have left their parts; blocks, also while others read the folder.

        Returns:
            Whether it did; False if parts are missing, or another rank does it or did it.

        Raises:
            ArgumentError: a rank was given other metadata.
            CheckpointError: others held the folder all the time, or changed its files.
            OSError: it could not be committed.
        """
        deadline = time.monotonic() + self._patience
        pause = _PAUSE
        while self._parts() is not None and not self._marked():
            # What held it a moment ago were other ranks of this attempt, the last of which finds
            # all parts, too; somebody who looks whether there is a checkpoint; or another attempt,
            # which takes a part back first.
            with self._storage.claim(self._directory) as claimed:
                if claimed:
                    return self._commit()
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"{self._where} is whole, but others held it for {self._patience:g} s, to read "
                    "or write there, so that it could not be committed; call again on any rank, "
                    "with the same state and metadata, to commit it"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return False

    # Writing.

    def _make(self) -> str:
        with suppress(FileExistsError):
            self._storage.make_directory(self._directory)
        return self._directory

    def _written(self, sources: Sequence[Array]) -> bool:
        """Return whether this rank has written the same before, in this attempt.

        Raises:
            ArgumentError: it has written other values, or with other metadata.
        """
        part, metadata = self._part(self._rank), self._metadata
        if part is None or part.save_id != metadata.save_id:
            return False
        layout = self._layout(self._rank)
        same = (part.world_size, part.digest) == (metadata.world_size, metadata.digest)
        if same and layout is not None:
            same = part.table == table_sum(_arrays(sources, layout))
        if not same:
            raise ArgumentError(
                f"rank {self._rank} has saved to {self._where} with the save_id "
                f"{part.save_id!r} before, and not the same; every attempt needs another one, the "
                "same on all ranks"
            )
        # Where a commit was killed all is done anew: that is what clears the folder.
        begun = {MARKER_NAME, METADATA_NAME}.intersection(self._storage.names(self._directory))
        return not (begun and self._storage.locks)

    def _clear(self) -> None:
        """Remove what this rank has left of an older attempt, its part first."""
        names = self._storage.names(self._directory)
        for name in (part_name(self._rank), MARKER_NAME, METADATA_NAME, file_name(self._rank)):
            if name in names:
                with suppress(FileNotFoundError):  # other ranks remove the same
                    self._storage.remove(self._at(name))
                # From here on nobody takes what follows for whole, even if the power fails.
                self._storage.sync(self._directory)

    def _check_torn(self) -> None:
        """Raise ArgumentError unless the marker is what is left of a commit that was cut off."""
        try:
            data = self._storage.read(self._at(MARKER_NAME), MAX_MARKER_BYTES)
        except FileNotFoundError:
            return  # removed by another rank
        try:
            marker = Marker.from_bytes(data)
        except CorruptCheckpointError as error:
            if is_torn(data):
                return
            raise ArgumentError(
                f"{self._where} has a damaged commit marker ({error}); move it away, or choose "
                "another path"
            ) from None
        raise ArgumentError(
            f"{self._where} is a committed checkpoint, of step {marker.step} and save_id "
            f"{marker.save_id!r}; choose another path, or remove it first"
        )

    def _write(self, sources: Sequence[Array]) -> None:
        metadata, rank = self._metadata, self._rank
        layout = self._layout(rank)
        table = 0
        if layout is not None:
            arrays = _arrays(sources, layout)
            table = write_file(self._storage, self._at(file_name(rank)), layout, [arrays]).table
            self._storage.sync(self._directory)
        part = RankPart(
            rank,
            metadata.world_size,
            metadata.save_id,
            metadata.digest,
            now(),
            table,
        )
        self._storage.put(self._at(part_name(rank)), part.to_bytes())
        self._storage.sync(self._directory)

    # Committing.

    def _commit(self) -> bool:
        parts = self._parts()  # once more, now that nobody else writes
        if parts is None or self._marked():
            return False
        metadata = self._described(parts)
        try:
            commit(self._storage, self._directory, metadata)
        except FileExistsError:
            return False  # another rank of this attempt is at it, or died at it
        except (OSError, CheckpointError):
            if self._storage.locks:  # else it may be another rank's
                for name in (MARKER_NAME, METADATA_NAME):
                    with suppress(OSError):
                        self._storage.remove(self._at(name))
            raise
        self._tidy(metadata)
        return True

    def _marked(self) -> bool:
        return MARKER_NAME in self._storage.names(self._directory)

    def _parts(self) -> list[RankPart] | None:
        """Return the parts of all ranks of this attempt; None if any is missing.

        Raises:
            ArgumentError: a rank was given other metadata.
        """
        ranks = range(self._metadata.world_size)
        if not {part_name(rank) for rank in ranks} <= {*self._storage.names(self._directory)}:
            return None
        found = []
        for rank, part in enumerate(for_many(self._part, ranks)):
            if part is None or part.save_id != self._metadata.save_id:
                return None
            if (part.world_size, part.digest) != (ranks.stop, self._metadata.digest):
                raise ArgumentError(
                    f"ranks {rank} and {self._rank} were given different metadata under the "
                    f"save_id {part.save_id!r}: nothing is committed to {self._where}; try again "
                    "with another save_id and the same metadata on all ranks"
                )
            found.append(part)
        return found

    def _part(self, rank: int) -> RankPart | None:
        """Return a rank's part; None if there is none, or it is still being written."""
        try:
            part = RankPart.from_bytes(
                self._storage.read(self._at(part_name(rank)), MAX_PART_BYTES)
            )
        except (FileNotFoundError, EOFError, CorruptCheckpointError):
            return None
        return part if part.rank == rank else None

    def _described(self, parts: Sequence[RankPart]) -> Metadata:
        """Return the metadata; the same bytes on whichever rank.

        Raises:
            CheckpointError: a file is not the one that its rank has left a part for.
        """
        save = self._metadata
        found = for_many(self._checked_file, parts)
        files = [each for each in found if each is not None]
        return described(
            files,
            save_id=save.save_id,
            step=save.step,
            world_size=save.world_size,
            arrays=save.plan.arrays,
            created=max(part.created for part in parts),
            extra=save.extra,
        )

    def _checked_file(self, part: RankPart) -> RankFile | None:
        """Return the file that a rank has left a part for, which is there; None if it has none."""
        layout = self._layout(part.rank)
        if layout is None:
            return None
        self._check_file(file_name(part.rank), layout)
        sums = FileSums(xxh3_64_intdigest(layout.header), part.table)
        return RankFile(part.rank, layout.places, sums)

    def _check_file(self, name: str, layout: FileLayout) -> None:
        """Look whether a file is there and of this attempt, as its header says."""
        try:
            with self._storage.reader(self._at(name)) as reader:
                header = bytearray(len(layout.header))
                same = reader.size == layout.places.size
                if same:
                    reader.read_into(0, memoryview(header))
        except FileNotFoundError:
            same = False
        if not same or header != layout.header:
            raise CheckpointError(
                f"{self._where}/{name} is not what its rank has written: another attempt is under "
                "way, or files were changed; try again with another save_id"
            )

    def _tidy(self, metadata: Metadata) -> None:
        """Remove the parts, and files of older attempts by more ranks; what fails stays."""
        used = {file.name for file in metadata.files}
        with suppress(OSError):
            names = self._storage.names(self._directory)
            unused = [each for each in names if _OWN.fullmatch(each) and each not in used]
            for_many(lambda name: self._storage.remove(self._at(name)), unused)

    def _layout(self, rank: int) -> FileLayout | None:
        """Return what a rank's file is like; None if it has nothing to write."""
        written = self._metadata.plan.of(rank)
        return lay_out(written, self._metadata.save_id, rank) if written else None

    def _at(self, name: str) -> str:
        return f"{self._directory}/{name}"


def _arrays(sources: Sequence[Array], layout: FileLayout) -> list[Array]:
    """Return the elements of each piece of a file, in its order."""
    return [rows_of(sources[each.rows.piece], each.rows) for each in layout.places.pieces]
