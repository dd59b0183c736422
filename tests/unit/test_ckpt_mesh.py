"""Checkpoints of meshes: who writes what, in how many pieces, what is refused; every way in."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import fake_cuda
from support.arrays import array_of
from support.ckpt_gpus import moved, on_gpus, strided
from support.ckpt_mesh import (
    Cut,
    Grid,
    box_of,
    check_filled,
    check_whole,
    even,
    load_on,
    room_for,
    save_on,
    state_of,
)
from support.fsdp_steps import cause_of, launch
from typer.testing import CliRunner

import fsdpcore as fc
import fsdpcore.checkpoint as alone
from fsdpcore.checkpoint import (
    BoxShard,
    Range,
    ShardMetadata,
    TensorShardSpec,
    diff,
    export_safetensors,
    read,
    rewrite,
    verify,
)
from fsdpcore.checkpoint.memory.shards import parts_of
from fsdpcore.checkpoint.plan.held import HeldArray, held_piece
from fsdpcore.checkpoint.plan.save_plan import plan
from fsdpcore.checkpoint.storage.opening import open_storage
from fsdpcore.checkpoint.storage.steps import StepName, read_step
from fsdpcore.commands.main import app
from fsdpcore.core.geometry.regions import Box

# A layer of a transformer, in odd sizes: columns, heads, rows, and what is whole on every rank.
ARRAYS = {
    "block.table": array_of(7, (400,), np.float32),  # more than half of the buffer
    "block.norm": array_of(0, (13,), np.float32),
    "block.qkv.w": array_of(1, (13, 3, 5, 2), np.float32),
    "block.qkv.b": array_of(2, (3, 5, 2), np.float32),
    "block.out.w": array_of(3, (11, 13), np.float32),
    "block.out.b": array_of(4, (13,), np.float32),
    "block.up.w": array_of(5, (13, 27), ml_dtypes.bfloat16),
    "optimizer/exp_avg/block.up.w": array_of(6, (13, 27), np.float64),
}
AXES = {
    "block.qkv.w": 2,
    "block.qkv.b": 1,
    "block.out.w": 0,
    "block.up.w": 1,
    "optimizer/exp_avg/block.up.w": 1,
}
BUFFERS = (tuple(ARRAYS)[:6], tuple(ARRAYS)[6:7], tuple(ARRAYS)[7:])


def grid(replicate: int, shard: int, tensor: int) -> Grid:
    cuts = {name: Cut(axis, even(ARRAYS[name].shape[axis], tensor)) for name, axis in AXES.items()}
    return Grid(replicate, shard, tensor, cuts if tensor > 1 else {}, BUFFERS)


MESH = grid(2, 2, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("mesh")
    save_on(path, ARRAYS, MESH)
    return path


def stored(path):
    return read_step(open_storage(path), StepName(1))


# What is stored.


def test_each_element_is_stored_once(run):
    metadata = stored(run)
    nbytes = sum(file.table - file.data_start for file in metadata.files)
    assert nbytes == sum(array.nbytes for array in ARRAYS.values())
    assert verify(run).problems == ()
    check_whole(ARRAYS, read(run))


def test_columns_are_few_pieces_and_rows_are_runs():
    shape = (101, 30)
    for axis, most in ((1, 3), (0, 1)):
        cut = Cut(axis, even(shape[axis], 3))
        made = Grid(1, 4, 3, {"w": cut})
        for rank in range(made.ranks):
            (shard,) = state_of({"w": array_of(0, shape)}, made, rank).values()
            parts = parts_of(shard)
            assert 1 <= len(parts) <= most
            assert all(isinstance(part.region, Box if axis else Range) for part in parts)
            for part in parts:  # views, so that what is loaded arrives
                assert np.shares_memory(part.array, shard.pieces[0].array)


def test_parts_of_boxes_are_the_elements_of_the_array():
    for name, array in ARRAYS.items():
        for rank in range(MESH.ranks):
            for region, part in parts_of(state_of(ARRAYS, MESH, rank)[name]):
                if isinstance(region, Range):
                    expected = array.reshape(-1)[region.start : region.stop]
                else:
                    expected = array[tuple(map(slice, region.start, region.stop))]
                assert part.shape == expected.shape
                assert part.tobytes() == expected.tobytes()


def test_copies_with_the_same_cuts_are_shared_out(tmp_path):
    arrays = {"w": array_of(0, (1024, 1024), np.float64)}
    save_on(tmp_path, arrays, Grid(2, 2, 2, {"w": Cut(1, even(1024, 2))}))
    sizes = [file.table - file.data_start for file in stored(tmp_path).files]
    assert sizes == [1 << 20] * 8
    check_whole(arrays, read(tmp_path))


def test_of_copies_with_other_cuts_the_first_is_written(tmp_path):
    arrays = {"w": array_of(0, (9, 8)), "b": array_of(1, (1000,))}
    uneven = Grid(1, 2, 2, {"w": Cut(1, (0, 1, 8))})  # "b" begins elsewhere on each tensor rank

    def body(backend):
        state = state_of(arrays, uneven, backend.rank)
        assert state["b"].replica == backend.rank % 2
        if backend.rank % 2:  # the other copy is not looked at
            for piece in state["b"].pieces:
                piece.array[...] = np.nan
        fc.checkpoint.save(tmp_path, state, backend, step=1)

    launch(body, 4)
    check_whole(arrays, read(tmp_path))
    assert len(stored(tmp_path).tensors["b"].pieces) == 2


# What is refused.


def held(name, shape, *regions, replica=0):
    return [
        HeldArray(name, "float32", shape, tuple(held_piece(r, shape) for r in regions), replica)
    ]


def test_the_first_copy_has_to_be_complete():
    ranks = [
        held("w", (10,), Range(0, 5), replica=1),
        held("w", (10,), Range(5, 9), replica=1),
        held("w", (10,), Range(0, 10), replica=2),
    ]
    with pytest.raises(
        fc.ArgumentError, match="not complete: no rank of replica 1 has 1 of its 10"
    ):
        plan(ranks)
    ranks.append(held("w", (10,), Range(9, 10), replica=1))
    written = [[each.region for each in rank] for rank in plan(ranks).written]
    assert written == [[Range(0, 5)], [Range(5, 9)], [], [Range(9, 10)]]


def test_copies_that_only_together_are_complete_are_taken_as_they_are():
    ranks = [held("w", (10,), Range(0, 5)), held("w", (10,), Range(5, 10), replica=1)]
    assert [len(each) for each in plan(ranks).written] == [1, 1]


@pytest.mark.parametrize("replica", [0, 1])
def test_parts_of_one_copy_that_overlap_are_refused(replica):
    ranks = [
        held("w", (4, 6), Box((0, 0), (4, 4)), replica=replica),
        held("w", (4, 6), Box((0, 3), (4, 6)), replica=replica),
        held("w", (4, 6), Range(0, 24), replica=1 - replica),
    ]
    with pytest.raises(fc.ArgumentError, match="share elements"):
        plan(ranks)
    plan([ranks[0], held("w", (4, 6), Box((0, 4), (4, 6)), replica=replica), ranks[2]])


def test_a_part_of_the_mesh_alone_is_refused(tmp_path):
    def body(backend):  # a tensor rank's data-parallel ranks, as the engine's backend has them
        state = state_of(ARRAYS, grid(1, 2, 2), 2 * backend.rank)
        fc.checkpoint.save(tmp_path, state, backend, step=1)

    error = cause_of(body, 2)
    assert isinstance(error, fc.ArgumentError)
    assert "block.qkv.w of shape (13, 3, 5, 2) is not complete" in str(error)


# Every way in.


@pytest.mark.parametrize("to", [(1, 1, 1), (1, 3, 1), (2, 1, 3), (1, 1, 5), (2, 2, 1)])
def test_another_mesh_loads_it(run, to):
    reports = load_on(run, ARRAYS, grid(*to))
    assert all(each.missing == each.unexpected == each.uncovered == () for each in reports)
    assert sum(e.bytes_read for e in reports) <= 1.02 * sum(e.bytes_needed for e in reports)


def test_plain_boxes_and_a_mesh_are_the_same(tmp_path, run):
    bounds = even(27, 3)

    def body(backend):
        target = {name: np.empty_like(array) for name, array in ARRAYS.items()}
        low, high = list(pairwise(bounds))[backend.rank]
        columns = np.empty((13, high - low), ml_dtypes.bfloat16)
        state = {**target, "block.up.w": BoxShard((13, 27), (0, low), columns)}
        fc.checkpoint.load(run, state, backend)
        assert columns.tobytes() == ARRAYS["block.up.w"][:, low:high].tobytes()
        fc.checkpoint.save(tmp_path, state, backend, step=1)

    launch(body, 3)
    check_whole(ARRAYS, read(tmp_path))
    load_on(tmp_path, ARRAYS, MESH)


def test_cast_on_the_way_in(run):
    wide = {name: array.astype(np.float64) for name, array in ARRAYS.items()}
    other = grid(1, 2, 3)

    def body(backend):
        state = room_for(wide, other, backend.rank)
        fc.checkpoint.load(run, state, backend, cast=True)
        check_filled(wide, other, backend.rank, state)

    launch(body, other.ranks)


def test_memory_beyond_the_arrays_is_bounded(tmp_path):
    arrays = {"w": np.arange(16 << 20, dtype=np.float32).reshape(4 << 10, 4 << 10)}
    cut = {"w": Cut(1, even(4 << 10, 2))}
    one, other = Grid(1, 2, 2, cut), Grid(1, 1, 3, {"w": Cut(1, even(4 << 10, 3))})
    states = [state_of(arrays, one, rank) for rank in range(one.ranks)]
    rooms = [room_for(arrays, other, rank) for rank in range(other.ranks)]
    tracemalloc.start()
    try:
        launch(lambda b: fc.checkpoint.save(tmp_path, states[b.rank], b, step=1), one.ranks)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 8 << 20
        tracemalloc.reset_peak()
        launch(lambda b: fc.checkpoint.load(tmp_path, rooms[b.rank], b, threads=1), other.ranks)
        _, peak = tracemalloc.get_traced_memory()
        assert peak < other.ranks * 16 << 20  # of 64 MiB
    finally:
        tracemalloc.stop()
    for rank, room in enumerate(rooms):
        check_filled(arrays, other, rank, room)


# In the background, and on GPUs.


def test_in_the_background_what_is_saved_is_what_there_was(tmp_path):
    def body(backend):
        state = state_of(ARRAYS, MESH, backend.rank)
        with fc.checkpoint.AsyncCheckpointer(tmp_path, backend) as checkpointer:
            checkpointer.save(state, step=1)
            for shard in state.values():
                for piece in shard.pieces:
                    piece.array.view(np.uint8)[...] = 1
            checkpointer.save(state, step=2)  # by the plan of the first one
            uneven = {**MESH.cuts, "block.up.w": Cut(1, (0, 20, 27))}
            checkpointer.save(state_of(ARRAYS, replace(MESH, cuts=uneven), backend.rank), step=3)

    launch(body, MESH.ranks)
    check_whole(ARRAYS, read(tmp_path, step=1))
    check_whole(ARRAYS, read(tmp_path, step=3))
    changed = read(tmp_path, step=2)
    assert all((array.view(np.uint8) == 1).all() for array in changed.values())


def test_on_gpus(tmp_path):
    grids = grid(1, 2, 2), grid(2, 1, 2)

    def body(backend):
        xp = backend.device.xp

        def place(state):
            return {name: moved(each, lambda a: strided(xp, a)) for name, each in state.items()}

        mine = state_of(ARRAYS, grids[0], backend.rank)
        fc.checkpoint.save(tmp_path, place(mine), backend, step=1)
        room = place(room_for(ARRAYS, grids[1], backend.rank))
        fc.checkpoint.load(tmp_path, room, backend)
        host = {name: moved(each, lambda array: array.get()) for name, each in room.items()}
        check_filled(ARRAYS, grids[1], backend.rank, host)

    with fake_cuda.installed(4):
        on_gpus(4, body)
    check_whole(ARRAYS, read(tmp_path))


# Without a backend.


def described(made: Grid, **options) -> ShardMetadata:
    shards = []
    for rank in range(made.ranks):
        state = state_of(ARRAYS, made, rank)
        shards.append(
            tuple(
                TensorShardSpec(
                    name,
                    shard.dtype,
                    shard.shape,
                    tuple(Range(piece.start, piece.stop) for piece in shard.pieces),
                    shard.box,
                    shard.replica,
                    shard.replicas,
                )
                for name, shard in state.items()
            )
        )
    return ShardMetadata(world_size=made.ranks, shards=tuple(shards), **options)


def test_ranks_that_do_not_talk_save_and_load_meshes(tmp_path, run):
    metadata = described(MESH, step=1, save_id="a-1")
    path = tmp_path / "step_00000001"
    done = [
        alone.save_distributed(state_of(ARRAYS, MESH, rank), path, rank, MESH.ranks, metadata)
        for rank in range(MESH.ranks)
    ]
    assert done == [False] * 7 + [True]
    check_whole(ARRAYS, read(tmp_path))
    other = grid(1, 2, 3)
    layout = described(other, step=0, save_id="x")
    for folder in (path, run / "step_00000001"):
        for rank in range(other.ranks):
            state, found = alone.load_distributed(folder, rank, other.ranks, layout=layout)
            check_filled(ARRAYS, other, rank, state)
            assert (found.step, found.shards) == (1, layout.shards)
            for name, shard in state_of(ARRAYS, other, rank).items():
                assert (state[name].box, state[name].replica) == (shard.box, shard.replica)
    flat = alone.reshard(run / "step_00000001", MESH.ranks, 3, 1)["block.qkv.w"]
    (piece,) = flat.pieces
    assert piece.array.tobytes() == ARRAYS["block.qkv.w"].reshape(-1)[slice(*piece[:2])].tobytes()


def test_plain_arrays_for_the_parts_of_boxes(tmp_path):
    whole = array_of(0, (6, 5))
    boxes = [box_of((6, 5), Cut(1, (0, 2, 5)), rank) for rank in range(2)]

    def spec(box, *runs):
        return (TensorShardSpec("w", np.dtype("f4"), (6, 5), runs, box),)

    columns, odd = whole[boxes[0].slices], whole[boxes[1].slices].reshape(-1)
    metadata = ShardMetadata(
        0,
        3,
        "s",
        (spec(boxes[0], Range(0, 12)), spec(boxes[1], Range(0, 7)), spec(boxes[1], Range(7, 18))),
    )
    for rank, given in enumerate((columns, odd[:7], odd[7:])):
        alone.save_distributed({"w": given}, tmp_path / "c", rank, 3, metadata)
    state, _ = alone.load_distributed(tmp_path / "c", 0, 1)
    assert state["w"].pieces[0].array.tobytes() == whole.tobytes()
    with pytest.raises(fc.ArgumentError, match=r"shape \(5, 6\) in the state"):
        alone.save_distributed({"w": whole.T}, tmp_path / "d", 0, 3, metadata)

    rows = [box_of((6, 5), Cut(0, (0, 2, 6)), rank) for rank in range(2)]
    metadata = ShardMetadata(0, 2, "r", tuple(spec(box, Range(0, box.size)) for box in rows))
    for rank, box in enumerate(rows):
        alone.save_distributed({"w": whole[box.slices]}, tmp_path / "r", rank, 2, metadata)
    state, _ = alone.load_distributed(tmp_path / "r", 0, 1)
    assert state["w"].pieces[0].array.tobytes() == whole.tobytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"box": box_of((6, 6), None, 0)}, "is none of it"),
        ({"box": "columns"}, "is none of it"),
        ({"regions": (Box((0, 0), (1, 1)),)}, "ranges of its box"),
        ({"regions": (Range(0, 13),)}, "has 12 elements"),
        ({"replica": 1}, "does not exist"),
        ({"replicas": 0}, "at least 1"),
    ],
)
def test_specs_that_make_no_sense(changes, words):
    box = box_of((6, 5), Cut(1, (0, 2, 5)), 0)
    good = {"name": "w", "dtype": "f4", "shape": (6, 5), "regions": (Range(0, 12),), "box": box}
    assert TensorShardSpec(**good).parts == (Box((0, 0), (6, 2)),)
    with pytest.raises(fc.ArgumentError, match=words):
        TensorShardSpec(**{**good, **changes})


# Tools.


def test_tools_read_it(run, tmp_path):
    def ckpt(*arguments):
        result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.stdout

    told = json.loads(ckpt("inspect", run, "--step", 1, "--json"))
    rows = {row["name"]: row for row in told["arrays"]}
    assert rows["block.up.w"]["shape"] == [13, 27]
    assert all(row["missing"] == 0 for row in rows.values())
    assert "valid" in ckpt("verify", run)
    rewrite(run, tmp_path / "three", 3)
    check_whole(ARRAYS, read(tmp_path / "three"))
    assert diff(run, tmp_path / "three").equal
    assert "equal" in ckpt("diff", run, tmp_path / "three")
    export_safetensors(run, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    for name, array in ARRAYS.items():
        if not name.startswith("optimizer/"):
            assert found[name].tobytes() == array.tobytes()
