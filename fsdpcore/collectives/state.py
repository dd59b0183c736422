"""``CollectiveState``: what the collectives keep with a group from one call to the next."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fsdpcore.collectives.device_transport import device_transport_of
from fsdpcore.collectives.spec import Operation
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.algorithm import Algorithm

if TYPE_CHECKING:
    from fsdpcore.collectives.context import CollectiveContext


class CollectiveState:
    """The state of one group's collectives on this rank; ``backend.collectives`` is one.

    Attributes:
        operations: all collectives that move data, by name.
        context: what algorithms see of the group; None before its first collective has run.
        specs: of the kinds of calls that the group has seen, each a ``CallSpec``.
        device_twin: the same ranks as a group that moves arrays of the device, once there is one;
            see ``on_device.device_twin``.
    """

    # ``CollectiveMethods`` has them: their files import ``run``, which imports this one.
    operations: ClassVar[Mapping[str, Operation]]

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)  # which holds this
        self.context: CollectiveContext | None = None
        self.specs: dict[Any, Any] = {}
        self.device_twin: Backend | None = None

    @property
    def backend(self) -> Backend:
        """The group."""
        found = self._backend()
        assert found is not None, "the group is in use"
        return found

    @functools.cached_property
    def own_algorithms(self) -> Mapping[str, Mapping[str, Algorithm]]:
        """What the transport offers for this group's collectives beyond the general algorithms."""
        backend = self.backend
        if backend.moves.on_host:
            return transport_of(backend).algorithms(backend)
        return device_transport_of(backend).device_algorithms(backend)


def state_of(backend: Backend) -> CollectiveState:
    """Return what the collectives keep with a group."""
    return backend.collectives  # type: ignore[return-value]  # what ``provide_collectives`` gave
