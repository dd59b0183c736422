"""``DeviceTransport``: what a transport implements whose ranks move arrays of GPUs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import Transport
from fsdpcore.core.algorithm import Algorithm
from fsdpcore.core.device import Ticket

if TYPE_CHECKING:
    from fsdpcore.collectives.spec import CallSpec


class DeviceTransport(Transport):
    """A transport that also carries out collectives of arrays of ``device``.

    It moves them by algorithms of its own alone, which enqueue what they do.
    """

    @abstractmethod
    def device_algorithms(self, group: Backend) -> Mapping[str, Mapping[str, Algorithm]]:
        """Do as ``algorithms`` for arrays of ``device``, which the general ones do not move.

        Their functions enqueue what they do where the calling thread does, and do not wait for it.
        The context is for arrays of the host. The first one of a collective that supports a call is
        what ``auto`` takes.
        """

    @abstractmethod
    def enqueued(
        self,
        group: Backend,
        spec: CallSpec,
        sequence: int,
        limit: float,
        ticket: Ticket | None,
        held: object,
    ) -> None:
        """Take note of a collective that was enqueued.

        Args:
            group, spec, sequence: which.
            limit: seconds within which it must end.
            ticket: of the background; None where it was enqueued with everything else.
            held: with a ticket, what keeps its arrays, to be kept until it is done.
        """

    @abstractmethod
    def keep(self, ticket: Ticket, held: object) -> None:
        """Keep what is used in the background of ``device`` until the ticket is done."""

    @abstractmethod
    def device_group(self) -> AbstractContextManager[None]:
        """Have what algorithms that are not canonical enqueue in the block begin at its end."""

    @abstractmethod
    def was_split(self, group: Backend, made: Backend | None) -> None:
        """Take note of a ``split``, which all ranks of ``group`` called, and what it made here."""

    @abstractmethod
    def group_closed(self, group: Backend) -> None:
        """Free what there is of a group that moves arrays of ``device``; not of the whole job."""


def device_transport_of(backend: Backend) -> DeviceTransport:
    """Return the transport of a backend whose device is a GPU."""
    root = backend.root
    assert isinstance(root, DeviceTransport), "it has a device"
    return root
