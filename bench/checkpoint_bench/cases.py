"""What is measured: an operation, and where the files are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fsdpcore.bench.harness import options
from fsdpcore.core.errors import ArgumentError

LIMIT = "plain files"  # each rank writes or reads one file, with no checksum and no agreement
MEMCPY = "memcpy"  # of a rank's shard, for the stall
PEER = "dcp"
PEERS = (PEER,)

SAVE, LOAD, RESHARD, STALL, COPY = "save", "load", "reshard", "stall", "copy"
OPERATIONS = (SAVE, LOAD, RESHARD, STALL)
DISK, TMPFS = "disk", "tmpfs"
PLACES = (DISK, TMPFS)
NAMES = tuple(f"{operation}-{place}" for operation in OPERATIONS for place in PLACES)
DEFAULT = ("save-tmpfs", "save-disk", "load-disk", "reshard-disk", "stall-disk")

SETTINGS = ("1 thread", "2 threads")
"""Of the peer's writer: how many threads write a rank's files, of which there are as many."""


@dataclass(frozen=True)
class Case:
    """One operation at one place.

    Attributes:
        operation: one of ``OPERATIONS``.
        place: one of ``PLACES``.
        ranks: that save and, but for ``RESHARD``, load.
        readers: ranks that load.
        nbytes: of all arrays together.
        layers: of the GPT that they belong to.
    """

    operation: str
    place: str
    ranks: int = 2
    readers: int = 4
    nbytes: int = 1 << 30
    layers: int = 12

    @property
    def name(self) -> str:
        """As the command takes it."""
        return f"{self.operation}-{self.place}"

    @property
    def players(self) -> int:
        """Ranks that are measured."""
        return self.readers if self.operation == RESHARD else self.ranks

    @property
    def reads(self) -> bool:
        """Whether loading is measured."""
        return self.operation in (LOAD, RESHARD)

    def as_dict(self) -> dict[str, Any]:
        """All that says what was measured, for JSON."""
        return {"case": self.name, **asdict(self), "players": self.players}


def chosen(text: str) -> list[tuple[str, str]]:
    """Return operations and places of a list of names with commas; "all" are all of them.

    Raises:
        ArgumentError: there is no such case, or none at all.
    """
    wanted = options.names(text)
    found = NAMES if "all" in wanted else wanted
    options.check_known("--cases", found, NAMES)
    if not found:
        raise ArgumentError(f"--cases needs at least one of {', '.join(NAMES)}")
    return [(one.partition("-")[0], one.partition("-")[2]) for one in found]
