"""Checkpoints without a backend: what is refused, crashes at every call, processes that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import ckpt_kills
from support.ckpt_disk import Disk, DiskFiles, crashes
from support.ckpt_make import commit, make_checkpoint

from fsdpcore import checkpoint
from fsdpcore.checkpoint import BoxShard
from fsdpcore.checkpoint.format.rank_part import RankPart
from fsdpcore.checkpoint.load import distributed as distributed_load
from fsdpcore.checkpoint.load.distributed import load_distributed, reshard
from fsdpcore.checkpoint.plan.shard_specs import (
    ShardMetadata,
    TensorShardSpec,
    compute_shard_sizes,
    flat_shard_metadata,
    flat_shard_sizes,
)
from fsdpcore.checkpoint.save import distributed
from fsdpcore.checkpoint.save.distributed import save_distributed
from fsdpcore.checkpoint.storage.local_storage import LocalStorage
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from fsdpcore.core.geometry.regions import Box, Range

SHAPES = {"w": (4, 5), "none": (0, 3), "b": (7,), "scale": ()}
NAME = "step_00000030"


def described(save_id="one", ranks=3, **more):
    return flat_shard_metadata(SHAPES, "f4", ranks, step=30, save_id=save_id, **more)


def values(offset=0.0):
    return {
        name: np.arange(int(np.prod(shape)), dtype="f4").reshape(shape) + np.float32(offset)
        for name, shape in SHAPES.items()
    }


def state_of(metadata, rank, full):
    return {
        spec.name: full[spec.name].reshape(-1)[region.start : region.stop]
        for spec in metadata.shards[rank]
        for region in spec.regions
    }


def save_all(path, metadata, full):
    ranks = range(metadata.world_size)
    return [
        save_distributed(state_of(metadata, r, full), path, r, len(ranks), metadata) for r in ranks
    ]


def whole(path):
    state, metadata = load_distributed(path, 0, 1)
    arrays = {
        name: (shard.pieces[0].array if shard.pieces else np.empty(0, "f4")).reshape(shard.shape)
        for name, shard in state.items()
    }
    return arrays, metadata


def assert_same(arrays, full):
    assert list(arrays) == list(full)
    for name, array in arrays.items():
        assert array.dtype == full[name].dtype
        assert array.tobytes() == full[name].tobytes(), name


def test_shard_sizes_differ_by_one_at_most_or_are_ceil_and_pad_at_the_end_only():
    assert compute_shard_sizes(10, 3) == [4, 3, 3]
    assert compute_shard_sizes(2, 4) == [1, 1, 0, 0]
    assert flat_shard_sizes(10, 4) == [3, 3, 3, 1]
    assert flat_shard_sizes(2, 4) == [1, 1, 0, 0]
    for sizes in (compute_shard_sizes, flat_shard_sizes):
        assert sizes(0, 2) == [0, 0]
        for wrong in ((-1, 2), (3, 0), (2.0, 1), (True, 1)):
            with pytest.raises(ArgumentError):
                sizes(*wrong)


def test_the_last_rank_commits_whatever_the_order_and_latest_finds_it(tmp_path):
    metadata, full = described(extra={"z": [1], "a": None}), values()
    path = tmp_path / NAME
    done = []
    for rank in (2, 0, 1):
        with pytest.raises(CheckpointNotFoundError):
            load_distributed(path, 0, 1)
        done.append(save_distributed(state_of(metadata, rank, full), path, rank, 3, metadata))
    assert done == [False, False, True]
    assert checkpoint.latest(tmp_path).name == NAME
    assert_same(checkpoint.read(tmp_path), full)
    arrays, found = whole(path)
    assert_same(arrays, full)
    assert (found.step, found.save_id, found.extra) == (30, "one", {"z": [1], "a": None})
    assert sorted(os.listdir(path)) == [
        "COMMIT",
        "metadata.json",
        *(f"rank_{rank}.safetensors" for rank in range(3)),
    ]


def test_what_was_loaded_can_be_saved_again_on_other_ranks(tmp_path):
    save_all(tmp_path / "any name", described(), values())
    for rank in range(5):
        state, metadata = load_distributed(tmp_path / "any name", rank, 5)
        again = replace(metadata, save_id="again")
        assert save_distributed(state, tmp_path / "other", rank, 5, again) == (rank == 4)
    assert_same(whole(tmp_path / "other")[0], values())


def test_reshard_compares_the_number_of_ranks(tmp_path):
    save_all(tmp_path / "x", described(), values())
    parts = [reshard(tmp_path / "x", 3, 2, rank) for rank in range(2)]
    loaded = np.concatenate([piece.array for part in parts for piece in part["w"].pieces])
    assert loaded.tobytes() == values()["w"].tobytes()
    with pytest.raises(ArgumentError, match="saved by 3 ranks, not 4"):
        reshard(tmp_path / "x", 4, 2, 0)
    with pytest.raises(ArgumentError, match="rank 2"):
        reshard(tmp_path / "x", 3, 2, 2)


def test_boxes_replicas_and_ranges_together(tmp_path):
    full = np.arange(24.0).reshape(4, 6)
    bias = np.arange(5, dtype="i8")

    def specs(rank):
        box = Box((0, 3 * rank), (4, 3 * rank + 3))
        return (
            TensorShardSpec("w", np.dtype("f8"), (4, 6), (box,)),
            TensorShardSpec("bias", np.dtype("i8"), (5,), (Range(0, 5),)),
        )

    metadata = ShardMetadata(1, 2, "s", (specs(0), specs(1)))
    for rank in range(2):
        part = full[:, 3 * rank : 3 * rank + 3]  # not contiguous
        state = {"w": BoxShard((4, 6), (0, 3 * rank), part) if rank else part, "bias": bias}
        save_distributed(state, tmp_path / "c", rank, 2, metadata)
    files = [(tmp_path / "c" / f"rank_{rank}.safetensors").read_bytes() for rank in range(2)]
    assert sum(b'"bias"' in data for data in files) == 1  # the replica is there once
    arrays, _ = load_distributed(tmp_path / "c", 0, 1)
    assert arrays["w"].pieces[0].array.tobytes() == full.tobytes()
    assert arrays["bias"].pieces[0].array.tolist() == bias.tolist()
    state, _ = load_distributed(tmp_path / "c", 1, 2, layout=metadata)
    assert (state["w"].start, state["w"].array.tolist()) == ((0, 3), full[:, 3:].tolist())
    with pytest.raises(ArgumentError, match="but float64"):
        load_distributed(tmp_path / "c", 0, 3, layout=described())


@pytest.mark.parametrize(
    ("regions", "reason"),
    [
        (((Range(0, 4),), (Range(3, 6),)), "share elements"),
        (((Range(0, 3),), (Range(4, 6),)), "is not complete"),
        (((Range(0, 3), Range(2, 6)), ()), "ascend"),
        (((Range(0, 7),), ()), "within"),
        (((Range(0, 3), Box((1, 0), (2, 3))), ()), "a box besides"),
        (((Box((0, 0), (2, 3)), Box((0, 0), (2, 3))), ()), "a box besides"),
        (((Range(0, 3.0),), (Range(3, 6),)), "must be an integer"),
        (((), ()), "is not complete"),
    ],
)
def test_metadata_covers_every_array_once(regions, reason):
    with pytest.raises(ArgumentError, match=reason):
        ShardMetadata(
            0, 2, "s", tuple((TensorShardSpec("x", np.dtype("f4"), (2, 3), r),) for r in regions)
        )


def test_metadata_with_other_faults_is_refused():
    spec = TensorShardSpec("x", np.dtype("f4"), (2,), (Range(0, 2),))
    other = TensorShardSpec("x", np.dtype("f8"), (2,), (Range(0, 2),))
    for wrong in (
        (-1, 1, "s", ((spec,),)),
        (0, 0, "s", ()),
        (0, 2, "s", ((spec,),)),
        (0, 1, "", ((spec,),)),
        (0, 1, "a/b", ((spec,),)),
        (0, 1, "s", ((spec, spec),)),
        (0, 2, "s", ((spec,), (other,))),
        (0, 1, "s", (("x",),)),
        (0, 1, "s", ((spec,),), {"x": float("nan")}),
    ):
        with pytest.raises(ArgumentError):
            ShardMetadata(*wrong)
    for dtypes in ("no such", None, {"w": "f4"}, np.dtype("O")):
        with pytest.raises(ArgumentError):
            flat_shard_metadata(SHAPES, dtypes, 2, step=0, save_id="s")
    assert described().digest == described().digest
    assert described().digest != described(extra=1).digest
    assert described(extra={"a": 1, "b": 2}).digest == described(extra={"b": 2, "a": 1}).digest


def test_a_state_that_is_not_what_the_metadata_says_writes_nothing(tmp_path):
    metadata, full = described(), values()
    good = state_of(metadata, 0, full)
    for state, reason in (
        ({}, "lacks 'w'"),
        ({"w": good["w"].astype("f8")}, "has dtype float64"),
        ({"w": good["w"][1:]}, "array of shape"),
        ({"w": full["w"]}, "array of shape"),
        ({**good, "other": full["w"]}, "does not name"),
        ({**good, "b": full["b"]}, "array of shape"),
        ([good], "a mapping"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            save_distributed(state, tmp_path / "x", 0, 3, metadata)
    for rank, ranks in ((3, 3), (-1, 3), (0, 2), (0, 0), (True, 3)):
        with pytest.raises(ArgumentError):
            save_distributed(good, tmp_path / "x", rank, ranks, metadata)
    for path in ("", "/", "a\0b", 7, b"x", "memory://x"):
        with pytest.raises(ArgumentError):
            save_distributed(good, path, 0, 3, metadata)
    with pytest.raises(ArgumentError, match="step_00000030 would be"):
        save_distributed(good, tmp_path / "step_00000031", 0, 3, metadata)
    assert os.listdir(tmp_path) == []


def test_a_committed_checkpoint_is_not_written_over(tmp_path):
    save_all(tmp_path / "x", described(), values())
    metadata = described("two")
    with pytest.raises(ArgumentError, match="is a committed checkpoint, of step 30"):
        save_distributed(state_of(metadata, 0, values(9)), tmp_path / "x", 0, 3, metadata)
    assert_same(whole(tmp_path / "x")[0], values())
    marker = tmp_path / "x" / "COMMIT"
    marker.write_bytes(marker.read_bytes().replace(b"step 30", b"step 31"))
    with pytest.raises(ArgumentError, match="damaged"):
        save_distributed(state_of(metadata, 0, values(9)), tmp_path / "x", 0, 3, metadata)
    with pytest.raises(CorruptCheckpointError):
        load_distributed(tmp_path / "x", 0, 1)


def test_parts_of_two_attempts_never_come_together(tmp_path):
    path = tmp_path / "x"
    old, new, later = described("old"), described("new"), described("later", ranks=2)
    for rank in (0, 1):
        save_distributed(state_of(old, rank, values(1)), path, rank, 3, old)
    assert not save_distributed(state_of(new, 2, values(2)), path, 2, 3, new)
    assert not save_distributed(state_of(new, 0, values(2)), path, 0, 3, new)
    assert not save_distributed(state_of(old, 2, values(1)), path, 2, 3, old)
    with pytest.raises(ArgumentError, match=r"has saved to .* before, and not the same"):
        save_distributed(state_of(new, 0, values(3)), path, 0, 3, new)
    other = described("new", extra=1)
    with pytest.raises(ArgumentError, match=r"has saved to .* before, and not the same"):
        save_distributed(state_of(other, 0, values(2)), path, 0, 3, other)
    assert not save_distributed(state_of(new, 0, values(2)), path, 0, 3, new)
    with pytest.raises(CheckpointNotFoundError, match="no save into"):
        load_distributed(path, 0, 1)
    assert save_all(path, later, values(3)) == [False, True]
    assert_same(whole(path)[0], values(3))
    assert sorted(os.listdir(path))[-2:] == ["rank_0.safetensors", "rank_1.safetensors"]


def test_ranks_with_different_metadata_are_told(tmp_path):
    one, other = described(), described(extra=1)
    for rank in (0, 1):
        save_distributed(state_of(one, rank, values()), tmp_path / "x", rank, 3, one)
    with pytest.raises(ArgumentError, match="were given different metadata"):
        save_distributed(state_of(other, 2, values()), tmp_path / "x", 2, 3, other)
    with pytest.raises(CheckpointNotFoundError):
        load_distributed(tmp_path / "x", 0, 1)


def test_a_file_that_was_replaced_is_not_committed(tmp_path):
    metadata = described()
    for rank in (0, 1):
        save_distributed(state_of(metadata, rank, values()), tmp_path / "x", rank, 3, metadata)
    file = tmp_path / "x" / "rank_1.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"save_id":"one"', b'"save_id":"two"'))
    with pytest.raises(CheckpointError, match="is not what its rank has written"):
        save_distributed(state_of(metadata, 2, values()), tmp_path / "x", 2, 3, metadata)


def test_parts_that_are_cut_off_or_changed_are_none():
    data = RankPart(1, 3, "one", "0" * 64, "2026-11-21T00:00:00+00:00", 17).to_bytes()
    assert RankPart.from_bytes(data).to_bytes() == data
    broken = [data[:size] for size in range(len(data))] + [data + b"\n"]
    broken += [
        data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        for at in range(len(data))
        for bit in range(8)
    ]
    for each in broken:
        with pytest.raises(CorruptCheckpointError):
            RankPart.from_bytes(each)


def test_loads_of_what_is_no_checkpoint_say_so(tmp_path):
    save_all(tmp_path / NAME, described(), values())
    with pytest.raises(CheckpointNotFoundError, match=f"such as .*{NAME}"):
        load_distributed(tmp_path, 0, 1)
    with pytest.raises(CheckpointNotFoundError, match="there is no"):
        load_distributed(tmp_path / "nothing", 0, 1)
    (tmp_path / NAME).rename(tmp_path / "step_00000031")
    with pytest.raises(CorruptCheckpointError, match="different saves"):
        load_distributed(tmp_path / "step_00000031", 0, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError):
        load_distributed(tmp_path / "file", 0, 1)


def test_a_flipped_bit_is_found_by_the_rank_that_needs_it(tmp_path):
    metadata = flat_shard_metadata({"x": (100_000,)}, "f4", 2, step=0, save_id="s")
    full = np.arange(100_000, dtype="f4")
    for rank in range(2):
        part = full[rank * 50_000 : (rank + 1) * 50_000]
        save_distributed({"x": part}, tmp_path / "x", rank, 2, metadata)
    file = tmp_path / "x" / "rank_1.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    state, _ = load_distributed(tmp_path / "x", 0, 2)
    assert state["x"].pieces[0].array.tobytes() == full[:50_000].tobytes()
    with pytest.raises(CorruptCheckpointError, match=r"rank_1\.safetensors"):
        load_distributed(tmp_path / "x", 1, 2)


def test_threads_at_once_commit_exactly_once(tmp_path):
    for number in range(10):
        metadata, full, done = described(ranks=4), values(number), []

        def one(rank, metadata=metadata, full=full, done=done, path=tmp_path / str(number)):
            done.append(save_distributed(state_of(metadata, rank, full), path, rank, 4, metadata))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [False, False, False, True]
        assert_same(whole(tmp_path / str(number))[0], full)


def test_urls_work_without_locks():
    pytest.importorskip("fsspec")
    metadata = described()
    url = "memory://distributed-test/run/x"
    assert save_all(url, metadata, values()) == [False, False, True]
    assert_same(whole(url)[0], values())
    with pytest.raises(ArgumentError, match="is a committed"):
        save_all(url, described("two"), values())


def _save_on(files, save_id, full, name=NAME):
    metadata = described(save_id, ranks=2)
    storage = LocalStorage("/run", files)
    return [
        distributed._save(storage, name, state_of(metadata, r, full), r, 2, metadata)
        for r in range(2)
    ]


def _found(disk):
    state, metadata = distributed_load._load(LocalStorage("/run", DiskFiles(disk)), NAME, 0, 1)
    arrays = {n: s.pieces[0].array if s.pieces else np.empty(0, "f4") for n, s in state.items()}
    return metadata.save_id, {n: a.reshape(SHAPES[n]) for n, a in arrays.items()}


def test_power_loss_at_every_call_leaves_nothing_or_all_and_room_for_another_attempt():
    saved = {"first": values(1), "second": values(2), "third": values(3)}
    start = Disk()
    first = described("first", ranks=2)
    storage = LocalStorage("/run", DiskFiles(start))
    distributed._save(storage, NAME, state_of(first, 1, saved["first"]), 1, 2, first)
    seen = set()
    for what, disk in crashes(
        start,
        lambda files: _save_on(files, "second", saved["second"]),
        kept=("nothing", "everything", 1),
    ):
        with suppress(CheckpointNotFoundError):
            save_id, arrays = _found(disk)
            assert save_id == "second", what
            assert_same(arrays, saved["second"])
            seen.add("committed")
            continue
        seen.add("nothing")
        assert _save_on(DiskFiles(disk), "third", saved["third"]) == [False, True], what
        assert_same(_found(disk)[1], saved["third"])
    assert seen == {"committed", "nothing"}


def test_processes_killed_at_any_call_never_leave_a_mix(tmp_path):
    script = Path(ckpt_kills.__file__)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "1", "15"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["killed"] >= 15


@pytest.mark.parametrize("pieces", [True, False])
def test_a_shape_that_says_more_than_there_is_takes_no_memory(tmp_path, pieces):
    folder = make_checkpoint(tmp_path, {"w": np.arange(5.0)})
    told = json.loads((folder / "metadata.json").read_bytes())
    if pieces:
        told["tensors"]["w"][1] = [1 << 40]
    else:
        told["tensors"]["huge"] = ["float32", [1 << 20, 1 << 20], []]
    commit(folder, told)
    name = "w" if pieces else "huge"
    for action in (lambda: load_distributed(folder, 0, 2), lambda: reshard(folder, 1, 2, 1)):
        with pytest.raises(CheckpointError, match=f"not all elements were saved of '{name}'"):
            action()


def test_what_is_stored_of_an_array_can_be_loaded_though_the_rest_is_not(tmp_path):
    stored = np.arange(5.0)
    folder = make_checkpoint(tmp_path, {"w": stored})
    told = json.loads((folder / "metadata.json").read_bytes())
    told["tensors"]["w"][1] = [10]
    commit(folder, told)
    state, _ = load_distributed(folder, 0, 2)
    assert np.array_equal(state["w"].pieces[0].array, stored)
    with pytest.raises(CheckpointError, match="not all elements were saved of 'w'"):
        load_distributed(folder, 1, 2)
