"""The stand-in for NCCL: what hangs, what an abort frees, and what goes wrong on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.fake_cuda.ranks import PATIENCE, on_comms, on_ranks


def until(what: Callable[[], Any]) -> None:
    """Wait for something that happens by itself."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.001)


def here() -> int:
    """The handle of the current stream."""
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


class TestHanging:
    def test_a_call_that_does_not_fit_hangs_until_it_is_aborted(
        self, machine: Any, cupy: Any
    ) -> None:
        meeting = threading.Barrier(2)

        def body(comm: Any) -> Any:
            x = cupy.ones(4)
            stream = cupy.cuda.get_current_stream()
            comm.allReduce(x.data.ptr, x.data.ptr, 3 + comm.rank_id(), 8, 0, stream.ptr)
            until(lambda: machine.mismatches)
            assert not stream.done
            comm.check_async_error()  # NCCL does not notice
            meeting.wait(PATIENCE)
            comm.abort()
            return x.get()

        for rank, x in enumerate(on_comms(body)):
            assert np.isnan(x[: 3 + rank]).all()  # anything may be in it
        assert "allReduce" in machine.mismatches[0]

    @pytest.mark.parametrize("call", ["kind", "op", "root", "dtype"])
    def test_all_ranks_call_the_same(self, machine: Any, cupy: Any, call: str) -> None:
        def body(comm: Any) -> None:
            x, odd = cupy.ones(4), comm.rank_id()
            at, stream = x.data.ptr, cupy.cuda.get_current_stream()
            if call == "kind" and odd:
                comm.bcast(at, 4, 8, 0, stream.ptr)
            elif call == "root":
                comm.bcast(at, 4, 8, odd, stream.ptr)
            else:
                dtype = 4 if call == "dtype" and odd else 8
                op = odd if call == "op" else 0
                comm.allReduce(at, at, 4, dtype, op, stream.ptr)
            until(lambda: machine.mismatches)
            comm.abort()
            stream.synchronize()

        on_comms(body)

    def test_messages_in_the_wrong_order_wait_for_each_other(self, machine: Any, cupy: Any) -> None:
        meeting = threading.Barrier(2)

        def body(comm: Any) -> None:
            x, y, peer = cupy.ones(4), cupy.zeros(4), 1 - comm.rank_id()
            stream = cupy.cuda.get_current_stream()
            comm.send(x.data.ptr, 4, 8, peer, stream.ptr)
            comm.recv(y.data.ptr, 4, 8, peer, stream.ptr)
            queue = machine.queue(stream)
            until(lambda: queue.finished >= queue.issued - 2)  # both are at their sends
            meeting.wait(PATIENCE)
            assert not stream.done
            meeting.wait(PATIENCE)
            comm.abort()
            stream.synchronize()

        on_comms(body)

    def test_a_rank_that_does_not_call_is_waited_for(self, machine: Any, cupy: Any) -> None:
        meeting = threading.Barrier(2)

        def body(comm: Any) -> None:
            if comm.rank_id() == 0:
                x = cupy.ones(4)
                comm.allReduce(x.data.ptr, x.data.ptr, 4, 8, 0, here())
                assert not cupy.cuda.get_current_stream().done
                comm.abort()
                cupy.cuda.get_current_stream().synchronize()
            meeting.wait(PATIENCE)

        on_comms(body)

    def test_destroy_waits_for_what_is_under_way_and_that_is_told(
        self, machine: Any, cupy: Any
    ) -> None:
        destroyed = []

        def body(comm: Any) -> None:
            x, stream = cupy.ones(4), cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.get_current_stream().synchronize()
            if comm.rank_id() == 1:
                until(lambda: machine.calls("nccl.destroy", rank=0))
                assert not destroyed
            comm.allReduce(x.data.ptr, x.data.ptr, 4, 8, 0, stream.ptr)
            comm.destroy()
            destroyed.append(comm)
            until(lambda: stream.done)

        on_comms(body)
        assert any("rank 0> is destroyed while" in misuse for misuse in machine.misuses)
        machine.misuses.clear()

    def test_a_root_that_ends_its_communicator_takes_its_broadcasts_with_it(
        self, machine: Any, cupy: Any
    ) -> None:
        ended = threading.Event()

        def body(comm: Any) -> None:
            x, stream = cupy.ones(4), cupy.cuda.get_current_stream()
            if comm.rank_id() == 0:
                comm.bcast(x.data.ptr, 4, 8, 0, stream.ptr)
                stream.synchronize()
                comm.destroy()
                ended.set()
                return
            assert ended.wait(PATIENCE)
            queue = machine.queue(stream)
            comm.bcast(x.data.ptr, 4, 8, 0, stream.ptr)
            until(lambda: queue.finished == queue.issued - 1)
            assert not stream.done
            comm.abort()
            stream.synchronize()

        on_comms(body)

    def test_frozen_streams_hold_up_the_others(self, machine: Any, cupy: Any) -> None:
        handles: dict[int, Any] = {}
        meeting = threading.Barrier(2)

        def body(comm: Any) -> Any:
            x = cupy.ones(4)
            stream = handles[comm.rank_id()] = cupy.cuda.Stream()
            if comm.rank_id():
                machine.freeze(stream)
            comm.allReduce(x.data.ptr, x.data.ptr, 4, 8, 0, stream.ptr)
            meeting.wait(PATIENCE)
            assert not stream.done
            meeting.wait(PATIENCE)
            machine.thaw(stream)
            return x.get(stream).tolist()

        assert on_comms(body) == [[2.0] * 4] * 2


class TestFaults:
    def test_a_refusal(self, machine: Any, cupy: Any, nccl: Any) -> None:
        machine.faults.refuse_init(0, status=2)
        with pytest.raises(nccl.NcclError, match="SYSTEM_ERROR"):
            nccl.NcclCommunicator(2, nccl.get_unique_id(), 0)

    def test_a_rank_that_never_comes_is_waited_for(
        self, machine: Any, cupy: Any, nccl: Any
    ) -> None:
        machine.faults.hang_init(1)
        uid, made = nccl.get_unique_id(), list[Any]()

        meeting = threading.Barrier(2)

        def one(rank: int) -> None:
            made_here = threading.Thread(target=_make, args=(nccl, uid, rank, made), daemon=True)
            made_here.start()
            meeting.wait(PATIENCE)
            assert not made
            meeting.wait(PATIENCE)
            machine.faults.release()
            made_here.join(PATIENCE)

        on_ranks(one)
        assert len(made) == 2
        for comm in made:
            comm.destroy()

    def test_an_error_that_is_found_later(self, machine: Any, cupy: Any, nccl: Any) -> None:
        def body(comm: Any) -> None:
            comm.check_async_error()
            meeting.wait(PATIENCE)
            if comm.rank_id() == 1:
                machine.fail_async(1)
                with pytest.raises(nccl.NcclError, match="remote process exited"):
                    comm.check_async_error()
            comm.abort()

        meeting = threading.Barrier(2)
        on_comms(body)

    def test_an_abort_that_hangs(self, machine: Any, cupy: Any) -> None:
        machine.faults.hang_abort(0)

        def body(comm: Any) -> None:
            if comm.rank_id() == 0:
                thread = threading.Thread(target=comm.abort, daemon=True)
                thread.start()
                until(lambda: machine.calls("nccl.abort", rank=0))
                assert thread.is_alive()
                assert comm.comm
                machine.faults.release()
                thread.join(PATIENCE)
                assert not comm.comm

        on_comms(body)

    def test_forgotten_communicators_are_told(self) -> None:
        with (
            pytest.raises(AssertionError, match=r"collected before.*clique 0, rank 0"),
            fake_cuda.installed(1),
        ):
            from cupy.cuda import nccl

            nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        with pytest.raises(AssertionError, match="still open"), fake_cuda.installed(1):
            from cupy.cuda import nccl

            kept = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        kept.abort()

    def test_communicators_in_another_order_on_another_gpu_are_told(self) -> None:
        with pytest.raises(AssertionError, match="crossed"), fake_cuda.installed(2):
            import cupy

            def body(comm: Any) -> None:
                other = comm.commSplit(0, comm.rank_id())
                x, y = cupy.ones(4), cupy.ones(4)
                cupy.cuda.Stream.null.synchronize()
                calls = [(comm, x), (other, y)]
                # The streams of this machine do not keep each other from anything.
                for used, array in calls if comm.rank_id() else reversed(calls):
                    stream = cupy.cuda.Stream(non_blocking=True)
                    used.allReduce(array.data.ptr, array.data.ptr, 4, 8, 0, stream.ptr)
                other.destroy()

            on_comms(body)

    def test_splitting_under_way_is_told(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> None:
            x, stream = cupy.ones(4), cupy.cuda.Stream()
            with machine.frozen(stream):
                comm.allReduce(x.data.ptr, x.data.ptr, 4, 8, 0, stream.ptr)
                comm.commSplit(-1, 0)
            stream.synchronize()

        on_comms(body)
        assert len(machine.misuses) == 2
        machine.misuses.clear()


def _make(nccl: Any, uid: bytes, rank: int, made: list[Any]) -> None:
    import cupy

    cupy.cuda.Device(rank).use()
    made.append(nccl.NcclCommunicator(2, uid, rank))
