"""The options of ``zmq``: what a URL of that transport may say."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdpcore.comm.hosts import HostOptions
from fsdpcore.core.checks import as_choice
from fsdpcore.core.errors import ConfigError

from .wire import MAX_INLINE, MAX_PAYLOAD


@dataclass(frozen=True)
class ZmqOptions(HostOptions):
    """Options of ``zmq://HOST:PORT`` URLs: those of ``HostOptions``, and these.

    HOST:PORT is where rank 0 lets the others meet. Large messages, too, go through shared memory.

    Attributes:
        security: "auto" encrypts where the ranks do not meet at the loopback address, and then
            needs a secret; "curve" encrypts everywhere; "none" nowhere, for networks that are
            trusted.
        heartbeat: seconds without a sign of life after which a rank counts as lost. A network may
            be down for less, if TCP gets through in time: it tries again 0.2, 0.6, 1.4, 3.0 and
            6.2 seconds after the first loss.
        port: where the ranks listen: 0 for any free port, N, or a range N-M, of which each rank
            of a host takes one.
        interface: at which the ranks of this host listen: an address or an interface's name; by
            default loopback, or the one from which HOST is reached. They also connect from there
            to ranks that would not let them in otherwise.
        segment_bytes: large messages travel in pieces of this size, between which others get
            their turn.
        eager_bytes: messages up to this size are sent at once, and kept by the receiver.
    """

    security: str = "auto"
    heartbeat: float = 5.0
    port: str = "0"
    interface: str = ""
    segment_bytes: int = 1 << 20
    eager_bytes: int = 64 * 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        as_choice(self.security, ("auto", "curve", "none"), "security", error=ConfigError)
        if not 0.1 <= self.heartbeat <= 3600:
            raise ConfigError(f"heartbeat must be 0.1 to 3600 seconds, got {self.heartbeat:g}")
        ports(self.port)
        if not 1024 <= self.segment_bytes <= MAX_PAYLOAD:
            raise ConfigError(f"segment_bytes must be 1 KiB to 16 MiB, got {self.segment_bytes}")
        if not 0 <= self.eager_bytes <= MAX_INLINE:
            raise ConfigError(f"eager_bytes must be 0 to 1 MiB, got {self.eager_bytes}")


def ports(text: str) -> range:
    """Read ``port``: 0, N or N-M.

    Raises:
        ConfigError: it is none of these.
    """
    found = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
    first = int(found[1]) if found else -1
    last = int(found[2]) if found and found[2] else first
    if not 0 <= first <= last <= 65535 or (first == 0 and last > 0):
        raise ConfigError(f"port must be 0, N or N-M, with ports up to 65535; got {text!r}")
    return range(first, last + 1)
