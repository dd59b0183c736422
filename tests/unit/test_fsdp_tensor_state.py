"""States of engines whose parameters are cut over a group of ranks: whole arrays, boxes, shards."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_steps import launch
from support.fsdp_tensor import (
    AXES,
    Grid,
    Model,
    PlainAdamW,
    assert_state,
    engine_on,
    raised_alike,
    train,
)

import fsdpcore as fc
from fsdpcore.fsdp.state.state import EngineState

TWO = Grid(tensor=2, shard=2)
THREE = Grid(tensor=3, shard=2, strategy="no_shard")
CUBE = Grid(tensor=2, shard=2, replicate=2, strategy="hybrid_shard")
by_grid = pytest.mark.parametrize("grid", [TWO, THREE, CUBE], ids=repr)


def trained(grid, backend, model, steps=range(2), **options):
    engine = engine_on(grid, backend, model, **options)
    train(engine, model, steps)
    return engine


def expected_state(grid, model, steps=range(2)):
    plain = PlainAdamW(model.params)
    for step in steps:
        plain.step(model.mean_gradients(step, grid.data))
    return plain.state()


@by_grid
def test_one_rank_gets_whole_arrays_and_gives_them(grid):
    model = Model()
    last = grid.data - 1

    def body(backend):
        engine = trained(grid, backend, model)
        state = engine.state_dict(full=True, to=last)
        fresh = engine_on(grid, backend, model)
        fresh.load_state_dict(state if state else None, src=last)
        again = fresh.state_dict(full=True)
        here = (engine.tensor.rank, engine.backend.rank)
        return here, state.arrays, state.info, again.arrays, fresh.steps

    expected = expected_state(grid, model)
    for here, arrays, info, again, steps in launch(body, grid.ranks):
        assert bool(arrays) is (here == (0, last))
        assert info["world_size"] == grid.ranks
        assert steps == 2
        assert_state(again, expected, 1e-12)
        if arrays:
            assert_state(arrays, again, 0.0)


@by_grid
def test_boxes_may_lie_in_another_order_than_their_ranks(grid):
    model = Model()

    def body(backend):
        mesh = fc.Mesh(backend, {"data": grid.data, "tensor": grid.tensor})
        units = model.units(grid.tensor, grid.tensor - 1 - mesh["tensor"].rank)
        engine = engine_on(grid, backend, model, units=units)
        whole = engine.state_dict(full=True)
        one = engine.state_dict(full=True, to=0)
        engine.load_state_dict(whole)
        return [
            [state[name] for name in model.names] if state else None
            for state in (whole, one, engine.state_dict(full=True))
        ]

    for rank, (whole, one, again) in enumerate(launch(body, grid.ranks)):
        assert bool(one) is (rank == 0)
        for arrays in filter(None, (whole, one, again)):
            for name, array in zip(model.names, arrays, strict=True):
                assert_array_equal(array, model.params[name])


@by_grid
def test_shards_are_pieces_of_boxes_and_every_copy_is_whole(grid):
    model = Model()

    def body(backend):
        engine = trained(grid, backend, model)
        state = engine.state_dict()
        return dict(state), engine.state_dict(full=True).arrays

    results = launch(body, grid.ranks)
    for name, whole in results[0][1].items():
        shards = [result[0][name] for result in results]
        boxed = name.rpartition("/")[2] in AXES
        copies = grid.replicate * (grid.shard if grid.strategy == "no_shard" else 1)
        copies *= 1 if boxed else grid.tensor
        assert {(each.shape, each.replicas) for each in shards} == {(whole.shape, copies)}
        for copy in range(copies):
            found, seen = np.zeros(whole.shape), np.zeros(whole.shape, int)
            for shard in (each for each in shards if each.replica == copy):
                assert (shard.box is not None) is boxed
                slices = shard.box.slices if boxed else ...
                flat, count = found[slices].reshape(-1), seen[slices].reshape(-1)
                for start, stop, array in shard.pieces:
                    flat[start:stop] = array
                    count[start:stop] += 1
                found[slices], seen[slices] = (
                    a.reshape(found[slices].shape) for a in (flat, count)
                )
            assert (seen == 1).all(), name
            assert_array_equal(found, whole)


def copied(state):
    """A state that outlives updates."""
    arrays = {
        name: fc.ShardedArray(
            shard.shape,
            shard.dtype,
            tuple(fc.ArrayPiece(start, stop, array.copy()) for start, stop, array in shard.pieces),
            shard.replica,
            shard.replicas,
            shard.box,
        )
        for name, shard in state.items()
    }
    return EngineState(arrays, state.info)


@by_grid
def test_shards_load_where_they_came_from(grid):
    model = Model()

    def body(backend):
        engine = trained(grid, backend, model)
        kept = copied(engine.state_dict())
        before = engine.state_dict(full=True).arrays
        train(engine, model, range(2, 3))
        engine.load_state_dict(kept)
        loaded = engine.state_dict(full=True).arrays
        train(engine, model, range(2, 3))
        with engine.writing_state() as state:
            for name, shard in kept.items():
                for target, piece in zip(state[name].pieces, shard.pieces, strict=True):
                    target.array[:] = piece.array
        return before, loaded, engine.state_dict(full=True).arrays

    for before, loaded, written in launch(body, grid.ranks):
        assert_state(loaded, before, 0.0)
        assert_state(written, before, 0.0)


@pytest.mark.parametrize("grid", [THREE, CUBE, Grid(tensor=1, shard=3)], ids=repr)
def test_training_goes_on_over_another_number_of_ranks(grid):
    model = Model()

    def first(backend):
        return trained(TWO, backend, model).state_dict(full=True)

    state = launch(first, TWO.ranks)[0]

    def body(backend):
        engine = engine_on(grid, backend, model)
        engine.load_state_dict(state)
        train(engine, model, range(2, 4))
        return engine.state_dict(full=True).arrays

    expected = PlainAdamW(model.params)
    for step in range(4):
        expected.step(model.mean_gradients(step, TWO.data if step < 2 else grid.data))
    for arrays in launch(body, grid.ranks):
        assert_state(arrays, expected.state(), 1e-12)


def test_parameters_load_whole_and_rounded_from_all_ranks_or_one():
    model = Model(dtype=np.float32)
    given = {name: np.full(a.shape, 1 + 2.0**-40) for name, a in model.params.items()}

    def body(backend, src):
        engine = engine_on(TWO, backend, model)
        one = src is not None and (engine.backend.rank, engine.tensor.rank) != (src, 0)
        report = engine.load_full(None if one else given, src=src)
        return report, engine.state_dict(full=True, optimizer=False).arrays

    for src in (None, 1):
        for report, arrays in launch(body, 4, args=(src,)):
            assert report == ((), ())
            assert all(
                (array == 1).all() and array.dtype == np.float32 for array in arrays.values()
            )


def test_an_ignored_array_is_dealt_out_to_all():
    model, given = Model(), np.arange(3.0)

    def body(backend):
        rank = fc.Mesh(backend, {"shard": 2, "tensor": 2})["tensor"].rank
        w = model.boxed("a.w", model.params["a.w"], 2, rank)
        unit = fc.Unit("a", {"w": w, "table": np.zeros(3)}, ignored="table")
        engine = engine_on(TWO, backend, model, units=[unit])
        params = {"a.w": model.params["a.w"] + 1, "a.table": given}
        engine.load_full(params if backend.rank == 0 else None, src=0)
        return engine.state_dict(full=True)

    for state in launch(body, 4):
        assert_array_equal(state["a.table"], given)
        assert_array_equal(state["a.w"], model.params["a.w"] + 1)


@by_grid
@pytest.mark.parametrize("window", [True, False], ids=["window", "apart"])
def test_full_params_are_whole_and_written_back(grid, window):
    model = Model()

    def body(backend):
        engine = engine_on(grid, backend, model, window=window)
        with engine.full_params() as params:
            for name, whole in model.params.items():
                assert_array_equal(params[name], whole)
                assert not params[name].flags.writeable
        with engine.full_params(write=True, names=["a.*", "c.*"]) as params:
            params["a.w"][...] *= 2
            params["c.plain"] = np.zeros((3, 4))
        return engine.state_dict(full=True, optimizer=False).arrays

    expected = model.params | {"a.w": 2 * model.params["a.w"], "c.plain": np.zeros((3, 4))}
    for arrays in launch(body, grid.ranks):
        assert_state(arrays, expected, 0.0)


def test_what_is_written_is_the_same_on_all_ranks():
    model = Model()

    def body(backend):
        engine = engine_on(TWO, backend, model)
        with engine.full_params(write=True) as params:
            params["a.w"][...] = backend.rank == 3

    kind, message = raised_alike(body, 4)
    assert kind is fc.MismatchError
    assert "a.w was written differently on rank 0 and on rank 3" in message


def test_what_is_whole_is_given_by_one_tensor_rank():
    """Ranks may have it different in the last bits, where sums are made in another order."""
    model = Model()

    def body(backend):
        engine = engine_on(TWO, backend, model)
        with engine["c"].writing() as shard:
            shard += engine.tensor.rank * 2.0**-40
        state = engine.state_dict(full=True, optimizer=False).arrays
        with engine.full_params(write=True) as params:
            params["a.gain"][...] = 0
        with engine.gathered():
            return state, engine["c"].params["plain"].copy()

    for state, after in launch(body, 4):
        assert_state(state, model.params, 0.0)
        assert_array_equal(after, model.params["c.plain"])


def changed(engine, state, name, **fields):
    """The state with another shard of an array."""
    shard = state[name]
    values = {
        key: getattr(shard, key)
        for key in ("shape", "dtype", "pieces", "replica", "replicas", "box")
    }
    return EngineState({**state.arrays, name: fc.ShardedArray(**(values | fields))}, state.info)


REFUSED = {
    "a box as a whole": (
        lambda engine: engine.load_full({"a.w": np.zeros((6, 4))}, strict=False),
        r"a.w has shape \(6, 4\), but here it is \(6, 7\)",
    ),
    "no box": (
        lambda engine: engine.load_state_dict(
            changed(engine, engine.state_dict(), "a.w", box=None, pieces=())
        ),
        r"a.w comes as whole, but what this rank has is the box \[0:6, 0:4\] of an array of shape",
    ),
    "a box of what is whole": (
        lambda engine: engine.load_state_dict(
            changed(
                engine,
                engine.state_dict(),
                "c.plain",
                box=fc.BoxShard((3, 4), (0, 0), np.zeros((3, 2))).box,
                pieces=(),
            )
        ),
        r"c.plain comes as the box \[0:3, 0:2\] of an array of shape \(3, 4\), but what this rank",
    ),
    "one rank's problem": (
        lambda engine: engine.load_full(
            {"a.w": np.zeros(3) if engine.everyone.rank == 3 else np.zeros((6, 7))}, strict=False
        ),
        r"a.w has shape \(3,\), but here it is \(6, 7\) \(on rank 3\)",
    ),
    "no such rank": (lambda engine: engine.state_dict(full=True, to=2), "to=2, but there are 2"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_does_not_fit_changes_nothing_on_any_rank(case):
    model, (load, words) = Model(), REFUSED[case]

    def body(backend):
        engine = engine_on(TWO, backend, model)
        before = engine.state_dict(full=True).arrays
        with contextlib.ExitStack() as after:
            after.callback(lambda: assert_state(engine.state_dict(full=True).arrays, before, 0.0))
            load(engine)

    kind, message = raised_alike(body, 4)
    assert kind is fc.ArgumentError
    assert pytest.raises(fc.ArgumentError, match=words).matches(fc.ArgumentError(message))


def test_ranks_with_other_states_are_found_out():
    model = Model()

    def body(backend):
        engine = engine_on(TWO, backend, model)
        state = engine.state_dict(full=True)
        if engine.tensor.rank == 1:
            state.info["step"] = 7
        engine.load_state_dict(state)

    kind, message = raised_alike(body, 4)
    assert kind is fc.MismatchError
    assert "rank 0 and ranks 1, 3 differ" in message


def test_shards_are_replaced_by_each_rank_or_by_none():
    model = Model()

    def body(backend, good):
        engine = engine_on(TWO, backend, model)
        size = engine["a"].valid_size
        bad = not good and backend.rank == 3
        engine.update_shards({"a": np.ones(size + 99 if bad else size)})
        return engine.state_dict(full=True, optimizer=False)

    for state in launch(body, 4, args=(True,)):
        assert all((state[name] == 1).all() for name in ("a.w", "a.b", "a.gain"))
    kind, message = raised_alike(lambda backend: body(backend, False), 4)
    assert kind is fc.ArgumentError
    assert "(on rank 3)" in message


def test_a_unit_loads_its_box():
    model = Model()

    def body(backend):
        engine = engine_on(TWO, backend, model)
        shape = engine["a"].boxes["w"].shape
        engine["a"].load({"w": np.full(shape, engine.tensor.rank, np.float64)})
        return engine.state_dict(full=True, optimizer=False)["a.w"]

    for array in launch(body, 4):
        assert_array_equal(array, np.repeat([0.0, 1.0], [4, 3]) + np.zeros((6, 1)))


def test_offloaded_boxes_are_those_in_memory(tmp_path):
    model = Model()
    offload = fc.Offload(tmp_path, "all")

    def body(backend):
        engine = trained(TWO, backend, model, offload=offload, optimizer=fc.optim.Adafactor())
        plain = trained(TWO, backend, model, optimizer=fc.optim.Adafactor())
        return engine.state_dict(full=True).arrays, plain.state_dict(full=True).arrays

    for found, expected in launch(body, 4):
        assert_state(found, expected, 0.0)
