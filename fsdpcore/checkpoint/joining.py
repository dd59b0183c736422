"""One rank's part of a save without communication, and the commit by whoever finds all parts.

The order is what makes it safe. Before a rank touches anything of its own it takes back its part of
an older attempt, so that nobody can commit that any more. It leaves its new part when its file is
durable. So the parts of one attempt are all there only when all of its files are. Who finds them
commits, alone: writers hold the folder, a commit claims it. Where the storage knows no locks, the
first to make ``metadata.json`` does it; then attempts must not overlap, ranks of one attempt may.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import datetime, timezone

from xxhash import xxh3_64_intdigest

from fsdpcore.buffers import Array
from fsdpcore.checkpoint.committing import file_name
from fsdpcore.checkpoint.describe import rows_of
from fsdpcore.checkpoint.file_layout import FileLayout, lay_out
from fsdpcore.checkpoint.marker import MARKER_NAME, MAX_MARKER_BYTES, Marker, is_torn
from fsdpcore.checkpoint.metadata import METADATA_NAME, Metadata, StoredFile, make_metadata
from fsdpcore.checkpoint.rank_part import MAX_PART_BYTES, RankPart, part_name
from fsdpcore.checkpoint.regions import Region
from fsdpcore.checkpoint.shard_specs import ShardMetadata
from fsdpcore.checkpoint.storage import Storage
from fsdpcore.checkpoint.writing import write_file
from fsdpcore.errors import ArgumentError, CheckpointError, CorruptCheckpointError

_TRIES = 20  # for a folder that others remove, taking it for a leftover
_OWN = re.compile(r"rank_[0-9]+\.(part|safetensors)")


class Joining:
    """What one rank does.

    Args:
        storage: of the folder above.
        directory: of the checkpoint.
        metadata: of the save.
        rank: which this is.
    """

    def __init__(
        self, storage: Storage, directory: str, metadata: ShardMetadata, rank: int
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._metadata = metadata
        self._rank = rank
        self._where = f"{storage.path}/{directory}"

    def write(self, sources: Sequence[Array]) -> None:
        """Write this rank's file and its part; blocks.

        Args:
            sources: the elements of every region of this rank's specs, one after the other.

        Raises:
            ArgumentError: a checkpoint was committed here, or the ``save_id`` was used before.
            CheckpointError: another process writes as the same rank.
            OSError: it could not be written.
        """
        with ExitStack() as held:
            self._hold(held)
            self._clear()
            try:
                self._write(sources)
            except FileExistsError as error:
                raise CheckpointError(
                    f"{error.filename} has appeared meanwhile: another process saves as rank "
                    f"{self._rank} to {self._where}"
                ) from error

    def commit(self) -> bool:
        """Commit if all ranks have left their parts; blocks.

        Returns:
            Whether it did; False if parts are missing, or another rank does it or did it.

        Raises:
            ArgumentError: a rank was given other metadata.
            OSError: it could not be committed; nobody will.
        """
        if self._parts() is None:
            return False
        with self._storage.claim(self._directory) as claimed:
            # What held it a moment ago were other ranks of this attempt, the last of which finds
            # all parts, too; or another attempt, which this one must not get in the way of.
            return claimed and self._commit()

    # Writing.

    def _hold(self, held: ExitStack) -> None:
        """Make the folder, and hold it against those that commit or clear leftovers."""
        self._storage.prepare()
        for left in reversed(range(_TRIES)):
            with suppress(FileExistsError):
                self._storage.make_directory(self._directory)
            try:
                held.enter_context(self._storage.hold(self._directory))
                break
            except FileNotFoundError:
                if not left:
                    raise
        self._storage.sync()

    def _clear(self) -> None:
        """Remove what this rank has left of an older attempt, its part first."""
        names = self._storage.names(self._directory)
        if MARKER_NAME in names:
            self._check_torn()
        mine = part_name(self._rank)
        if mine in names:
            part = self._part(self._rank)
            if part is not None and part.save_id == self._metadata.save_id:
                raise ArgumentError(
                    f"rank {self._rank} has saved to {self._where} with the save_id "
                    f"{part.save_id!r} before; every attempt needs another one, the same on all "
                    "ranks"
                )
        for name in (mine, MARKER_NAME, METADATA_NAME, file_name(self._rank)):
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
            arrays = [rows_of(sources[piece.rows.piece], piece.rows) for piece in layout.pieces]
            table = write_file(self._storage, self._at(file_name(rank)), layout, arrays).table
            self._storage.sync(self._directory)
        part = RankPart(
            rank,
            metadata.world_size,
            metadata.save_id,
            metadata.digest,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            table,
        )
        self._storage.put(self._at(part_name(rank)), part.to_bytes())
        self._storage.sync(self._directory)

    # Committing.

    def _commit(self) -> bool:
        parts = self._parts()  # once more, now that nobody else writes
        if parts is None or MARKER_NAME in self._storage.names(self._directory):
            return False
        metadata = self._described(parts)
        data = metadata.to_bytes()
        marker = Marker.of(metadata.step, metadata.save_id, data).to_bytes()
        try:
            self._storage.put(self._at(METADATA_NAME), data)
            # The marker must not survive a crash that the others do not.
            self._storage.sync(self._directory)
            self._storage.sync()
            self._storage.put(self._at(MARKER_NAME), marker)
        except FileExistsError:
            return False  # another rank of this attempt is at it, or died at it
        try:
            self._storage.sync(self._directory)
        except OSError:
            with suppress(OSError):
                self._storage.remove(self._at(MARKER_NAME))
            raise
        self._tidy(metadata)
        return True

    def _parts(self) -> list[RankPart] | None:
        """Return the parts of all ranks of this attempt; None if any is missing.

        Raises:
            ArgumentError: a rank was given other metadata.
        """
        ranks = range(self._metadata.world_size)
        if not {part_name(rank) for rank in ranks} <= {*self._storage.names(self._directory)}:
            return None
        found = []
        for rank in ranks:
            part = self._part(rank)
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
        files: list[StoredFile] = []
        pieces: list[tuple[str, Region, int, int]] = []
        for part in parts:
            layout = self._layout(part.rank)
            if layout is None:
                continue
            for piece, offset in zip(layout.pieces, layout.offsets, strict=True):
                pieces.append((piece.name, piece.region, len(files), offset))
            name = file_name(part.rank)
            self._check_file(name, layout)
            sums = (xxh3_64_intdigest(layout.header), part.table)
            files.append(StoredFile(name, layout.size, layout.data_start, layout.table, *sums))
        return make_metadata(
            save_id=save.save_id,
            step=save.step,
            world_size=save.world_size,
            created=max(part.created for part in parts),
            files=files,
            arrays=save.plan.arrays,
            pieces=pieces,
            extra=save.extra,
        )

    def _check_file(self, name: str, layout: FileLayout) -> None:
        """Look whether a file is there and of this attempt, as its header says."""
        try:
            with self._storage.reader(self._at(name)) as reader:
                header = bytearray(layout.data_start)
                same = reader.size == layout.size
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
            for name in self._storage.names(self._directory):
                if _OWN.fullmatch(name) and name not in used:
                    self._storage.remove(self._at(name))

    def _layout(self, rank: int) -> FileLayout | None:
        """Return what a rank's file is like; None if it has nothing to write."""
        written = self._metadata.plan.written[rank]
        return lay_out(written, self._metadata.save_id, rank) if written else None

    def _at(self, name: str) -> str:
        return f"{self._directory}/{name}"
