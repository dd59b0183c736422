"""``Offload``: what a rank holds all the time is out of memory while nobody uses it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from fsdpcore.core.checks import as_int
from fsdpcore.core.errors import ConfigError
from fsdpcore.fsdp.offload.arrays import GATHERED, WRITTEN, ArrayKind


@dataclass(frozen=True)
class Offload:
    """What is kept out of memory while it is not in use; the same on all ranks.

    On the host: in files that are mapped into memory. Each rank has one, without a name, so that
    nothing is left of it when the process ends. Its place on the disk is reserved when the engine
    is made. Parameters are not in a window of the host then. Gathered parameters, full gradients
    and what ``no_sync`` keeps stay in memory, for as long as the strategy says.

    On a GPU: in memory of the host that the GPU reads and writes from where it is, so that nothing
    has to be loaded. Gathered parameters and full gradients are in the GPU's own memory.

    Args:
        directory: where the files are, on a disk: not on a file system in memory, such as tmpfs,
            where nothing would be gained. An engine on the host needs one; there is no default,
            since the system's directory for temporary files often is in memory. None on a GPU.
        what: "parameters": shards of parameters, and where all ranks keep all parameters, these;
            with mixed precision the master shards too. "all": also shards of gradients, and the
            optimizer's state.
        ahead: so many units that come next are read from files ahead of their use; 0 for none.
        evict: have pages of files written and freed as soon as they are not in use. With False they
            leave the process, but stay in the system's cache until it needs the memory for
            something else: faster while there is enough.

    Raises:
        ConfigError: something of this makes no sense.

    Example::

        fc.FSDP(units, backend, offload=fc.Offload("/fast/disk"), window=False)
    """

    directory: str | os.PathLike[str] | None = None
    what: Literal["parameters", "all"] = "parameters"
    ahead: int = 1
    evict: bool = True

    def __post_init__(self) -> None:
        if self.directory is not None:
            given = self.directory
            path: Any = os.fspath(given) if isinstance(given, os.PathLike) else given
            if not path or not isinstance(path, str):
                raise ConfigError(
                    f"directory of Offload must be a path such as '/scratch', got {given!r}"
                )
            object.__setattr__(self, "directory", path)
        if self.what not in ("parameters", "all"):
            raise ConfigError(f"Offload: what must be 'parameters' or 'all', got {self.what!r}")
        ahead = as_int(self.ahead, "ahead of Offload (in units)", minimum=0, error=ConfigError)
        object.__setattr__(self, "ahead", ahead)
        if not isinstance(self.evict, bool):
            raise ConfigError(f"evict of Offload must be True or False, got {self.evict!r}")

    @property
    def kinds(self) -> tuple[ArrayKind, ...]:
        """What is offloaded."""
        if self.what == "all":
            return tuple(ArrayKind)
        return (*GATHERED, *WRITTEN)


@dataclass
class OffloadStats:
    """What one rank moved between memory and disk since its last step began.

    Attributes:
        held: bytes of its file.
        used: bytes that were announced to be used.
        ready: of these, those that were in memory when they were needed.
        read: bytes that were not in memory when they were asked for.
        written: bytes that were changed, and are on their way to the disk or there.
        waited: seconds in which the rank waited until what it needed was in memory.
        flushed: seconds in which it waited until what it had changed was on the disk.
    """

    held: int = 0
    used: int = 0
    ready: int = 0
    read: int = 0
    written: int = 0
    waited: float = 0.0
    flushed: float = 0.0
