"""Learning rates over the steps, against formulas and values written down by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fsdpcore.core.errors import ArgumentError, ConfigError
from fsdpcore.fsdp.optim.schedules import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    Schedule,
    Step,
)


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(0.5), [0.5, 0.5, 0.5]),
        (Constant(0.6, warmup=3), [0.2, 0.4, 0.6, 0.6, 0.6]),
        (Linear(1.0, warmup=0, total=5), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]),
        (Linear(1.0, warmup=1, total=5), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (Linear(1.0, warmup=2, total=4, floor=0.2), [0.5, 1.0, 0.6, 0.2, 0.2]),
        (Cosine(1.0, warmup=0, total=5), [1.0, 0.8535533906, 0.5, 0.1464466094, 0.0, 0.0]),
        (Cosine(1.0, warmup=2, total=6, floor=0.5), [0.5, 1, 0.9267766953, 0.75, 0.5732233047]),
        (Step(1.0, every=2), [1.0, 1.0, 0.1, 0.1, 0.01]),
        (Step(1.0, every=2, factor=0.5, warmup=2), [0.5, 1.0, 0.5, 0.5, 0.25]),
        (Step(1.0, every=(1, 4), factor=0.5), [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]),
        (InverseSqrt(0.5), [0.5, 0.5, 0.5, 0.5, 0.4472135955, 0.4082482905]),
        (InverseSqrt(0.5, warmup=2), [0.25, 0.5, 0.5, 0.5, 0.4472135955]),
    ],
    ids=repr,
)
def test_rates(schedule: Schedule, expected: list[float]) -> None:
    assert rates(schedule, len(expected)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("schedule", [Cosine(0.3, 10, 100, 0.03), Linear(0.3, 10, 100, 0.03)])
def test_decay_rises_to_the_peak_and_falls_to_the_floor(schedule: Schedule) -> None:
    values = np.array(rates(schedule, 120))
    assert values[9] == 0.3  # the last step of the warm-up
    assert (np.diff(values[:10]) > 0).all()
    assert (np.diff(values[9:100]) < 0).all()
    np.testing.assert_array_equal(values[99:], 0.03)


def test_cosine_is_the_formula() -> None:
    for step in range(10, 101):
        turn = math.pi * (step - 10) / 90
        expected = 0.03 + 0.27 * (1 + math.cos(turn)) / 2
        assert Cosine(0.3, 10, 100, 0.03)(step) == pytest.approx(expected, rel=1e-14, abs=1e-16)


def test_rates_are_python_floats_whatever_went_in() -> None:
    """A NumPy scalar would make float32 arithmetic float64."""
    for schedule in (
        Constant(np.float32(0.5)),  # type: ignore[arg-type]
        Cosine(np.float64(1), np.int64(2), np.int32(9)),  # type: ignore[arg-type]
        Step(np.float64(1), np.int64(3)),  # type: ignore[arg-type]
    ):
        assert all(type(rate) is float for rate in rates(schedule, 10))


def test_schedules_are_values() -> None:
    assert Cosine(1, 2, 3) == Cosine(1.0, 2, 3, floor=0.0)
    assert hash(Step(0.1, [2, 5])) == hash(Step(0.1, (2, 5)))  # type: ignore[arg-type]
    assert repr(Cosine(1, 2, 3)) == "Cosine(peak=1.0, warmup=2, total=3, floor=0.0)"
    assert Cosine(1, 2, 3) != Linear(1, 2, 3)


@pytest.mark.parametrize("step", [0, -1, 1.0, True])
def test_steps_count_from_1(step: Any) -> None:
    with pytest.raises(ArgumentError, match="counts from 1"):
        Constant(0.1)(step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(-0.1), "peak of Constant must be at least 0"),
        (lambda: Constant(math.nan), "peak of Constant must be finite"),
        (lambda: Constant(0.1, warmup=-1), r"warmup of Constant \(in steps\) must be at least 0"),
        (lambda: Constant(0.1, warmup=0.5), "warmup of Constant .* must be an integer"),  # type: ignore[arg-type]
        (lambda: Cosine(0.1, 5, 5), "Cosine needs total .* above warmup .* total 5 and warmup 5"),
        (lambda: Linear(0.1, 0, 1), "Linear needs total"),
        (lambda: Linear(0.1, 0, 10, floor=0.2), "floor may not be above peak; got 0.2 and 0.1"),
        (lambda: Linear(0.1, 0, 10, floor=-0.2), "floor of Linear must be at least 0"),
        (lambda: Step(0.1, 0), "every of Step .* must be at least 1"),
        (lambda: Step(0.1, ()), "every of Step must be increasing step numbers"),
        (lambda: Step(0.1, (5, 5)), "every of Step must be increasing step numbers"),
        (lambda: Step(0.1, "5"), "every of Step .* must be an integer, got '5'"),  # type: ignore[arg-type]
        (lambda: Step(0.1, (5, 6.5)), "a step in every of Step must be an integer, got 6.5"),  # type: ignore[arg-type]
        (lambda: Step(0.1, 5, factor=-1), "factor of Step must be at least 0"),
        (lambda: InverseSqrt(-1), "peak of InverseSqrt must be at least 0"),
    ],
)
def test_bad_numbers_are_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@dataclass(frozen=True)
class Falling(Schedule):
    """One of a user's own, which forgets to stop."""

    def at(self, step: int) -> float:
        return 0.3 - 0.1 * step


def test_a_rate_out_of_range_is_refused() -> None:
    assert Falling()(1) == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"rate of Falling\(\) at step 4 must be at least 0"):
        Falling()(4)
