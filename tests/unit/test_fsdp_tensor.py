"""Parameters that are cut over a group of ranks, beside the sharding: steps and their updates."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import launch
from support.fsdp_tensor import (
    AXES,
    Grid,
    Model,
    PlainAdamW,
    assert_state,
    engine_on,
    gradients_into,
    norm_of,
    raised_alike,
    step_on,
    train,
)

import fsdpcore as fc
from fsdpcore.core.geometry.boxes import BoxShard

GRIDS = [
    Grid(tensor=1, shard=2),
    Grid(tensor=2),
    Grid(tensor=2, shard=2),
    Grid(tensor=3, shard=2, strategy="shard_grad_op"),
    Grid(tensor=2, shard=3, strategy="shard_optimizer"),
    Grid(tensor=2, shard=2, strategy="no_shard"),
    Grid(tensor=2, shard=2, replicate=2, strategy="hybrid_shard"),
    Grid(tensor=4),
]
by_grid = pytest.mark.parametrize("grid", GRIDS, ids=repr)
TWO = Grid(tensor=2, shard=2)


@by_grid
def test_training_equals_that_of_whole_parameters(grid):
    model = Model()

    def body(backend):
        engine = engine_on(grid, backend, model)
        norms = train(engine, model, range(3), clip=1.0)
        return norms, engine.state_dict(full=True).arrays

    expected = PlainAdamW(model.params)
    norms = [expected.step(model.mean_gradients(step, grid.data), clip=1.0) for step in range(3)]
    for found, arrays in launch(body, grid.ranks):
        assert_allclose(found, norms, rtol=1e-12)
        assert_state(arrays, expected.state(), 1e-12)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_norms_count_every_element_once(p):
    model, grid = Model(), Grid(tensor=3, shard=2)

    def body(backend):
        engine = engine_on(grid, backend, model)
        return train(engine, model, range(1), clip=0.5, norm_type=p)

    expected = norm_of(model.mean_gradients(0, 2), p)
    found = launch(body, grid.ranks)
    assert_allclose(found, [[expected]] * grid.ranks, rtol=1e-12)
    assert len({tuple(norms) for norms in found}) == 1


def test_elements_are_cut_off_at_a_value():
    model, grid = Model(), TWO

    def body(backend):
        engine = engine_on(grid, backend, model, optimizer=fc.optim.SGD(lr=1.0))
        train(engine, model, range(1), clip_value=0.25)
        return engine.state_dict(full=True).arrays

    grads = model.mean_gradients(0, grid.data)
    expected = {n: a - np.clip(grads[n], -0.25, 0.25) for n, a in model.params.items()}
    for arrays in launch(body, grid.ranks):
        assert_state(arrays, expected, 1e-12)


def test_a_layer_sees_its_box():
    model, grid = Model(), TWO

    def body(backend):
        engine = engine_on(grid, backend, model)
        rank = engine.tensor.rank
        with engine.gathered():
            for name in model.names:
                unit, param = name.split(".")
                slices = model.slices(name, grid.tensor, rank)
                assert_array_equal(engine[unit].params[param], model.params[name][slices])
        boxes = {f"{unit.name}.{name}" for unit in engine.units for name in unit.boxes}
        return boxes == set(AXES)

    assert all(launch(body, grid.ranks))


def box_of(name, model, grid, tensor):
    return model.boxed(name, model.params[name], grid.tensor, tensor.rank)


def test_frozen_boxes_stay_and_tied_ones_share_their_gradient():
    """A tie is found by the array, or said by name; what is tied to a box is that box."""
    model, grid = Model(), TWO

    def body(backend):
        tensor = fc.Mesh(backend, {"shard": 2, "tensor": 2})["tensor"]
        e, w = (box_of(name, model, grid, tensor) for name in ("b.e", "a.w"))
        units = [
            fc.Unit("b", {"e": e, "w": w}, frozen="w"),
            fc.Unit("same", {"e": BoxShard(e.shape, e.start, e.array)}),
            fc.Unit("said", {"e": fc.Tied("b", "e"), "w": fc.Tied("b", "w")}),
        ]
        engine = engine_on(grid, backend, model, units=units, optimizer=fc.optim.SGD(lr=1.0))
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit) as params:
                    assert_array_equal(params["e"], e.array)
            for unit in reversed(engine.units):
                with step.backward(unit) as (_, grads):
                    grads["e"][...] = 1
            norm = step.update(clip=1e9)
        return norm, engine.state_dict(full=True)

    for norm, state in launch(body, grid.ranks):
        assert norm == pytest.approx(3 * math.sqrt(15), rel=1e-12)
        assert_allclose(state["b.e"], model.params["b.e"] - 3, rtol=1e-12)
        assert_array_equal(state["b.w"], model.params["a.w"])
        assert state.info["ties"] == {"same.e": "b.e", "said.e": "b.e", "said.w": "b.w"}


def spoiled(engine, model, where, value=math.nan, name="a.w"):
    """Gradients of which one rank of the job has a bad element in a box."""
    whole = model.gradients(0, engine.backend.rank)
    if engine.everyone.rank == where:
        whole[name] = np.full_like(whole[name], value)
    return whole


@pytest.mark.parametrize(("where", "clip"), [(0, None), (0, 1.0), (1, 1.0), (2, None), (3, 1.0)])
def test_gradients_that_are_not_finite_are_so_for_all(where, clip):
    model, grid = Model(), TWO

    def body(backend):
        engine = engine_on(grid, backend, model)
        step_on(engine, spoiled(engine, model, where), clip=clip)

    kind, message = raised_alike(body, grid.ranks)
    assert kind is fc.NonFiniteGradientError
    rank = (0, 2, 1, 3)[where]  # of the job, by the rank of ``everyone``
    assert f"gradients of 'a.w' are inf or nan; those of rank {rank} were so" in message

    def skipping(backend):
        engine = engine_on(grid, backend, model)
        step, _ = step_on(engine, spoiled(engine, model, where), clip=clip, skip_nonfinite=True)
        return step.skipped, engine.steps

    assert launch(skipping, grid.ranks) == [(True, 0)] * grid.ranks


def test_what_should_be_alike_is_looked_at_on_every_rank():
    """The gradient of a whole parameter is bad on a tensor rank that does not count it."""
    model, grid = Model(), TWO

    def body(backend):
        engine = engine_on(grid, backend, model)
        step_on(engine, spoiled(engine, model, 3, name="c.plain"), clip=1.0)

    assert raised_alike(body, grid.ranks)[0] is fc.NonFiniteGradientError


def test_a_scaled_loss_is_scaled_alike_everywhere():
    model, grid = Model(dtype=np.float32), TWO
    precision = fc.Precision(np.float16, np.float32, fc.LossScale(8.0))

    def body(backend):
        engine = engine_on(grid, backend, model, precision=precision)
        step, _ = step_on(engine, spoiled(engine, model, 3, math.inf), clip=1.0)
        scale = engine.loss_scale
        whole = {n: g * scale for n, g in model.gradients(1, engine.backend.rank).items()}
        _, norm = step_on(engine, whole, clip=1.0)
        return step.skipped, scale, engine.loss_scale, engine.steps, norm

    found = launch(body, grid.ranks)
    assert len(set(found)) == 1
    assert found[0][:4] == (True, 4.0, 4.0, 1)
    assert found[0][4] == pytest.approx(norm_of(model.mean_gradients(1, 2)), rel=1e-5)


@pytest.mark.parametrize("grid", [TWO, Grid(tensor=3), GRIDS[5]], ids=repr)
def test_the_plan_is_what_happens(grid):
    model = Model(dtype=np.float32)

    def body(backend):
        engine = engine_on(grid, backend, model)
        train(engine, model, range(2), clip=1.0)
        report = engine.report()
        return report.plan.tensor, report.plan, report.measured

    for tensor, plan, measured in launch(body, grid.ranks):
        assert tensor == grid.tensor
        assert plan.bytes_sent == measured.bytes_sent
        assert plan.peak_bytes == measured.peak_bytes
        assert plan.gathers == measured.gathers
        assert plan.reductions == (measured.reductions if grid.data > 1 else 0)
        assert plan.operations[-1].group_size == grid.ranks
        assert plan.as_dict()["tensor"] == grid.tensor
        assert f", parameters cut over {grid.tensor}): 3 units" in str(plan)


def test_a_group_of_one_costs_nothing():
    model = Model()

    def collectives(backend, tensor):
        engine = fc.FSDP(model.units(), backend, optimizer=fc.optim.SGD(lr=1.0), tensor=tensor)
        train(engine, model, range(1), clip=1.0)
        engine.state_dict(full=True)
        assert engine.everyone is backend
        assert not any(unit.boxes for unit in engine.units)
        return backend.order.issued

    def body(backend):
        mesh = fc.Mesh(backend, {"shard": 2, "tensor": 1})
        first = collectives(mesh["shard"], None)
        return first, collectives(mesh["shard"], mesh["tensor"]) - first

    for alone, beside in launch(body, 2):
        assert alone == beside


UPDATES = {
    "lr": (lambda rank: {"lr": 0.1 + (rank == 3)}, "lr is 0.1 on rank 0, but 1.1 on rank 3"),
    "clip": (lambda rank: {"clip": 1.0 + (rank > 1)}, "clip is 1 on rank 0, but 2 on rank"),
}


@pytest.mark.parametrize("case", list(UPDATES))
def test_all_ranks_want_the_same_update(case):
    model, (options, words) = Model(), UPDATES[case]

    def body(backend):
        train(engine_on(TWO, backend, model), model, range(1), **options(backend.rank))

    kind, message = raised_alike(body, 4)
    assert kind is fc.MismatchError
    assert words in message


def test_all_ranks_go_the_same_way():
    """A tensor rank that leaves out a unit has communicated as much as the others."""
    model = Model()

    def body(backend):
        engine = engine_on(TWO, backend, model, window=False)
        with engine.step() as step:
            order = ["a", "c", "b"] if engine.tensor.rank else ["a", "b", "c"]
            for unit in order:
                with step.forward(unit):
                    pass
            for unit in reversed(order):
                with step.backward(unit) as (_, grads):
                    gradients_into(grads, unit, model.gradients(0, 0), engine)
            step.update()

    kind, message = raised_alike(body, 4)
    assert kind is fc.MismatchError
    assert "use 2 of this step was forward of unit 'b' on rank 0" in message
    assert "forward of unit 'c' on rank 1" in message


def test_deferred_boxes_have_the_values_of_the_whole():
    whole = fc.Spec((70, 1003), np.float32, fc.initializers.normal(std=0.5))

    def unit(spec):
        return fc.Unit("u", {"w": spec, "b": fc.Spec(5)})

    def alone(backend):
        return fc.FSDP([unit(whole)], backend, seed=3).state_dict(full=True)["u.w"]

    def body(backend, cut):
        mesh = fc.Mesh(backend, {"shard": 2, "tensor": 2})
        spec = whole[cut[mesh["tensor"].rank]]
        engine = fc.FSDP([unit(spec)], mesh["shard"], tensor=mesh["tensor"], seed=3)
        return engine.state_dict(full=True)["u.w"]

    expected = launch(alone, 1)[0]
    columns = np.s_[:, :400], np.s_[:, 400:]
    for cut in (columns, (np.s_[:69], np.s_[69:])):
        for found in launch(body, 4, args=(cut,)):
            assert_array_equal(found, expected)


ADAFACTORS = [
    fc.optim.Adafactor(),
    fc.optim.Adafactor(0.05, scale_parameter=False, beta1=0.9, weight_decay=0.1),
    {"*.b": fc.optim.SGD(lr=0.1), "*": fc.optim.Adafactor(clip_threshold=0.3)},
]


@pytest.mark.parametrize(
    ("grid", "optimizer"),
    [
        *((TWO, each) for each in ADAFACTORS),
        (Grid(tensor=3), ADAFACTORS[1]),
        (GRIDS[5], ADAFACTORS[2]),
    ],
    ids=repr,
)
def test_adafactor_sees_whole_parameters(grid, optimizer):
    """As it updates them where they are not cut; that is compared with its formulas elsewhere."""
    model, mean = Model(), [Model().mean_gradients(step, grid.data) for step in range(3)]

    def alone(backend):
        units = [fc.Unit(unit.name, dict(unit.initial)) for unit in model.units()]
        engine = fc.FSDP(units, backend, optimizer=optimizer)
        for whole in mean:
            step_on(engine, whole)
        return engine.state_dict(full=True).arrays

    def body(backend):
        engine = engine_on(grid, backend, model, optimizer=optimizer)
        train(engine, model, range(3))
        state = engine.state_dict(full=True)
        alike = [state[n].tobytes() for n in state if "row_var" in n or n in ("c.plain", "b.z")]
        engine.load_state_dict(state)
        assert engine.held().optimizer == engine.plan().persistent.optimizer
        return state.arrays, alike

    (expected,) = launch(alone, 1)
    results = launch(body, grid.ranks)
    for arrays, alike in results:
        assert_state(arrays, expected, 1e-11)
        assert alike == results[0][1]  # to the bit, however the shards lie


def test_an_optimizer_of_whole_parameters_only_gets_no_boxes():
    class Whole(fc.optim.Adafactor):
        takes_boxes = False

    def body(backend, optimizer):
        engine_on(TWO, backend, Model(), optimizer=optimizer)

    matrices = {"a.w": fc.optim.Muon(), "*": fc.optim.AdamW()}
    for optimizer, kind in ((Whole(), "Whole"), (matrices, "Muon")):
        error, message = raised_alike(functools.partial(body, optimizer=optimizer), 4)
        assert error is fc.ArgumentError
        assert f"{kind} updates whole parameters" in message


@pytest.mark.parametrize(
    ("optimizer", "window", "dtype"),
    [  # every two values meet once
        (fc.optim.AdamW(lr=0.05), True, np.float32),
        (fc.optim.AdamW(lr=0.05), False, np.float64),
        (fc.optim.Adafactor(), True, np.float64),
        (fc.optim.Adafactor(), False, np.float32),
        ({"u.plain": fc.optim.Muon(), "*": fc.optim.NAdam()}, False, np.float64),
    ],
)
def test_copies_of_what_is_whole_keep_the_same_bits(optimizer, window, dtype):
    """In a deterministic job, sums do not depend on the place in a buffer, which differs.

    Those of an optimizer of whole parameters do: in float64 their last bits are seen.
    """
    shapes = {"u": {"w": (5, 9), "b": (9,), "gain": (40,), "plain": (6, 7)}}
    model, grid = Model(shapes, {"u.w": 1, "u.b": 0}, dtype), Grid(tensor=2, shard=3)

    def body(backend):
        engine = engine_on(grid, backend, model, optimizer=optimizer, window=window)
        train(engine, model, range(8), clip=1.0)
        with engine.gathered():
            params = engine["u"].params
            return [params[name].tobytes() for name in ("gain", "plain")]

    found = launch(body, grid.ranks, deterministic=True)
    assert all(each == found[0] for each in found)
