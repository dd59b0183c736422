"""Which ranks share a host, and the options that say so."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdpcore.core.checks import as_choice
from fsdpcore.core.errors import ConfigError

_LOG = logging.getLogger("fsdpcore")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = "/proc/self/ns/pid"
_SEES = ", "
MAX_BYTES = 64


@dataclass(frozen=True)
class HostOptions:
    """Options of transports whose ranks are processes.

    Attributes:
        shm: "auto" lets collectives among ranks of one host go through shared memory, where that
            is to be had, and large messages if the transport says so; "on" makes it an error if
            it is not; "off" leaves everything to messages.
        host_id: ranks with equal ones count as being on one host, those with others as elsewhere;
            by default the system tells.
    """

    shm: str = "auto"
    host_id: str = ""

    def __post_init__(self) -> None:
        as_choice(self.shm, ("auto", "on", "off"), "shm", error=ConfigError)


def identity(host_id: str = "") -> str:
    """Return text that is equal in two processes only if they are on one host.

    That is, if one running kernel serves both, and they can see each other: processes in
    containers may not. A name alone does not tell hosts apart: images and containers are cloned
    with theirs.

    Args:
        host_id: what the user wants to tell the host by instead; empty for none.

    Returns:
        At most ``MAX_BYTES`` as UTF-8.

    Raises:
        ConfigError: ``host_id`` is too long.
    """
    if host_id:
        if len(host_id.encode(errors="replace")) > MAX_BYTES:
            raise ConfigError(f"host_id must be at most {MAX_BYTES} bytes, got {host_id!r}")
        return host_id
    try:
        boot = _BOOT_ID.read_text().strip()
        return f"{boot}{_SEES}{os.readlink(_PROCESSES)}"
    except OSError:  # not Linux
        return f"{socket.gethostname()} {uuid.getnode():012x}"[:MAX_BYTES]


def number(identities: Iterable[Hashable]) -> tuple[int, ...]:
    """Replace identities by numbers, from 0 in the order of their first appearance."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in identities)


def warn_of_containers(identities: Iterable[str]) -> None:
    """Log, for one rank of a job, if ranks run on one kernel but cannot see each other."""
    places: dict[str, set[str]] = {}
    for name in identities:
        boot, found, processes = name.partition(_SEES)
        if found:
            places.setdefault(boot, set()).add(processes)
    count = max(map(len, places.values()), default=0)
    if count > 1:
        _LOG.warning(
            "ranks on one machine are in %d containers that do not see each other's processes: "
            "they share memory inside of each, and send messages from one to another; "
            "containers with the host's processes (docker run --pid=host) share all",
            count,
        )
