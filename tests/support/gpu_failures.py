"""Bodies: ranks on GPUs that do not come, die, differ or raise. ``VICTIM`` is the one that does."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from support.bodies.point_to_point import check_words, expect
from support.spmd_job import meet
from support.zmq_ranks import Line

import fsdpcore as fc

VICTIM = 1
# Of a call that will miss it; and in which a failure that was told must have come.
DEADLINE, SOON = 2.0, 30.0


def _ones(backend: fc.Backend, size: int = 1000) -> Any:
    return backend.device.from_host(np.ones(size, np.float32))


def _goes_on(backend: fc.Backend) -> None:
    """The stream was freed of the call, and the GPU computes."""
    xp = backend.device.xp
    y = xp.ones(3, np.float32)
    y += 1
    xp.cuda.get_current_stream().synchronize()
    assert y.get().tolist() == [2.0] * 3  # not by the device, which raises what has happened


def missing_from_known_call(backend: fc.Backend) -> None:
    """A rank does not come; the others learn which, though nobody waits for the call.

    The ranks have agreed on such a call before, so the host goes on at once.
    """
    _missing(backend, known=True)


def missing_from_new_call(backend: fc.Backend) -> None:
    """A rank does not come to a call that is new, which the host waits for."""
    _missing(backend, known=False)


def differing_in_known_calls(backend: fc.Backend) -> None:
    """A rank calls something else; all learn who called what, behind the callers' backs."""
    _differing(backend, known=True)


def differing_in_new_calls(backend: fc.Backend) -> None:
    """A rank calls something else for the first time."""
    _differing(backend, known=False)


def _missing(backend: fc.Backend, *, known: bool) -> None:
    x = _ones(backend)
    if known:
        fc.all_reduce(x, backend, out=x)
    backend.device.synchronize()
    meet()
    if backend.rank != VICTIM:

        def call() -> None:
            fc.all_reduce(x, backend, out=x, timeout=DEADLINE)
            backend.barrier(timeout=SOON)  # raises what has happened meanwhile

        error = expect(fc.CommTimeoutError, call)
        check_words(error, "all_reduce #", f"{DEADLINE:g} s", f"rank {VICTIM} is missing")
        _goes_on(backend)
    meet()


def _differing(backend: fc.Backend, *, known: bool) -> None:
    x = _ones(backend)
    if known:
        fc.all_reduce(x, backend)
        fc.broadcast(x, backend)
    backend.device.synchronize()
    meet()

    def calls() -> None:
        if backend.rank == VICTIM:
            fc.broadcast(x, backend)
        else:
            fc.all_reduce(x, backend)
        end = time.monotonic() + SOON
        while time.monotonic() < end:  # it may be found behind the caller's back
            backend.barrier(timeout=SOON)

    error = expect(fc.MismatchError, calls)
    check_words(error, "broadcast", "all_reduce", f"rank {VICTIM}")
    _goes_on(backend)
    meet()


def raising(backend: fc.Backend) -> None:
    """A rank raises between calls that others have enqueued; they learn why."""
    x = _ones(backend)
    fc.all_reduce(x, backend, out=x)
    meet()
    if backend.rank == VICTIM:
        backend.abort("ValueError: the loss is not a number")
    else:

        def calls() -> None:
            fc.all_reduce(x, backend, out=x)
            backend.barrier(timeout=SOON)

        error = expect(fc.PeerFailedError, calls)
        check_words(error, f"rank {VICTIM}", "the loss is not a number")
        _goes_on(backend)
    meet()


def collectives(backend: fc.Backend, line: Line) -> None:
    """All reduce on the device until something happens."""
    x = _ones(backend, 4_000_000)
    fc.all_reduce(x, backend, out=x, op="max")
    backend.device.synchronize()
    line.tell("ready")
    while True:
        for _ in range(10):
            fc.all_reduce(x, backend, out=x, op="max")
        backend.device.synchronize()


def started(backend: fc.Backend, line: Line) -> None:
    """The same, in the background."""
    x = _ones(backend, 4_000_000)
    fc.all_reduce(x, backend, async_op=True).wait(SOON)
    line.tell("ready")
    while True:
        works = [fc.all_reduce(x, backend, async_op=True) for _ in range(4)]
        for work in works:
            work.wait()
        backend.device.synchronize()


def nothing(backend: fc.Backend, line: Line) -> None:
    """Leave at once."""
