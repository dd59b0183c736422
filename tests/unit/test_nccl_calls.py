"""What is asked of NCCL: which calls, with which counts, dtypes, ranks and grouping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda
from support.fake_cuda import Entry, Machine
from support.nccl_ranks import results_of

import fsdpcore as fc
from fsdpcore.collectives.on_device import device_twin
from fsdpcore.core.buffers import DTYPES

P = 3
# The numbers of nccl.h.
INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
SUM, PROD, MAX, MIN, AVG = range(5)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_cuda.installed(P) as made:
        yield made


def on_ranks(body: Callable[[Any], Any], size: int = P, **options: Any) -> list[Any]:
    return results_of(body, size, **options)


def device_array(backend: Any, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return backend.device.from_host(np.ones(shape, dtype))


def seen(machine: Machine, rank: int = 1) -> list[Entry]:
    """The collectives and messages of a rank, in order."""
    ends = ("nccl.init", "nccl.destroy", "nccl.abort", "nccl.commSplit")
    return [
        entry
        for entry in machine.log
        if entry.name.startswith("nccl.") and entry.name not in ends and entry.args["rank"] == rank
    ]


def words(entries: list[Entry], *names: str) -> list[tuple[Any, ...]]:
    return [(e.name.removeprefix("nccl."), *(e.args[name] for name in names)) for e in entries]


NATIVE = {
    (np.dtype(np.bool_), "sum"): (UINT8, MAX, 1),
    (np.dtype(np.bool_), "prod"): (UINT8, MIN, 1),
    (np.dtype(np.int8), "max"): (INT8, MAX, 1),
    (np.dtype(np.uint8), "sum"): (UINT8, SUM, 1),
    (np.dtype(np.int32), "prod"): (INT32, PROD, 1),
    (np.dtype(np.uint32), "min"): (UINT32, MIN, 1),
    (np.dtype(np.int64), "sum"): (INT64, SUM, 1),
    (np.dtype(np.uint64), "max"): (UINT64, MAX, 1),
    (np.dtype(np.float16), "sum"): (FLOAT16, SUM, 1),
    (np.dtype(ml_dtypes.bfloat16), "mean"): (BFLOAT16, AVG, 1),
    (np.dtype(np.float32), "mean"): (FLOAT32, AVG, 1),
    (np.dtype(np.float32), "prod"): (FLOAT32, PROD, 1),
    (np.dtype(np.float64), "sum"): (FLOAT64, SUM, 1),
    (np.dtype(np.complex64), "sum"): (FLOAT32, SUM, 2),
    (np.dtype(np.complex64), "mean"): (FLOAT32, AVG, 2),
    (np.dtype(np.complex128), "sum"): (FLOAT64, SUM, 2),
    (np.dtype(np.complex128), "mean"): (FLOAT64, AVG, 2),
}


def test_reductions_that_nccl_does(machine: Machine) -> None:
    def body(backend: Any) -> None:
        for dtype, op in NATIVE:
            fc.all_reduce(device_array(backend, (5, 2), dtype), backend, op=op)

    on_ranks(body)
    found = words(seen(machine), "datatype", "op", "count")
    expected = [("allReduce", dtype, op, 10 * width) for dtype, op, width in NATIVE.values()]
    assert found == expected


def test_what_nccl_is_not_asked_for(machine: Machine) -> None:
    """Reductions whose values it would not get right: they are sent, and computed by CuPy."""
    from fsdpcore.transports.nccl.calls import reduces

    def never(dtype: np.dtype[Any], op: str) -> bool:
        if dtype.kind == "b" or (dtype.kind in "iu" and dtype.itemsize != 2):
            return op == "mean"
        if dtype.kind in "iu":
            return True
        return op in ("min", "max") or (op == "prod" and dtype.name not in ("float32", "float64"))

    for dtype in DTYPES:
        for op in ("sum", "mean", "min", "max", "prod"):
            assert reduces(dtype, op) != never(dtype, op), (dtype, op)

    on_ranks(lambda backend: fc.all_reduce(device_array(backend, (7,)), backend, op="max"))
    found = words(seen(machine), "peer", "count", "datatype")
    me, mine, others = 1, 2 * 4, [(0, 3 * 4), (2, 2 * 4)]
    assert found[:4] == [
        *[("send", rank, nbytes, UINT8) for rank, nbytes in others],
        *[("recv", rank, mine, UINT8) for rank, _ in others],
    ]
    assert {call for call, *_ in found[4:]} == {"broadcast"}
    assert me not in [peer for _, peer, *_ in found[:4]]


def test_canonical_where_asked_for(machine: Machine) -> None:
    on_ranks(lambda b: fc.all_reduce(device_array(b, (6,)), b), deterministic=True)
    assert {entry.name for entry in seen(machine)} == {"nccl.send", "nccl.recv", "nccl.allGather"}


def test_even_parts_are_one_call(machine: Machine) -> None:
    def body(backend: Any) -> None:
        x = device_array(backend, (6, 4))
        fc.reduce_scatter(x, backend)
        fc.all_gather(x, backend)
        fc.broadcast(x, backend, root=2)
        fc.reduce(x, backend, root=2)

    on_ranks(body)
    names = ("count", "datatype", "root", "depth")
    assert words(seen(machine), *names) == [
        ("reduceScatter", 8, FLOAT32, 0, 0),
        ("allGather", 96, UINT8, 0, 0),
        ("broadcast", 96, UINT8, 2, 0),
        ("reduce", 24, FLOAT32, 2, 0),
    ]


def test_uneven_parts_are_one_group(machine: Machine) -> None:
    def body(backend: Any) -> None:
        fc.reduce_scatter(device_array(backend, (4, 5)), backend)
        fc.all_gather_v(device_array(backend, (backend.rank, 5)), backend)

    on_ranks(body)
    assert words(seen(machine), "count", "root", "depth") == [
        ("reduce", 10, 0, 1),
        ("reduce", 5, 1, 1),
        ("reduce", 5, 2, 1),
        ("broadcast", 20, 1, 1),
        ("broadcast", 40, 2, 1),
    ]


def test_what_nccl_has_no_call_for_is_messages_in_one_group(machine: Machine) -> None:
    def body(backend: Any) -> None:
        x = device_array(backend, (3, 2))
        fc.gather(x, backend, root=1)
        fc.scatter(x if backend.rank == 2 else None, backend, root=2)
        fc.all_to_all(x, backend)

    on_ranks(body)
    assert words(seen(machine), "count", "peer", "depth") == [
        ("recv", 24, 0, 1),
        ("recv", 24, 2, 1),
        ("recv", 8, 2, 1),
        ("send", 8, 0, 1),
        ("send", 8, 2, 1),
        ("recv", 8, 0, 1),
        ("recv", 8, 2, 1),
    ]


def test_a_batch_is_one_group(machine: Machine) -> None:
    def body(backend: Any) -> list[float]:
        x = device_array(backend, (4,))
        with fc.coalesce(backend) as batch:
            works = [batch.all_reduce(x), batch.all_gather(x), batch.all_reduce(x, op="mean")]
        return [float(work.result()[0]) for work in works]

    assert on_ranks(body) == [[3.0, 1.0, 1.0]] * P
    found = words(seen(machine), "depth")
    assert found == [("allReduce", 1), ("allGather", 1), ("allReduce", 1)]
    starts = {entry.args["comm"] for entry in seen(machine)}
    assert len(starts) == 1


def test_nothing_is_asked_of_nccl_by_a_rank_alone(machine: Machine) -> None:
    def body(backend: Any) -> list[float]:
        x = device_array(backend, (4,))
        parts = [
            fc.all_reduce(x, backend),
            fc.reduce_scatter(x, backend),
            fc.all_gather(x, backend),
        ]
        return [float(part[0]) for part in parts]

    assert on_ranks(body, 1) == [[1.0, 1.0, 1.0]]
    assert not [entry for entry in machine.log if entry.name.startswith("nccl.")]


def test_empty_arrays(machine: Machine) -> None:
    def body(backend: Any) -> list[int]:
        x = device_array(backend, (0, 3))
        return [fc.all_reduce(x, backend).size, fc.all_gather(x, backend).size]

    assert on_ranks(body) == [[0, 0]] * P
    assert not seen(machine)


def test_a_batch_may_be_the_first_call_of_a_group(machine: Machine) -> None:
    def body(backend: Any) -> float:
        group, x = backend.sub(range(P)), device_array(backend, (4,))
        with fc.coalesce(group) as batch:
            works = [batch.all_reduce(x), batch.broadcast(x, root=1)]
        return float(works[0].result()[0] + works[1].result()[0])

    assert on_ranks(body) == [4.0] * P


def test_a_barrier_of_gpus_waits_every_time(machine: Machine) -> None:
    def body(backend: Any) -> None:
        twin = device_twin(backend)
        for late in (0, 1, 2):
            if backend.rank == late:
                time.sleep(0.02)
            came = time.monotonic()
            fc.barrier(twin)
            left = time.monotonic()
            assert left >= fc.all_reduce(came, backend, op="max")

    on_ranks(body)


# Ways.


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_the_short_way_does_what_the_long_one_does(
    machine: Machine, operation: str, dtype: Any
) -> None:
    """The third call of a kind takes it; any timeout of its own goes the long way."""

    def body(backend: Any) -> list[Any]:
        function: Any = getattr(fc, operation)
        x = backend.device.from_host(np.arange(12, dtype=dtype).reshape(6, 2) + backend.rank)
        found = [function(x, backend) for _ in range(3)]
        place = backend.device.empty(found[0].shape, dtype)
        found.append(function(x, backend, out=place))
        assert found[-1] is place
        strided = backend.device.empty((2 * place.shape[0], 2), dtype)[::2]
        found.append(function(x, backend, out=strided))
        found.append(function(x, backend, timeout=60.0))
        assert device_twin(backend).order.issued == len(found)
        return [np.asarray(backend.device.to_host(each)) for each in found]

    for results in on_ranks(body):
        for result in results[1:]:
            assert np.array_equal(result, results[0])
    names = ("count", "datatype", "op", "root")
    calls = words(seen(machine), *names)
    assert len(calls) == 6
    assert len(set(calls)) == 1


@pytest.mark.parametrize(
    ("operation", "shape", "dtype"),
    [
        ("all_reduce", (5,), np.complex64),
        ("reduce_scatter", (6, 2), np.complex64),
        ("reduce_scatter", (5, 2), np.float32),  # in parts that are not equal
    ],
)
def test_the_short_way_counts_as_the_long_one_does(
    machine: Machine, operation: str, shape: tuple[int, ...], dtype: Any
) -> None:
    def body(backend: Any) -> list[Any]:
        x = backend.device.from_host(np.arange(np.prod(shape)).reshape(shape).astype(dtype))
        found = [getattr(fc, operation)(x, backend) for _ in range(4)]
        return [backend.device.to_host(each) for each in found]

    for first, *others in on_ranks(body, timeout=10.0):  # what does not fit hangs
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_the_short_way_refuses_what_the_long_one_refuses(machine: Machine) -> None:
    def body(backend: Any) -> list[str]:
        x = device_array(backend, (6,))
        for _ in range(2):
            fc.all_reduce(x, backend)
        found = []
        for out in (device_array(backend, (5,)), device_array(backend, (6,), np.int32), np.ones(6)):
            with pytest.raises(fc.ArgumentError) as caught:
                fc.all_reduce(x, backend, out=out)
            found.append(str(caught.value))
        backend.device.to_host(fc.all_reduce(x, backend))
        return found

    for shape, dtype, host in on_ranks(body):
        assert "shape" in shape
        assert "dtype" in dtype
        assert "array of cuda" in host


def test_overlaps(machine: Machine) -> None:
    """The result may begin anywhere in the input; where NCCL does not allow it, that is copied."""

    def body(backend: Any) -> list[bool]:
        found = []
        for low in (0, 1, 4):
            for _ in range(3):
                room = backend.device.from_host(np.arange(12, dtype=np.float32))
                fc.all_reduce(room[:8], backend, out=room[low : low + 8])
                expected = P * np.arange(8, dtype=np.float32)
                found.append(np.array_equal(backend.device.to_host(room[low : low + 8]), expected))
        return found

    for found in on_ranks(body):
        assert all(found)


def test_the_caller_may_be_on_any_stream(machine: Machine) -> None:
    def body(backend: Any) -> float:
        import cupy

        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = device_array(backend, (8,))
            for _ in range(3):
                x = fc.all_reduce(x, backend)
            work = fc.all_reduce(x, backend, async_op=True)
            x = work.wait() + x
            stream.synchronize()
            return float(x[0])

    assert on_ranks(body) == [81.0 + 27.0] * P
    streams = [entry.stream for entry in seen(machine)]
    assert len(set(streams)) == 2
    assert 0 not in streams


def test_the_host_does_not_wait(machine: Machine) -> None:
    """Calls of a known kind return while the GPU has not begun, as does waiting for a work."""

    def body(backend: Any) -> float:
        x = device_array(backend, (8,))
        for _ in range(2):
            fc.all_reduce(x, backend)
        backend.device.synchronize()
        with machine.frozen(0):
            y = fc.all_reduce(x, backend)
            work = fc.all_reduce(y, backend, async_op=True)
            z = work.wait()
            assert not work.done()
            with pytest.raises(fc.CommTimeoutError, match="all_reduce #4 is not finished"):
                work.wait(timeout=0.01)
        assert work.wait(timeout=60.0) is z
        assert work.done()
        return float(z[0])

    assert on_ranks(body) == [9.0] * P


def test_rows_of_other_ranks_are_asked_for_every_time(machine: Machine) -> None:
    """A rank that calls the same again does not know that another one has other rows now."""

    def body(backend: Any) -> list[list[float]]:
        found = []
        for others in (1, 1, 3, 0, 2):
            rows = 2 if backend.rank == 0 else others * backend.rank
            x = device_array(backend, (rows,)) + backend.rank
            found.append(backend.device.to_host(fc.all_gather_v(x, backend)).tolist())
        return found

    expected = [[1.0] * 2 + [2.0] * n + [3.0] * (2 * n) for n in (1, 1, 3, 0, 2)]
    assert on_ranks(body, timeout=5.0) == [expected] * P


def test_the_input_of_a_started_call_is_kept_until_it_was_read(machine: Machine) -> None:
    """The caller lets go of it at once, and the pool hands its memory out again."""

    def body(backend: Any) -> float:
        fc.all_reduce(device_array(backend, (300,)), backend)
        backend.device.synchronize()
        with machine.frozen(backend.gpu.stream):
            work = fc.all_reduce(device_array(backend, (300,)), backend, async_op=True)
            others = [backend.device.from_host(np.full(300, 9, np.float32)) for _ in range(3)]
        result = backend.device.to_host(work.wait())
        assert [float(other[0]) for other in others] == [9.0] * 3
        return float(result.mean())

    assert on_ranks(body) == [3.0] * P


def test_the_supervisor_sleeps_while_there_is_nothing_to_do(machine: Machine) -> None:
    import time

    def body(backend: Any) -> bool:
        x = device_array(backend, (8,))
        fc.all_reduce(x, backend)
        backend.device.synchronize()
        end = time.monotonic() + 20
        while not backend.supervisor._asleep and time.monotonic() < end:
            time.sleep(0.01)
        return bool(backend.supervisor._asleep)

    assert on_ranks(body) == [True] * P


def test_messages_go_through_the_host(machine: Machine) -> None:
    """In any order of their tags, to arrays of the GPU and of the host."""

    def body(backend: Any) -> list[float]:
        x, after, before = device_array(backend, (4,)), (backend.rank + 1) % P, backend.rank - 1
        works = [backend.isend(x * (tag + backend.rank), after, tag=tag) for tag in (1, 2)]
        there, here = backend.device.empty((4,), np.float32), np.empty(4, np.float32)
        backend.recv(there, before % P, tag=2)
        backend.recv(here, before % P, tag=1)
        for work in works:
            work.wait()
        return [float(there[0]), float(here[0])]

    assert on_ranks(body) == [[2.0 + r, 1.0 + r] for r in (2, 0, 1)]
    assert not seen(machine)


def test_arrays_of_another_gpu_are_refused(machine: Machine) -> None:
    def body(backend: Any) -> None:
        import cupy

        there, me = (backend.rank + 1) % P, backend.rank
        with cupy.cuda.Device(there):
            x = cupy.ones(3, np.float32)
        y = device_array(backend, (3,))
        found = rf"one of cuda:{there}, but this rank computes on cuda:{me}: .*Device\({me}\)"
        for call in (
            lambda: fc.all_reduce(x, backend),
            lambda: fc.coalesce(backend).__enter__().all_reduce(x),
            lambda: fc.all_reduce_many([y, x], backend),
            lambda: backend.isend(x, there),
        ):
            with pytest.raises(fc.ArgumentError, match=found):
                call()
        for refused in (
            lambda: fc.all_reduce(y, backend, out=x),
            lambda: backend.irecv(x, there),
        ):
            with pytest.raises(fc.ArgumentError, match="out must be an array of cuda"):
                refused()

    on_ranks(body)


def test_arrays_that_are_not_cupys_are_refused(machine: Machine) -> None:
    class Tensor:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {}

    def body(backend: Any) -> None:
        for call in (
            lambda: fc.all_reduce(Tensor(), backend),
            lambda: backend.isend(Tensor(), (backend.rank + 1) % P),
        ):
            with pytest.raises(fc.ArgumentError, match=r"Tensor, on a GPU .*cupy\.asarray\(\)"):
                call()

    on_ranks(body)


def test_what_is_no_array_is_not_copied_to_a_gpu(machine: Machine) -> None:
    def body(backend: Any) -> list[float]:
        for value in ([1.0, 2.0], device_array(backend, (2,)), None):
            with pytest.raises(fc.ArgumentError, match=r"from_host\(\) takes a NumPy array, got "):
                backend.device.from_host(value)
        found: list[float] = backend.device.from_host(np.ones(2, ">f4")).tolist()
        return found

    assert on_ranks(body) == [[1.0, 1.0]] * P


def test_results_are_not_written_over_each_other(machine: Machine) -> None:
    """CuPy has no arrays that are read-only, as NumPy's of ``broadcast_to`` are."""

    def body(backend: Any) -> None:
        import cupy

        out = cupy.broadcast_to(device_array(backend, (1, 3)), (4, 3))
        with pytest.raises(fc.ArgumentError, match="several elements at one place"):
            fc.all_reduce(device_array(backend, (4, 3)), backend, out=out)

    on_ranks(body)
