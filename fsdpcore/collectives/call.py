"""How a collective call runs on a rank: in order, checked against the other ranks, in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array, input_array
from fsdpcore.collectives.fingerprint import Fingerprint, exchange
from fsdpcore.collectives.link import Link
from fsdpcore.errors import ArgumentError, CommTimeoutError, CommunicationError
from fsdpcore.work import Deadline

Body = Callable[[Link, list[int]], Any]


def operand(array: ArrayLike, backend: Backend) -> Array:
    """Return the first argument of a collective as an array that travels; check the second.

    Raises:
        ArgumentError: one of them is not what it should be.
    """
    check_backend(backend)
    return input_array(array)


def check_backend(backend: Backend) -> None:
    """Raise ``ArgumentError`` if what a caller passed as the backend is none."""
    if not isinstance(backend, Backend):
        raise ArgumentError(
            f"a collective takes the array, then the backend; got {type(backend).__name__} "
            "as the backend"
        )


def run(
    backend: Backend,
    fingerprint: Fingerprint,
    body: Body,
    *,
    timeout: float | None,
    async_op: bool,
) -> Any:
    """Run one collective: ``body(link, rows)`` after the ranks have agreed on it.

    Args:
        backend: the group.
        fingerprint: what this rank calls.
        body: moves the data; ``rows`` is the size of axis 0 on every rank.
        timeout: seconds from the start of the operation, for all of it.
        async_op: return a ``Work`` at once.

    Returns:
        What ``body`` returns, or a ``Work`` for it.

    Raises:
        CommunicationError: also breaks the backend, since ranks may now be at different places.
    """
    limit = Deadline(backend.timeout if timeout is None else timeout).seconds
    activity, root = backend.root.activity, backend.root

    def task(sequence: int) -> Any:
        link = Link(backend, fingerprint.operation, sequence, limit)
        activity.begin(backend.channel, sequence, link.name)
        try:
            result = body(link, exchange(link, fingerprint))
        except CommunicationError as error:
            # After a timeout the others are left time to report their own view of it.
            root.fail(error, tell=not isinstance(error, CommTimeoutError))
            raise
        except BaseException as error:
            why = f"{link.name} was left on rank {root.rank}: {type(error).__name__}: {error}"
            root.fail(CommunicationError(why), tell=True)
            raise
        finally:
            link.release()
        activity.end()
        return result

    return backend.issue(fingerprint.operation, task, async_op=async_op)
