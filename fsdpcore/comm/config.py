"""What a transport is made from: the ``Settings`` of all of them, and a ``TransportConfig``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdpcore.core.errors import ConfigError
from fsdpcore.core.policy import Policy
from fsdpcore.diagnostics.recorder import DEFAULT_SIZE

# Beyond this (about 23 days) the operating system's own waits overflow.
MAX_TIMEOUT = 2e6


@dataclass(frozen=True)
class Settings:
    """What applies to every transport.

    Attributes:
        transport: URL, or bare scheme; empty for the default of whoever asks.
        world_size: number of ranks; 0 where nothing says.
        timeout: seconds that an operation may take.
        rendezvous_timeout: seconds until all ranks must have joined.
        blas_threads: threads of each rank's BLAS; 0 shares the cores of the host evenly.
        deterministic: keep ``algorithm="auto"`` to algorithms that reduce in the canonical order,
            so that the bits are those of every other transport. An override that names another
            one is then an error.
        tuning: file that ``fsdpcore tune`` has written, relative to the working directory; empty
            for the costs that come with the package.
        trace: directory where every rank writes its last operations when it fails, and when it
            closes, for ``fsdpcore trace``; empty for none.
        trace_operations: how many a rank remembers.
    """

    transport: str = ""
    world_size: int = 0
    timeout: float = 60.0
    rendezvous_timeout: float = 60.0
    blas_threads: int = 0
    deterministic: bool = False
    tuning: str = ""
    trace: str = ""
    trace_operations: int = DEFAULT_SIZE

    def __post_init__(self) -> None:
        for name in ("timeout", "rendezvous_timeout"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT:
                raise ConfigError(
                    f"{name} must be more than 0 and at most {MAX_TIMEOUT:.0f} seconds, "
                    f"got {getattr(self, name):g}"
                )
        for name in ("world_size", "blas_threads"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.trace_operations < 1:
            raise ConfigError(f"trace_operations must be at least 1, got {self.trace_operations}")
        if self.trace and Path(self.trace).exists() and not Path(self.trace).is_dir():
            raise ConfigError(f"trace must be a directory, but {self.trace!r} is a file")


@dataclass(frozen=True)
class TransportConfig(Settings):
    """Settings, and what the transport's URL says.

    Attributes:
        host, port: of the URL; empty and 0 where it names none.
        transport_options: instance of the transport's ``options``.
        policy: how algorithms are chosen, from ``deterministic``, ``tuning`` and the overrides.
    """

    host: str = ""
    port: int = 0
    transport_options: Any = None
    policy: Policy = field(default_factory=Policy)
