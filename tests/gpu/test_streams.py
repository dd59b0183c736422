"""What waits for what on a GPU: seen by a gate that the test opens, not by a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.bodies.point_to_point import expect
from support.gpu_gate import Gate
from support.gpu_ranks import alone, through_nccl

import fsdpcore as fc

SIZE = 100_000

# Every one on an array of the device, out of place.
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, b, **o: fc.all_reduce(x, b, **o),
    "mean": lambda x, b, **o: fc.all_reduce(x, b, op="mean", **o),
    "direct": lambda x, b, **o: fc.all_reduce(x, b, algorithm="direct", **o),
    "reduce_scatter": lambda x, b, **o: fc.reduce_scatter(x, b, **o),
    "all_gather": lambda x, b, **o: fc.all_gather(x, b, **o),
    "broadcast": lambda x, b, **o: fc.broadcast(x, b, **o),
    "reduce": lambda x, b, **o: fc.reduce(x, b, **o),
    "gather": lambda x, b, **o: fc.gather(x, b, **o),
    "scatter": lambda x, b, **o: fc.scatter(x, b, **o),
    "all_to_all": lambda x, b, **o: fc.all_to_all(x, b, **o),
}
by_call = pytest.mark.parametrize("call", list(CALLS))


def by_copies(backend: fc.Backend, body: Callable[..., None]) -> None:
    """As ever with one rank, which need not call NCCL."""
    body(backend)


by_way = pytest.mark.parametrize("way", [by_copies, through_nccl])


def _recorded(xp: Any) -> Any:
    """An event at this point of the current stream."""
    event = xp.cuda.Event(disable_timing=True)
    event.record()
    return event


def _filled(xp: Any, value: float) -> Any:
    array = xp.empty(SIZE, np.float32)
    array.fill(value)
    return array


def _blocking(backend: fc.Backend, name: str, *, own_stream: bool) -> None:
    call, xp = CALLS[name], backend.device.xp
    stream = xp.cuda.Stream(non_blocking=True) if own_stream else xp.cuda.Stream.null
    with stream:
        gate, x = Gate(xp), _filled(xp, 1.0)
        # As below, so that nothing is loaded, connected or allocated while the gate is closed.
        warm = call(x, backend)
        warm *= 2
        del warm
        stream.synchronize()
        with gate:
            x.fill(3.0)
            result = call(x, backend)
            result *= 2
            after = _recorded(xp)
            assert not after.done, "the host waited for the collective, or it did not wait"
            gate.open()
            stream.synchronize()
        assert (backend.device.to_host(result) == 6.0).all()


@by_call
@by_way
@pytest.mark.parametrize("own_stream", [False, True], ids=["null stream", "own stream"])
def test_a_blocking_call_is_ordered_by_the_stream(
    call: str, own_stream: bool, way: Callable[..., None]
) -> None:
    alone(way, lambda backend: _blocking(backend, call, own_stream=own_stream))


def _started(backend: fc.Backend, name: str) -> None:
    call, xp = CALLS[name], backend.device.xp
    mine, other = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
    with other:
        y = _filled(xp, 5.0)
        y += 1
        other.synchronize()
    with mine:
        gate, x = Gate(xp), _filled(xp, 1.0)
        warm = call(x, backend, async_op=True).wait()
        warm *= 2
        del warm
        mine.synchronize()
        with gate:
            x.fill(3.0)
            work = call(x, backend, async_op=True)
            x_is_late = _recorded(xp)
            with other:  # computes while the collective waits for its input
                y += 1
                computed = _recorded(xp)
            computed.synchronize()
            assert not x_is_late.done
            assert not work.done(), "the collective did not wait for its input"
            expect(fc.CommTimeoutError, work.wait, timeout=0.05)
            result = work.wait()  # the stream waits, the host does not
            result *= 2
            after = _recorded(xp)
            assert not after.done
            gate.open()
            mine.synchronize()
        assert work.done()
        assert work.wait(timeout=5) is result
        assert (backend.device.to_host(result) == 6.0).all()
        assert (backend.device.to_host(y) == 7.0).all()


@by_call
@by_way
def test_a_started_call_runs_beside_the_streams(call: str, way: Callable[..., None]) -> None:
    alone(way, lambda backend: _started(backend, call))


def _forgotten(backend: fc.Backend) -> None:
    xp = backend.device.xp
    with xp.cuda.Stream(non_blocking=True) as stream:
        gate, x = Gate(xp), _filled(xp, 2.0)
        fc.all_reduce(x.copy(), backend, async_op=True).wait()
        _filled(xp, 9.0)
        stream.synchronize()
        with gate:
            works = [fc.all_reduce(x * 1.0, backend, async_op=True) for _ in range(8)]
            # Memory of inputs that were freed too early would be handed out again for these.
            later = [_filled(xp, 9.0) for _ in range(16)]
            gate.open()
            results = [work.wait() for work in works]
            stream.synchronize()
        for result in results:
            assert (backend.device.to_host(result) == 2.0).all()
        del later


def test_arrays_live_as_long_as_a_started_call_needs_them() -> None:
    alone(_forgotten)


def _in_background(backend: fc.Backend) -> None:
    xp, device = backend.device.xp, backend.device
    with xp.cuda.Stream(non_blocking=True) as stream:
        gate, x, y = Gate(xp), _filled(xp, 1.0), _filled(xp, 1.0)
        with device.background() as ticket:
            y += x
        ticket.join()
        x *= 2
        stream.synchronize()
        with gate:
            x.fill(4.0)
            with device.background() as ticket:
                y += x
            assert not ticket.done()
            assert not ticket.block(0.05)
            ticket.join()
            y *= 2
            gate.open()
            assert ticket.block(10)
            stream.synchronize()
        assert ticket.done()
        assert (device.to_host(y) == 12.0).all()


def test_the_background_waits_for_the_stream_and_the_stream_for_it() -> None:
    alone(_in_background)


def _late(backend: fc.Backend) -> str:
    """A stream that stands still makes a call miss its deadline; the next call says so."""
    xp = backend.device.xp
    with xp.cuda.Stream(non_blocking=True):
        gate, x = Gate(xp), _filled(xp, 1.0)
        fc.all_reduce(x, backend, out=x)
        backend.device.synchronize()
        with gate:
            fc.all_reduce(x, backend, out=x, timeout=0.3)
            end = time.monotonic() + 20
            while backend.root.failure is None and time.monotonic() < end:
                time.sleep(0.01)
        error = expect(fc.CommTimeoutError, fc.all_reduce, x, backend)
    return str(error)


def test_the_deadline_of_a_call_that_nobody_waits_for() -> None:
    text = alone(_late)
    assert "all_reduce #2" in text
    assert "0.3 s" in text


def _many(backend: fc.Backend) -> None:
    """More started calls than any queue holds, with and without waiting."""
    xp = backend.device.xp
    x = _filled(xp, 1.0)
    works = [fc.all_reduce(x, backend, async_op=True) for _ in range(3000)]
    total = sum(work.wait()[0] for work in works[::100])
    assert float(total) == 30.0


def test_thousands_of_started_calls() -> None:
    alone(_many)


def _memory_in_use(backend: fc.Backend) -> None:
    xp = backend.device.xp
    x = xp.zeros(1 << 22, np.float32)
    for _ in range(3):
        fc.all_reduce(x, backend, async_op=True).wait()
    backend.device.synchronize()
    pool = xp.get_default_memory_pool()
    before = pool.total_bytes()
    for _ in range(50):
        fc.all_reduce(x, backend, async_op=True).wait()
        backend.device.synchronize()
        time.sleep(0.002)
    backend.device.synchronize()
    # Results are freed when their call has ended: not all fifty are kept.
    assert pool.total_bytes() - before <= 25 * x.nbytes


def test_results_that_nobody_holds_are_freed() -> None:
    alone(_memory_in_use)
