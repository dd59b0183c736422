"""Which rank a process on a host is to be: what a user sets who starts each by hand."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from support.hosts.lab import Host

PORT = 5555


def environs(hosts: Sequence[Host], token: str = "", port: int = PORT) -> list[dict[str, str]]:
    """The variables of each rank of a job whose ranks are on these hosts, in rank order.

    Without a token they get one that nobody else has.
    """
    secret = token or secrets.token_hex(16)
    return [
        {
            "FSDPCORE_RANK": str(rank),
            "FSDPCORE_WORLD_SIZE": str(len(hosts)),
            "FSDPCORE_LOCAL_RANK": str(hosts[:rank].count(host)),
            "FSDPCORE_LOCAL_WORLD_SIZE": str(hosts.count(host)),
            "FSDPCORE_RENDEZVOUS": f"{hosts[0].address}:{port}",
            "FSDPCORE_TOKEN": secret,
        }
        for rank, host in enumerate(hosts)
    ]
