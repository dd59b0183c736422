"""The note that a rank leaves when its file is written, so that whoever is last can commit.

It is text and proves itself: its last line is the SHA-256 of all lines before it. One that is cut
off, or still being written, is none::

    fsdpcore part 1
    rank 0 of 4
    save_id 5f0c...
    digest 9f86...
    created 2026-11-21T20:15:00+00:00
    table 00ff...
    checksum 60303...
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdpcore.checkpoint.format.marker import checksum_line
from fsdpcore.core.errors import CorruptCheckpointError

MAX_PART_BYTES = 4096
"""Larger is none; nobody needs to read more."""

_PART = re.compile(
    rb"fsdpcore part 1\n"
    rb"rank (0|[1-9][0-9]{0,9}) of ([1-9][0-9]{0,9})\n"
    rb"save_id ([0-9A-Za-z._-]{1,128})\n"
    rb"digest ([0-9a-f]{64})\n"
    rb"created ([0-9T:+-]{1,40})\n"
    rb"table ([0-9a-f]{16})\n"
)


@dataclass(frozen=True)
class RankPart:
    """What a rank has written.

    Attributes:
        rank: which one.
        world_size: of how many.
        save_id: of the attempt.
        digest: of the ``ShardMetadata`` that it was given.
        created: when, in UTC.
        table: checksum of the checksums in its file; 0 if it has none to write.
    """

    rank: int
    world_size: int
    save_id: str
    digest: str
    created: str
    table: int

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        text = (
            f"fsdpcore part 1\nrank {self.rank} of {self.world_size}\nsave_id {self.save_id}\n"
            f"digest {self.digest}\ncreated {self.created}\ntable {self.table:016x}\n"
        ).encode()
        return text + checksum_line(text)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankPart:
        """Read one.

        Raises:
            CorruptCheckpointError: these are not exactly the bytes of one.
        """
        text, space, last = bytes(data).rpartition(b"checksum ")
        found = _PART.fullmatch(text)
        if found is None or checksum_line(text) != space + last:
            raise CorruptCheckpointError("the part of a rank is cut off or was changed")
        rank, ranks, save_id, digest, created, table = (each.decode() for each in found.groups())
        return cls(int(rank), int(ranks), save_id, digest, created, int(table, 16))


def part_name(rank: int) -> str:
    """Return the name of the file that says what a rank has written."""
    return f"rank_{rank}.part"
