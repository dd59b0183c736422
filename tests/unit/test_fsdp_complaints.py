"""What users of other engines complain about must not happen here.

One test for each complaint, with the number of the issue: ``#n`` is PyTorch's.
"""

from __future__ import annotations

import re
import tracemalloc
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_models import named
from support.fsdp_steps import strategies_in_turn
from support.spmd import RanksFailed, run_on
from support.windows import WithoutWindow, WithWindow

import fsdpcore as fc

KINDS = [WithWindow, WithoutWindow]
STRATEGIES = [
    fc.Strategy("full_shard"),
    fc.Strategy("full_shard", False),
    fc.Strategy("full_shard", 2),
    fc.Strategy("shard_grad_op"),
    fc.Strategy("hybrid_shard", shard_group_size=2),
    fc.Strategy("no_shard"),
    fc.Strategy("shard_optimizer"),
]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=named)
NAMED = {named(strategy): strategy for strategy in STRATEGIES}


def run(body, world_size=4, kind=WithoutWindow, **options):
    return run_on(kind, body, world_size=world_size, timeout=60, **options)


def engine_of(backend, shapes, strategy="full_shard", **options):
    """Units of one parameter each, which begins as ones."""
    units = [fc.Unit(name, {"w": np.ones(shape, np.float32)}) for name, shape in shapes.items()]
    return fc.FSDP(
        units, backend, strategy=strategy, **{"optimizer": fc.optim.SGD(lr=1.0), **options}
    )


def forward(step, *units):
    for unit in units:
        with step.forward(unit):
            pass


def backward(step, *units, value=1.0):
    for unit in units:
        with step.backward(unit) as (params, grads):
            for name in params:
                if name in grads:
                    grads[name] = np.full_like(params[name], value)


def one_step(engine, value=1.0, **update):
    names = [unit.name for unit in engine.units]
    with engine.step() as step:
        forward(step, *names)
        backward(step, *reversed(names), value=value)
        return step.update(**update)


def whole(engine, name):
    with engine.full_params() as params:
        return params[name].copy()


# 1. Ranks with different control flow.


def other_order(step, rank):
    forward(step, *(("a", "b") if rank != 1 else ("b", "a")))
    backward(step, "b", "a")


def other_backward_order(step, rank):
    forward(step, "a", "b")
    backward(step, *(("b", "a") if rank != 1 else ("a", "b")))


def skipped_unit(step, rank):
    forward(step, *(("a", "b") if rank != 1 else ("a",)))
    backward(step, *(("b", "a") if rank != 1 else ("a",)))


def one_pass_more(step, rank):
    for _ in range(1 if rank != 1 else 2):
        forward(step, "a", "b")
        backward(step, "b", "a")


WAYS = [other_order, other_backward_order, skipped_unit, one_pass_more]


def go_astray(backend, way, strategy):
    engine = engine_of(backend, {"a": (6, 3), "b": (6, 3)}, strategy)
    one_step(engine)
    with engine.step() as step:
        way(step, backend.rank)
        step.update()


@pytest.mark.parametrize(
    ("way", "strategy", "kind"),
    [
        (w, s, KINDS[(i + j) % 2])
        for i, w in enumerate(WAYS)
        for j, s in enumerate(STRATEGIES)
        if w is not one_pass_more or s.name[0] != "h"
    ],
    ids=lambda value: named(value) if isinstance(value, fc.Strategy) else value.__name__,
)
def test_ranks_with_different_control_flow_get_an_error_that_names_ranks_and_unit(
    way, kind, strategy
):
    """#170667 hangs; #75902 corrupts silently where all shapes match, as here."""
    with pytest.raises(RanksFailed) as caught:
        run(go_astray, kind=kind, args=(way, strategy))
    told = str(caught.value)
    assert "failed on ranks [0, 1, 2, 3] of 4" in told
    errors = [line for line in told.splitlines() if line.startswith("----- rank")]
    assert len([error for error in errors if "MismatchError" in error]) == 4
    use = r"^  rank 1: \w+\(.*for (forward|backward|gradients) of unit [ab]"
    by_collective = re.search(use, told, re.MULTILINE)
    by_update = re.search(r"unit '[ab]' on rank 0, but .* on rank 1;", told)
    assert by_collective or by_update


def test_ranks_that_wait_in_different_groups_are_told_where_the_others_are():
    """#170667 again: where no group sees both, as with hybrid_shard, it takes the deadline."""
    with pytest.raises(RanksFailed) as caught:
        run(go_astray, args=(one_pass_more, STRATEGIES[4]), op_timeout=2)
    told = str(caught.value)
    assert "failed on ranks [0, 1, 2, 3] of 4" in told
    assert "timed out" in told
    # Whose deadline passes first is chance; where the two wait that cannot go on is not.
    first = told[: told.index("Traceback")]
    assert re.search(r"reduce_scatter #\d+ .*\(gradients of unit b\)", first)
    assert re.search(r"all_gather #\d+ .*\(update\)", first)
    assert "different orders" in first


# 2. Gathers that run ahead.


@pytest.mark.parametrize(("prefetch", "units"), [(0, 1), (1, 2), (2, 3), (8, 9)])
def test_gathers_run_no_further_ahead_than_was_asked(prefetch, units):
    """#83917: memory is exhausted by gathers that the host issues ahead of the computation."""

    def body(backend):
        engine = engine_of(backend, dict.fromkeys("abcdefghij", 100), prefetch=prefetch)
        most = 0
        with engine.evaluation() as step:
            for unit in engine.units:
                with step.forward(unit):
                    most = max(most, sum(u.state.value != "sharded" for u in engine.units))
        limited = engine_of(
            backend,
            dict.fromkeys("abcdefghij", 100),
            prefetch=fc.Prefetch(8, max_bytes=2 * 400),
        )
        with limited.evaluation() as step:
            forward(step, *limited.units)
        return most, engine.gathered_peak, limited.gathered_peak

    assert run(body) == [(units, units * 400, 3 * 400)] * 4


# 3. Clipping.


@each_strategy
def test_no_shard_counts_the_norm_once(strategy):
    """#88955: it was counted once for every rank; nothing that several ranks hold may be."""

    def body(backend):
        return one_step(engine_of(backend, {"a": (3, 3), "b": ()}, strategy), 2.0, clip=1.0)

    assert run(body) == [np.float32(np.sqrt(10 * 4.0))] * 4


@each_strategy
def test_nothing_is_added_to_the_norm_on_any_rank(strategy):
    """#149768: an eps is added per rank, so that the result depends on their number."""

    def body(backend):
        engine = engine_of(backend, {"a": (16,)}, strategy)
        norms = [one_step(engine, 0.0, clip=1.0), one_step(engine, 3.0, clip=12.0)]
        unclipped = whole(engine, "a.w")
        norms.append(one_step(engine, 3.0, clip=6.0))
        return norms, unclipped, whole(engine, "a.w")

    for norms, unclipped, clipped in run(body):
        assert norms == [0.0, 12.0, 12.0]
        assert_array_equal(unclipped, np.full(16, 1 - 3, np.float32))
        assert_array_equal(clipped, np.full(16, -2 - 1.5, np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_meshes_may_be_mixed_and_each_engine_clips_what_is_its_own(kind):
    """#180346: clipping breaks where parameters are on different meshes."""

    def body(backend):
        mesh = fc.Mesh(backend, {"data": 2, "model": 2})
        hybrid = fc.Strategy("hybrid_shard", shard_group_size=2)
        engines = [
            engine_of(backend, {"all": (9,)}, hybrid),
            engine_of(mesh["data"], {"slice": (4,)}),
            engine_of(mesh["model"], {"other": (25,)}, "no_shard"),
        ]
        return [one_step(engine, 2.0, clip=1.0) for engine in engines]

    assert run(body, kind=kind) == [[6.0, 4.0, 10.0]] * 4


# 4. Memory of a checkpoint on rank 0.


def test_a_full_state_on_rank_0_needs_no_more_than_itself_and_one_array_more():
    """fairscale#844, #104143, #116553: ranks run out of memory while a state is gathered."""
    size, units = 50_000, 12

    def body(backend):
        engine = fc.FSDP(
            [fc.Unit(f"u{i}", {"w": fc.Spec(size)}) for i in range(units)],
            backend,
            optimizer=fc.optim.SGD(lr=1.0, momentum=0.9),
        )
        fc.barrier(backend)
        if backend.rank == 0:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
        state = engine.state_dict(full=True, to=0)
        fc.barrier(backend)
        peak = tracemalloc.get_traced_memory()[1] - before if backend.rank == 0 else 0
        fc.barrier(backend)
        return sum(np.asarray(array).nbytes for array in state.values()), peak

    tracemalloc.start()
    try:
        (held, peak), *others = run(body)
    finally:
        tracemalloc.stop()
    assert held == 2 * 4 * size * units
    assert others == [(0, 0)] * 3
    assert peak < held + 4 * 4 * size  # of all ranks together, which are threads here


# 5. Frozen parameters, and optimizers that are made first.


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_frozen_parameters_cost_no_gradients_and_no_optimizer_state(strategy):
    """#104690, litgpt#1538: a frozen base with adapters takes as much as training all of it."""
    base, adapter = 4000, 40

    def body(backend):
        params = {"base": fc.Spec(base), "lora.a": fc.Spec(adapter)}
        engine = fc.FSDP(
            [fc.Unit("u", params, frozen="base")],
            backend,
            strategy=strategy,
            optimizer=fc.optim.AdamW(),
            window=False,
        )
        one_step(engine)
        held = engine.held()
        return held.gradients, held.optimizer, engine.gathered_peak, whole(engine, "u.base").any()

    shares = 1 if strategy == "no_shard" else 4
    gathered = 4 * base + 4 * adapter if strategy == "full_shard" else 0
    for gradients, optimizer, peak, changed in run(body):
        assert gradients == 4 * adapter / shares
        assert optimizer == 2 * 4 * adapter / shares
        assert peak == gathered + 4 * adapter
        assert not changed


@strategies_in_turn(0, NAMED, KINDS, "kind")
def test_an_optimizer_that_was_made_before_the_engine_trains_it(kind, strategy):
    """accelerate#3256: it keeps the arrays of before, and training silently stalls."""
    optimizer = fc.optim.SGD(lr=0.1)

    def body(backend):
        mine = {"w": np.ones((5, 3), np.float32)}
        engine = fc.FSDP([fc.Unit("u", mine)], backend, strategy=strategy, optimizer=optimizer)
        losses = []
        for _ in range(5):
            with engine.step() as step:
                with step.forward("u") as params:
                    losses.append(float((params["w"] ** 2).sum()))
                with step.backward("u") as (params, grads):
                    grads["w"] = 2 * params["w"]
                step.update()
        return losses, mine["w"]

    for losses, mine in run(body, kind=kind):
        assert_allclose(losses, 15 * 0.64 ** np.arange(5), rtol=1e-5)
        assert_array_equal(mine, np.ones((5, 3)))  # the engine has its own


# 6. Tied, uneven and empty.


@strategies_in_turn(1, NAMED, KINDS, "kind")
def test_tied_and_uneven_every_rank_updates(kind, strategy):
    """#176076: the last rank never updates. accelerate#4171: ties across units come apart."""

    def body(backend):
        table = np.ones((7, 3), np.float32)  # 21 elements do not divide by 4, nor by 2
        engine = fc.FSDP(
            [fc.Unit("in", {"w": table}), fc.Unit("out", {"w": table, "b": np.ones(3, "f4")})],
            backend,
            strategy=strategy,
            optimizer=fc.optim.SGD(lr=1.0),
        )
        before = engine["in"].shard[: engine["in"].valid_size].copy()
        one_step(engine)  # a gradient of 1 by each of the two uses
        after = engine["in"].shard[: engine["in"].valid_size]
        with engine.evaluation() as step, step.forward("out") as params:
            tied = params["w"].copy()
        return before - after, tied, whole(engine, "in.w")

    for change, tied, owner in run(body, kind=kind):
        assert change.size
        assert_array_equal(change, 2)
        assert_array_equal(tied, np.full((7, 3), -1))
        assert_array_equal(owner, tied)


@strategies_in_turn(0, NAMED, KINDS, "kind")
def test_ranks_without_an_element_take_part_like_others(kind, strategy):
    """#137342: empty shards."""

    def body(backend):
        shapes = {"one": (), "two": (2,), "none": (0, 5), "nine": (9,)}
        engine = engine_of(backend, shapes, strategy, optimizer=fc.optim.AdamW())
        norms = [one_step(engine, 1.0, clip=10.0) for _ in range(2)]
        state = engine.state_dict(full=True)
        engine.load_state_dict(state)
        return norms, engine["one"].valid_size, {n: whole(engine, f"{n}.w") for n in shapes}

    results = run(body, kind=kind)
    shards = strategy.place(4).shards
    assert [valid for _, valid, _ in results] == [int(r % shards == 0) for r in range(4)]
    for norms, _, params in results:
        assert norms == [np.float32(np.sqrt(12))] * 2
        assert [array.size for array in params.values()] == [1, 2, 0, 9]
        for array in params.values():
            assert_allclose(array, 1 - 2 * 1e-3, atol=1e-4)


# 7. Several forwards before a backward, and recomputation.


@pytest.mark.parametrize(
    ("strategy", "gathers"), [*zip(STRATEGIES, [4, 1, 4, 1, 4, 0, 1], strict=True)]
)
def test_several_forwards_before_a_backward_gather_once_each(strategy, gathers):
    """#105635: parameters are gathered twice, or freed too early. Four passes need four at most."""

    def body(backend):
        engine = engine_of(backend, {"a": (8,)}, strategy, window=False)
        with engine.step() as step:
            forward(step, "a", "a")
            backward(step, "a", "a")
            count = engine.stats.gathers
            step.update()
        return count, whole(engine, "a.w")

    for count, array in run(body):
        assert count == gathers
        assert_array_equal(array, np.full(8, 1 - 2))


@pytest.mark.parametrize(
    ("strategy", "gathers"), [*zip(STRATEGIES, [2, 1, 2, 1, 2, 0, 1], strict=True)]
)
def test_recomputation_gathers_once(strategy, gathers):
    """#153354: activation checkpointing gathers a unit twice for its backward pass."""

    def body(backend):
        engine = engine_of(backend, {"a": (8,), "b": (8,)}, strategy, window=False)
        with engine.step() as step:
            forward(step, "a", "b")
            for name in ("b", "a"):
                with step.backward(name) as (params, grads):
                    with step.forward(name) as again:
                        assert_array_equal(again["w"], params["w"])
                    grads["w"] = params["w"]
            count = engine.stats.gathers
            step.update()
        return count

    assert run(body) == [2 * gathers] * 4


# 8. no_sync and divisors.


@each_strategy
def test_no_sync_holds_one_full_gradient_of_each_unit_and_sends_nothing(strategy):
    """accelerate#2531: memory grows, or no_sync silently does nothing."""

    def body(backend, microbatches, deferred):
        engine = engine_of(backend, {"a": (40,), "b": (40,)}, strategy, prefetch=0)
        with engine.step() as step:
            for number in range(microbatches):
                early = deferred and number < microbatches - 1
                with step.no_sync() if early else nullcontext():
                    forward(step, "a", "b")
                    backward(step, "b", "a")
            reductions = engine.stats.reductions
            step.update()
        return reductions, engine.gathered_peak, engine.held().buffers, whole(engine, "a.w")

    each = run(body, args=(4, False))
    few, many = (run(body, args=(count, True)) for count in (2, 6))
    for synchronised, shorter, longer in zip(each, few, many, strict=True):
        assert (synchronised[0], shorter[0], longer[0]) == (8, 2, 2)
        assert longer[1] == shorter[1] <= synchronised[1] + 2 * 160
        assert longer[2] == 0  # once the step is over
        assert_array_equal(longer[3], np.full(40, 1 - 6))
        assert_array_equal(synchronised[3], np.full(40, 1 - 4))


def test_gradients_that_no_sync_kept_are_never_lost_silently():
    """accelerate#2531: a loop that ends inside no_sync forgets its gradients."""

    def body(backend):
        engine = engine_of(backend, {"a": (40,), "b": (40,)})
        with engine.step() as step:
            with step.no_sync():
                forward(step, "a", "b")
                backward(step, "b", "a")
            with pytest.raises(fc.StateError, match=r"'a', 'b'.*were kept by no_sync.. and never"):
                step.update()
            forward(step, "a", "b")
            backward(step, "b")
            with step.no_sync():
                backward(step, "a")
            with pytest.raises(fc.StateError, match=r"'a'.*were kept by no_sync.. and never red"):
                step.update()
            forward(step, "a")
            backward(step, "a")
            step.update()
        return whole(engine, "a.w")

    for array in run(body):
        assert_array_equal(array, np.full(40, 1 - 3))


@pytest.mark.parametrize(("divisor", "expected"), [(None, 2.5), (1, 10.0), (20, 0.5)])
def test_a_divisor_is_the_same_in_every_strategy(divisor, expected):
    """#155903: some divide by the ranks that share a copy, some by all, some not at all."""

    def body(backend, strategy):
        engine = engine_of(backend, {"a": (8,)}, strategy)
        with engine.step(divisor=divisor) as step:
            forward(step, "a")
            backward(step, "a", value=backend.rank + 1.0)  # 10 in sum
            norm = step.update(clip=1e9)
        return norm, whole(engine, "a.w")

    for strategy in STRATEGIES:
        for norm, array in run(body, args=(strategy,)):
            assert norm == np.float32(expected * np.sqrt(8))
            assert_array_equal(array, np.full(8, 1 - expected, np.float32))


# 9. Precision.


@each_strategy
def test_buffers_keep_their_dtype_whatever_parameters_are_computed_in(strategy):
    """#143900: rotary tables, counters and running means are rounded with the parameters."""
    precise = np.linspace(1, 2, 9)

    def body(backend):
        buffers = {"table": precise, "single": precise.astype("f4"), "count": np.array(2**60 + 1)}
        unit = fc.Unit(
            "u", {"w": np.ones(5, np.float32), **buffers}, ignored=["table", "single", "count"]
        )
        engine = fc.FSDP(
            [unit],
            backend,
            strategy=strategy,
            optimizer=fc.optim.SGD(lr=1.0),
            precision=fc.Precision(param_dtype=ml_dtypes.bfloat16, reduce_dtype=np.float32),
        )
        one_step(engine)
        with engine.evaluation() as step, step.forward("u") as params:
            assert params["w"].dtype == ml_dtypes.bfloat16
            for name, array in buffers.items():
                assert_array_equal(params[name], array, strict=True)
        return True

    assert run(body) == [True] * 4


@strategies_in_turn(1, NAMED, KINDS, "kind")
def test_bfloat16_has_a_float32_master_so_that_small_updates_add_up(kind, strategy):
    """Loaded without one, updates below 1/256 of a parameter vanish, and the loss sticks."""

    def body(backend):
        with pytest.raises(fc.ArgumentError, match=r"which the optimizer updates.*param_dtype"):
            fc.Unit("u", {"w": np.ones(5, ml_dtypes.bfloat16)})
        engine = engine_of(
            backend,
            {"a": (5,)},
            strategy,
            optimizer=fc.optim.SGD(lr=1e-3),
            precision=fc.Precision(param_dtype=ml_dtypes.bfloat16, reduce_dtype=np.float32),
        )
        for _ in range(20):
            one_step(engine)
        with engine.evaluation() as step, step.forward("a") as params:
            seen = params["w"].astype(np.float32)
        return seen, whole(engine, "a.w")

    for seen, master in run(body, kind=kind):
        assert_allclose(master, np.full(5, 0.98), rtol=1e-5)
        assert_array_equal(seen, master.astype(ml_dtypes.bfloat16).astype(np.float32))
