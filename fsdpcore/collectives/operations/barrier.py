"""``barrier``: wait for all ranks."""

from __future__ import annotations

from typing import Any

from fsdpcore.collectives.arguments import check_backend, remembered, spec_for
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.run import run
from fsdpcore.collectives.spec import DECLINED, CallSpec, Choice
from fsdpcore.comm.backend import Backend


def barrier(
    backend: Backend, *, timeout: float | None = None, async_op: bool = False, label: str = ""
) -> Any:
    """Block until every rank has called it: ceil(lg p) small messages, no data.

    Args:
        backend: the group. All its ranks call this, in the same order of collectives.
        timeout: seconds for the whole operation, from when its turn comes after those that this
            group was given before; by default ``backend.timeout``.
        async_op: return a ``Work`` at once, whose ``wait()`` blocks instead.
        label: what the call is for; compared between the ranks and named in errors.

    Returns:
        None, or a ``Work``.

    Raises:
        ArgumentError: an argument is wrong. Nothing was sent.
        MismatchError: the ranks called different things; on all ranks.
        CommTimeoutError: the deadline passed; names the ranks that are missing.
        PeerFailedError: another rank failed, was lost or left.

    Example::

        if backend.rank == 0:
            prepare(folder)
        fc.barrier(backend)  # nobody goes on before the folder is ready
    """
    check_backend(backend)
    spec = remembered(backend, _spec, label)
    if timeout is None and spec.fast_path is not None and not async_op:
        result = spec.fast_path(None, None)
        if result is not DECLINED:
            return result
    return run(backend, spec, _nothing, timeout=timeout, async_op=async_op)


def _spec(backend: Backend, label: str) -> CallSpec:
    spec = spec_for(backend, "barrier", size=0, label=label)
    spec.choose = _no_algorithm
    return spec


def _no_algorithm(size: int) -> Choice:
    return Choice("auto")


def _nothing(context: CollectiveContext) -> None:
    """The body of a barrier: that all ranks have met is all that it does."""
