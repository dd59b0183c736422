"""A signal's exception that the program catches: a collective was left, or never began."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np
import pytest

import fsdpcore as fc

CALLS = 20_000  # more than fit the time until the interrupt


def _interrupted(backend: fc.Backend) -> str:
    def raise_it(*ignored: Any) -> None:
        raise KeyboardInterrupt

    values = np.zeros(1, np.int64)
    fc.all_reduce(values, backend)
    if backend.rank == 1:
        signal.signal(signal.SIGALRM, raise_it)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
    before = backend.issued
    try:
        while backend.issued < CALLS:
            before = backend.issued
            fc.all_reduce(values, backend)
    except KeyboardInterrupt:
        if backend.root.failure is not None:
            return "broken"
        if backend.issued == before or backend.root.recorder._entries[-1].end:
            return "between two calls"
        return "left, and nobody knows"
    except fc.PeerFailedError:
        return "told"
    return "done"


@pytest.mark.parametrize("attempt", range(3))
def test_a_caught_interrupt_leaves_nothing_half_done(attempt: int) -> None:
    """The rank goes on to its end: with the other, or with the job broken for both."""
    told, interrupted = fc.launch(_interrupted, world_size=2, transport="zmq", timeout=60)
    assert (told, interrupted) in [
        ("told", "broken"),
        ("told", "between two calls"),  # it leaves the job then
        ("done", "done"),
        ("told", "done"),
    ]
