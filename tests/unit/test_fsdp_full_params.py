"""Whole parameters for a while, and shards from outside."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_states import (
    HYBRID,
    IGNORED,
    LAYOUTS,
    OWN,
    PAIR,
    TIED,
    TRAINED,
    engine_of,
    entered,
    run,
    same,
    train,
    without,
)

import fsdpcore as fc


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_params_shows_master_weights_and_gives_them_back(layout):
    def body(backend, layout):
        engine = engine_of(backend, layout)
        train(engine, 2)
        expected = engine.state_dict(full=True, optimizer=False)
        held = engine.held().total
        with engine.full_params() as params:
            assert set(params) == {*OWN, *IGNORED, *TIED}
            for name, array in params.items():
                assert_array_equal(array, expected[TIED.get(name, name)], strict=True)
                assert not array.flags.writeable
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.flags.writeable = True
            with pytest.raises(fc.StateError, match=r"block.w is read-only here; full_params"):
                params["block.w"] = expected["block.w"]
            with pytest.raises(KeyError, match=r"no parameter 'block.v' here .did you mean"):
                params["block.v"]
        for broken in (lambda: params["block.w"], lambda: list(params), lambda: len(params)):
            with pytest.raises(fc.StateError, match=r"full_params.. has ended"):
                broken()
        assert engine.held().total == held
        train(engine, 1)

    run(layout, body)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_kept(layout):
    def body(backend, layout):
        engine = engine_of(backend, layout)
        expected = engine.state_dict(full=True)
        with engine.full_params(write=True) as params:
            for name in OWN:
                if name < "block.w":
                    params[name] = -params[name]
                else:
                    np.negative(params[name], out=params[name])
            params["block.w"] *= 1
            for wrong in (np.zeros((7, 5), np.float32), np.zeros((5, 7), complex)):
                with pytest.raises(fc.ArgumentError, match=r"block.w has shape .5, 7. and dtype"):
                    params["block.w"] = wrong
            assert not params["head.places"].flags.writeable
            assert params["head.w"] is params["embed.table"]
        after = engine.state_dict(full=True)
        for name, array in after.items():
            assert_array_equal(array, -expected[name] if name in OWN else expected[name])
        with engine.evaluation() as step, step.forward("block") as params:
            shown = -expected["block.w"].astype(params["w"].dtype)
            assert_array_equal(params["w"], shown)

    run(layout, body)


@pytest.mark.parametrize("write", [False, True])
def test_an_exception_keeps_nothing_and_frees_everything(write):
    def body(backend, layout):
        engine = engine_of(backend, layout)
        before = engine.state_dict(full=True)
        for ends in (ValueError, KeyboardInterrupt):
            with pytest.raises(ends), engine.full_params(write=write) as params:
                if write:
                    params["block.w"][...] = 0
                raise ends
            with pytest.raises(fc.StateError, match="has ended"):
                len(params)
        same(engine.state_dict(full=True), before)
        train(engine, 1)

    run(PAIR, body)


def test_ranks_that_write_different_values_are_told_and_nothing_is_kept():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        before = engine.state_dict(full=True)
        with (
            pytest.raises(fc.MismatchError, match=r"block.b was written differently .* ranks 2, 3"),
            engine.full_params(write=True) as params,
        ):
            params["block.w"][...] = 1
            params["block.b"][...] = backend.rank // 2
        same(engine.state_dict(full=True), before)
        train(engine, 1)

    run(HYBRID, body)


@pytest.mark.parametrize("write", [False, True])
def test_full_params_of_some_names_or_of_one_unit(write):
    def body(backend, layout):
        engine = engine_of(backend, layout)
        before = engine.state_dict(full=True)
        asked = [
            ({"names": "*.b*"}, {"block.b", "block.base", "head.bias"}),
            ({"names": ["head.w", "block.scale"]}, {"block.scale", "head.w"}),
            ({"unit": "head"}, {"head.bias", "head.places", "head.w"}),
            ({"unit": engine["block"], "names": "*.none"}, {"block.none"}),
        ]
        for options, names in asked:
            with engine.full_params(write=write, **options) as params:
                assert set(params) == names
                if write and "head.w" in names:
                    params["head.w"][...] *= 2
        after = engine.state_dict(full=True)
        same(without(after, "embed.table"), without(before, "embed.table"))
        assert_array_equal(after["embed.table"], before["embed.table"] * (4 if write else 1))
        with pytest.raises(fc.ArgumentError, match=r"names='x.*' matches no parameter"):
            entered(engine.full_params(names="x.*"))

    run(PAIR, body)


def test_ranks_that_ask_for_different_parameters_are_told():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        names = ["block.w", "block.b"][backend.rank]
        with pytest.raises(fc.MismatchError, match="full_params"):
            entered(engine.full_params(names=names))

    run(PAIR, body)


# Shards from outside.


@pytest.mark.parametrize(
    ("layout", "padded"), [(layout, bool(i % 2)) for i, layout in enumerate(LAYOUTS)]
)
def test_shards_from_flat_arrays(layout, padded):
    def body(backend, layout):
        engine = engine_of(backend, layout)
        train(engine, 1)
        before = engine.state_dict(full=True)
        given = {
            unit.name: 2.0 * (unit.shard if padded else unit.shard[: unit.valid_size])
            for unit in engine.units
        }
        engine["embed"].update_shards(given.pop("embed").astype(np.float64))
        engine.update_shards(given)
        after = engine.state_dict(full=True)
        for name, array in after.items():
            assert_array_equal(array, before[name] * (2 if name in TRAINED else 1))
        for unit in engine.units:
            assert not unit.shard[unit.valid_size :].any()

    run(layout, body)


def test_shards_that_do_not_fit_on_one_rank_change_nothing_anywhere():
    def body(backend, layout):
        engine = engine_of(backend, layout)
        before = engine.state_dict(full=True)
        shards = {unit.name: unit.shard + 1 for unit in engine.units}
        bad = dict(shards, head=np.zeros((3, 3), np.float32), embed=shards["embed"])
        with pytest.raises(fc.ArgumentError, match=r"of unit 'head' on this rank has .*on rank 1"):
            engine.update_shards(bad if backend.rank else shards)
        with pytest.raises(fc.MismatchError, match="the units differ"):
            engine.update_shards({} if backend.rank else shards)
        with pytest.raises(fc.ArgumentError, match="no unit 'x'"):
            engine.update_shards({"x": np.zeros(1)})
        with pytest.raises(fc.ArgumentError, match="complex64 cannot be rounded"):
            engine["head"].update_shards(np.zeros(engine["head"].shard.size, np.complex64))
        same(engine.state_dict(full=True), before)

    run(PAIR, body)
