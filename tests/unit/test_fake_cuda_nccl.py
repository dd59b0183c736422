"""The stand-in for NCCL: what calls do, when they meet, and what becomes of those that do not."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.fake_cuda.nccl_moves import DTYPES
from support.fake_cuda.ranks import PATIENCE, on_comms

NUMBERS = {dtype: number for number, dtype in DTYPES.items()}


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

    def test_a_result_over_its_input_is_a_misuse(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> None:
            x = cupy.zeros(12)
            at = x.data.ptr
            comm.allReduce(at, at + 8, 4, 8, 0, here())
            comm.allGather(at + 8, at, 4, 8, here())
            comm.allGather(at, at + 32, 2, 8, here())  # beside it
            x.get()  # once they have ended

        on_comms(body)
        assert [text.split()[0] for text in sorted(machine.misuses)] == [
            *["allGather"] * 2,
            *["allReduce"] * 2,
        ]
        machine.misuses.clear()

    def test_broadcasts(self, machine: Any, cupy: Any) -> None:
        def body(comm: Any) -> Any:
            rank = comm.rank_id()
            # The root of the last one is through with it before the others begin.
            machine.slow(here(), 0.005 * (rank != 1))
            x, out = cupy.full(3, rank), cupy.zeros(3, int)
            # Only the root's buffer is read: the others may give none.
            comm.broadcast(x.data.ptr if rank == 2 else 0, out.data.ptr, 3, 4, 2, here())
            comm.bcast(x.data.ptr, 3, 4, 1, here())
            return out.tolist(), x.tolist()

        assert on_comms(body, 3) == [([2] * 3, [1] * 3)] * 3

    def test_the_root_of_a_broadcast_waits_for_nobody(self, machine: Any, cupy: Any) -> None:
        """And needs its array no more; but the others need its communicator."""
        sent, taken = threading.Event(), threading.Event()

        def body(comm: Any) -> Any:
            x, stream = cupy.full(3, comm.rank_id()), cupy.cuda.get_current_stream()
            if comm.rank_id():
                assert sent.wait(PATIENCE)
            comm.bcast(x.data.ptr, 3, 4, 0, stream.ptr)
            stream.synchronize()
            if comm.rank_id():
                taken.set()
            else:
                x.fill(9)
                sent.set()
                assert taken.wait(PATIENCE)
            return x.tolist()

        assert on_comms(body) == [[9] * 3, [0] * 3]

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
            found = int(x.item())
            part.destroy()
            return comm_rank, size, found

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
