"""Learning rates that change from step to step: frozen values, called with the step's number.

Every optimizer takes one in place of a number: ``AdamW(lr=schedules.Cosine(3e-4, 100, 2000))``.
Steps count from 1. With ``warmup`` w, the learning rate rises in a straight line through the first
w steps, ``peak * step / w``, and reaches the peak at step w; with 0 the first step has the peak.
After ``total`` steps it stays as it is.

A schedule of your own is a frozen dataclass that derives from ``Schedule`` and gives ``at``. Its
``repr`` is what ranks compare, so it must show everything that the rate follows from.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from fsdpcore.core.checks import as_finite, as_int
from fsdpcore.core.errors import ConfigError

__all__ = ["Constant", "Cosine", "InverseSqrt", "Linear", "Schedule", "Step"]


def __dir__() -> list[str]:
    return __all__


class Schedule(ABC):
    """A learning rate as a function of the step, the same on every rank."""

    @abstractmethod
    def at(self, step: int) -> float:
        """Return the learning rate of a step: finite and not negative.

        Args:
            step: the number of the step, from 1, which was checked.
        """

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step.

        Args:
            step: the number of the step, from 1.

        Raises:
            ArgumentError: ``step`` is no integer of at least 1.
            ConfigError: ``at`` gives a rate that is negative or not finite.
        """
        step = as_int(step, "step (which counts from 1)", minimum=1)
        what = f"the learning rate of {self!r} at step {step}"
        return as_finite(self.at(step), what, minimum=0.0, error=ConfigError)

    def _set_finite(self, field: str, *, minimum: float = 0.0) -> float:
        what = f"{field} of {type(self).__name__}"
        value = as_finite(getattr(self, field), what, minimum=minimum, error=ConfigError)
        object.__setattr__(self, field, value)
        return value

    def _set_int(self, field: str, *, minimum: int = 0) -> int:
        what = f"{field} of {type(self).__name__} (in steps)"
        value = as_int(getattr(self, field), what, minimum=minimum, error=ConfigError)
        object.__setattr__(self, field, value)
        return value


@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate at every step, after a warm-up.

    Args:
        peak: the learning rate, at least 0.
        warmup: through so many steps the rate rises in a straight line, and reaches ``peak`` at
            the last of them; by default 0, for none.

    Raises:
        ConfigError: one of them is negative, ``peak`` is not finite, or ``warmup`` no integer.
    """

    peak: float
    warmup: int = 0

    def __post_init__(self) -> None:
        self._set_finite("peak")
        self._set_int("warmup")

    def at(self, step: int) -> float:
        return _warmed(self.peak, self.warmup, step)


@dataclass(frozen=True)
class _Decay(Schedule):
    """From the peak at the last step of the warm-up down to the floor at step ``total``."""

    peak: float
    warmup: int
    total: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        peak = self._set_finite("peak")
        warmup = self._set_int("warmup")
        total = self._set_int("total", minimum=1)
        floor = self._set_finite("floor")
        name = type(self).__name__
        if total <= max(warmup, 1):
            raise ConfigError(
                f"{name} needs total (all steps, those of the warm-up too) above warmup and above "
                f"1, got total {total} and warmup {warmup}"
            )
        if floor > peak:
            raise ConfigError(
                f"{name} falls from peak to floor, so floor may not be above peak; got "
                f"{floor:g} and {peak:g}"
            )

    def at(self, step: int) -> float:
        first = max(self.warmup, 1)
        if step <= first:
            return _warmed(self.peak, self.warmup, step)
        if step >= self.total:
            return self.floor
        left = self._left((step - first) / (self.total - first))
        return self.floor + (self.peak - self.floor) * left

    @abstractmethod
    def _left(self, progress: float) -> float:
        """Return which part of the way from floor to peak is left, for progress in (0, 1)."""


@dataclass(frozen=True)
class Cosine(_Decay):
    """Half a cosine from ``peak`` to ``floor``, which it reaches at step ``total``.

    That is::

        rate = floor + (peak - floor) * (1 + cos(pi * (step - w) / (total - w))) / 2

    with w = ``warmup``, or 1 if there is none. (Loshchilov & Hutter, "SGDR: stochastic gradient
    descent with warm restarts", ICLR 2017, equation 5, without restarts.)

    Args:
        peak: the largest rate, finite.
        warmup: through so many steps the rate rises in a straight line, and reaches ``peak`` at
            the last of them. With 0 the first step has the peak.
        total: all steps, those of the warm-up too; above ``warmup`` and above 1.
        floor: the rate from step ``total`` on, from 0 to ``peak``; by default 0.

    Raises:
        ConfigError: one of them is out of its range.
    """

    def _left(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Linear(_Decay):
    """A straight line from ``peak`` to ``floor``, which it reaches at step ``total``.

    That is::

        rate = floor + (peak - floor) * (total - step) / (total - w)

    with w = ``warmup``, or 1 if there is none.

    Args:
        peak: the largest rate, finite.
        warmup: through so many steps the rate rises in a straight line, and reaches ``peak`` at
            the last of them. With 0 the first step has the peak.
        total: all steps, those of the warm-up too; above ``warmup`` and above 1.
        floor: the rate from step ``total`` on, from 0 to ``peak``; by default 0.

    Raises:
        ConfigError: one of them is out of its range.
    """

    def _left(self, progress: float) -> float:
        return 1.0 - progress


@dataclass(frozen=True)
class Step(Schedule):
    """Multiplied by ``factor`` after every so many steps, or after those that are listed.

    That is::

        rate = peak * factor**k

    With an integer ``every``, k is ``(step - 1) // every``; with a sequence, k is how many of its
    steps have passed. The steps of the warm-up count.

    Args:
        peak: the rate before the first of these steps, at least 0.
        every: a number of steps, at least 1; or a tuple or list of increasing step numbers, each
            the last one before the rate changes.
        factor: what the rate is multiplied by, at least 0; by default 0.1.
        warmup: through so many steps the rate rises in a straight line; by default 0, for none.

    Raises:
        ConfigError: one of them is out of its range, or ``every`` is neither of these two.
    """

    peak: float
    every: int | tuple[int, ...]
    factor: float = 0.1
    warmup: int = 0

    def __post_init__(self) -> None:
        self._set_finite("peak")
        self._set_finite("factor")
        self._set_int("warmup")
        every: object = self.every
        if not isinstance(every, (tuple, list)):
            self._set_int("every", minimum=1)
            return
        what = "a step in every of Step"
        steps = tuple(as_int(step, what, minimum=1, error=ConfigError) for step in every)
        if not steps or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ConfigError(f"every of Step must be increasing step numbers, got {every!r}")
        object.__setattr__(self, "every", steps)

    def at(self, step: int) -> float:
        if isinstance(self.every, int):
            passed = (step - 1) // self.every
        else:
            passed = sum(step > last for last in self.every)
        return _warmed(self.peak, self.warmup, step) * self.factor**passed


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """``min(peak, 1 / sqrt(step))``: the relative step size of Adafactor.

    (Shazeer & Stern, "Adafactor: adaptive learning rates with sublinear memory cost", ICML 2018,
    algorithm 4, where ``peak`` is 0.01.)

    Args:
        peak: the largest rate, at least 0; by default 0.01.
        warmup: through so many steps the rate is multiplied by ``step / warmup``; by default 0,
            for none.

    Raises:
        ConfigError: one of them is negative, ``peak`` is not finite, or ``warmup`` no integer.
    """

    peak: float = 1e-2
    warmup: int = 0

    def __post_init__(self) -> None:
        self._set_finite("peak")
        self._set_int("warmup")

    def at(self, step: int) -> float:
        return _warmed(min(self.peak, 1.0 / math.sqrt(step)), self.warmup, step)


def _warmed(rate: float, warmup: int, step: int) -> float:
    return rate * step / warmup if step < warmup else rate
