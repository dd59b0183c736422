"""``MpiTransport``: what MPI's own collectives find at the transport of a rank."""

from __future__ import annotations

from fsdpcore.comm.transport import Transport

from .guard import BlockedCallGuard
from .library import MPI


class MpiTransport(Transport):
    """A transport whose ranks are those of an MPI job.

    Attributes:
        comm: all ranks, apart from the communicators of other software.
        guard: watches calls that block inside MPI.
    """

    comm: MPI.Intracomm
    guard: BlockedCallGuard
