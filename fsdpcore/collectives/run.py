"""How a collective call runs on a rank: in order, checked against the other ranks, in time."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fsdpcore.collectives import on_device
from fsdpcore.collectives.algorithms import hierarchy_costs
from fsdpcore.collectives.context import CollectiveContext
from fsdpcore.collectives.fingerprint import Fingerprint
from fsdpcore.collectives.output import Output
from fsdpcore.collectives.selection.choose import Choice, choose
from fsdpcore.collectives.shared import algorithm as shared
from fsdpcore.collectives.shared import region
from fsdpcore.collectives.shared.fast_path import Lane, lane_for
from fsdpcore.collectives.state import state_of
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array, dtype_code
from fsdpcore.core.errors import ArgumentError, PeerFailedError
from fsdpcore.core.reductions import Reduction
from fsdpcore.core.work import Deadline, fresh
from fsdpcore.diagnostics.recorder import Record

Body = Callable[[CollectiveContext], Any]

# Kinds of calls that a group remembers.
_REMEMBERED = 1024


def _unchosen(*args: Any) -> Any:
    raise AssertionError("no algorithm was chosen for this call")


_UNCHOSEN = Choice("", _unchosen)


class CallSpec:
    """One kind of call: all that follows from it without its data, and without communication.

    A training loop makes few kinds of calls many times over, so a group remembers them.

    Attributes:
        fingerprint: what the ranks must agree on.
        operation, dtype, shape, root, digest, rows, ragged: of the fingerprint.
        record: what the flight recorder keeps.
        collective: the one whose algorithms carry it out; empty for none.
        nbytes: of this rank's array.
        size: the n of the cost formulas; 0 where it follows only from what ranks tell each other.
        reduction: of a collective that reduces.
        bounds: where the ranks' chunks lie in the flat array that is split or joined.
        out_shape: of the result on this rank.
        choice: the algorithm, chosen when the first such call runs.
        lane: a shorter way for blocking calls with the default deadline, if there is one.
        chooses_late: there is no ``choice``: the body takes ``link.choose(size)``, or needs none.
        agreed: the ranks have agreed on such a call, and need not do so again before the next.
    """

    def __init__(
        self,
        backend: Backend,
        collective: str,
        fingerprint: Fingerprint,
        size: int | None = None,
        *,
        reduction: Reduction | None = None,
        bounds: Sequence[int] = (),
        out_shape: tuple[int, ...] = (),
    ) -> None:
        self.fingerprint = fingerprint
        self.operation = fingerprint.operation
        self.dtype = fingerprint.dtype
        self.shape = fingerprint.shape
        self.root = fingerprint.root
        self.digest = fingerprint.digest
        self.rows = fingerprint.rows
        self.ragged = fingerprint.ragged
        self.collective = collective
        itemsize = self.dtype.itemsize if self.dtype is not None else 0
        self.nbytes = math.prod(self.shape) * itemsize
        self.record = Record(
            self.operation,
            self.dtype,
            self.shape,
            self.nbytes,
            fingerprint.algorithm,
            fingerprint.label,
        )
        self.size = size or 0
        self.reduction = reduction
        self.bounds = bounds
        self.out_shape = out_shape
        self.choice = _UNCHOSEN
        self.lane: Lane | None = None
        self.agreed = False
        self.chooses_late = size is None
        self._backend = weakref.ref(backend)
        if collective:
            self._check_algorithm(backend)

    def choose(self, size: int) -> Choice:
        """Return the algorithm for ``size`` bytes, as the cost formulas count them."""
        backend, fingerprint = self._backend(), self.fingerprint
        assert backend is not None, "the group is in use"
        return choose(
            self.collective,
            fingerprint.algorithm,
            size,
            backend,
            fingerprint.dtype,
            fingerprint.op,
        )

    def _check_algorithm(self, backend: Backend) -> None:
        """Refuse an unknown algorithm before anything is sent.

        Whether a group has shared memory is known only once its first collective runs.
        """
        memory = backend.root.memory
        open_yet = (
            state_of(backend).context is None
            and backend.moves.on_host
            and memory is not None
            and memory.available
        )
        if self.fingerprint.algorithm != shared.NAME or not open_yet:
            self.choose(self.size)


def call_for(
    backend: Backend,
    operation: str,
    collective: str,
    dtype: np.dtype[Any] | None = None,
    shape: tuple[int, ...] = (),
    *,
    size: int | None = None,
    reduction: Reduction | None = None,
    root: int = -1,
    algorithm: str = "auto",
    label: str = "",
    counts: tuple[int, ...] = (),
    ragged: bool = False,
    bounds: Sequence[int] = (),
    out_shape: tuple[int, ...] = (),
) -> CallSpec:
    """Make a call; the arguments are those of ``Fingerprint`` and ``CallSpec``.

    Raises:
        ArgumentError: the dtype cannot travel, or the collective has no such algorithm.
    """
    if dtype is not None:
        dtype_code(dtype)
    if not isinstance(label, str):
        raise ArgumentError(f"{operation}: a label is a string, got {label!r}")
    fingerprint = Fingerprint(
        operation,
        dtype,
        shape,
        reduction.name if reduction else "",
        root,
        algorithm,
        counts,
        label,
        ragged,
        policy=str(backend.root.policy),
    )
    return CallSpec(
        backend,
        collective,
        fingerprint,
        size,
        reduction=reduction,
        bounds=bounds,
        out_shape=out_shape,
    )


def operand(array: ArrayLike, backend: Backend) -> tuple[Array, Backend]:
    """Check the first arguments of a collective.

    Whether arrays of its dtype travel is for ``call_for`` to check.

    Returns:
        The array, C-contiguous, and the group that moves such arrays.

    Raises:
        ArgumentError: one of them is not what it should be.
    """
    if type(array) is np.ndarray and array.flags.c_contiguous and isinstance(backend, Backend):
        return array, backend
    check_backend(backend)
    backend = on_device.mover(backend, array)
    return backend.moves.operand(array), backend


def remembered(backend: Backend, make: Callable[..., CallSpec], *key: Any) -> CallSpec:
    """Return ``make(backend, *key)``, made once for equal keys."""
    calls: dict[Any, CallSpec] = state_of(backend).calls
    try:
        return calls[make, key]
    except KeyError:
        if len(calls) >= _REMEMBERED:
            calls.clear()
        call = calls[make, key] = make(backend, *key)
        return call
    except TypeError:  # an argument that cannot be a key is wrong, and ``make`` says how
        return make(backend, *key)


def check_backend(backend: Backend) -> None:
    """Raise ``ArgumentError`` if what a caller passed as the backend is none."""
    if not isinstance(backend, Backend):
        raise ArgumentError(
            f"a collective takes the array, then the backend; got {type(backend).__name__} "
            "as the backend"
        )


def run(
    backend: Backend,
    call: CallSpec,
    body: Body,
    *,
    timeout: float | None,
    async_op: bool,
    output: Output | None = None,
) -> Any:
    """Run one collective: ``body(link)`` after the ranks have agreed on it.

    Args:
        backend: the group.
        call: what this rank calls.
        body: moves the data, by ``call.choice``; ``link.rows`` is the size of axis 0 on every
            rank, where the ranks have agreed before.
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
        return on_device.run(_perform, backend, call, body, limit, async_op=async_op)
    order = backend.order
    if not async_op:
        with order.lock:
            before = order.issued
            try:
                if sequence := order.acquire_sequence():
                    return _perform(backend, call, body, limit, sequence, False)
            except BaseException as error:
                order.abandon(before, call.operation, error)
                raise
    return order.issue(
        call.operation,
        lambda sequence: _perform(backend, call, body, limit, sequence, True),
        async_op=async_op,
        nbytes=output.held if output is not None else 0,
        timeout=limit,
    )


def _perform(
    backend: Backend, call: CallSpec, body: Body, limit: float, sequence: int, background: bool
) -> Any:
    recorder = backend.root.recorder
    link = state_of(backend).context or CollectiveContext(backend)
    link.begin(call, sequence, limit, background)
    entry = link.entry = recorder.begin(backend.order, sequence, call.record)
    try:
        choice = call.choice
        if choice is _UNCHOSEN:
            choice = _settle(backend, link, call)
        if not (choice.agrees or call.agreed):
            link.rows = link.agree()
            # Among GPUs the host does not wait for the others at every call: see ``on_device``.
            call.agreed = not (backend.moves.on_host or call.ragged or call.chooses_late)
        result = body(link)
    except BaseException as error:
        link.broke(entry, error)
        first = backend.root.failure
        if isinstance(error, PeerFailedError) and str(first) != str(error) and first is not None:
            # Another rank told of it a moment before, and that is what every later call raises.
            raise fresh(first) from None
        raise
    finally:
        link.release()
    recorder.end(entry)
    return result


def _settle(backend: Backend, link: CollectiveContext, call: CallSpec) -> Choice:
    """Choose the algorithm of a call that is new to the group, or late in choosing."""
    if state_of(backend).context is None:
        _first(backend, link)
    if not call.chooses_late:
        call.choice = call.choose(call.size)
        link.staged = call.choice.staged
        call.record.algorithm = call.choice.name
        call.lane = lane_for(backend, call) if backend.moves.on_host else None
    return call.choice


def _first(backend: Backend, link: CollectiveContext) -> None:
    """Find out, in a group's first collective, whether its ranks share memory."""
    state = state_of(backend)
    if not backend.moves.on_host:
        state.context = link
        return
    link.area = region.establish(link, backend)
    if link.area is not None:
        backend.root.regions.add(link.area)
        found = shared.ALGORITHMS
    else:
        found = hierarchy_costs.establish(link, backend)
    own = state.own_algorithms
    if found:
        state.own_algorithms = {
            name: {**own.get(name, {}), **found.get(name, {})} for name in {*own, *found}
        }
    state.context = link
