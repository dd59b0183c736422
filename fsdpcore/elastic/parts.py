"""What a rank has in memory of the versions of a job's state: parts, its own and others'."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fsdpcore.checkpoint.plan.save_plan import Rows, WrittenPiece
from fsdpcore.core.buffers import Bytes
from fsdpcore.core.geometry.regions import Box, Range, Region
from fsdpcore.elastic.memory import new_room

_ROOM = 2
"""Times as much memory is asked for as a part takes, since parts grow when ranks are lost. What is
not used takes none; what was used before is much faster than what the system has to give first."""


class Version(NamedTuple):
    """Which one; the higher, the newer.

    Attributes:
        generation: of the job, in which it was made.
        commit: of the program.
    """

    generation: int
    commit: int


class Whole(NamedTuple):
    """A version of which all parts are there.

    Attributes:
        version: which one.
        keepers: for each part, the ranks (of now) that have it.
        sizes: of each part, and of its file, in bytes.
    """

    version: Version
    keepers: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """What one rank has of a version.

    Attributes:
        version: of which it is.
        rank: of that generation.
        ranks: how many it had.
        memory: the file, without checksums, and the record.
        file_bytes: of the file.
    """

    version: Version
    rank: int
    ranks: int
    memory: Bytes
    file_bytes: int

    @property
    def file(self) -> Bytes:
        """The bytes of the file."""
        return self.memory[: self.file_bytes]

    def record(self) -> dict[str, Any]:
        """What is in the file, and all that is no array."""
        found: dict[str, Any] = json.loads(self.memory[self.file_bytes :].tobytes())
        return found


class Vault:
    """The parts that a rank has in its memory, its own and others', through all generations."""

    def __init__(self) -> None:
        self.parts: dict[tuple[Version, int], Part] = {}
        self._free: list[Bytes] = []

    def keep(self, part: Part) -> None:
        """Have a part, which is whole."""
        self.parts[part.version, part.rank] = part

    def room(self, size: int) -> Bytes:
        """Memory for a part of so many bytes."""
        for index, each in enumerate(self._free):
            if each.size >= size:
                return self._free.pop(index)[:size]
        self._free.clear()  # all too small
        return new_room(_ROOM * size)[:size]

    def keep_from(self, version: Version) -> None:
        """Forget what is older than a version; its memory serves again.

        Nobody may send or receive that any more.
        """
        self._forget([key for key, part in self.parts.items() if part.version < version])

    def keep_only(self, version: Version) -> None:
        """Forget all but a version; likewise."""
        self._forget([key for key, part in self.parts.items() if part.version != version])

    def _forget(self, keys: Iterable[tuple[Version, int]]) -> None:
        for key in keys:
            memory = self.parts.pop(key).memory
            self._free.append(memory if memory.base is None else memory.base)


def encoded(piece: WrittenPiece) -> list[Any]:
    """Return a piece as a record has it."""
    region = piece.region
    return [piece.name, piece.dtype, piece.shape, region.start, region.stop, piece.rows]


def pieces_of(record: Mapping[str, Any]) -> list[WrittenPiece]:
    """Return the pieces of a part's file."""
    found = []
    for name, dtype, shape, start, stop, rows in record["pieces"]:
        region: Region
        region = Range(start, stop) if isinstance(start, int) else Box(tuple(start), tuple(stop))
        found.append(WrittenPiece(name, dtype, tuple(shape), region, Rows(*rows)))
    return found
