"""Ranks of which some share memory with those that shard with them, and some do not.

On 3 hosts, 4 ranks are on hosts 0, 0, 1 and 2: ranks 0 and 1 have a window, ranks 2 and 3 have
none. Whatever all ranks do together, they do, or refuse, alike.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support import mlp
from support.fsdp_steps import launch
from support.fsdp_tensor import Model, PlainAdamW, assert_state, train

import fsdpcore as fc

HYBRID = fc.Strategy("hybrid_shard", shard_group_size=2)
by_hosts = pytest.mark.parametrize("hosts", [1, 2, 3])


def engine_on_rows(backend, model, **options):
    """An engine whose neighbours shard, so that rows of the mesh are on different hosts."""
    mesh = fc.Mesh(backend, {"tensor": 2, "shard": 2})
    units = model.units(2, mesh["tensor"].rank)
    optimizer = fc.optim.AdamW(lr=0.05)
    return fc.FSDP(units, mesh["shard"], tensor=mesh["tensor"], optimizer=optimizer, **options)


def test_some_ranks_have_a_window():
    def body(backend):
        return engine_on_rows(backend, Model()).windowed

    assert launch(body, 4, hosts=3) == [True, True, False, False]


@by_hosts
def test_full_params_are_whole_on_all_hosts(hosts):
    model = Model()

    def body(backend):
        engine = engine_on_rows(backend, model)
        with engine.full_params() as params:
            found = {name: params[name].copy() for name in params}
        with engine.full_params(write=True, names=["a.gain", "b.*"]) as params:
            params["a.gain"][...] *= 2
            params["b.e"][...] *= 2
        with engine.full_params(unit="c") as params:
            assert_array_equal(params["c.plain"], model.params["c.plain"])
        return found, engine.state_dict(full=True, optimizer=False).arrays

    written = {name: 2 * model.params[name] for name in ("a.gain", "b.e")}
    for found, state in launch(body, 4, hosts=hosts):
        assert_state(found, model.params, 0.0)
        assert_state(state, model.params | written, 0.0)


def test_full_params_of_units_that_are_empty_on_some_ranks():
    """What takes no memory on a rank that has nothing of a unit takes some on another."""

    def body(backend):
        mesh = fc.Mesh(backend, {"tensor": 2, "shard": 2})
        rank = mesh["tensor"].rank
        box = fc.BoxShard((2,), (2 * rank,), np.ones(2 - 2 * rank))
        units = [fc.Unit("u", {"w": box, "empty": np.ones((0, 3))})]
        engine = fc.FSDP(units, mesh["shard"], tensor=mesh["tensor"], window=False)
        with engine.full_params(names="u.empty") as params:
            found = {name: array.shape for name, array in params.items()}
        with engine.full_params() as params:
            return found | {"u.w": params["u.w"].shape}

    assert launch(body, 4) == [{"u.w": (2,), "u.empty": (0, 3)}] * 4


@by_hosts
def test_states_and_training_are_those_of_any_hosts(hosts):
    model = Model()

    def body(backend):
        engine = engine_on_rows(backend, model)
        train(engine, model, range(2))
        state = engine.state_dict(full=True, to=1)
        fresh = engine_on_rows(backend, model)
        fresh.load_state_dict(state if state else None, src=1)
        train(fresh, model, range(2, 3))
        return fresh.state_dict(full=True).arrays

    expected = PlainAdamW(model.params)
    for step in range(3):
        expected.step(model.mean_gradients(step, 2))
    for arrays in launch(body, 4, hosts=hosts):
        assert_state(arrays, expected.state(), 1e-12)


def _hybrid(units, backend):
    return fc.FSDP(units, backend, strategy=HYBRID)


def _rows(units, backend):
    mesh = fc.Mesh(backend, {"tensor": 2, "shard": 2})
    return fc.FSDP(units, mesh["shard"], tensor=mesh["tensor"])


@by_hosts
@pytest.mark.parametrize("make", [_hybrid, _rows])
def test_parameters_stay_on_all_ranks_or_layers_that_hold_them_are_refused_on_all(make, hosts):
    """A rank that refuses alone would leave the others waiting in their next collective."""

    def body(backend):
        layers = mlp.layers()
        layers[1][1].holds_params = True
        stack = fc.LayerStack(layers)
        engine = make(stack.units(np.random.default_rng(0)), backend)
        refused = False
        with engine.step() as step:
            try:
                stack.forward(step, mlp.batch(0)[0])
            except fc.StateError:
                refused = True
            return engine.windowed, step.keeps_params, refused

    found = launch(body, 4, hosts=hosts)
    everywhere = all(windowed for windowed, _, _ in found)
    assert everywhere is (hosts < 3)
    assert [(kept, refused) for _, kept, refused in found] == [(everywhere, not everywhere)] * 4
