"""Verified reads: few calls, no byte in vain, little memory, and no error that is lost."""

from __future__ import annotations

import errno
import json
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.arrays import array_of
from support.ckpt_make import commit, make_checkpoint

import fsdpcore as fc
from fsdpcore.checkpoint import BoxShard, read
from fsdpcore.checkpoint.format.metadata import Metadata
from fsdpcore.checkpoint.load import reading
from fsdpcore.checkpoint.load.batches import STRETCH_BYTES, _cut
from fsdpcore.checkpoint.load.load import Loaded, load
from fsdpcore.checkpoint.load.reading import FileSet
from fsdpcore.checkpoint.plan import read_sharing as sharing
from fsdpcore.checkpoint.plan.catalog import Catalog
from fsdpcore.checkpoint.plan.strided import Strided
from fsdpcore.checkpoint.storage.files import Files, WritableBuffer
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.core.errors import ArgumentError, CheckpointError, CorruptCheckpointError

Array = NDArray[Any]
MIB = 1 << 20


class Watched(Files):
    """Notes every read; fails from some byte of payload on; returns less than asked for."""

    def __init__(self, *, fails_at: int = 1 << 62, error: int = errno.EIO, most: int = 0) -> None:
        self.reads: list[tuple[int, int, int]] = []  # offset, bytes, buffers
        self.lock = threading.Lock()
        self.fails_at = fails_at
        self.error = error
        self.most = most

    def preadv(self, fd: int, buffers: Sequence[WritableBuffer], offset: int) -> int:
        nbytes = sum(len(each) for each in buffers)
        with self.lock:
            self.reads.append((offset, nbytes, len(buffers)))
        if offset + nbytes > self.fails_at:
            raise OSError(self.error, "as the test wants it")
        if self.most:
            buffers = [memoryview(buffers[0])[: self.most]]
        return super().preadv(fd, buffers, offset)


def file_set(folder: Path, files: Files, threads: int = 1) -> tuple[FileSet, Catalog]:
    metadata = Metadata.from_bytes((folder / "metadata.json").read_bytes())
    catalog = Catalog(metadata)
    return FileSet(LocalStorage(str(folder.parent), files), folder.name, catalog, threads), catalog


def test_neighbours_are_read_at_once(tmp_path: Path) -> None:
    given_arrays = {f"t{n:03}": array_of(n, (50,)) for n in range(300)}
    folder = make_checkpoint(tmp_path, given_arrays)
    files = Watched()
    reader, catalog = file_set(folder, files)
    buffers = [bytearray(200) for _ in range(300)]
    with reader:
        reader.read((piece, 0, 200, memoryview(buffers[piece])) for piece in range(300))
        assert len(files.reads) == 3  # header, checksums, everything
        assert files.reads[-1][1:] == (300 * 200, 300)
        reader.read([(7, 0, 200, memoryview(buffers[7])), (9, 0, 200, memoryview(buffers[9]))])
        assert [nbytes for _, nbytes, _ in files.reads[3:]] == [200, 200]
    assert reader.bytes_read == 302 * 200
    assert reader.bytes_beside == sum(nbytes for _, nbytes, _ in files.reads[:2])
    assert [bytes(each) for each in buffers] == [a.tobytes() for a in given_arrays.values()]
    assert catalog.pieces_of(5) == [5]


def test_large_pieces_are_read_in_runs(tmp_path: Path) -> None:
    array = array_of(0, (3 * MIB + 5,), np.uint8)
    folder = make_checkpoint(tmp_path, {"w": array})
    for threads in (1, 3):
        files = Watched()
        reader, _ = file_set(folder, files, threads)
        out = bytearray(array.nbytes)
        with reader:
            reader.read([(0, 0, array.nbytes, memoryview(out))])
        assert bytes(out) == array.tobytes()
        assert sorted(n for _, n, _ in files.reads[2:]) == [5, MIB, MIB, MIB]
        assert not [t for t in threading.enumerate() if t.name.startswith("fsdpcore-load")]


def test_short_reads_are_continued(tmp_path: Path) -> None:
    array = array_of(0, (5000,), np.uint8)
    folder = make_checkpoint(tmp_path, {"w": array})
    reader, _ = file_set(folder, Watched(most=700))
    out = bytearray(5000)
    with reader:
        reader.read([(0, 0, 5000, memoryview(out))])
    assert bytes(out) == array.tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_damaged_block_is_named(tmp_path: Path, threads: int) -> None:
    folder = make_checkpoint(tmp_path, {"w": array_of(0, (200_000,), np.uint8)})
    file = folder / "rank_0.safetensors"
    reader, catalog = file_set(folder, Watched(), threads)
    offset = int(catalog.offset[0])
    data = bytearray(file.read_bytes())
    data[offset + 70_000] ^= 16
    file.write_bytes(data)
    with reader, pytest.raises(CorruptCheckpointError) as found:
        reader.read([(0, 0, 200_000, memoryview(bytearray(200_000)))])
    expected = f"bytes [{offset + 65536}, {offset + 131072}) of rank_0.safetensors, tensor 'w'"
    assert expected in str(found.value)
    assert not [t for t in threading.enumerate() if t.name.startswith("fsdpcore-load")]


def test_errors_of_the_system_are_no_corruption(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, {"w": array_of(0, (200_000,), np.uint8)})
    for error, kind in (
        (errno.EIO, CheckpointError),
        (errno.ESTALE, CheckpointError),
        (errno.EISDIR, CorruptCheckpointError),
    ):
        reader, _ = file_set(folder, Watched(fails_at=100_000, error=error))
        with reader, pytest.raises(CheckpointError) as found:
            reader.read([(0, 0, 200_000, memoryview(bytearray(200_000)))])
        assert type(found.value) is kind
        assert "rank_0.safetensors" in str(found.value)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    array = array_of(0, (64, 5000))
    folder = make_checkpoint(tmp_path, {"w": array})

    def main(backend: fc.Backend) -> str:
        files = Watched(fails_at=(folder / "rank_0.safetensors").stat().st_size // 2)
        storage = LocalStorage(str(tmp_path), files if backend.rank == 1 else None)
        rows = BoxShard((64, 5000), (32 * backend.rank, 0), np.zeros((32, 5000), np.float32))
        with pytest.raises(CheckpointError, match="rank 1") as found:
            load(storage, {"w": rows}, backend)
        assert not isinstance(found.value, CorruptCheckpointError)
        return str(found.value)

    first, second = fc.launch(main, world_size=2, transport="sim")
    assert first == second


class Counting(Files):
    """Counts what is open."""

    opened = most = 0

    def open(self, path: str, flags: int, mode: int = 0o666, *, dir_fd: Any = None) -> int:
        fd = super().open(path, flags, mode, dir_fd=dir_fd)
        self.opened += 1
        self.most = max(self.most, self.opened)
        return fd

    def close(self, fd: int) -> None:
        self.opened -= 1
        super().close(fd)


def test_many_files_are_not_all_open(tmp_path: Path) -> None:
    array = array_of(0, (4000,))
    cuts = {"w": [(n, ("range", 100 * n, 100 * n + 100)) for n in range(40)]}
    make_checkpoint(tmp_path, {"w": array}, cuts, world_size=40)

    files = Counting()
    assert np.array_equal(read(LocalStorage(str(tmp_path), files), threads=1)["w"], array)
    assert files.opened == 0
    assert 1 < files.most < 40


def test_no_more_files_are_closed_than_their_checksums_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = {"w": [(n, ("range", 100 * n, 100 * n + 100)) for n in range(5)]}
    folder = make_checkpoint(tmp_path, {"w": array_of(0, (500,))}, cuts, world_size=5)
    files = Counting()
    reader, _ = file_set(folder, files)
    monkeypatch.setattr(reading, "_TABLE_BYTES", 3 * 8)  # one checksum of each file
    with reader:
        for piece in range(5):
            reader.read([(piece, 0, 400, memoryview(bytearray(400)))])
            assert files.opened == min(piece + 1, 3)
    assert files.opened == 0


@given(
    st.integers(0, 40),
    st.integers(0, 60),
    st.sampled_from([5, MIB, MIB + 12, 3 * MIB, STRETCH_BYTES - 4, STRETCH_BYTES]),
    st.integers(0, 3 * STRETCH_BYTES),
)
def test_each_stretch_is_one_batch_of_what_begins_in_it(
    first: int, count: int, pitch: int, base: int
) -> None:
    last = first + count
    found = list(_cut(first, last, pitch, base))
    assert [item for _, start, stop in found for item in range(start, stop)] == list(
        range(first, last)
    )
    for stretch, start, stop in found:
        assert {(base + item * pitch) // STRETCH_BYTES for item in range(start, stop)} == {stretch}
    stretches = [stretch for stretch, _, _ in found]
    assert stretches == sorted(set(stretches))


# Sharing.


def columns(array: Array, rank: int, ranks: int) -> BoxShard:
    low, high = (array.shape[1] * each // ranks for each in (rank, rank + 1))
    return BoxShard(array.shape, (0, low), np.zeros((array.shape[0], high - low), array.dtype))


@pytest.mark.parametrize("block", [64, 1 << 16])
def test_columns_of_rows_are_read_once_by_all_together(tmp_path: Path, block: int) -> None:
    # With blocks of 64 bytes that is more than one window, with those of 64 KiB several rounds.
    array = array_of(0, (1500, 1501))
    rows = [(0, ("box", (0, 0), (700, 1501))), (1, ("box", (700, 0), (1500, 1501)))]
    make_checkpoint(tmp_path, {"w": array}, {"w": rows}, world_size=2, block=block)

    def main(backend: fc.Backend) -> Loaded:
        shard = columns(array, backend.rank, 3)
        loaded = load(tmp_path, {"w": shard}, backend)
        start = shard.start[1]
        assert np.array_equal(shard.array, array[:, start : start + shard.array.shape[1]])
        return loaded

    reports = fc.launch(main, world_size=3, transport="sim")
    assert sum(each.bytes_read for each in reports) == array.nbytes
    assert max(each.bytes_read for each in reports) < array.nbytes // 2


def test_neighbours_that_are_shared_are_read_by_one_rank(tmp_path: Path) -> None:
    array = array_of(0, (4 * MIB // 1024, 1024))
    make_checkpoint(tmp_path, {"w": array})
    files = Watched()

    def main(backend: fc.Backend) -> Loaded:
        shard = columns(array, backend.rank, 2)
        return load(LocalStorage(str(tmp_path), files), {"w": shard}, backend)

    reports = fc.launch(main, world_size=2, transport="sim")
    assert sum(each.bytes_read for each in reports) == array.nbytes
    assert max(each.bytes_read for each in reports) <= array.nbytes // 2 + 2 * MIB
    payload = [nbytes for _, nbytes, _ in files.reads if nbytes >= 1 << 16]
    assert len(payload) <= array.nbytes // MIB + 8


def test_who_needs_all_serves_who_needs_a_part(tmp_path: Path) -> None:
    array = array_of(0, (1000, 500))
    make_checkpoint(tmp_path, {"w": array})

    def main(backend: fc.Backend) -> Loaded:
        if backend.rank == 0:
            whole = np.zeros_like(array)
            loaded = load(tmp_path, {"w": whole}, backend)
            assert np.array_equal(whole, array)
            return loaded
        shard = columns(array, backend.rank, 8)
        loaded = load(tmp_path, {"w": shard}, backend)
        start = shard.start[1]
        assert np.array_equal(shard.array, array[:, start : start + shard.array.shape[1]])
        return loaded

    reports = fc.launch(main, world_size=3, transport="sim")
    assert sum(each.bytes_read for each in reports) == array.nbytes


@pytest.mark.parametrize("start", [0, 1 << 15])
def test_half_of_a_block_is_not_read_beside_who_needs_all(tmp_path: Path, start: int) -> None:
    array = array_of(0, (1 << 16,), np.uint8)
    make_checkpoint(tmp_path, {"w": array})

    def main(backend: fc.Backend) -> Loaded:
        size = 1 << 15 if backend.rank else array.size
        begin = start if backend.rank else 0
        target = np.zeros(size, np.uint8)
        loaded = load(tmp_path, {"w": BoxShard(array.shape, (begin,), target)}, backend)
        assert np.array_equal(target, array[begin : begin + size])
        return loaded

    reports = fc.launch(main, world_size=2, transport="sim")
    assert sum(each.bytes_read for each in reports) == array.nbytes


def test_replicas_read_for_themselves(tmp_path: Path) -> None:
    array = array_of(0, (1000, 500))
    make_checkpoint(tmp_path, {"w": array})

    def main(backend: fc.Backend) -> Loaded:
        return load(tmp_path, {"w": np.zeros_like(array)}, backend)

    for each in fc.launch(main, world_size=2, transport="sim"):
        assert each.bytes_read == each.bytes_needed == array.nbytes


ROUND = sharing.ROUND_BYTES


def run(reader: int, size: int, needs: dict[int, int]) -> sharing.BlockRun:
    ranks = tuple(sorted(needs))
    return sharing.BlockRun(0, 0, size, ranks, tuple(needs[rank] for rank in ranks), reader)


@pytest.mark.parametrize(
    ("extents", "lengths"),
    [
        # Rank 0 reads a quarter of its buffer each time, for others that need a little of it.
        ([run(0, ROUND // 4, {0: ROUND // 4, 1 + n % 3: 64}) for n in range(10)], [4, 4, 2]),
        # Rank 0 sends three times what it reads.
        ([run(0, ROUND // 16, dict.fromkeys(range(4), ROUND // 16))] * 12, [5, 5, 2]),
        # Rank 3 receives from three others in turn.
        ([run(n % 3, ROUND // 4, {n % 3: ROUND // 4, 3: ROUND // 4}) for n in range(9)], [4, 4, 1]),
        # What is larger than a buffer is a round by itself.
        ([run(0, 2 * ROUND, {0: ROUND, 1: 2 * ROUND})] * 2, [1, 1]),
    ],
    ids=["read", "sent", "received", "large"],
)
def test_rounds_are_as_long_as_the_buffers_of_every_rank_allow(
    extents: list[sharing.BlockRun], lengths: list[int]
) -> None:
    found = list(sharing.rounds(extents, 4))
    assert [len(each) for each in found] == lengths
    assert [extent for each in found for extent in each] == extents


def test_memory_is_the_target_and_a_little(tmp_path: Path) -> None:
    array = np.arange(4096 * 4100, dtype=np.float32).reshape(4096, 4100)  # 64 MiB
    make_checkpoint(tmp_path, {"w": array})
    nbytes = array.nbytes
    column = array[:, 4000].copy()
    del array

    def main(backend: fc.Backend) -> None:
        low, high = (4100 * each // 2 for each in (backend.rank, backend.rank + 1))
        half = np.zeros((4096, high - low), np.float32)
        load(tmp_path, {"w": BoxShard((4096, 4100), (0, low), half)}, backend)
        if low <= 4000 < high:
            assert np.array_equal(half[:, 4000 - low], column)

    tracemalloc.start()
    try:
        fc.launch(main, world_size=2, transport="sim")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes + 2 * 40 * MIB  # of two ranks


# Strided parts.


@st.composite
def strided(draw: st.DrawFn) -> Strided:
    shape = tuple(draw(st.integers(1, 5)) for _ in range(draw(st.integers(1, 4))))
    strides: list[int] = []
    inner = 1
    for extent in reversed(shape):
        step = inner + draw(st.integers(0, 3))
        strides.insert(0, step)
        inner = step * extent
    return Strided(draw(st.sampled_from([1, 2, 8])), draw(st.integers(0, 9)), shape, (*strides,))


@settings(max_examples=300, derandomize=True, deadline=None)
@given(cut=strided(), unit=st.integers(1, 40), data=st.data())
def test_clips_have_every_element_of_a_run_once(
    cut: Strided, unit: int, data: st.DataObject
) -> None:
    places = cut.src + sum(
        np.arange(extent).reshape([-1] + [1] * (len(cut.shape) - axis - 1)) * stride
        for axis, (extent, stride) in enumerate(zip(cut.shape, cut.strides, strict=True))
    )
    assert (cut.start, cut.stop) == (
        int(places.min()) * cut.itemsize,
        (int(places.max()) + 1) * cut.itemsize,
    )
    step = unit * cut.itemsize
    bounds = np.arange(0, cut.stop + step, step)
    expected, _ = np.histogram(places * cut.itemsize, bounds)
    last = (places * cut.itemsize == bounds[-1]).sum()  # histogram counts its last edge, too
    expected[-1] -= last
    assert cut.counts(bounds).tolist() == (expected * cut.itemsize).tolist()
    start = data.draw(st.integers(0, len(bounds) - 2)) * step
    stop = start + step * data.draw(st.integers(1, 5))
    numbers = np.arange(cut.stop // cut.itemsize + 6 * unit)
    dtype = np.dtype(f"u{cut.itemsize}")
    raw = numbers.astype(dtype).view(np.uint8)[start:stop]
    found = np.zeros(cut.shape, bool)
    order: list[int] = []
    for clip in cut.clips(start, stop):
        assert not found[clip.where].any()
        found[clip.where] = True
        values = cut.view(clip, raw, start, dtype)
        assert np.array_equal(values, places[clip.where].astype(dtype))
        order += places[clip.where].reshape(-1).tolist()
    inside = (places * cut.itemsize >= start) & (places * cut.itemsize < stop)
    assert np.array_equal(found, inside)
    assert order == sorted(order)


def test_there_are_no_more_threads_than_there_is_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    class Pool(reading.ThreadPoolExecutor):
        def __init__(self, workers: int, prefix: str) -> None:
            counts.append(workers)
            super().__init__(workers, prefix)

    monkeypatch.setattr(reading, "ThreadPoolExecutor", Pool)
    for bytes_there, expected in ((100, []), (3 * MIB, [3]), (65 * MIB, [64])):
        folder = tmp_path / str(bytes_there)
        array = np.resize(np.arange(251, dtype=np.uint8), bytes_there)
        make_checkpoint(folder, {"w": array})
        counts.clear()
        assert np.array_equal(read(folder, threads=10**6)["w"], array)
        assert counts == expected


def test_an_array_may_be_called_like_a_pattern(tmp_path: Path) -> None:
    given_arrays = {name: array_of(n, (5,)) for n, name in enumerate(("*", "w", "b?", "bx"))}
    make_checkpoint(tmp_path, given_arrays)
    assert list(read(tmp_path)) == list(given_arrays)
    assert list(read(tmp_path, None)) == list(given_arrays)
    assert list(read(tmp_path, "*")) == ["*"]
    assert list(read(tmp_path, ["b?", "w"])) == ["w", "b?"]
    assert list(read(tmp_path, "b*")) == ["b?", "bx"]


def test_arrays_are_rounded_to_floating_dtypes_only(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, {"w": np.full(3, 1.5), "n": np.arange(3)})
    for dtype in ("i4", "i8", "?", "c8"):
        with pytest.raises(ArgumentError, match="floating arrays are rounded to, such as float32"):
            read(tmp_path, dtype=dtype)
    found = read(tmp_path, dtype="f2")
    assert (found["w"].dtype, found["n"].dtype) == (np.float16, np.int64)
    assert found["w"].tolist() == [1.5] * 3


@pytest.mark.parametrize("pieces", ["some", "none"])
def test_a_shape_that_says_more_than_there_is_takes_no_memory(tmp_path: Path, pieces: str) -> None:
    folder = make_checkpoint(tmp_path, {"w": array_of(0, (5,)), "b": array_of(1, (5,))})
    told = json.loads((folder / "metadata.json").read_bytes())
    told["tensors"]["w"][1] = [1 << 40]
    if pieces == "none":
        told["tensors"]["huge"] = ["float32", [1 << 40, 2], []]
        told["tensors"]["w"][1] = [5]
    commit(folder, told)
    name = "huge" if pieces == "none" else "w"
    with pytest.raises(CheckpointError, match=f"not all elements were saved of '{name}'"):
        read(tmp_path)
    assert list(read(tmp_path, "b")) == ["b"]
