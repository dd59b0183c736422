"""State of an engine: what it has."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.fsdp_states import (
    HYBRID,
    LAYOUTS,
    PAIR,
    TIED,
    TRAINED,
    assembled,
    copied,
    engine_of,
    expected_names,
    only_parameters,
    run,
    same,
    train,
    values,
)

import fsdpcore as fc
from fsdpcore.fsdp.state.state import ArrayPiece, ShardedArray


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        (layout, ["momentum", "adafactor", "groups"][(number + more) % 3])
        for number, layout in enumerate(LAYOUTS)
        for more in (0, 1)
    ],
)
def test_everything_is_there_once_per_replica_and_full_is_the_same(layout, optimizer):
    last = layout.world_size - 1

    def body(backend, layout):
        engine = engine_of(backend, layout, optimizer)
        same(only_parameters(engine.state_dict(full=True)), values(0))
        train(engine, 2)
        state = engine.state_dict()
        for value in state.values():
            for piece in value.pieces if isinstance(value, ShardedArray) else ():
                assert not piece.array.flags.writeable
                assert np.shares_memory(piece.array, piece.array.base)
        everywhere = engine.state_dict(full=True)
        there = engine.state_dict(full=True, to=last)
        assert state.info == everywhere.info == there.info
        return copied(state), everywhere, there

    states, everywhere, there = zip(*run(layout, body), strict=True)
    whole = assembled(states)
    assert set(whole) == expected_names(optimizer)
    for each in everywhere:
        same(each, whole)
    same(there[last], whole)
    assert not any(map(len, there[:last]))


def test_replicas_say_which_one_they_are():
    def body(backend, layout):
        state = engine_of(backend, layout, "adafactor").state_dict()
        names = "block.w", "optimizer/exp_avg/block.w", "optimizer/row_var/block.w"
        return [(state[name].replica, state[name].replicas) for name in names]

    told = run(HYBRID, body)
    assert told == [[(r // 2, 2), (r // 2, 2), (r, 4)] for r in range(4)]


def test_values_that_are_no_arrays_go_through_json():
    def body(backend, layout):
        engine = engine_of(
            backend, layout, precision=fc.Precision(loss_scale=fc.LossScale(64.0, interval=3))
        )
        train(engine, 4)
        info = engine.state_dict(optimizer=False).info
        assert json.loads(json.dumps(info)) == info
        other = engine_of(backend, layout, precision=fc.Precision(loss_scale=fc.LossScale(8.0)))
        other.load_info(json.loads(json.dumps(info)))
        applied = other.state_dict(optimizer=False).info["loss_scale"]["applied"]
        assert (other.steps, other.loss_scale, applied) == (4, 128.0, 1)
        constant = engine_of(backend, layout, precision=fc.Precision(loss_scale=16.0))
        constant.load_info(info)
        assert constant.loss_scale == 16.0
        return info

    info, _ = run(PAIR, body)
    assert info.pop("optimizer").startswith("ParamGroups(rules=(('*', AdamW(lr=0.01,")
    assert info == {
        "format": 1,
        "step": 4,
        "loss_scale": {"scale": 128.0, "applied": 1},
        "strategy": "full_shard",
        "world_size": 2,
        "ties": TIED,
    }


def test_the_shards_are_views_of_what_is_trained():
    def body(backend, layout):
        engine = engine_of(backend, layout, "sgd")
        state = engine.state_dict()
        before = copied(state)
        train(engine, 1)
        for (_, _, old), (_, _, now) in zip(
            before["block.w"].pieces, state["block.w"].pieces, strict=True
        ):
            assert not (old == now).all()
        with pytest.raises(ValueError, match="read-only"):
            state["block.w"].pieces[0].array[:] = 0

    run(PAIR, body)


def test_first_moment_of_adam_is_a_tenth_of_the_gradient():
    """A value that is known without any engine."""

    def body(backend, layout):
        engine = engine_of(backend, layout)
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (_, grads):
                    for name in grads:
                        grads[name] = np.full_like(grads[name], 10 * (name != "w"))
            step.update()
        return engine.state_dict(full=True)

    for state in run(HYBRID, body):
        for name, shape in TRAINED.items():
            expected = np.full(shape, 0 if name == "block.w" else 1, np.float32)
            np.testing.assert_allclose(state[f"optimizer/exp_avg/{name}"], expected, rtol=1e-6)


def test_two_arrays_of_one_name_are_refused():
    def body(backend):
        units = [fc.Unit("a.b", {"c": np.ones(2, np.float32)}), fc.Unit("a", {"b.c": np.ones(2)})]
        engine = fc.FSDP(units, backend)
        with pytest.raises(fc.ArgumentError, match=r"both named 'a.b.c'"):
            engine.state_dict()

    fc.launch(body, world_size=1, transport="sim")


def test_ranks_that_want_different_states_are_told():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        with pytest.raises(fc.MismatchError, match="state_dict"):
            engine.state_dict(full=True, to=backend.rank)

    run(PAIR, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": 0}, "belongs to full=True"),
        ({"full": True, "to": 2}, "there are 2 ranks"),
        ({"full": True, "to": -1}, "at least 0"),
        ({"full": True, "to": "some"}, "or 'all'"),
    ],
)
def test_no_such_rank(options, message):
    def body(backend, layout):
        with pytest.raises(fc.ArgumentError, match=message):
            engine_of(backend, layout).state_dict(**options)

    run(PAIR, body)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 2, np.zeros(3))], "needs an array of shape"),
        ([(0, 2, np.zeros(2, np.float32))], "dtype float64"),
        ([(4, 7, np.zeros(3))], "of 6 elements"),
        ([(2, 4, np.zeros(2)), (3, 5, np.zeros(2))], "behind element 4"),
        ([(2, 2, np.zeros(0))], "not empty"),
        ([(-1, 1, np.zeros(2))], "at least 0"),
    ],
)
def test_pieces_that_do_not_fit_are_refused(pieces, message):
    with pytest.raises(fc.ArgumentError, match=message):
        ShardedArray((2, 3), np.float64, pieces)


def test_a_sharded_array_can_be_made_by_hand():
    made = ShardedArray((2, 3), np.float64, [(1, 3, np.zeros(2))], 1, 2)
    assert made.pieces == (ArrayPiece(1, 3, made.pieces[0].array),)
    assert (made.size, made.nbytes, made.dtype) == (6, 16, np.dtype("float64"))
    with pytest.raises(fc.ArgumentError, match="replica 2"):
        ShardedArray((2, 3), np.float64, [], 2, 2)
