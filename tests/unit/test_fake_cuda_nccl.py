"""The stand-in for NCCL: what calls do, when they meet, and what becomes of those that do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda
from support.fake_cuda.nccl_moves import DTYPES
from support.fake_cuda.ranks import PATIENCE, on_comms, on_ranks

NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


@pytest.fixture
def machine() -> Iterator[fake_cuda.Machine]:
    with fake_cuda.installed(4) as machine:
        yield machine


@pytest.fixture
def cupy(machine: fake_cuda.Machine) -> Any:
    import cupy

    return cupy


@pytest.fixture
def nccl(machine: fake_cuda.Machine) -> Any:
    from cupy.cuda import nccl

    return nccl


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


class TestCalls:
    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
    @pytest.mark.parametrize("op", range(5), ids=["sum", "prod", "max", "min", "avg"])
    def test_reductions(self, machine: Any, cupy: Any, dtype: Any, op: int) -> None:
        given = [np.array([r + 1, 3 * r, 2], dtype) for r in range(3)]

        def body(comm: Any) -> Any:
            x = cupy.asarray(given[comm.rank_id()])
            out, root = cupy.zeros_like(x), cupy.zeros_like(x)
            comm.allReduce(x.data.ptr, out.data.ptr, 3, NUMBERS[dtype], op, here())
            comm.reduce(x.data.ptr, root.data.ptr, 3, NUMBERS[dtype], op, 1, here())
            return out.get(), root.get()

        found = on_comms(body, 3)
        wide = np.stack(given).astype(np.float64)
        combined = {0: wide.sum, 1: wide.prod, 2: wide.max, 3: wide.min, 4: wide.mean}[op](0)
        expected = combined.astype(dtype)
        for rank, (everywhere, at_root) in enumerate(found):
            np.testing.assert_allclose(everywhere, expected, rtol=1e-2)
            np.testing.assert_array_equal(at_root, everywhere if rank == 1 else 0 * everywhere)

    def test_sums_are_rounded_in_an_order_of_their_own(self, machine: Any, cupy: Any) -> None:
        given = np.random.default_rng(0).standard_normal((4, 100)).astype(ml_dtypes.bfloat16)

        def body(comm: Any) -> Any:
            x = cupy.asarray(given[comm.rank_id()])
            comm.allReduce(x.data.ptr, x.data.ptr, 100, NUMBERS[x.dtype], 0, here())
            return x.get()

        found = on_comms(body, 4)
        backwards = ((given[3] + given[2]) + given[1]) + given[0]
        for one in found:
            np.testing.assert_array_equal(one, backwards)
        assert (backwards != ((given[0] + given[1]) + given[2]) + given[3]).any()

    def test_gathering_and_scattering_in_place(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> Any:
            rank, p = comm.rank_id(), comm.size()
            x = cupy.zeros(2 * p)
            x[2 * rank : 2 * rank + 2] = rank + 1
            part = x.data.ptr + 16 * rank
            comm.allGather(part, x.data.ptr, 2, 8, here())
            gathered = x.get().tolist()
            comm.reduceScatter(x.data.ptr, part, 2, 8, 0, here())
            return gathered, x.get().tolist()

        for rank, (gathered, scattered) in enumerate(on_comms(body, 3)):
            assert gathered == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
            gathered[2 * rank : 2 * rank + 2] = [3.0 * (rank + 1)] * 2
            assert scattered == gathered

    def test_broadcasts(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> Any:
            rank = comm.rank_id()
            x, out = cupy.full(3, rank), cupy.zeros(3, int)
            # Only the root's buffer is read: the others may give none.
            comm.broadcast(x.data.ptr if rank == 2 else 0, out.data.ptr, 3, 4, 2, here())
            comm.bcast(x.data.ptr, 3, 4, 1, here())
            return out.tolist(), x.tolist()

        assert on_comms(body, 3) == [([2] * 3, [1] * 3)] * 3

    def test_messages_of_a_group_pass_each_other(self, machine: Any, cupy: Any, nccl: Any) -> None:
        def body(comm: Any) -> Any:
            rank, p = comm.rank_id(), comm.size()
            x, out = cupy.arange(p) + 10 * rank, cupy.zeros(p, int)
            nccl.groupStart()
            for peer in range(p):
                nccl.groupStart()  # groups may be nested
                comm.send(x.data.ptr + 8 * peer, 1, 4, peer, here())
                comm.recv(out.data.ptr + 8 * peer, 1, 4, peer, here())
                nccl.groupEnd()
            nccl.groupEnd()
            return out.tolist()

        assert on_comms(body, 3) == [[r, 10 + r, 20 + r] for r in range(3)]
        assert {call.args["depth"] for call in machine.calls("nccl.send")} == {2}

    def test_splitting(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> Any:
            rank = comm.rank_id()
            part = comm.commSplit(-1 if rank == 3 else 0, -rank)
            if part is None:
                return None
            x = cupy.full(1, rank)
            comm_rank, size = part.rank_id(), part.size()
            part.allReduce(x.data.ptr, x.data.ptr, 1, 4, 0, here())
            part.destroy()
            return comm_rank, size, int(x.item())

        assert on_comms(body, 4) == [(2, 3, 3), (1, 3, 3), (0, 3, 3), None]

    def test_one_thread_for_all_gpus(self, machine: Any, cupy: Any, nccl: Any) -> None:
        comms = nccl.NcclCommunicator.initAll([1, 3])
        arrays = []
        nccl.groupStart()
        for comm in comms:
            with cupy.cuda.Device(comm.device_id()):
                x = cupy.ones(2)
                arrays.append(x)
                comm.allReduce(x.data.ptr, x.data.ptr, 2, 8, 0, 0)
        nccl.groupEnd()
        for comm, x in zip(comms, arrays, strict=True):
            with cupy.cuda.Device(comm.device_id()):
                assert x.tolist() == [2.0, 2.0]
            comm.destroy()

    def test_calls_on_several_streams_go_in_the_order_of_calls(
        self, machine: Any, cupy: Any
    ) -> None:
        def body(comm: Any) -> Any:
            x, y = cupy.ones(1), cupy.ones(1)
            cupy.cuda.Stream.null.synchronize()
            first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            machine.slow(first, 0.01 * comm.rank_id())
            comm.allReduce(x.data.ptr, x.data.ptr, 1, 8, 0, first.ptr)
            comm.allReduce(y.data.ptr, y.data.ptr, 1, 8, 1, second.ptr)
            return x.get(first).item(), y.get(second).item()

        assert on_comms(body, 2) == [(2.0, 1.0)] * 2

    def test_a_collective_of_nothing_meets_nobody(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> None:
            if comm.rank_id() == 0:
                comm.allReduce(0, 0, 0, 7, 0, here())
                cupy.cuda.get_current_stream().synchronize()

        on_comms(body)

    def test_it_is_ordered_with_what_else_is_on_the_stream(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> None:
            other = cupy.cuda.Stream(non_blocking=True)
            x = cupy.ones(5)
            comm.allReduce(x.data.ptr, x.data.ptr, 5, 8, 0, other.ptr)
            other.synchronize()

        on_comms(body)
        assert {race.second for race in machine.races} == {"nccl.allReduce"}
        machine.races.clear()


class TestRefusals:
    def test_arguments(self, machine: Any, cupy: Any, nccl: Any) -> None:
        uid = nccl.get_unique_id()
        assert (type(uid), len(uid)) == (bytes, 128)
        with pytest.raises(TypeError, match="expected bytes, got tuple"):
            nccl.NcclCommunicator(1, tuple(uid), 0)
        comm = nccl.NcclCommunicator(1, uid, 0)
        x = cupy.ones(4)
        at, stream = x.data.ptr, here()
        for wrong in (x, np.array(3), 1.0):
            with pytest.raises(TypeError, match="an integer is required"):
                comm.allReduce(wrong, at, 4, 8, 0, stream)
        with pytest.raises(TypeError):
            comm.allReduce(at, at, 4, 8, 0)
        with pytest.raises(OverflowError):
            comm.allReduce(at, at, -1, 8, 0, stream)
        for wrong in ((0, at, 4, 8, 0), (at, at, 4, 12, 0), (at, at, 4, 8, 5)):
            with pytest.raises(nccl.NcclError, match="invalid argument"):
                comm.allReduce(*wrong, stream)
        with pytest.raises(nccl.NcclError, match="unhandled cuda error"):
            comm.allReduce(at, at + 16, 64, 8, 0, stream)  # beyond the memory
        with pytest.raises(nccl.NcclError, match="invalid usage"):
            nccl.groupEnd()
        comm.destroy()

    def test_streams_and_memory_of_other_gpus(self, machine: Any, cupy: Any, nccl: Any) -> None:
        with cupy.cuda.Device(3):
            theirs, stream = cupy.ones(4), cupy.cuda.Stream()

        def body(comm: Any) -> None:
            x = cupy.ones(4)
            for address, handle in ((theirs.data.ptr, here()), (x.data.ptr, stream.ptr)):
                with pytest.raises(nccl.NcclError):
                    comm.allReduce(address, address, 4, 8, 0, handle)

        on_comms(body)

    def test_ended_communicators(self, machine: Any, cupy: Any, nccl: Any) -> None:
        def body(comm: Any) -> None:
            assert comm.comm
            end = comm.abort if comm.rank_id() else comm.destroy
            end()
            assert comm.comm == 0
            comm.destroy()
            comm.abort()
            for call in (comm.size, comm.check_async_error, lambda: comm.send(1, 1, 7, 0, 0)):
                with pytest.raises(nccl.NcclError, match="invalid argument"):
                    call()

        on_comms(body)

    def test_one_gpu_for_two_ranks(self, machine: Any, cupy: Any, nccl: Any) -> None:
        machine.faults.same_gpu(0, 1)

        def body(comm: Any) -> None:
            raise AssertionError

        with pytest.raises(nccl.NcclError, match="invalid usage"):
            on_comms(body)
        machine.faults.shared_gpu = True
        on_comms(lambda comm: None)


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

    def test_destroy_waits_for_what_is_under_way(self, machine: Any, cupy: Any) -> None:
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


def test_what_was_called_is_recorded(machine: Any, cupy: Any) -> None:
    def body(comm: Any) -> None:
        x = cupy.ones(4, np.float32)
        with cupy.cuda.Stream() as stream:
            comm.reduce(x.data.ptr, x.data.ptr, 4, 7, 2, 1, stream.ptr)
            stream.synchronize()

    on_comms(body)
    (entry,) = machine.calls("nccl.reduce", rank=1)
    assert (entry.thread, entry.device) == ("rank-1", 1)
    wanted = {"count": 4, "datatype": 7, "op": 2, "root": 1, "depth": 0, "comm": 0}
    assert wanted.items() <= entry.args.items()
    names = [e.name for e in machine.log if e.thread == "rank-0" and e.name.startswith("nccl")]
    assert names == ["nccl.init", "nccl.reduce", "nccl.destroy"]
