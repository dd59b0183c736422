"""State of an engine: how it goes back, and what is refused, on all ranks alike."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_states import (
    HYBRID,
    LAYOUTS,
    PAIR,
    Layout,
    copied,
    engine_of,
    entered,
    only_parameters,
    run,
    same,
    train,
    values,
    wide,
    without,
)

import fsdpcore as fc
from fsdpcore.fsdp.offload.mapped_file import in_memory
from fsdpcore.fsdp.state.state import EngineState, ShardedArray


@functools.cache
def saved(layout, optimizer="adamw"):
    """A full state, and one that went on from it for two steps more; nobody changes them."""

    def body(backend, layout):
        engine = engine_of(backend, layout, optimizer)
        train(engine, 2)
        state = engine.state_dict(full=True, to=0)
        train(engine, 2)
        return state, engine.state_dict(full=True, to=0)

    both = run(layout, body)[0]
    for state in both:
        for array in state.values():
            array.flags.writeable = False
    return both


def resumed(layout, state, optimizer="adamw", src=None):
    def body(backend, layout):
        engine = engine_of(backend, layout, optimizer, seed=1)
        train(engine, 1)
        given = state if src is None or backend.rank == src else None
        assert engine.load_state_dict(given, src=src) == ((), ())
        same(engine.state_dict(full=True), state)
        train(engine, 2)
        return engine.state_dict(full=True)

    return run(layout, body)


STRATEGIES = [
    "no_shard",
    "shard_grad_op",
    "shard_optimizer",
    fc.Strategy("hybrid_shard", shard_group_size=2),
    fc.Strategy(reshard_after_forward=2),
]


@pytest.mark.parametrize(
    ("strategy", "window", "optimizer"),
    [
        (strategy, bool(number % 2), ["adamw", "momentum"][number // 2 % 2])
        for number, strategy in enumerate(STRATEGIES)
    ],
    ids=lambda s: getattr(s, "name", s),
)
def test_training_goes_on_bit_for_bit_with_another_strategy(strategy, optimizer, window):
    state, expected = saved(Layout(4), optimizer)
    for result in resumed(Layout(4, strategy, window), state, optimizer):
        same(result, expected)
        assert result.info["step"] == 4


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [
        (layout, ["adamw", "adafactor", "groups"][number % 3])
        for number, layout in enumerate(LAYOUTS)
    ],
)
def test_and_to_rounding_with_another_number_of_ranks(layout, optimizer):
    state, expected = saved(Layout(3, "shard_grad_op"), optimizer)
    src = [None, 0, layout.world_size - 1][LAYOUTS.index(layout) % 3]
    # Gradients, but not master weights, are rounded to bfloat16.
    close = {"rtol": 0.1, "atol": 0.1} if layout.half else {"rtol": 1e-4, "atol": 1e-5}
    for result in resumed(layout, state, optimizer, src):
        assert set(result) == set(expected)
        for name, array in result.items():
            np.testing.assert_allclose(wide(name, array), expected[name], err_msg=name, **close)


@pytest.mark.parametrize(
    ("layout", "optimizer"),
    [(layout, ["adamw", "groups"][number % 2]) for number, layout in enumerate(LAYOUTS)],
)
def test_shards_go_back_to_where_they_were(layout, optimizer):
    def body(backend, layout):
        engine = engine_of(backend, layout, optimizer)
        train(engine, 2)
        state = copied(engine.state_dict())
        train(engine, 2)
        other = engine_of(backend, layout, optimizer, seed=1)
        assert other.load_state_dict(state) == ((), ())
        train(other, 2)
        same(engine.state_dict(full=True), other.state_dict(full=True))

    run(layout, body)


@pytest.mark.parametrize("layout", [PAIR, HYBRID, Layout(3, half=True)])
def test_shards_are_written_in_place(layout):
    def body(backend, layout):
        engine = engine_of(backend, layout, "groups")
        train(engine, 2)
        given, other = engine.state_dict(), engine_of(backend, layout, "groups", seed=1)
        with other.writing_state() as target:
            assert set(target) == set(given)
            for name, value in target.items():
                if not isinstance(value, ShardedArray):
                    value[...] = given[name]
                    continue
                for mine, theirs in zip(value.pieces, given[name].pieces, strict=True):
                    mine.array[:] = theirs.array
        other.load_info(given.info)
        with pytest.raises(ValueError, match="read-only"):
            target["embed.table"].pieces[0].array[:] = 0
        train(engine, 1)
        train(other, 1)
        same(engine.state_dict(full=True), other.state_dict(full=True))

    run(layout, body)


def test_parameters_alone_leave_optimizer_and_steps():
    state, _ = saved(Layout(3))

    def body(backend, layout):
        engine = engine_of(backend, layout, seed=1)
        train(engine, 1)
        before = engine.state_dict(full=True)
        engine.load_state_dict(state, optimizer=False)
        after = engine.state_dict(full=True)
        assert after.info["step"] == 1
        same(only_parameters(after), only_parameters(state))
        for name in set(after) - set(only_parameters(after)):
            assert_array_equal(after[name], before[name])

    run(PAIR, body)


def test_a_tied_parameter_is_its_owner():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        mine = values(1)
        mine["head.w"] = mine.pop("embed.table")
        engine.load_full(mine)
        got = engine.state_dict(full=True, optimizer=False)
        assert_array_equal(got["embed.table"], mine["head.w"])
        with engine.full_params() as params:
            assert_array_equal(params["head.w"], mine["head.w"])
            engine_params = {name: array.copy() for name, array in params.items()}
        engine_params["head.w"][0, 0] += 1
        with pytest.raises(fc.ArgumentError, match=r"head.w is tied to embed.table, but"):
            engine.load_full(engine_params)

    run(PAIR, body)


def test_an_ignored_array_is_replaced_and_the_callers_stays():
    def body(backend):
        mask = np.arange(3)
        unit = fc.Unit("u", {"w": np.ones(2, np.float32), "mask": mask}, ignored="mask")
        engine = fc.FSDP([unit], backend)
        state = engine.state_dict(full=True)
        state.arrays["u.mask"] = mask + 5
        assert_array_equal(engine.state_dict()["u.mask"], mask)
        engine.load_state_dict(state)
        assert_array_equal(engine.state_dict()["u.mask"], mask + 5)
        unit.unshard()
        assert_array_equal(unit.params["mask"], [5, 6, 7])
        assert not unit.params["mask"].flags.writeable
        assert_array_equal(mask, [0, 1, 2])

    fc.launch(body, world_size=2, transport="sim")


# What is refused, on all ranks alike.


def spoilt(state, **arrays):
    return EngineState(
        {**state, **{k.replace("__", "."): v for k, v in arrays.items()}}, state.info
    )


WRONG = {
    "missing": (
        lambda s: spoilt(without(s, "block.w", "optimizer/exp_avg/block.b"), x__y=np.ones(1)),
        r"missing are 'block.w', 'optimizer/exp_avg/block.b', unexpected are 'x.y' \(strict=False",
    ),
    "shape": (
        lambda s: spoilt(s, block__w=np.zeros((7, 5), np.float32)),
        r"block.w has shape \(7, 5\), but here it is \(5, 7\)",
    ),
    "dtype": (
        lambda s: spoilt(s, block__w=np.zeros((5, 7), int)),
        "block.w has dtype int64, but here it is float32",
    ),
    "integers": (
        lambda s: spoilt(s, block__mask=np.zeros(11, np.float32)),
        "block.mask has dtype float32, but here it is int32",
    ),
    "ignored": (
        lambda s: spoilt(s, head__places=np.zeros(5, int)),
        r"head.places has shape \(5,\) and dtype int64",
    ),
    "no array": (
        lambda s: spoilt(s, block__w=[[1.0], [1.0, 2.0]]),
        "block.w is no array",
    ),
    "format": (
        lambda s: EngineState(s, {**s.info, "format": 2}),
        "format 2, but this version of fsdpcore reads 1; .*load_full",
    ),
    "step": (
        lambda s: EngineState(s, {**s.info, "step": -1}),
        "step in the state's info must be at least 0",
    ),
    "loss scale": (
        lambda s: EngineState(s, {**s.info, "loss_scale": {"scale": float("nan")}}),
        "scale of loss_scale in the state's info must be finite",
    ),
    "a dict": (dict, "a state is what state_dict.. returns, got dict; .* load_full"),
    "nothing": (lambda s: None, "a state is what state_dict.. returns, got NoneType; .* src="),
    "no arrays": (lambda s: EngineState({}, s.info), "the state is empty; .* pass src="),
    "other shards": (
        lambda s: spoilt(s, block__w=ShardedArray((5, 7), np.float32, [(0, 1, np.ones(1, "f"))])),
        r"block.w comes in the ranges \[\(0, 1\)\], but this rank holds .* a checkpoint loads",
    ),
}


@pytest.mark.parametrize(
    ("wrong", "culprit"),
    [
        (wrong, ["one", "src", "all"][(number + turn) % 3])
        for number, wrong in enumerate(WRONG)
        for turn in (0, 1)
    ],
)
def test_nothing_is_changed_if_anything_is_wrong_anywhere(wrong, culprit):
    change, message = WRONG[wrong]
    if (wrong, culprit) == ("other shards", "src"):
        message = "block.w is sharded, but with src one rank gives whole arrays"
    good, _ = saved(Layout(2))
    bad = change(good)

    def body(backend, layout):
        engine = engine_of(backend, layout, seed=1)
        train(engine, 1)
        before = engine.state_dict(full=True)
        mine = bad if culprit == "all" or backend.rank == 1 else good
        with pytest.raises(fc.ArgumentError, match=message) as caught:
            engine.load_state_dict(mine, src=1 if culprit == "src" else None)
        after = engine.state_dict(full=True)
        same(after, before)
        assert after.info == before.info
        train(engine, 1)  # everything still works
        text = str(caught.value)
        if wrong != "other shards":  # there each rank has its own ranges to complain about
            assert ("(on rank 1)" in text) is (culprit != "all")
        assert text.endswith("Nothing was changed on any rank")
        return text

    assert len(set(run(PAIR, body))) == 1


def test_ranks_with_states_of_different_steps_are_told():
    state, later = saved(Layout(2))

    def body(backend, layout):
        engine = engine_of(backend, layout)
        with pytest.raises(fc.MismatchError, match="different names, steps or loss scales"):
            engine.load_state_dict(later if backend.rank else state)
        assert engine.steps == 0
        train(engine, 1)

    run(PAIR, body)


@pytest.mark.parametrize("src", [None, 1])
def test_what_fits_is_loaded_if_that_is_wanted(src):
    state, _ = saved(Layout(2))
    partial = spoilt(without(state, "block.w", "optimizer/exp_avg/block.b"), x__y=np.ones(1))

    def body(backend, layout):
        engine = engine_of(backend, layout, seed=1)
        before = engine.state_dict(full=True)
        given = None if src is not None and backend.rank != src else partial
        report = engine.load_state_dict(given, strict=False, src=src)
        assert report == (("block.w", "optimizer/exp_avg/block.b"), ("x.y",))
        after = engine.state_dict(full=True)
        for name, array in after.items():
            kept = before if name in report.missing else state
            assert_array_equal(array, kept[name])

    run(PAIR, body)


def test_a_unit_of_which_nothing_is_loaded_stays_gathered():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        embed, block, _ = engine.units
        embed.unshard()
        block.unshard()
        engine.load_full({"block.w": values(1)["block.w"]}, strict=False)
        assert_array_equal(embed.params["table"], values(0)["embed.table"])
        with pytest.raises(fc.StateError, match="'block' are sharded"):
            _ = block.params

    run(PAIR, body)


def test_another_layout_points_to_checkpoints():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        other = engine_of(backend, Layout(2, "no_shard"))
        with pytest.raises(
            fc.ArgumentError, match=r"another layout .* a checkpoint loads into any"
        ):
            engine.load_state_dict(other.state_dict())
        same_shards = engine_of(backend, Layout(2, "shard_grad_op"), seed=1)
        engine.load_state_dict(same_shards.state_dict())

    run(PAIR, body)


BUSY = {
    "load_state_dict": lambda e, s: e.load_state_dict(s),
    "load_full": lambda e, s: e.load_full(s),
    "update_shards": lambda e, s: e.update_shards({}),
    "full_params": lambda e, s: entered(e.full_params()),
    "writing_state": lambda e, s: entered(e.writing_state()),
    "a step": lambda e, s: entered(e.step()),
}


@pytest.mark.parametrize("what", BUSY)
def test_not_inside_of_a_step_nor_of_full_params(what):
    def body(backend, layout):
        engine = engine_of(backend, layout)
        state = engine.state_dict(full=True)
        with engine.full_params(), pytest.raises(fc.StateError, match=r"inside of full_params\(\)"):
            BUSY[what](engine, state)
        with engine.step(), pytest.raises(fc.StateError, match=r"a step( is open|; leave)"):
            BUSY[what](engine, state)
        BUSY[what](engine, state)

    run(PAIR, body)


def test_load_full_wants_every_parameter_but_the_ignored_ones():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        mine = values(1)
        place = mine.pop("head.places")
        engine.load_full(mine)
        got = engine.state_dict(full=True, optimizer=False)
        same(got, {**mine, "head.places": values(0)["head.places"]})
        engine.load_full({**mine, "head.places": place} if backend.rank == 0 else None, src=0)
        same(engine.state_dict(full=True, optimizer=False), values(1))
        del mine["block.w"]
        with pytest.raises(fc.ArgumentError, match=r"missing are 'block.w'"):
            engine.load_full(mine)
        with pytest.raises(fc.ArgumentError, match="got list"):
            engine.load_full([1])

    run(HYBRID, body)


@pytest.mark.skipif(sys.platform != "linux", reason="files are mapped on Linux")
@pytest.mark.parametrize("layout", [Layout(3), HYBRID, Layout(2, "no_shard", half=True)])
def test_what_is_on_the_disk_is_saved_and_loaded_like_anything_else(layout, tmp_path):
    if in_memory(str(tmp_path)):
        pytest.skip("no directory on a disk")

    def body(backend, layout):
        engine = engine_of(backend, layout, "groups")
        aside = fc.Offload(str(tmp_path), "all")
        other = engine_of(backend, layout, "groups", seed=1, offload=aside)
        train(engine, 2)
        other.load_state_dict(engine.state_dict(full=True, to=0), src=0)
        with other.full_params() as params:
            assert_array_equal(params["block.w"], engine.state_dict(full=True)["block.w"])
        for each in (engine, other):
            train(each, 1)
            with each.full_params(write=True) as params:
                params["block.w"] = 2 * params["block.w"]
            train(each, 1)
        same(engine.state_dict(full=True), other.state_dict(full=True))
        third = engine_of(backend, layout, "groups", seed=2, offload=aside)
        third.load_state_dict(copied(other.state_dict()))
        same(engine.state_dict(full=True), third.state_dict(full=True))

    run(layout, body)
