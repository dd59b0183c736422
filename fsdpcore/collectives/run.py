"""How a collective call runs on a rank: in order, checked against the other ranks, in time."""

from __future__ import annotations

from typing import Any

from fsdpcore.collectives import on_device
from fsdpcore.collectives.context import Body, CollectiveContext
from fsdpcore.collectives.hierarchy import costs as hierarchy_costs
from fsdpcore.collectives.hierarchy import host_context
from fsdpcore.collectives.lone import LoneContext
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.shared import algorithm as shared
from fsdpcore.collectives.shared.establish import establish
from fsdpcore.collectives.shared.fast_path import fast_path_for
from fsdpcore.collectives.spec import UNCHOSEN, CallSpec
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.comm.transport import transport_of
from fsdpcore.core.errors import PeerFailedError
from fsdpcore.core.work import Deadline


def run(
    backend: Backend,
    spec: CallSpec,
    body: Body,
    *,
    timeout: float | None,
    async_op: bool,
    output: Output | None = None,
) -> Any:
    """Run one collective: ``body(context)``, with all ranks' calls compared before it or in it.

    Args:
        backend: the group.
        spec: what this rank calls.
        body: moves the data, by ``spec.choice``; ``context.rows`` is the size of axis 0 on every
            rank, where ``spec.meets``.
        timeout: seconds from the start of the operation, for all of it.
        async_op: return a ``Work`` at once.
        output: what ``body`` fills, if that was made before.

    Returns:
        What ``body`` returns, or a ``Work`` for it.

    Raises:
        CommunicationError: also breaks the backend, since ranks may now be at different places.
    """
    limit = backend.root.default_timeout if timeout is None else Deadline(timeout).seconds
    if not backend.moves.on_host:
        return on_device.run(_perform, backend, spec, body, limit, async_op=async_op)
    return backend.order.issue(
        spec.operation,
        lambda sequence, background: _perform(backend, spec, body, limit, sequence, background),
        async_op=async_op,
        nbytes=output.held if output is not None else 0,
        timeout=limit,
    )


def _perform(
    backend: Backend, spec: CallSpec, body: Body, limit: float, sequence: int, background: bool
) -> Any:
    recorder = backend.root.recorder
    context = state_of(backend).context or _context(backend)
    context.begin(spec, sequence, limit, background)
    entry = context.entry = recorder.begin(backend.order, sequence, spec.record)
    try:
        if spec.choice is UNCHOSEN:
            _settle(backend, context, spec)
        context.enter()
        result = body(context)
        if backend.root.reduce_rate is not None:
            _reduce(backend, spec, backend.root.reduce_rate)
    except BaseException as error:
        context.broke(entry, error)
        if isinstance(error, PeerFailedError):  # another rank may have told of it a moment before
            raise backend.root.fail_with(error) from None
        raise
    finally:
        context.release()
    recorder.end(entry)
    return result


def _reduce(backend: Backend, spec: CallSpec, rate: float) -> None:
    """Let the time pass of what this rank has reduced."""
    algorithm = spec.choice.algorithm
    if algorithm is not None:
        gamma = algorithm.cost(backend.world_size).gamma
        backend.root.clock.sleep(gamma * spec.size / rate)


def _context(backend: Backend) -> CollectiveContext:
    """Make the context of a group's collectives."""
    alike = transport_of(backend).alike
    return CollectiveContext(backend) if alike is None else LoneContext(backend, alike)


def _settle(backend: Backend, context: CollectiveContext, spec: CallSpec) -> None:
    """Choose the algorithm of a call that is new to the group, or late in choosing."""
    if state_of(backend).context is None:
        _first(backend, context)
    if not spec.chooses_late:
        spec.choice = spec.choose(spec.size)
        context.fallback = spec.choice.fallback
        spec.record.algorithm = spec.choice.name
        spec.fast_path = fast_path_for(backend, spec) if backend.moves.on_host else None


def _first(backend: Backend, context: CollectiveContext) -> None:
    """Find out, in a group's first collective, whether its ranks share memory."""
    state = state_of(backend)
    if not backend.moves.on_host or transport_of(backend).alike is not None:
        state.context = context
        return
    region = establish(context, backend)
    if region is not None:
        context.share(region)
        found = shared.algorithms(state.operations) if region.moves else {}
    elif host_context.establish(context, backend, state.operations):
        tuning = backend.root.policy.tuning
        found = hierarchy_costs.algorithms(backend.hosts, tuning, state.operations)
    else:
        found = {}
    own = state.own_algorithms
    if found:
        state.own_algorithms = {
            name: {**own.get(name, {}), **found.get(name, {})} for name in {*own, *found}
        }
    state.context = context
