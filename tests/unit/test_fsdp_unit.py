"""The state machine of a unit and of a step: what is allowed, and what is said if it is not."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.spmd import RanksFailed, run_on
from support.windows import WithoutWindow, WithWindow

import fsdpcore as fc


def run(body, world_size=1, **options):
    return fc.launch(body, world_size=world_size, transport="sim", timeout=20, **options)


def cause_of(body, world_size=1):
    with pytest.raises(fc.RankFailedError) as caught:
        run(body, world_size)
    return caught.value.__cause__


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": (3, 5), "b": (5,), "scale": (), "none": (0, 4)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def engine_of(backend, units=2, **options):
    made = [fc.Unit(f"u{i}", arrays(i)) for i in range(units)]
    return fc.FSDP(made, backend, optimizer=fc.optim.SGD(lr=1.0), **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 30])
def test_gathered_parameters_are_those_given_and_a_rank_holds_only_its_share(world_size):
    def body(backend):
        unit = engine_of(backend, 1).units[0]
        size = sum(array.size for array in arrays().values())
        assert unit.shard.size == -(-size // backend.world_size)
        unit.unshard()
        for name, array in arrays().items():
            assert_array_equal(unit.params[name], array, strict=True)
            assert not unit.params[name].flags.writeable
        unit.reshard()
        return unit.valid_size

    assert sum(run(body, world_size)) == 15 + 5 + 1


def test_unshard_in_the_background_ends_with_wait_or_a_second_unshard():
    def body(backend):
        unit = engine_of(backend).units[0]
        work = unit.unshard(async_op=True)
        with pytest.raises(fc.StateError, match="gathering; call unshard"):
            _ = unit.params
        work.wait()
        unit.unshard()
        assert_array_equal(unit.params["w"], arrays()["w"])
        unit.reshard()
        unit.unshard(async_op=True)
        unit.reshard()  # waits, so that no message is left behind

    run(body, 3)


def test_reduced_gradients_are_the_mean_over_ranks_and_add_up():
    def body(backend):
        unit = engine_of(backend).units[0]
        for _ in range(2):
            grads = unit.begin_gradients()
            grads["w"] = np.full((3, 5), backend.rank, np.float32)
            np.add(grads["b"], backend.rank, out=grads["b"])
            unit.reduce_gradients()
        unit.reduce_gradients({"w": np.ones((3, 5), np.float32)}, divisor=1)
        return unit.grad_shard[: unit.valid_size]

    flat = np.concatenate(run(body, 3))
    assert_array_equal(flat[:15], np.full(15, 2 * 1.0 + 3, np.float32))
    assert_array_equal(flat[15:20], np.full(5, 2 * 1.0, np.float32))
    assert flat[20] == 0  # missing counts as zero


@pytest.mark.parametrize("kind", [WithoutWindow, WithWindow])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard", "shard_optimizer"])
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("earlier", [0, 2])
def test_an_update_waits_for_the_reduction_that_was_begun(
    kind, strategy, offloaded, earlier, tmp_path
):
    def body(backend):
        offload = fc.Offload(tmp_path) if offloaded else None
        engine = engine_of(backend, 1, strategy=strategy, offload=offload)
        unit = engine.units[0]
        ours = np.full((3, 5), backend.rank + 1, np.float32)
        for _ in range(earlier):
            unit.reduce_gradients({"w": ours})
        unit.reduce_gradients({"w": ours}, async_op=True)
        unit.update(step=1, lr=None, grad_scale=1.0)
        assert unit.grad_state.value == "none"
        unit.unshard()
        found = unit.params["w"].copy(), unit.params["b"].copy()
        unit.reshard()
        assert engine.held().buffers == 0
        return found

    for w, b in run_on(kind, body, world_size=3):
        assert_array_equal(w, arrays()["w"] - np.float32(2 * (earlier + 1)), strict=True)
        assert_array_equal(b, arrays()["b"], strict=True)


def test_owners_get_what_was_reduced_in_the_background():
    def trained(backend, async_op):
        units = [fc.Unit("u", {"w": np.eye(40, 30, dtype=np.float32)})]
        engine = fc.FSDP(units, backend, optimizer=fc.optim.Muon(lr=0.1))
        (unit,) = engine.units
        grads = np.random.default_rng(backend.rank).normal(size=(40, 30)).astype(np.float32)
        if backend.rank:
            time.sleep(0.05)
        unit.reduce_gradients({"w": grads}, async_op=async_op)
        unit.update(step=1, lr=None, grad_scale=1.0)
        unit.unshard()
        return unit.params["w"].copy()

    for found in run_on(
        WithoutWindow, lambda b: [trained(b, a) for a in (True, False)], world_size=2
    ):
        assert_array_equal(*found)


def test_update_changes_what_the_next_gather_gives():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            for unit in engine.units:
                with step.forward(unit) as params:
                    assert params["w"].shape == (3, 5)
            for unit in reversed(engine.units):
                with step.backward(unit) as (params, grads):
                    grads["w"] = params["w"]
            assert step.update() is None
        engine.units[0].unshard()
        return engine.units[0].params["w"].copy(), engine.units[0].params["b"].copy()

    for w, b in run(body, 4):
        assert_array_equal(w, np.zeros((3, 5), np.float32))
        assert_array_equal(b, arrays()["b"])


def whole_pass(engine, step):
    for unit in engine.units:
        with step.forward(unit):
            pass
    for unit in reversed(engine.units):
        with step.backward(unit):
            pass


@pytest.mark.parametrize("kind", [WithoutWindow, WithWindow])
def test_ranks_that_gather_different_units_get_an_error_though_the_shapes_fit(kind):
    def body(backend):
        engine_of(backend).units[backend.rank].unshard()

    with pytest.raises(RanksFailed, match="MismatchError") as caught:
        run_on(kind, body, world_size=2)
    assert re.search(
        r"rank 0: \w+\(.*for unshard of unit u0\)\n  rank 1: \w+\(.*for unshard of unit u1\)",
        str(caught.value),
    )


def test_not_a_number_is_noticed_on_all_ranks_and_changes_nothing():
    def body(backend):
        engine = engine_of(backend)
        before = engine.units[0].shard.copy()
        with (
            pytest.raises(
                fc.NonFiniteGradientError,
                match=r"'u1\.b', 'u0\.b' are inf or nan; those of ranks 1, 2 ",
            ),
            engine.step() as step,
        ):
            for unit in engine.units:
                with step.forward(unit):
                    pass
            for unit in reversed(engine.units):
                with step.backward(unit) as (_, grads):
                    grads["b"] = np.full(5, np.nan if backend.rank else 1.0, np.float32)
            step.update(clip=1.0)
        assert_array_equal(engine.units[0].shard, before)
        assert engine.steps == 0
        with engine.step() as step:  # the engine can go on
            whole_pass(engine, step)
            step.update(clip=1.0)

    run(body, 3)


def test_an_exception_inside_a_unit_frees_it_and_the_engine_can_go_on():
    def body(backend):
        engine = engine_of(backend)
        with pytest.raises(ZeroDivisionError), engine.step() as step, step.forward("u0"):
            raise ZeroDivisionError
        with pytest.raises(fc.ArgumentError), engine.step() as step:
            with step.forward("u0"):
                pass
            with step.backward("u0") as (_, grads):
                grads["w"] = np.zeros(1, np.float32)
        with engine.step() as step:
            whole_pass(engine, step)
            step.update()
        assert engine.held().buffers == 0

    run(body, 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_deferred_parameters_do_not_depend_on_the_number_of_ranks(world_size):
    def body(backend):
        params = {
            "w": fc.Spec((300, 301), init=fc.initializers.normal(std=0.02)),
            "b": fc.Spec(7),
        }
        engine = fc.FSDP([fc.Unit("u", params)], backend, seed=5)
        engine.units[0].unshard()
        return engine.units[0].params["w"].copy(), engine.units[0].params["b"].copy()

    ((expected, _),) = run(body, 1)
    assert abs(expected.std() / 0.02 - 1) < 0.02
    for w, b in run(body, world_size):
        assert_array_equal(w, expected)
        assert_array_equal(b, np.zeros(7, np.float32))


def test_leaving_the_step_after_inf_or_nan_is_allowed():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            whole_pass(engine, step)
            engine.units[0].grad_shard[:] = np.inf
            with pytest.raises(fc.NonFiniteGradientError):
                step.update(clip=1.0)

    run(body, 2)


def test_parameters_after_an_update_are_never_the_old_ones():
    """A unit that was fetched ahead, or gathered by hand, is gathered anew after the update."""

    def body(backend):
        engine = engine_of(backend)
        with pytest.raises(ZeroDivisionError), engine.step() as step:
            with step.forward("u1"):
                pass
            with step.backward("u1") as (_, grads):  # fetches u0 ahead
                grads["b"] = np.ones(5, np.float32)
            engine.units[1].unshard()
            step.update()
            raise ZeroDivisionError
        engine.units[1].unshard()
        assert_array_equal(engine.units[1].params["b"], arrays(1)["b"] - 1)
        engine.units[1].reshard()
        assert {unit.state.value for unit in engine.units} == {"sharded"}

    run(body, 2)


@pytest.mark.parametrize(("kind", "live"), [(WithoutWindow, 3), (WithWindow, 1)])
def test_units_of_different_sizes_do_not_pile_up_in_the_pool(kind, live):
    def body(backend):
        made = [fc.Unit(f"u{i}", {"w": np.ones(1000 + i, np.float32)}) for i in range(12)]
        engine = fc.FSDP(made, backend, optimizer=fc.optim.SGD(lr=1.0))
        with engine.step() as step:
            whole_pass(engine, step)
            held = engine.held()
            assert held.buffers + held.spare <= engine.gathered_peak
            step.update()
        assert engine.gathered_peak <= live * 4 * 1013

    run_on(kind, body, world_size=2)


def test_gradients_that_are_not_written_are_zeros_whatever_the_memory_held_before():
    def body(backend):
        engine = engine_of(backend, 1)
        unit = engine.units[0]
        for fill in (np.nan, 1.0):  # the second time in the same memory
            grads = unit.begin_gradients()
            for name in grads:
                grads[name] = np.full_like(grads[name], fill)
            unit.reduce_gradients()
            unit.drop_gradients()
        grads = unit.begin_gradients()
        assert (list(grads), len(grads)) == (["w", "b", "scale", "none"], 4)
        assert "w" in grads
        assert "x" not in grads
        grads["b"] += 1
        grads.empty("scale")[...] = 5
        grads.empty("scale")[...] += 1
        assert grads["scale"] == 6
        unit.reduce_gradients()
        return unit.grad_shard

    for kind in (WithoutWindow, WithWindow):
        flat = np.concatenate(run_on(kind, body, world_size=4))
        assert_array_equal(flat[:15], 0)
        assert_array_equal(flat[15:20], 1)
        assert flat[20] == 6
        assert_array_equal(flat[21:], 0)  # padding


def test_gradients_are_out_of_reach_once_they_were_reduced():
    def body(backend):
        unit = engine_of(backend).units[0]
        kept = unit.begin_gradients()
        kept["w"] = np.ones((3, 5), np.float32)
        unit.reduce_gradients()
        for use in (
            lambda: kept["w"],
            lambda: kept["b"],
            lambda: kept.empty("w"),
            lambda: kept.update(w=np.ones((3, 5), np.float32)),
        ):
            with pytest.raises(fc.StateError, match="gradients of unit 'u0' were reduced"):
                use()
        dropped = unit.begin_gradients()
        unit.drop_gradients()
        with pytest.raises(fc.StateError, match="or dropped; write them before"):
            _ = dropped["w"]

    run(body)


@pytest.mark.parametrize("kind", [WithoutWindow, WithWindow])
def test_what_is_written_to_the_shards_is_what_the_next_gather_gives(kind):
    def body(backend):
        unit = engine_of(backend).units[0]
        unit.unshard()
        with unit.writing() as shard:
            assert unit.state.value == "sharded"
            with pytest.raises(fc.StateError, match="unshard\\(\\) of unit 'u0' while"):
                unit.unshard()
            with pytest.raises(fc.StateError, match="being written already"), unit.writing():
                pass
            for piece in unit.layout.pieces(backend.rank):
                whole = np.arange(15, dtype=np.float32) + ord(piece.name[0])
                shard[piece.shard_start : piece.shard_stop] = whole[
                    piece.param_start : piece.param_stop
                ]
        unit.unshard()
        return unit.params["w"].copy(), unit.params["b"].copy(), unit.params["scale"].copy()

    for w, b, scale in run_on(kind, body, world_size=3):
        assert_array_equal(w.reshape(-1), np.arange(15) + ord("w"))
        assert_array_equal(b, np.arange(5) + ord("b"))
        assert scale == ord("s")


def test_one_rank_alone_gathers_without_a_copy():
    def body(backend):
        engine = engine_of(backend)
        assert engine.windowed
        unit = engine.units[0]
        unit.unshard()
        assert np.shares_memory(unit.params["w"], unit.shard)
        return engine.held().buffers

    assert run(body) == [0]
