"""Several forward passes, recomputation, evaluation, and steps that end with an error."""

from __future__ import annotations

import re
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from support.fsdp_steps import (
    STRATEGIES,
    is_clean,
    launch,
    one_pass,
    strategies_in_turn,
    train,
    values_of,
)

import fsdpcore as fc
from fsdpcore.fsdp.units import gradients, storages


def engine_of(backend, **options):
    """Three units of zeros; each gradient that is written moves them by its mean."""
    units = [
        fc.Unit(name, {"w": np.zeros((5, 3), np.float32), "x": np.zeros(2 + i, np.float32)})
        for i, name in enumerate("abc")
    ]
    options.setdefault("optimizer", fc.optim.SGD(lr=1.0))
    return fc.FSDP(units, backend, **options)


def amount(value):
    def give(unit, params, grads):
        grads["w"] = np.full((5, 3), value, np.float32)

    return give


class Gathers:
    """Counts the collectives of the engine by what they are for, on rank 0."""

    def __init__(self):
        self.labels = Counter()
        self._lock = threading.Lock()

    def counting(self, function):
        def count(array, backend, **options):
            if backend.ranks[backend.rank] == 0:
                with self._lock:
                    self.labels[options["label"]] += 1
            return function(array, backend, **options)

        return count

    def __enter__(self):
        self._patches = [
            mock.patch.object(storages, "all_gather", self.counting(storages.all_gather)),
            mock.patch.object(gradients, "reduce_scatter", self.counting(gradients.reduce_scatter)),
            mock.patch.object(gradients, "all_reduce", self.counting(gradients.all_reduce)),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self._patches:
            patch.stop()

    def of(self, unit):
        """Gathers of a unit, and those of the smaller group."""
        passes = [f"{phase} of unit {unit}" for phase in ("forward", "backward")]
        return tuple(sum(self.labels[each + end] for each in passes) for end in ("", ", again"))


# Several forward passes.


@strategies_in_turn(0)
def test_forwards_a_b_a_and_backwards_a_b_a_add_up(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        for number in range(2):
            with engine.step() as step:
                for name in "aba":
                    with step.forward(name) as params:
                        assert_array_equal(params["w"], -4.0 * number)
                for name, value in (("a", 1), ("b", 4), ("a", 3)):
                    with step.backward(name) as (params, grads):
                        assert_array_equal(params["w"], -4.0 * number)
                        amount(value)(name, params, grads)
                step.update()
        assert is_clean(engine)
        values = values_of(engine)
        for name, expected in (("a", -8), ("b", -8), ("c", 0)):
            assert_array_equal(values[name]["w"], expected)
            assert_array_equal(values[name]["x"], 0)

    launch(body)


def test_each_backward_needs_a_forward_of_its_own():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            for name in "aab":
                with step.forward(name):
                    pass
            for name in "aba":
                with step.backward(name):
                    pass
            with (
                pytest.raises(fc.StateError, match="backward of unit 'a' without a forward"),
                step.backward("a"),
            ):
                pass
            step.update()
        with engine.step() as step:
            for name in "aa":
                with step.forward(name):
                    pass
            with step.backward("a"):
                pass
            with pytest.raises(
                fc.StateError, match=r"units \['a'\] had a forward pass without its"
            ):
                step.update()
            with step.backward("a"):
                pass
            step.update()
        assert engine.steps == 2

    launch(body, 2)


# Recomputation.

# Gathers of a unit for one forward and one backward pass, among all ranks and among neighbours.
USES = {
    "full_shard": (2, 0),
    "until_backward": (1, 0),
    "near": (1, 1),
    "shard_grad_op": (1, 0),
    "shard_optimizer": (1, 0),
}
by_use = pytest.mark.parametrize("name", list(USES))


@by_use
def test_recomputation_inside_the_backward_pass_gathers_nothing(name):
    def body(backend):
        engine = engine_of(backend, strategy=STRATEGIES[name], window=False, prefetch=0)
        with engine.step() as step:
            for unit in "abc":
                with step.forward(unit):
                    pass
            for unit in "cba":
                with step.backward(unit) as (params, grads):
                    for _ in range(2):
                        with step.forward(unit) as again:
                            assert again["w"].ctypes.data == params["w"].ctypes.data
                    assert_array_equal(params["w"], 0)  # it has not freed them
                    grads["w"] = np.ones((5, 3), np.float32)
            step.update()
        assert is_clean(engine)
        for named in values_of(engine).values():
            assert_array_equal(named["w"], -1)

    with Gathers() as gathers:
        launch(body)
    for unit in "abc":
        everything, again = gathers.of(unit)
        assert (everything, again) == USES[name]


@by_use
def test_segments_are_recomputed_without_a_backward_pass_of_their_own(name):
    """a b c forward; then for each segment (b c), (a): forward once more, and backward."""

    def body(backend):
        engine = engine_of(backend, strategy=STRATEGIES[name], window=False, prefetch=0)
        with engine.step() as step:
            for unit in "abc":
                with step.forward(unit):
                    pass
            for segment in ("bc", "a"):
                for unit in segment:
                    with step.forward(unit, recompute=True) as params:
                        assert_array_equal(params["w"], 0)
                for unit in reversed(segment):
                    with step.backward(unit) as (params, grads):
                        amount(1)(unit, params, grads)
            step.update()
        assert is_clean(engine)
        for named in values_of(engine).values():
            assert_array_equal(named["w"], -1)

    with Gathers() as gathers:
        launch(body)
    whole, near = USES[name]
    for unit in "abc":
        everything, again = gathers.of(unit)
        # One use more, of the kind that the backward pass has.
        assert (everything, again) == (2 * whole - 1, 2 * near)


def test_a_recomputation_needs_no_backward_but_allows_none_either():
    def body(backend):
        engine = engine_of(backend)
        with engine.step() as step:
            with step.forward("a", recompute=True):
                pass
            with (
                pytest.raises(fc.StateError, match="backward of unit 'a' without a forward"),
                step.backward("a"),
            ):
                pass
            one_pass(step, "b", amount(1))
            step.update()
        assert is_clean(engine)

    launch(body, 2)


@strategies_in_turn(1)
def test_prefetch_and_recomputation_of_segments_get_along(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window, prefetch=2)
        for number in range(3):
            with engine.step() as step:
                for unit in "abc":
                    with step.forward(unit):
                        pass
                for segment in ("c", "ab"):
                    for unit in segment:
                        with step.forward(unit, recompute=True) as params:
                            assert_array_equal(params["w"], -2.0 * number)
                    for unit in reversed(segment):
                        with step.backward(unit) as (params, grads):
                            assert_array_equal(params["w"], -2.0 * number)
                            amount(2)(unit, params, grads)
                step.update()
            assert is_clean(engine)

    launch(body)


# Evaluation.


@strategies_in_turn(0)
def test_an_evaluation_has_no_gradients_and_frees_what_it_gathers(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window, prefetch=0)
        train(engine, amount(2))
        with engine.evaluation() as step:
            for _ in range(2):
                for unit in engine.units:
                    with step.forward(unit) as params:
                        assert_array_equal(params["w"], -2)
                        assert unit.grad_state.value == "none"
                    assert engine.held().buffers == 0  # no backward pass is to come
            with (
                pytest.raises(
                    fc.StateError, match="an evaluation has no backward pass; use engine"
                ),
                step.backward("a"),
            ):
                pass
            with pytest.raises(fc.StateError, match="an evaluation has no update"):
                step.update()
        assert is_clean(engine)
        assert engine.steps == 1
        train(engine, amount(1))
        assert_array_equal(values_of(engine)["c"]["w"], -3)

    launch(body)


def test_an_engine_for_evaluation_needs_no_optimizer():
    def body(backend):
        engine = engine_of(backend, optimizer=None)
        assert engine.held().optimizer == 0
        with engine.evaluation() as step:
            for unit in engine.units:
                with step.forward(unit) as params:
                    assert_array_equal(params["w"], 0)
        with engine.step() as step:
            one_pass(step, engine.units, amount(1))
            with pytest.raises(fc.StateError, match="the engine has no optimizer; pass one"):
                step.update()
        assert engine.steps == 0
        assert is_clean(engine)

    launch(body, 2)


# Errors.


def fail_in_forward(engine, step):
    with step.forward("a"):
        pass
    with step.forward("b"):
        raise ZeroDivisionError


def fail_in_second_forward(engine, step):
    one_pass(step, "abc", amount(1))
    fail_in_forward(engine, step)


def fail_in_backward(engine, step):
    for unit in "abc":
        with step.forward(unit):
            pass
    with step.backward("c") as (params, grads):
        amount(1)("c", params, grads)
    with step.backward("b") as (params, grads):  # the gradients of c are on their way
        grads["w"][0] = np.nan
        raise ZeroDivisionError


def fail_in_recomputation(engine, step):
    for unit in "abc":
        with step.forward(unit):
            pass
    with step.backward("c"), step.forward("c"):
        raise ZeroDivisionError


def fail_without_sync(engine, step):
    with step.no_sync():
        one_pass(step, "abc", amount(np.nan))
        fail_in_backward(engine, step)


def fail_between(engine, step):
    one_pass(step, "abc", amount(np.nan))
    engine["b"].unshard(async_op=True)
    raise ZeroDivisionError


def fail_in_writing(engine, step):
    with step.forward("a"):
        pass
    with engine["b"].writing():
        raise ZeroDivisionError


FAILURES = [
    fail_in_forward,
    fail_in_second_forward,
    fail_in_backward,
    fail_in_recomputation,
    fail_without_sync,
    fail_between,
    fail_in_writing,
]


@strategies_in_turn(1)
def test_an_error_in_a_step_leaves_nothing_behind_and_the_engine_goes_on(strategy, window):
    def body(backend):
        prefetch = fc.Prefetch(2, reductions=1)
        engine = engine_of(backend, strategy=strategy, window=window, prefetch=prefetch)
        for number, failure in enumerate(FAILURES * 2):
            with pytest.raises(ZeroDivisionError), engine.step() as step:
                failure(engine, step)
            assert is_clean(engine), failure
            if number % 2:
                train(engine, amount(1))
            assert engine.steps == (number + 1) // 2
        for named in values_of(engine).values():
            assert_array_equal(named["w"], -len(FAILURES))
            assert_array_equal(named["x"], 0)

    launch(body)


@strategies_in_turn(0)
def test_an_error_that_is_caught_inside_the_step_may_be_tried_again(strategy, window):
    def body(backend):
        engine = engine_of(backend, strategy=strategy, window=window)
        with engine.step() as step:
            for unit in "ab":
                with pytest.raises(ZeroDivisionError), step.forward(unit):
                    raise ZeroDivisionError
                with step.forward(unit):
                    pass
                with pytest.raises(ZeroDivisionError), step.forward(unit, recompute=True):
                    raise ZeroDivisionError
            for unit, value in (("b", 5), ("a", 2)):
                with pytest.raises(ZeroDivisionError), step.backward(unit) as (params, grads):
                    amount(np.nan)(unit, params, grads)
                    raise ZeroDivisionError
                kept = strategy.place(backend.world_size).keeps_for_backward
                assert engine[unit].state.value == ("unsharded" if kept else "sharded")
                with step.backward(unit) as (params, grads):
                    amount(value)(unit, params, grads)
            step.update()
        values = values_of(engine)
        assert [values[name]["w"][0, 0] for name in "abc"] == [-2, -5, 0]
        with engine.evaluation() as step:
            with pytest.raises(ZeroDivisionError), step.forward("a"):
                raise ZeroDivisionError
            with step.forward("a") as params:
                assert_array_equal(params["w"], -2)
        assert is_clean(engine)

    launch(body)


def test_a_pass_that_ends_after_its_step_leaves_the_next_step_alone():
    def body(backend):
        engine = engine_of(backend, window=False)
        with pytest.raises(ZeroDivisionError), engine.step() as step:
            with step.forward("a"):
                pass
            late = step.backward("a")
            late.__enter__()
            raise ZeroDivisionError
        with engine.evaluation() as step, step.forward("a") as params:
            late.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
            assert params["w"].size
            assert engine["a"].state.value == "unsharded"

    launch(body)


PAGE = Path(__file__).parents[2] / "docs/howto/training.md"
# Of the page, what it says of microbatches.
SECTION = PAGE.read_text().split("## Microbatches")[1].split("\n## ")[0]


@pytest.mark.parametrize("text", [SECTION, fc.FSDP.step.__doc__], ids=["page", "help"])
@pytest.mark.parametrize("synchronising", [True, False])
def test_what_texts_say_of_microbatches_gives_the_mean_of_all(text, synchronising):
    """The divisor that is told, and the division of the loss, against all on one rank."""
    told = set(re.findall(r"engine\.step\((divisor=[^.)][^)]*)\)", text))
    assert told, "the text tells no divisor"
    M, ranks = 3, 2
    rows = np.random.default_rng(0).normal(size=(ranks, M, 5)).astype(np.float32)

    def body(backend, options, divided):
        unit = fc.Unit("u", {"w": np.zeros(5, np.float32)})
        engine = fc.FSDP([unit], backend, optimizer=fc.optim.SGD(lr=1.0))
        with engine.step(**eval(f"dict({options})", {"M": M, "backend": backend})) as step:
            for number, row in enumerate(rows[backend.rank]):
                late = synchronising or number == M - 1
                with nullcontext() if late else step.no_sync():
                    with step.forward("u"):
                        pass
                    with step.backward("u") as (_, grads):
                        grads["w"] = row / divided
            step.update()
        return engine.state_dict(full=True)["u.w"]

    for options, divided in (*((each, 1) for each in told), ("", np.float32(M))):
        for found in launch(lambda backend, o=options, d=divided: body(backend, o, d), ranks):
            assert_allclose(-found, rows.mean((0, 1)), rtol=1e-5, atol=1e-6)
