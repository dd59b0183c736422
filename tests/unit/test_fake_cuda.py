"""The stand-in for CuPy and NCCL catches what it is there to catch."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from support import fake_cuda

PATIENCE = 30.0


def on_ranks(body: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    """Call ``body(rank)`` on threads, each on its own GPU; raises what the first of them raises."""
    import cupy

    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            cupy.cuda.Device(rank).use()
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


class TestInstalled:
    def test_modules_are_there_within_and_gone_after(self) -> None:
        before = sys.modules.get("cupy")
        with fake_cuda.installed(2):
            import cupy

            assert cupy.cuda.runtime.getDeviceCount() == 2
            assert cupy.__version__ == "14.2.0"
        assert sys.modules.get("cupy") is before

    def test_no_thread_is_left(self) -> None:
        with fake_cuda.installed(1):
            import cupy

            cupy.ones(3).sum().get()
        assert not [t for t in threading.enumerate() if t.name.startswith("fake-cuda")]


class TestOrder:
    def test_a_wait_for_an_event_orders_two_streams(self) -> None:
        with fake_cuda.installed(1) as machine:
            import cupy

            first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            machine.slow(first, 0.02)
            with first:
                x = cupy.full(100, 3.0)
                event = first.record()
            second.wait_event(event)
            with second:
                assert float((x * 2).sum()) == 600.0

    def test_a_missing_wait_reads_too_early_and_is_told(self) -> None:
        with fake_cuda.installed(1) as machine:
            import cupy

            first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            with machine.frozen(first):
                with first:
                    x = cupy.full(100, 3.0)
                with second:
                    assert np.isnan(x.get()).all()
            (race,) = machine.races
            assert race.first == "put"
            machine.races.clear()

    def test_memory_is_handed_out_again_while_another_stream_uses_it(self) -> None:
        with fake_cuda.installed(1) as machine:
            import cupy

            mine, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            with mine:
                x = cupy.full(100, 3.0)
                other.wait_event(mine.record())
            with machine.frozen(other):
                with other:
                    y = x * 2
                address = x.data.ptr
                del x
                with mine:
                    z = cupy.full(100, 7.0)
                    assert z.data.ptr == address
                    mine.synchronize()
            with other:
                assert y.get().tolist() == [14.0] * 100
            assert [race.second for race in machine.races] == ["put"]
            machine.races.clear()


class TestNccl:
    def test_a_call_that_does_not_fit_hangs_until_it_is_aborted(self) -> None:
        with fake_cuda.installed(2) as machine:
            import cupy
            from cupy.cuda import nccl

            uid = nccl.get_unique_id()
            meeting = threading.Barrier(2)

            def body(rank: int) -> None:
                comm = nccl.NcclCommunicator(2, uid, rank)
                x, stream = cupy.ones(4), cupy.cuda.Stream(non_blocking=True)
                cupy.cuda.Stream.null.synchronize()
                comm.allReduce(x.data.ptr, x.data.ptr, 3 + rank, nccl.NCCL_FLOAT64, 0, stream.ptr)
                while not machine.mismatches:
                    time.sleep(0.001)
                assert not stream.done
                meeting.wait(PATIENCE)
                comm.abort()
                stream.synchronize()

            on_ranks(body)
            assert "allReduce" in machine.mismatches[0]

    def test_sends_in_the_wrong_order_wait_for_each_other(self) -> None:
        with fake_cuda.installed(2):
            import cupy
            from cupy.cuda import nccl

            uid = nccl.get_unique_id()
            meeting = threading.Barrier(2)

            def body(rank: int) -> None:
                comm = nccl.NcclCommunicator(2, uid, rank)
                x, y = cupy.full(4, rank), cupy.zeros(4, int)
                stream = cupy.cuda.get_current_stream()
                comm.send(x.data.ptr, 4, nccl.NCCL_INT64, 1 - rank, stream.ptr)
                comm.recv(y.data.ptr, 4, nccl.NCCL_INT64, 1 - rank, stream.ptr)
                meeting.wait(PATIENCE)
                assert not stream.done
                meeting.wait(PATIENCE)
                comm.abort()
                stream.synchronize()

            on_ranks(body)
