"""Collectives of a GPU's arrays: enqueued, not waited for.

They go through the same checks as those of the host's arrays, with algorithms of the transport's
own. A blocking one is *ordered by the stream*: it is enqueued where the caller enqueues, and what
the caller enqueues next sees its result, while the host goes on. So the host does not wait for the
other ranks either: they agree on a kind of call when it is seen first, and the transport compares
later ones behind the caller's back. It watches the deadline, too; the next call raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from fsdpcore.collectives.context import Body
from fsdpcore.collectives.device_transport import device_transport_of
from fsdpcore.collectives.spec import CallSpec
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend, SubBackend
from fsdpcore.core.channels import channel_of
from fsdpcore.core.device import Device, Ticket
from fsdpcore.core.errors import ClosedError, CommTimeoutError
from fsdpcore.core.work import Deadline, Work, fresh


class DeviceGroup(SubBackend):
    """The ranks of a group as one that moves arrays of the device; made by ``device_twin``.

    Its collectives have an order and numbers of their own.
    """

    def __init__(self, group: Backend) -> None:
        everyone = tuple(range(group.world_size))
        channel = channel_of(group.channel, everyone, 0, "on device")
        super().__init__(group, everyone, group.group.for_device(channel))
        self.moves: Device = group.root.device

    def close(self) -> None:
        super().close()
        device_transport_of(self).group_closed(self)


_making = threading.Lock()  # two groups of one channel would mix their messages


def device_twin(backend: Backend) -> Backend:
    """Return the same ranks as a group that moves arrays of the device; the same every time."""
    state = state_of(backend)
    if state.device_twin is None:
        with _making:
            if state.device_twin is None:
                made = DeviceGroup(backend)
                backend.root.recorder.add_group(made.order)
                state.device_twin = made
    return state.device_twin


def mover(backend: Backend, array: object) -> Backend:
    """Return the group whose collectives move such an array; for others, the one given.

    Arrays of any GPU go where those of this rank's GPU do, which says what is wrong with them.
    """
    if isinstance(backend, DeviceGroup) or not backend.device.claims(array):
        return backend
    return device_twin(backend)


class DeviceWork(Work):
    """A collective in the background of a device."""

    def __init__(self, backend: Backend, text: str, ticket: Ticket, value: Any) -> None:
        self._root = backend.root
        self._text = text
        self._ticket = ticket
        self._value = value

    def done(self) -> bool:
        return self._ticket.done() or self._root.failure is not None

    def _words(self) -> str:
        return self._text

    def wait(self, timeout: float | None = None) -> Any:
        """Have what this thread enqueues from now on see the result, and return it.

        The host waits only if a ``timeout`` is given.
        """
        if timeout is not None and not self._ticket.block(Deadline(timeout).seconds):
            self._check()
            raise CommTimeoutError(f"{self._text} is not finished after waiting {timeout} s")
        self._check()
        self._ticket.join()
        return self._value

    def _check(self) -> None:
        failure = self._root.failure
        # A backend is closed when all has ended that was enqueued: the result is there.
        if failure is not None and not isinstance(failure, ClosedError):
            raise fresh(failure)


def in_background(backend: Backend, text: str, body: Callable[[], Any]) -> DeviceWork:
    """Enqueue what ``body`` does in the background of the device, one thing after the other.

    Collectives in it are blocking ones, and so are ordered like the rest. What it refers to is kept
    until all of that has ended, whoever waits for it.

    Args:
        backend: a group of the rank.
        text: for messages.
        body: called at once; the work's result is what it returns.
    """
    with backend.device.background() as ticket:
        value = body()
    device_transport_of(backend).keep(ticket, body)
    return DeviceWork(backend, text, ticket, value)


def run(
    perform: Callable[[Backend, CallSpec, Body, float, int, bool], Any],
    backend: Backend,
    spec: CallSpec,
    body: Body,
    limit: float,
    *,
    async_op: bool,
) -> Any:
    """Enqueue one collective by ``perform``; see ``run.run``."""
    transport, device = device_transport_of(backend), backend.moves
    order = backend.order
    with order.lock:
        before = order.issued
        try:
            sequence = order.acquire_sequence()
            if not async_op:
                value = perform(backend, spec, body, limit, sequence, False)
                transport.enqueued(backend, spec, sequence, limit, None, None)
                return value
            with device.background() as ticket:
                value = perform(backend, spec, body, limit, sequence, False)
            transport.enqueued(backend, spec, sequence, limit, ticket, body)
        except BaseException as error:
            order.abandon(before, spec.operation, error)
            raise
    return DeviceWork(backend, f"{spec.operation} #{sequence}", ticket, value)
