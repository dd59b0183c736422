"""The stand-in for CuPy: how it comes and goes, streams, events, devices, memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support import fake_cuda
from support.fake_cuda.ranks import PATIENCE


@pytest.fixture
def machine() -> Iterator[fake_cuda.Machine]:
    with fake_cuda.installed(2) as machine:
        yield machine


def streams(cupy: Any, **kind: bool) -> list[Any]:
    return [cupy.cuda.Stream(**kind) for _ in range(2)]


class _Handle:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class TestInstalled:
    def test_modules_are_there_within_and_gone_after(self) -> None:
        before = sys.modules.get("cupy")
        with fake_cuda.installed(2):
            import cupy

            assert cupy.cuda.runtime.getDeviceCount() == 2
            assert cupy.__version__ == "14.2.0"
        assert sys.modules.get("cupy") is before

    def test_what_was_bound_to_it_is_forgotten_and_the_rest_is_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("of_cupy", "of_nothing", "named"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with fake_cuda.installed(1, forget=["named"]):
            import cupy

            for name in ("of_cupy", "of_nothing", "named"):
                sys.modules[name] = ModuleType(name)
            sys.modules["of_cupy"].cupy = cupy  # type: ignore[attr-defined]
        assert "of_nothing" in sys.modules
        assert not {"of_cupy", "named"} & sys.modules.keys()

    def test_no_thread_is_left_though_a_stream_is_frozen(self) -> None:
        with fake_cuda.installed(1) as machine:
            import cupy

            stream = cupy.cuda.Stream()
            machine.freeze(stream)
            with stream:
                cupy.ones(3)
            waiting = threading.Thread(target=_expect_switched_off, args=(stream,))
            waiting.start()
        waiting.join(PATIENCE)
        assert not [t for t in threading.enumerate() if t.name.startswith("fake-cuda")]

    def test_there_is_one_at_a_time(self, machine: fake_cuda.Machine) -> None:
        with pytest.raises(RuntimeError, match="one at a time"), fake_cuda.installed(1):
            pass

    def test_what_must_not_be_left_is_told_at_the_end(self) -> None:
        with pytest.raises(AssertionError, match="not ordered"), fake_cuda.installed(1):
            import cupy

            first, second = streams(cupy, non_blocking=True)
            with first:
                x = cupy.zeros(3)
            with second:
                x += 1

    def test_no_driver(self) -> None:
        with fake_cuda.installed(2) as machine:
            import cupy
            from cupy.cuda import nccl

            machine.faults.driver = False
            for call in (cupy.cuda.runtime.getDeviceCount, lambda: cupy.empty(3), cupy.cuda.Stream):
                with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="InsufficientDriver"):
                    call()
            assert not cupy.cuda.is_available()
            with pytest.raises(nccl.NcclError):
                nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)

    def test_no_nccl(self) -> None:
        with fake_cuda.installed(1, nccl_at="missing"), pytest.raises(ImportError):
            from cupy.cuda import nccl
        with fake_cuda.installed(1, nccl_at="unavailable"):
            from cupy.cuda import nccl

            assert not nccl.available
            assert not hasattr(nccl, "NcclCommunicator")


def _expect_switched_off(stream: Any) -> None:
    with pytest.raises(fake_cuda.SwitchedOff):
        stream.synchronize()


class TestOrder:
    def test_a_wait_for_an_event_orders_two_streams(self, machine: Any, cupy: Any) -> None:
        first, second = streams(cupy, non_blocking=True)
        machine.slow(first, 0.02)
        with first:
            x = cupy.full(100, 3.0)
            event = first.record()
        second.wait_event(event)
        with second:
            assert float((x * 2).sum()) == 600.0
        assert event.done

    def test_a_missing_wait_reads_too_early_and_is_told(self, machine: Any, cupy: Any) -> None:
        first, second = streams(cupy, non_blocking=True)
        with machine.frozen(first):
            with first:
                x = cupy.full(100, 3.0)
            with second:
                assert np.isnan(x.get()).all()
        assert [(race.first, race.second) for race in machine.races] == [("put", "get")]
        machine.races.clear()

    def test_a_missing_wait_is_told_though_all_went_well(self, machine: Any, cupy: Any) -> None:
        first, second = streams(cupy, non_blocking=True)
        with first:
            x = cupy.full(100, 3.0)
        while machine.queue(first).finished < machine.queue(first).issued:
            pass  # looking at a queue is no wait of CUDA's
        with second:
            assert float(x.sum()) == 300.0
        assert len(machine.races) == 1
        machine.races.clear()

    @pytest.mark.parametrize("how", ["stream", "event", "device", "query"])
    def test_a_host_that_waits_orders_them_too(self, machine: Any, cupy: Any, how: str) -> None:
        first, second = streams(cupy, non_blocking=True)
        with first:
            x = cupy.full(100, 3.0)
        event = first.record()
        if how == "query":
            while not event.done:
                pass
        else:
            waited = {"stream": first, "event": event, "device": cupy.cuda.Device()}[how]
            waited.synchronize()
        with second:
            assert float(x.sum()) == 300.0

    def test_waits_of_the_host_are_recorded(self, machine: Any, cupy: Any) -> None:
        x = cupy.ones(4)
        pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(32), np.float64, 4)
        stream = cupy.cuda.get_current_stream()
        event = stream.record()
        x.get(out=pinned, blocking=False)
        assert event.done in (True, False)
        assert machine.host_waits() == []
        float(x.sum())
        event.synchronize()
        stream.synchronize()
        cupy.cuda.Device().synchronize()
        assert [entry.name for entry in machine.host_waits()] == [
            "get",
            "event.synchronize",
            "stream.synchronize",
            "device.synchronize",
        ]

    def test_reads_and_different_parts_need_no_order(self, machine: Any, cupy: Any) -> None:
        first, second = streams(cupy, non_blocking=True)
        x = cupy.zeros(100)
        cupy.cuda.Stream.null.synchronize()
        for stream, part in ((first, x[:50]), (second, x[50:])):
            with stream:
                part += 1
        for stream in (first, second):
            stream.synchronize()
        for stream in (first, second):
            with stream:
                assert float(x.sum()) == 100.0

    def test_memory_is_handed_out_again_while_another_stream_uses_it(
        self, machine: Any, cupy: Any
    ) -> None:
        mine, other = streams(cupy, non_blocking=True)
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

    def test_an_event_is_what_it_was_when_it_was_waited_for(self, machine: Any, cupy: Any) -> None:
        first, second = streams(cupy, non_blocking=True)
        event = cupy.cuda.Event(disable_timing=True)
        assert event.done
        event.record(first)
        second.wait_event(event)
        first.synchronize()  # or it may be frozen before it comes to the first record
        machine.freeze(first)
        event.record(first)
        second.synchronize()
        assert not event.done
        machine.thaw(first)
        event.synchronize()
        assert event.done

    def test_ordinary_streams_and_the_null_stream_wait_for_each_other(
        self, machine: Any, cupy: Any
    ) -> None:
        (stream, _), (free, _) = streams(cupy), streams(cupy, non_blocking=True)
        machine.slow(stream, 0.01)
        with stream:
            x = cupy.full(10, 1.0)
        x += 1  # on the null stream
        with stream:
            y = x + 1
        with free:
            x.get()
        assert y.get(stream).tolist() == [3.0] * 10
        assert [race.second for race in machine.races] == ["get"]
        machine.races.clear()

    @pytest.mark.parametrize("null_first", [True, False])
    def test_they_are_ordered_though_the_first_is_through_by_then(
        self, machine: Any, cupy: Any, null_first: bool
    ) -> None:
        (stream, _), null = streams(cupy), cupy.cuda.Stream.null
        first, second = (null, stream) if null_first else (stream, null)
        with first:
            x = cupy.full(10, 1.0)
        while machine.queue(first).finished < machine.queue(first).issued:
            pass  # looking at a queue is no wait of CUDA's
        with second:
            assert float(x.sum()) == 10.0

    def test_work_that_fails_breaks_the_device(self, machine: Any, cupy: Any) -> None:
        stream = cupy.cuda.Stream()
        event = cupy.cuda.Event()
        stream.launch_host_func(lambda arg: arg / 0, 1)
        event.record(stream)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            stream.synchronize()
        assert not event.done  # as CuPy has it, for ever
        assert cupy.cuda.runtime.eventQuery(event.ptr) == 719
        ((name, error),) = machine.errors
        assert name == "host function"
        assert isinstance(error, ZeroDivisionError)
        machine.errors.clear()


class TestPlace:
    def test_a_stream_that_is_gone_does_what_it_has_and_takes_no_more(
        self, machine: Any, cupy: Any
    ) -> None:
        stream = cupy.cuda.Stream(non_blocking=True)
        machine.slow(stream, 0.01)
        with stream:
            x = cupy.ones(3)
            event = stream.record()
        handle = stream.ptr
        cupy.cuda.Stream.null.use()
        del stream
        event.synchronize()
        assert x.tolist() == [1.0] * 3
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="invalid resource handle"):
            event.record(cupy.cuda.Stream.from_external(_Handle(handle)))

    def test_devices_and_streams_are_those_of_the_thread(self, machine: Any, cupy: Any) -> None:
        seen: list[Any] = []

        def look() -> None:
            seen.append((cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr))

        with cupy.cuda.Device(1), cupy.cuda.Stream() as stream:
            other = threading.Thread(target=look)
            other.start()
            other.join()
            look()
        look()
        assert seen == [(0, 0), (1, stream.ptr), (0, 0)]

    def test_streams_are_used_on_their_own_device(self, machine: Any, cupy: Any) -> None:
        stream = cupy.cuda.Stream()
        with (
            cupy.cuda.Device(1),
            pytest.raises(RuntimeError, match="does not match with the current device"),
            stream,
        ):
            pass

    def test_arrays_are_used_on_their_own_device(self, machine: Any, cupy: Any) -> None:
        x = cupy.ones(3)
        with cupy.cuda.Device(1), pytest.raises(ValueError, match="Peer access is unavailable"):
            x + 1
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="invalid device ordinal"):
            cupy.cuda.Device(2).use()

    def test_two_ordinals_can_be_one_gpu(self, machine: Any, cupy: Any) -> None:
        properties = cupy.cuda.runtime.getDeviceProperties
        assert properties(0)["uuid"] != properties(1)["uuid"]
        assert len(properties(0)["uuid"]) == 16
        machine.faults.same_gpu(0, 1)
        assert properties(0)["uuid"] == properties(1)["uuid"]
        assert cupy.cuda.Device(0).pci_bus_id == cupy.cuda.Device(1).pci_bus_id


class TestMemory:
    def test_views_are_the_same_memory_at_real_addresses(self, machine: Any, cupy: Any) -> None:
        x = cupy.arange(12, dtype=np.float32).reshape(3, 4)
        row = x[1]
        assert row.base is x.base
        assert row.data.ptr == x.data.ptr + 16
        row += 10
        assert x.get()[1].tolist() == [14.0, 15.0, 16.0, 17.0]
        assert not x.T.flags.c_contiguous
        assert cupy.may_share_memory(x, row)
        bits = x.view(np.uint32)
        assert bits.data.ptr == x.data.ptr
        cupy.cuda.Stream.null.synchronize()
        assert machine.memories.at(row.data.ptr, 16).view(np.float32).tolist() == row.tolist()

    def test_new_memory_is_nan_and_used_memory_is_counted(self, machine: Any, cupy: Any) -> None:
        pool = cupy.get_default_memory_pool()
        x = cupy.empty(1000, np.float32)
        assert np.isnan(x.get()).all()
        assert pool.used_bytes() == 4096
        del x
        assert (pool.used_bytes(), pool.free_bytes()) == (0, 4096)
        pool.free_all_blocks()
        assert pool.total_bytes() == 0
        machine.faults.limit = 4096
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="out of memory"):
            cupy.empty(5000, np.uint8)

    def test_ordinary_memory_is_read_at_once_and_pinned_memory_later(
        self, machine: Any, cupy: Any
    ) -> None:
        pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(32), np.float64, 4)
        ordinary = np.zeros(4)
        pinned[:] = 0
        a, b = cupy.empty(4), cupy.empty(4)
        with machine.frozen(cupy.cuda.Stream.null):
            a.set(ordinary)
            b.set(pinned)
            ordinary[:] = pinned[:] = 1
        assert (a.get() == 0).all()
        assert (b.get() == 1).all()

    def test_values_reach_pinned_memory_when_the_stream_is_there(
        self, machine: Any, cupy: Any
    ) -> None:
        pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(32), np.float64, 4)
        pinned[:] = 0
        x = cupy.ones(4)
        with machine.frozen(cupy.cuda.Stream.null):
            x.get(out=pinned, blocking=False)
            assert (pinned == 0).all()
        cupy.cuda.Stream.null.synchronize()
        assert (pinned == 1).all()

    def test_pinned_memory_as_an_array_of_the_device(self, machine: Any, cupy: Any) -> None:
        memory = cupy.cuda.alloc_pinned_memory(40)
        owned = cupy.cuda.UnownedMemory(memory.ptr, 40, memory, 0)
        x = cupy.ndarray((5,), np.float64, cupy.cuda.MemoryPointer(owned, 0))
        x[...] = 4
        assert float(x.sum()) == 20
        assert np.frombuffer(memory, np.float64, 5).tolist() == [4.0] * 5

    def test_copies_between_addresses(self, machine: Any, cupy: Any) -> None:
        runtime, host = cupy.cuda.runtime, np.arange(4.0)
        x, back = cupy.empty(4), np.empty(4)
        stream = cupy.cuda.get_current_stream().ptr
        to, out = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
        runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 32, to, stream)
        runtime.memcpyAsync(back.ctypes.data, x.data.ptr, 32, out, stream)
        assert back.tolist() == host.tolist()
        y = cupy.empty(4)
        y.data.copy_from_device_async(x.data, 32)
        y.data.memset_async(0, 8)
        (y.data + 8).copy_from_host_async(host.ctypes.data, 8)
        (y.data + 8).copy_to_host_async(back.ctypes.data, 24)
        assert y.tolist() == [0.0, 0.0, 2.0, 3.0]
        assert back.tolist() == [0.0, 2.0, 3.0, 3.0]
        with pytest.raises(runtime.CUDARuntimeError, match="illegal memory access"):
            runtime.memcpyAsync(x.data.ptr, x.data.ptr + 500, 32, 3, stream)
