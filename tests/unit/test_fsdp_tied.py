"""Parameters that are another unit's: one memory, and the sum of the gradients of all uses.

Gradients here are small integers, and the learning rate is 1, so that every sum is exact.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from support.fsdp_steps import (
    WORLD,
    cause_of,
    in_turn,
    is_clean,
    launch,
    one_pass,
    strategies_in_turn,
    train,
    values_of,
)

import fsdpcore as fc

TABLE, BIAS = (5, 3), (2,)  # 15 and 17 elements: uneven over four ranks, and over two


def table():
    return np.arange(15, dtype=np.float32).reshape(TABLE)


def gradient(rank, unit, name, shape, number=0):
    """Integers that depend on everything."""
    seed = (rank, number, *unit.encode(), *name.encode())
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)


def owner_first():
    return [
        fc.Unit("embed", {"w": table(), "b": np.zeros(BIAS, np.float32)}),
        fc.Unit("body", {"v": np.zeros(7, np.float32)}),
        fc.Unit("head", {"c": np.zeros(BIAS, np.float32), "w": fc.Tied("embed", "w")}),
    ]


def owner_last():
    return [
        fc.Unit("head", {"c": np.zeros(BIAS, np.float32), "w": fc.Tied("embed", "w")}),
        fc.Unit("body", {"v": np.zeros(7, np.float32)}),
        fc.Unit("embed", {"w": table(), "b": np.zeros(BIAS, np.float32)}),
    ]


def same_array():
    shared = table()
    return [
        fc.Unit("embed", {"w": shared, "b": np.zeros(BIAS, np.float32)}),
        fc.Unit("body", {"v": np.zeros(7, np.float32)}),
        fc.Unit("head", {"c": np.zeros(BIAS, np.float32), "w": shared}),
    ]


def nothing_of_its_own():
    return [
        fc.Unit("embed", {"w": table(), "b": np.zeros(BIAS, np.float32)}),
        fc.Unit("body", {"v": np.zeros(7, np.float32)}),
        fc.Unit("head", {"w": fc.Tied("embed", "w")}),
    ]


def inside_a_unit():
    shared = table()
    both = {"w": shared, "again": shared, "b": np.zeros(BIAS, np.float32)}
    return [fc.Unit("embed", both), fc.Unit("head", {"x": fc.Tied("embed", "w")})]


MODELS = [owner_first, owner_last, same_array, nothing_of_its_own, inside_a_unit]
by_model = in_turn("model", MODELS, lambda model: model.__name__)


def canonical(unit, name):
    """The parameter that this is one more name of."""
    tied = {"head.w", "head.x", "embed.again"}
    return "embed.w" if f"{unit}.{name}" in tied else f"{unit}.{name}"


class Oracle:
    """All parameters in float64, without ranks."""

    def __init__(self, units):
        self.names = [(unit.name, name) for unit in units for name in unit.names]
        self.values = {}
        for unit in units:
            for name, value in (unit.initial or {}).items():
                self.values[canonical(unit.name, name)] = np.array(value, np.float64)

    def update(self, used, numbers, ranks=WORLD):
        """Gradients of microbatches of all ranks, for those units that were used."""
        for unit, name in self.names:
            if unit in used:
                value = self.values[canonical(unit, name)]
                for number in numbers:
                    for rank in range(ranks):
                        value -= gradient(rank, unit, name, value.shape, number) / ranks

    def check(self, engine):
        for unit, named in values_of(engine).items():
            for name, array in named.items():
                assert_array_equal(array, self.values[canonical(unit, name)], err_msg=name)


def give(rank, number=0):
    def give(unit, params, grads):
        for name, array in params.items():
            grads[name] = gradient(rank, unit.name, name, array.shape, number)

    return give


def engine_of(backend, units, **options):
    return fc.FSDP(units, backend, optimizer=fc.optim.SGD(lr=1.0), **options)


@by_model
def test_the_gradient_is_the_sum_of_all_uses(model, strategy, window):
    def body(backend):
        oracle = Oracle(model())
        engine = engine_of(backend, model(), strategy=strategy, window=window)
        names = [unit.name for unit in engine.units]
        owner, before = engine["embed"], engine["embed"].shard.copy()
        oracle.check(engine)
        train(engine, give(backend.rank))
        oracle.update(names, [0])
        oracle.check(engine)
        # Every rank updates its part, though sizes are uneven.
        assert owner.valid_size > 0
        assert (owner.shard != before)[: owner.valid_size].any()

        with engine.step() as step:  # microbatches with a reduction each
            for number in (1, 2):
                one_pass(step, names, give(backend.rank, number))
            step.update()
        oracle.update(names, [1, 2])
        oracle.check(engine)

        with engine.step() as step:  # and with one for all
            with step.no_sync():
                for number in (3, 4):
                    one_pass(step, names, give(backend.rank, number))
            one_pass(step, names, give(backend.rank, 5))
            step.update()
        oracle.update(names, [3, 4, 5])
        oracle.check(engine)
        assert is_clean(engine)

    launch(body)


@in_turn("model", [owner_last, nothing_of_its_own, inside_a_unit], lambda model: model.__name__)
def test_an_owner_without_a_backward_pass_of_its_own_is_updated(model, strategy, window):
    def body(backend):
        oracle = Oracle(model())
        engine = engine_of(backend, model(), strategy=strategy, window=window)
        for number in range(2):
            with engine.step() as step:
                one_pass(step, ["head"], give(backend.rank, number))
                step.update()
            oracle.update(["head"], [number])
            oracle.check(engine)
        with engine.step() as step:
            with step.no_sync():
                one_pass(step, ["head"], give(backend.rank, 2))
            one_pass(step, ["head"], give(backend.rank, 3))
            step.update()
        oracle.update(["head"], [2, 3])
        oracle.check(engine)
        with engine.step() as step:  # the owner is used, too, but not for a gradient
            with step.forward("embed", recompute=True) as params:
                assert_array_equal(params["w"], oracle.values["embed.w"])
            one_pass(step, ["head"], give(backend.rank, 4))
            step.update()
        oracle.update(["head"], [4])
        oracle.check(engine)
        assert is_clean(engine)

    launch(body)


@strategies_in_turn(1)
def test_both_uses_see_the_same_values_in_every_pass(strategy, window):
    def body(backend):
        engine = engine_of(backend, owner_first(), strategy=strategy, window=window)
        for number in range(2):
            seen = []
            with engine.step() as step:
                for name in ("embed", "head", "embed"):
                    with step.forward(name) as params:
                        seen.append(params["w"].copy())
                for name in ("embed", "head", "embed"):
                    with step.backward(name) as (params, grads):
                        seen.append(params["w"].copy())
                        grads["w"] = np.ones(TABLE, np.float32)
                step.update()
            with engine.evaluation() as step:
                for name in ("head", "embed"):
                    with step.forward(name) as params:
                        seen.append(params["w"] + 3)
            for array in seen:
                assert_array_equal(array, table() - 3 * number)
            assert is_clean(engine)

    launch(body)


def test_the_norm_counts_a_tied_parameter_once():
    def body(backend):
        engine = engine_of(backend, owner_first())

        def give(unit, params, grads):
            if "w" in params:
                grads["w"] = np.full(TABLE, 2, np.float32)

        _, norm = train(engine, give, clip=1e9)
        return norm

    assert launch(body) == [float(np.float32(4 * 15**0.5))] * WORLD


def test_the_owner_alone_has_the_memory_and_the_optimizer_state():
    def body(backend, units):
        engine = fc.FSDP(units, backend, optimizer=fc.optim.AdamW(lr=0.1))
        train(engine)
        return engine.held()

    tied, alone = (
        launch(lambda b, m=model: body(b, m), 1)[0]
        for model in (
            nothing_of_its_own(),
            nothing_of_its_own()[:2],
        )
    )
    assert tied.parameters == alone.parameters == 4 * (15 + 2 + 7)
    assert (tied.gradients, tied.optimizer) == (alone.gradients, alone.optimizer)


def test_a_tie_to_a_frozen_parameter_has_no_gradient():
    frozen = table()

    def body(backend, tie):
        units = [
            fc.Unit("embed", {"w": frozen, "b": np.zeros(BIAS, np.float32)}, frozen="w"),
            fc.Unit(
                "head",
                {"c": np.zeros(BIAS, np.float32), "w": tie},
                frozen=() if isinstance(tie, fc.Tied) else "w",
            ),
        ]
        engine = engine_of(backend, units)

        def give(unit, params, grads):
            assert "w" in params
            assert "w" not in grads
            assert len(grads) == 1
            with pytest.raises(
                fc.ArgumentError, match=f"unit '{unit.name}' has no gradient of 'w'"
            ):
                grads["w"] = np.ones(TABLE, np.float32)

        train(engine, give)
        for named in values_of(engine).values():
            assert_array_equal(named["w"], frozen)
        assert engine.units[1].frozen == frozenset()

    for tie in (fc.Tied("embed", "w"), frozen):
        launch(lambda backend, tie=tie: body(backend, tie), 3)


@pytest.mark.parametrize("first", [True, False])
def test_one_array_cannot_be_frozen_and_trained(first):
    shared = table()
    frozen = [("*", ()), ((), "*")][first]
    units = [fc.Unit(f"u{i}", {"w": shared}, frozen=frozen[i]) for i in range(2)]
    error = cause_of(lambda backend: engine_of(backend, units))
    assert isinstance(error, fc.ArgumentError)
    still, moving = ("u1", "u0") if first else ("u0", "u1")
    assert str(error) == (
        f"{still}.w is frozen, but {moving}.w, which is the same array, is trained; "
        "freeze both, or neither"
    )


@pytest.mark.parametrize(
    ("tie", "named"),
    [
        (fc.Tied("head", "w"), "head.w"),  # a chain
        (fc.Tied("nobody", "w"), "nobody.w"),
        (fc.Tied("embed", "x"), "embed.x"),
        (fc.Tied("embed", "left"), "embed.left"),  # which is ignored
        (fc.Tied("third", "w"), "third.w"),  # itself
    ],
)
def test_a_tie_names_a_parameter_that_a_unit_owns(tie, named):
    embed = {"w": table(), "left": np.zeros(3, np.float32)}
    units = [
        fc.Unit("embed", embed, ignored="left"),
        fc.Unit("head", {"w": fc.Tied("embed", "w")}),
        fc.Unit("third", {"w": tie}),
    ]
    error = cause_of(lambda backend: engine_of(backend, units))
    assert isinstance(error, fc.ArgumentError)
    assert str(error) == (
        f"third.w is tied to {named}, which no unit of this engine owns; name a parameter that "
        "is itself an array or a Spec"
    )


def test_by_hand_the_owner_is_gathered_first():
    def body(backend):
        engine = engine_of(backend, owner_first())
        head, embed = engine["head"], engine["embed"]
        head.unshard()
        assert_array_equal(head.params["c"], np.zeros(BIAS))
        with pytest.raises(fc.StateError) as caught:
            _ = head.params["w"]
        assert str(caught.value) == (
            "head.w is tied to embed.w, which is sharded; call unshard() of unit 'embed' first"
        )
        embed.unshard()
        assert_array_equal(head.params["w"], table())
        assert head.params["w"].ctypes.data == embed.params["w"].ctypes.data
        assert list(head.params) == ["c", "w"]
        with pytest.raises(fc.ArgumentError, match="has no parameter 'w' to load; it has c"):
            head.load({"w": table()})
        embed.load({"w": table() + 1})
        embed.unshard()
        assert_array_equal(head.params["w"], table() + 1)

    launch(body, 2)


@pytest.mark.parametrize("model", [owner_first, owner_last, inside_a_unit])
def test_an_error_after_tied_gradients_were_written_leaves_nothing_of_them(model):
    def body(backend):
        oracle = Oracle(model())
        engine = engine_of(backend, model())
        names = [unit.name for unit in engine.units]
        with pytest.raises(ZeroDivisionError), engine.step() as step:
            with step.no_sync():
                one_pass(step, names, give(backend.rank))
            with step.forward("head"):
                pass
            with step.backward("head") as (_, grads):
                for name in grads:
                    grads[name][...] = np.nan
                raise ZeroDivisionError
        assert is_clean(engine)
        train(engine, give(backend.rank))
        oracle.update(names, [0])
        oracle.check(engine)

    launch(body)


def test_in_16_bits_the_uses_are_added_up_in_the_dtype_of_reduction():
    def body(backend):
        precision = fc.Precision(np.float16, np.float32)
        engine = engine_of(backend, owner_first(), precision=precision)

        def give(unit, params, grads):
            if "w" in params:
                assert params["w"].dtype == np.float16
                assert grads["w"].dtype == np.float32
                grads["w"] = np.full(TABLE, 2048 if unit.name == "head" else 1, np.float16)

        train(engine, give)  # 2049 is no number of float16
        (piece,) = [p for p in engine["embed"].layout.pieces(backend.rank) if p.name == "w"]
        got = engine["embed"].shard[piece.shard_start : piece.shard_stop]
        start = table().reshape(-1)[piece.param_start : piece.param_stop]
        assert_array_equal(got, start - 2049)

    launch(body, 2)
