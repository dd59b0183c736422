"""What is gathered ahead of its use, in which order, and what it may cost."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from numpy.testing import assert_array_equal
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
from fsdpcore.fsdp.step.schedule import UnitOrder
from fsdpcore.fsdp.units import gradients

SIZES = (100, 100, 100, 100, 100)


def engine_of(backend, prefetch, sizes=SIZES, **options):
    units = [fc.Unit(f"u{i}", {"w": np.zeros(n, np.float32)}) for i, n in enumerate(sizes)]
    options.setdefault("window", False)
    return fc.FSDP(units, backend, prefetch=prefetch, optimizer=fc.optim.SGD(lr=1.0), **options)


def gathered(engine):
    """Numbers of the units that are there, and of those that are on their way."""
    states = [unit.state.value for unit in engine.units]
    there = {n for n, state in enumerate(states) if state == "unsharded"}
    return there, {n for n, state in enumerate(states) if state == "gathering"}


def watched(engine, order):
    """Go through a step; return what is on its way inside of each context."""
    seen = {"forward": [], "backward": []}
    with engine.step() as step:
        for number in order:
            with step.forward(f"u{number}"):
                there, coming = gathered(engine)
                assert there == {number}
                assert engine.has_pending_prefetch == bool(coming)
                seen["forward"].append(coming)
        for number in reversed(order):
            with step.backward(f"u{number}") as (_, grads):
                there, coming = gathered(engine)
                assert there == {number}
                seen["backward"].append(coming)
                grads["w"][:] = 1
        step.update()
    assert is_clean(engine)
    return seen


@pytest.mark.parametrize("strategy", ["full_shard", "near", "hybrid_shard"])
@pytest.mark.parametrize(
    ("prefetch", "hosts", "depth"),
    [(0, 1, 0), (1, 1, 1), (2, 1, 2), (7, 1, 7), (None, 1, 0), (None, 2, 1)],
)
def test_so_many_units_are_gathered_ahead(prefetch, hosts, depth, strategy):
    def body(backend):
        engine = engine_of(backend, prefetch, strategy=STRATEGIES[strategy])
        steps = [watched(engine, range(5)) for _ in range(2)]
        assert engine.gathered_peak == engine.plan().peak_live_bytes
        return steps

    last = len(SIZES) - 1
    ahead = [set(range(n + 1, min(n + depth, last) + 1)) for n in range(5)]
    back = [set(range(max(n - depth, 0), n)) for n in reversed(range(5))]
    for steps in launch(body, hosts=hosts):
        assert steps == [{"forward": ahead, "backward": back}] * 2


def test_no_more_bytes_are_gathered_ahead_than_allowed_but_for_one_unit_alone():
    def body(backend):
        engine = engine_of(backend, fc.Prefetch(4, max_bytes=1000), sizes=(100, 100, 100, 400, 100))
        return watched(engine, range(5))

    for seen in launch(body, 2):
        assert seen["forward"] == [{1, 2}, {2}, {3}, {4}, set()]
        assert seen["backward"] == [{3}, {1, 2}, {0, 1}, {0}, set()]


@pytest.mark.parametrize(("depth", "live"), [(0, 1), (1, 2), (2, 3), (4, 5)])
def test_memory_is_that_of_the_units_ahead(depth, live):
    def body(backend):
        engine = engine_of(backend, fc.Prefetch(depth, reductions=0))
        with engine.evaluation() as step:
            for unit in engine.units:
                with step.forward(unit):
                    pass
        forward = engine.gathered_peak
        watched(engine, range(5))
        return forward, engine.gathered_peak

    for forward, whole in launch(body, 2):
        assert forward == live * 400
        # Gradients of one unit are written before it and those ahead of it are freed.
        assert whole == (live + 1) * 400


@pytest.mark.parametrize(
    ("prefetch", "hosts", "state"),
    [
        (0, 2, "reduced"),
        (2, 2, "being reduced"),
        (2, 1, "reduced"),
        (None, 2, "being reduced"),
        (None, 1, "reduced"),
        (fc.Prefetch(2, reductions=0), 2, "reduced"),
        (fc.Prefetch(0, reductions=1), 1, "being reduced"),
    ],
)
def test_gradients_are_reduced_while_the_backward_pass_goes_on_if_wanted(prefetch, hosts, state):
    def body(backend):
        engine = engine_of(backend, prefetch)
        states = []

        def note(unit, params, grads):
            number = int(unit.name[1:])
            grads["w"][:] = number
            states.append([unit.grad_state.value for unit in engine.units[number + 1 :]])

        train(engine, note)
        return states, values_of(engine)

    for states, values in launch(body, hosts=hosts):
        assert states == [([state] + ["reduced"] * n)[:n] for n in range(5)]
        for number in range(5):
            assert_array_equal(values[f"u{number}"]["w"], -number)


def test_sums_over_replicas_end_while_the_backward_pass_goes_on(monkeypatch):
    summed = [[threading.Event() for _ in SIZES] for _ in range(4)]
    all_reduce = gradients.all_reduce

    def noted(array, group, *, label, **options):
        all_reduce(array, group, label=label, **options)
        summed[group.root.rank][int(label[len("gradients of unit u")])].set()

    def body(backend):
        strategy = fc.Strategy("hybrid_shard", shard_group_size=2)
        engine = engine_of(backend, 2, strategy=strategy)

        def wait_for_sums(unit, params, grads):
            grads["w"][:] = backend.rank
            for before in summed[backend.rank][int(unit.name[1:]) + 1 :]:
                assert before.wait(10), unit

        train(engine, wait_for_sums)
        return values_of(engine)

    monkeypatch.setattr(gradients, "all_reduce", noted)
    for values in launch(body, 4, hosts=2):
        for number in range(5):
            assert_array_equal(values[f"u{number}"]["w"], -1.5)


ORDER = (2, 0, 4, 3, 1)


def test_from_the_second_step_on_the_order_is_that_of_the_first():
    def body(backend):
        engine = engine_of(backend, 1)
        return [watched(engine, ORDER) for _ in range(3)]

    guessed = {"forward": [{3}, {1}, set(), {4}, {2}], "backward": [{0}, {2}, {3}, set(), {1}]}
    known = {"forward": [{0}, {4}, {3}, {1}, set()], "backward": [{3}, {4}, {0}, {2}, set()]}
    assert launch(body, 2) == [[guessed, known, known]] * 2


def test_a_step_without_an_update_is_no_example():
    def body(backend):
        engine = engine_of(backend, 1)
        with engine.evaluation() as step:
            for number in ORDER:
                with step.forward(f"u{number}"):
                    pass
        with pytest.raises(ZeroDivisionError), engine.step() as step:
            one_pass(step, ["u3", "u1"])
            raise ZeroDivisionError
        return watched(engine, range(5))

    for seen in launch(body, 2):
        assert seen["forward"] == [{1}, {2}, {3}, {4}, set()]


@strategies_in_turn(1)
def test_wrong_guesses_do_no_harm(strategy, window):
    orders = [list(range(5))]
    chance = random.Random(3)
    for size in (3, 5, 1, 4):
        orders.append(chance.sample(range(5), size))

    def body(backend, prefetch):
        engine = engine_of(
            backend, prefetch, strategy=strategy, window=window, sizes=(13, 7, 1, 22, 5)
        )

        def give(unit, params, grads):
            size = params["w"].size
            grads["w"] = params["w"] / 4 + np.arange(size, dtype=np.float32) + backend.rank

        for order in orders:
            with engine.step() as step:
                one_pass(step, [f"u{n}" for n in order], give)
                step.update()
            assert is_clean(engine)
            with engine.evaluation() as step:
                for number in reversed(order):
                    with step.forward(f"u{number}") as params:
                        assert params["w"].all() or number != order[0]
            assert is_clean(engine)
        return {unit: named["w"].tobytes() for unit, named in values_of(engine).items()}

    # In a window nothing is gathered ahead, only reductions are left to begin.
    ahead = (3, fc.Prefetch(2, max_bytes=60))
    prefetches = (0, fc.Prefetch(1, reductions=1), *(() if window else ahead))
    expected, *others = (launch(lambda b, p=p: body(b, p)) for p in prefetches)
    for other in others:
        assert other == expected


def test_prefetch_by_hand_does_what_is_left_to_do():
    def body(backend):
        engine = engine_of(backend, 0)
        assert not engine.has_pending_prefetch
        engine.prefetch("u1")
        assert engine.has_pending_prefetch
        assert engine.units[1].has_pending_prefetch
        assert gathered(engine) == (set(), {1})
        engine.prefetch(engine.units[1])  # on its way
        assert gathered(engine) == (set(), {1})
        engine.prefetch("u0")  # another one
        engine.units[1].unshard()
        assert gathered(engine) == ({1}, {0})
        assert_array_equal(engine.units[1].params["w"], 0)
        engine.prefetch("u1")  # gathered
        assert gathered(engine) == ({1}, {0})
        for unit in engine.units:
            unit.reshard()
        assert not engine.has_pending_prefetch
        with pytest.raises(fc.ArgumentError, match="no unit 'u9'; it has u0, u1"):
            engine.prefetch("u9")
        engine.prefetch("u1")  # and again
        train(engine)
        assert is_clean(engine)

    launch(body, 2)


def test_prefetch_does_nothing_where_nothing_has_to_be_fetched():
    def body(backend):
        kept = engine_of(backend, 0, strategy="shard_grad_op")
        for changed in (False, True):
            if changed:
                train(kept)  # the others have not seen the update
            kept.prefetch("u0")
            assert kept.has_pending_prefetch
            kept.units[0].unshard()
            kept.units[0].reshard()
        replicated = engine_of(backend, 0, strategy="no_shard")
        for engine in (kept, replicated, engine_of(backend, 0, window=True)):
            for _ in range(2):
                engine.prefetch("u0")
                assert not engine.has_pending_prefetch
                assert is_clean(engine)

    launch(body, 2)


# The order alone, without an engine.


def follow(schedule, events):
    """Go through a step; return what comes next after each event."""
    schedule.begin()
    upcoming = [tuple(schedule.enter(phase, number)) for phase, number in events]
    assert schedule.events == events
    schedule.end()
    return upcoming


def passes(*parts):
    """``("forward", "012")`` and so on as events."""
    return [(phase, int(number)) for phase, numbers in parts for number in numbers]


def test_declared_order_until_a_step_has_ended():
    schedule = UnitOrder(4)
    assert follow(schedule, passes(("forward", "13"), ("backward", "31"))) == [
        (2, 3),
        (),
        (2, 1, 0),
        (0,),
    ]
    assert follow(schedule, passes(("forward", "13"), ("backward", "31"))) == [(3,), (), (1,), ()]
    # Unknown ones have no followers, and the first step stays the example.
    for _ in range(2):
        assert follow(schedule, passes(("forward", "02"))) == [(), ()]
    assert follow(schedule, passes(("forward", "1"), ("backward", "1"))) == [(3,), ()]


@pytest.mark.parametrize("order", ["01021", "00121", "00111"])
def test_a_unit_may_occur_several_times_in_a_pass(order):
    schedule = UnitOrder(3)
    events = passes(("forward", order), ("backward", order[::-1]))
    follow(schedule, events)
    upcoming = follow(schedule, events)
    for part in (slice(5), slice(5, None)):
        numbers = [number for _, number in events[part]]
        assert upcoming[part] == [tuple(numbers[n + 1 :]) for n in range(5)]


def test_each_microbatch_begins_anew():
    schedule = UnitOrder(3)
    micro = passes(("forward", "201"), ("backward", "102"))
    follow(schedule, micro * 3)
    one = [(0, 1), (1,), (), (0, 2), (2,), ()]
    assert follow(schedule, micro * 2) == one * 2


def test_recomputation_of_segments_belongs_to_the_backward_pass():
    schedule = UnitOrder(4)
    segments = (("forward", "23"), ("backward", "32"), ("forward", "01"), ("backward", "10"))
    events = passes(("forward", "0123"), *segments)
    follow(schedule, events)
    upcoming = follow(schedule, events)
    backward = [
        next_ for (phase, _), next_ in zip(events, upcoming, strict=True) if phase == "backward"
    ]
    assert backward == [(2, 1, 0), (1, 0), (0,), ()]
    with_microbatches = UnitOrder(4)
    follow(with_microbatches, events * 2)
    assert follow(with_microbatches, events) == upcoming
