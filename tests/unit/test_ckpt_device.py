"""Checkpoints of arrays on GPUs: the same bytes as anywhere, copied in order and window by window.

The GPUs are the stand-in's, which finds races and reads that do not wait; the ranks' messages are
simulated.
"""

from __future__ import annotations

import gc
import secrets
import threading
import tracemalloc
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fake_cuda
from support.arrays import array_of
from support.ckpt_gpus import check_parts, cut_of, moved, on_gpus, on_host, part, rank_part, strided
from support.ckpt_make import make_checkpoint
from support.ckpt_regions import mask, partitions, regions, shapes

import fsdpcore as fc
from fsdpcore.checkpoint.load import batches
from fsdpcore.checkpoint.memory import fetching
from fsdpcore.checkpoint.storage.files import Files
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.core.geometry.regions import Region

ARRAYS = {
    "flat": array_of(0, (37, 29), np.float32),
    "columns": array_of(1, (50, 30), ml_dtypes.bfloat16),
    "rows": array_of(2, (300, 200), np.float16),
    "whole": array_of(3, (5, 4, 3), np.complex64),
    "scalar": np.array(-7, np.int64),
    "bool": array_of(4, (1000,), np.bool_),
    "optimizer/exp_avg/flat": array_of(5, (37, 29), np.float64),
}
CUTS = {"flat": "flat", "columns": "axis 1", "rows": "axis 0", "optimizer/exp_avg/flat": "flat"}


@pytest.fixture
def machine():
    with fake_cuda.installed(3) as made:
        yield made


def parts(backend: fc.Backend, cuts=CUTS, arrays=ARRAYS) -> dict[str, Any]:
    """This rank's share of all arrays, on the host."""
    return {
        name: rank_part(array, cuts.get(name, "whole"), backend.rank, backend.world_size)
        for name, array in arrays.items()
    }


def on_device(backend: fc.Backend, state: dict[str, Any]) -> dict[str, Any]:
    """The same state on the rank's GPU; nothing of it is contiguous that need not be."""
    return {
        name: moved(shard, lambda array: strided(backend.device.xp, array))
        for name, shard in state.items()
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {name: moved(shard, np.zeros_like) for name, shard in state.items()}


def check_read(path: Any, arrays=ARRAYS) -> None:
    found = fc.checkpoint.read(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes(), name


# Save.


def test_the_files_are_the_same_wherever_the_arrays_are(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda _: "5a" * 16)  # the id of a save
    monkeypatch.setattr(fetching, "WINDOW_BYTES", 1 << 16)  # so that it takes many

    def save(backend, path, place):
        fc.checkpoint.save(path, place(parts(backend)), backend, step=3)

    on_host(2, lambda backend: save(backend, tmp_path / "host", dict))
    on_gpus(
        2,
        lambda backend: save(backend, tmp_path / "gpus", lambda state: on_device(backend, state)),
    )
    check_read(tmp_path / "gpus")
    for name in ("rank_0.safetensors", "rank_1.safetensors"):
        files = [tmp_path / where / "step_00000003" / name for where in ("host", "gpus")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_arrays_of_host_and_gpu_are_saved_and_loaded_together(machine, tmp_path):
    def body(backend):
        state = parts(backend)
        mixed = {**state, **on_device(backend, {n: state[n] for n in ("flat", "rows")})}
        fc.checkpoint.save(tmp_path, mixed, backend, step=3)
        target = blank(state)
        target.update(on_device(backend, blank({n: state[n] for n in ("columns", "rows")})))
        loaded = fc.checkpoint.load(tmp_path, target, backend)
        check_parts(target, state)
        return loaded

    for loaded in on_gpus(2, body):
        assert loaded.missing == loaded.unexpected == loaded.uncovered == ()


class Gate(Files):
    """Nothing is written to a file of arrays until it is opened."""

    def __init__(self) -> None:
        self.open_now = threading.Event()
        self.reached = threading.Event()

    def writev(self, fd, buffers):
        self.reached.set()
        assert self.open_now.wait(60)
        return super().writev(fd, buffers)


@pytest.mark.parametrize("seed", range(3))
def test_a_save_in_the_background_has_what_there_was_when_it_was_called(tmp_path, seed):
    gate = Gate()
    storage = LocalStorage(str(tmp_path), gate)

    def body(backend):
        import cupy

        with cupy.cuda.Stream(non_blocking=True):
            device = on_device(backend, blank(parts(backend)))
            for name, shard in parts(backend).items():  # enqueued before, and maybe not done yet
                _assign(device[name], on_device(backend, {name: shard})[name])
            with fc.checkpoint.AsyncCheckpointer(storage, backend) as checkpointer:
                future = checkpointer.save(device, step=3)
                for shard in device.values():  # as the next step of training does
                    for each in fc.checkpoint.memory.shards.parts_of(shard):
                        each.array.fill(0)
                assert gate.reached.wait(60)
                assert not future.done()
                backend.barrier()
                gate.open_now.set()
                future.wait()
                cupy.cuda.get_current_stream().synchronize()

    with fake_cuda.installed(2, seed=seed):
        on_gpus(2, body)
    check_read(tmp_path)


def _assign(target: Any, source: Any) -> None:
    have = fc.checkpoint.memory.shards.parts_of(target)
    for one, other in zip(have, fc.checkpoint.memory.shards.parts_of(source), strict=True):
        one.array[...] = other.array


def test_the_thread_that_writes_has_nothing_to_do_with_the_gpu(machine, tmp_path):
    def body(backend):
        state = on_device(backend, parts(backend))
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            checkpointer.save(state, step=3).wait()

    on_gpus(2, body)
    assert {entry.thread for entry in machine.log} == {"rank-0", "rank-1"}
    check_read(tmp_path)


def test_memory_that_cannot_be_page_locked_will_do(machine, tmp_path, monkeypatch):
    import cupy

    def refused(size, flags=0):
        raise fake_cuda.CUDARuntimeError(2)

    def body(backend):
        state = parts(backend)
        device = on_device(backend, state)
        fc.checkpoint.save(tmp_path, device, backend, step=2)
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            checkpointer.save(device, step=3)
        target = on_device(backend, blank(state))
        fc.checkpoint.load(tmp_path, target, backend)
        check_parts(target, state)

    monkeypatch.setattr(cupy.cuda, "PinnedMemory", refused)
    on_gpus(2, body)
    check_read(tmp_path)


def test_a_gpu_that_does_not_come_to_the_arrays_is_told_of(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "_PATIENCE", 2.0)  # far more than what is not frozen takes

    def body(backend):
        import cupy

        state = on_device(backend, parts(backend))
        stream = cupy.cuda.Stream.null
        stream.synchronize()
        if backend.rank == 1:
            machine.freeze(stream)
        try:
            with pytest.raises(fc.CheckpointError, match=r"cuda:1 has not come to .*on rank 1\)"):
                fc.checkpoint.save(tmp_path, state, backend, step=3)
        finally:
            gc.collect()  # whatever the error holds: what is still to be copied stays
            if backend.rank == 1:
                machine.thaw(stream)
        fc.checkpoint.save(tmp_path, state, backend, step=4)

    on_gpus(2, body)
    assert fc.checkpoint.steps(tmp_path) == [4]


# Load.


@pytest.mark.parametrize("saves_on", ["host", "gpus"])
def test_any_place_and_number_of_ranks_loads_what_any_other_saved(
    machine, tmp_path, monkeypatch, saves_on
):
    monkeypatch.setattr(batches, "STRETCH_BYTES", 4096)
    cuts = {"flat": "axis 0", "columns": "flat", "rows": "axis 1", "whole": "axis 2"}

    def save(backend):
        state = parts(backend)
        state = state if saves_on == "host" else on_device(backend, state)
        fc.checkpoint.save(tmp_path, state, backend, step=3)

    def load(backend):
        state = parts(backend, cuts)
        target = blank(state)
        target = target if saves_on == "gpus" else on_device(backend, target)
        loaded = fc.checkpoint.load(tmp_path, target, backend)
        check_parts(target, state)
        assert loaded.bytes_needed == sum(
            each.array.nbytes
            for shard in state.values()
            for each in fc.checkpoint.memory.shards.parts_of(shard)
        )

    run = {"host": on_host, "gpus": on_gpus}
    run[saves_on](2, save)
    run["host" if saves_on == "gpus" else "gpus"](3, load)


class Layout(NamedTuple):
    """An array, the regions that are stored of it and the file of each, what the ranks want."""

    array: Any
    stored: list[tuple[int, Region]]
    wanted: list[Region]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shape = draw(shapes(9))
    array = array_of(1, shape, draw(st.sampled_from(["u1", "i4", "f4"])))
    stored = [(draw(st.integers(0, 1)), region) for region in draw(partitions(shape))]
    return Layout(array, stored, [draw(regions(shape)) for _ in range(3)])


def test_any_part_of_an_array_goes_where_it_belongs_and_nothing_else_changes(
    machine, tmp_path_factory, monkeypatch
):
    """Also what is not stored, and what several ranks read for one another."""

    @settings(max_examples=20, deadline=None, database=None, derandomize=True)
    @given(layouts(), st.integers(1, 150), st.booleans())
    def check(layout, stretch, cast):
        monkeypatch.setattr(batches, "STRETCH_BYTES", stretch)
        array = layout.array
        path = tmp_path_factory.mktemp("run")
        cuts = [(file, cut_of(region)) for file, region in layout.stored if region.size]
        make_checkpoint(path, {"a": array}, {"a": cuts}, block=64)
        dtype = np.dtype(np.float64) if cast and array.dtype.kind == "f" else array.dtype
        covered = np.zeros(array.shape, bool)
        for _, region in layout.stored:
            covered |= mask(region, array.shape)
        before = np.full(array.shape, 77, dtype)
        after = np.where(covered, array, before).astype(dtype)

        def load(backend):
            region = layout.wanted[backend.rank]
            target = on_device(backend, {"a": part(before, region)})
            loaded = fc.checkpoint.load(path, target, backend, strict=False, cast=cast)
            check_parts(target, {"a": part(after, region)})
            return loaded.uncovered

        lacking = any((mask(each, array.shape) & ~covered).any() for each in layout.wanted)
        assert on_gpus(3, load) == [("a",) if lacking else ()] * 3

    check()


def test_neither_save_nor_load_takes_much_memory_of_the_host(machine, tmp_path, monkeypatch):
    """Windows are a hundredth as large as usual."""
    monkeypatch.setattr(batches, "STRETCH_BYTES", 160 << 10)
    monkeypatch.setattr(fetching, "WINDOW_BYTES", 64 << 10)
    array = array_of(0, (1300, 1300), np.float32)

    def peak(action, *args, **options):
        gc.collect()
        tracemalloc.start()
        try:
            action(*args, **options)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def body(backend):
        for place in ("flat", "axis 0", "axis 1"):
            state = {"a": rank_part(array, place, 0, 1)}
            device = on_device(backend, state)
            path = tmp_path / place.replace(" ", "")
            # Packing the metadata takes a quarter of a MiB, however little there is.
            assert peak(fc.checkpoint.save, path, device, backend, step=3) < 768 << 10
            target = on_device(backend, blank(state))
            # Parts of blocks go by way of two MiB, which are always there.
            assert peak(fc.checkpoint.load, path, target, backend) < 3 << 20
            check_parts(target, state)

    assert array.nbytes > 6 << 20
    on_gpus(1, body)


# What does not fit.


def test_arrays_that_are_elsewhere_are_refused(machine, tmp_path):
    def refused(backend):
        import cupy

        array = cupy.arange(6)
        box = fc.checkpoint.BoxShard((6,), (0,), array)
        flat = fc.ShardedArray((6,), array.dtype, (fc.ArrayPiece(0, 6, array),))
        for state in ({"a": array}, {"a": box}, {"a": flat}):
            with pytest.raises(fc.ArgumentError, match=r"'a' is a \w+\.ndarray, .* cupy\.asnumpy"):
                fc.checkpoint.save(tmp_path, state, backend, step=3)
            with pytest.raises(fc.ArgumentError, match=r"'a' is a \w+\.ndarray, .* cupy\.asnumpy"):
                fc.checkpoint.load(tmp_path, state, backend)
        metadata = fc.checkpoint.flat_shard_metadata({"a": (6,)}, "i8", 1, step=3, save_id="x")
        with pytest.raises(fc.ArgumentError, match=r"cupy\.asnumpy"):
            fc.checkpoint.save_distributed({"a": array}, tmp_path / "one", 0, 1, metadata)

    on_host(1, refused)
    assert not list(tmp_path.iterdir())

    def other_gpu(backend):
        import cupy

        with cupy.cuda.Device(1):
            array = cupy.arange(6)
        with pytest.raises(fc.ArgumentError, match="device cuda:0"):
            fc.checkpoint.save(tmp_path, {"a": array}, backend, step=3)

    on_gpus(1, other_gpu)


def test_targets_that_share_memory_of_a_gpu_are_refused(machine, tmp_path):
    arrays = {"a": np.arange(24.0).reshape(4, 6), "b": np.arange(24.0).reshape(4, 6)}

    def body(backend):
        xp = backend.device.xp
        fc.checkpoint.save(tmp_path, arrays, backend, step=3)
        room = xp.zeros((6, 6))
        for one, other in ((room[:4], room[2:]), (room[:4], room[:4])):
            with pytest.raises(fc.ArgumentError, match="'a' and 'b' share memory"):
                fc.checkpoint.load(tmp_path, {"a": one, "b": other}, backend)
        same = xp.broadcast_to(xp.zeros(6), (4, 6))
        with pytest.raises(fc.ArgumentError, match="elements of 'a' share memory"):
            fc.checkpoint.load(tmp_path, {"a": same}, backend, strict=False)
        room = xp.zeros((4, 12))
        apart = {"a": room[:, ::2], "b": room[:, 1::2]}
        fc.checkpoint.load(tmp_path, apart, backend)
        check_parts(apart, arrays)

    on_gpus(1, body)


@pytest.mark.parametrize("damaged", [0, 1])
def test_damage_is_told_on_all_ranks_and_the_older_step_is_loaded(
    machine, tmp_path, monkeypatch, damaged
):
    monkeypatch.setattr(batches, "STRETCH_BYTES", 4096)

    def body(backend):
        state = parts(backend)
        for step in (3, 4):
            fc.checkpoint.save(tmp_path, on_device(backend, state), backend, step=step)
        if backend.rank == 0:
            file = tmp_path / "step_00000004" / f"rank_{damaged}.safetensors"
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        backend.barrier()
        target = on_device(backend, blank(state))
        with pytest.raises(fc.CorruptCheckpointError, match="half overwritten"):
            fc.checkpoint.load(tmp_path, target, backend, step=4)
        loaded = fc.checkpoint.load(tmp_path, target, backend)
        assert loaded.step == 3
        check_parts(target, state)

    on_gpus(2, body)
