"""``NcclTransport``: what the collectives of a rank's GPU find at its transport."""

from __future__ import annotations

from fsdpcore.collectives.device_transport import DeviceTransport

from .communicators import Communicators
from .cuda_device import CudaDevice
from .groups import GroupCommunicators
from .supervisor import Supervisor


class NcclTransport(DeviceTransport):
    """A transport whose ranks have a GPU each.

    Attributes:
        gpu: the same as ``device``.
        communicators, groups: of NCCL; all of this rank, and those of its groups.
        supervisor: looks after what was enqueued.
    """

    gpu: CudaDevice
    communicators: Communicators
    groups: GroupCommunicators
    supervisor: Supervisor
