"""Initialisers: they write any range of a parameter without materialising the rest of it.

``fill`` gives element ``i`` of a parameter the same value whatever range was asked for, so a rank
of any world size can fill its own piece, and the parameter does not depend on how it was sharded::

    Spec((4096, 4096), init=initializers.normal(std=0.02))

Random values come from NumPy's Philox, a counter-based generator (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). They are drawn in blocks of ``BLOCK_ELEMENTS``: the key is
a hash of (seed, name) and the block's number stands in the high half of the counter, so a block
costs nothing unless it overlaps the range. NumPy keeps a generator's stream the same within a
release but may change it in a later one (NEP 19): ranks of a job need the same NumPy.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.checks import as_dtype, as_finite, as_int
from fsdpcore.core.errors import ArgumentError, ConfigError

__all__ = [
    "Constant",
    "Initializer",
    "Normal",
    "Ones",
    "Uniform",
    "Zeros",
    "constant",
    "normal",
    "ones",
    "uniform",
    "zeros",
]


def __dir__() -> list[str]:
    return __all__


BLOCK_ELEMENTS = 65536
"""Random values drawn from one counter; another number would give other values."""

_ml_dtypes: Any = ml_dtypes  # whose finfo and iinfo carry no type hints


class Initializer(ABC):
    """How a parameter gets its first values. Implementations are frozen dataclasses."""

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Refuse a dtype of which this initialiser cannot fill a parameter.

        Args:
            dtype: of the parameter.

        Raises:
            ArgumentError: it cannot. As it stands it takes every dtype of numbers or bools.
        """
        as_dtype(dtype, "a parameter")

    @abstractmethod
    def fill(self, out: NDArray[Any], start: int, *, seed: int, name: str) -> None:
        """Write elements ``[start, start + out.size)`` of the flattened (C order) parameter.

        An element's value depends on ``seed``, ``name``, its index and the dtype, and on nothing
        else.

        Args:
            out: a writable 1-D NumPy array of the parameter's dtype; the caller owns it.
            start: index of the first element in the flattened parameter, from 0.
            seed: the job's.
            name: of the parameter, ``unit.parameter``.

        Raises:
            ArgumentError: an argument is wrong, or ``check_dtype`` refuses the dtype; nothing was
                written.
        """


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element is the same.

    Args:
        value: of every element: a real number, infinity and NaN too. Integer and bool parameters
            need one that they can hold.

    Raises:
        ConfigError: ``value`` is no real number, or beyond the range of float64.
    """

    value: float

    def __post_init__(self) -> None:
        value: Any = self.value
        if not isinstance(value, Real):
            raise ConfigError(f"the value of Constant must be a real number, got {value!r}")
        try:
            as_float = float(value)
        except OverflowError as exc:
            raise ConfigError("the value of Constant is beyond the range of float64") from exc
        # A large int must not lose digits on its way into an integer parameter.
        exact = int(value) if isinstance(value, Integral) else as_float
        object.__setattr__(self, "value", exact)

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise ArgumentError if ``dtype`` would truncate or overflow the value."""
        super().check_dtype(dtype)
        bounds = _integer_bounds(dtype)
        if bounds is not None:
            whole = math.isfinite(self.value) and self.value == int(self.value)
            if not (whole and bounds[0] <= self.value <= bounds[1]):
                raise ArgumentError(f"a {dtype} parameter cannot hold the constant {self.value}")
        elif math.isfinite(self.value):
            with np.errstate(over="ignore"):
                cast = np.asarray(float(self.value)).astype(dtype)
            if not np.isfinite(cast):
                raise ArgumentError(f"the constant {self.value} overflows {dtype}")

    def fill(self, out: NDArray[Any], start: int, *, seed: int, name: str) -> None:
        _check_fill(self, out, start)
        out[...] = self.value


@dataclass(frozen=True)
class Zeros(Initializer):
    """Every element is 0."""

    def fill(self, out: NDArray[Any], start: int, *, seed: int, name: str) -> None:
        _check_fill(self, out, start)
        out[...] = 0


@dataclass(frozen=True)
class Ones(Initializer):
    """Every element is 1."""

    def fill(self, out: NDArray[Any], start: int, *, seed: int, name: str) -> None:
        _check_fill(self, out, start)
        out[...] = 1


class _Random(Initializer):
    """Base of the random initialisers: which block lies where, and in which dtype it is drawn."""

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise ArgumentError unless ``dtype`` is a real floating type."""
        if not _is_real_floating(dtype):
            raise ArgumentError(
                f"{self!r} draws real numbers, so it cannot fill a {dtype} parameter; use a "
                "floating dtype, or initializers.constant"
            )

    def fill(self, out: NDArray[Any], start: int, *, seed: int, name: str) -> None:
        """Draw in float64 for float64, else in float32, then round.

        Allocates at most one block of ``BLOCK_ELEMENTS``.
        """
        start = _check_fill(self, out, start)
        key = _philox_key(as_int(seed, "seed"), name)
        draw_dtype = np.dtype(np.float64 if out.dtype.itemsize >= 8 else np.float32)
        scratch = np.empty(min(BLOCK_ELEMENTS, start % BLOCK_ELEMENTS + out.size), draw_dtype)
        for block, low, high, position in _blocks(start, out.size):
            generator = np.random.Generator(np.random.Philox(key=key, counter=block << 128))
            # A block is drawn from its start, as a sequence, so its head can be had alone.
            drawn = scratch[:high]
            self._draw(generator, drawn)
            out[position : position + high - low] = drawn[low:]

    @abstractmethod
    def _draw(self, generator: np.random.Generator, out: NDArray[Any]) -> None:
        """Overwrite ``out`` (float32 or float64, contiguous) with the next values."""


@dataclass(frozen=True)
class Normal(_Random):
    """Independent draws from the normal distribution, for parameters of a real floating dtype.

    Args:
        mean: of the distribution, finite; by default 0.
        std: its standard deviation, finite and at least 0; by default 1.

    Raises:
        ConfigError: one of them is out of its range.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        mean = as_finite(self.mean, "the mean of Normal", error=ConfigError)
        std = as_finite(self.std, "the std of Normal", minimum=0.0, error=ConfigError)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    def _draw(self, generator: np.random.Generator, out: NDArray[Any]) -> None:
        generator.standard_normal(out=out, dtype=out.dtype.type)
        np.multiply(out, self.std, out=out)
        np.add(out, self.mean, out=out)


@dataclass(frozen=True)
class Uniform(_Random):
    """Independent draws from the uniform distribution, for parameters of a real floating dtype.

    Args:
        low: the least value, finite; by default 0.
        high: the end of the range, finite and at least ``low``; by default 1. As in NumPy, it is
            not drawn, but rounding may give it.

    Raises:
        ConfigError: one of them, or their difference, is not finite, or ``low`` is above ``high``.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        low = as_finite(self.low, "low of Uniform", error=ConfigError)
        high = as_finite(self.high, "high of Uniform", error=ConfigError)
        if not low <= high:
            raise ConfigError(f"Uniform needs low <= high, got low={low:g} and high={high:g}")
        as_finite(high - low, "high - low of Uniform", error=ConfigError)
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def _draw(self, generator: np.random.Generator, out: NDArray[Any]) -> None:
        generator.random(out=out, dtype=out.dtype.type)
        np.multiply(out, self.high - self.low, out=out)
        np.add(out, self.low, out=out)


zeros = Zeros()
ones = Ones()


def constant(value: float) -> Constant:
    """Every element is ``value``.

    Args:
        value: of every element: a real number, infinity and NaN too. Integer and bool parameters
            need one that they can hold.

    Returns:
        The initializer, for ``Spec``.

    Raises:
        ConfigError: ``value`` is no real number, or beyond the range of float64.

    Example::

        fc.Spec(512, init=fc.initializers.constant(0.5))
    """
    return Constant(value)


def normal(mean: float = 0.0, std: float = 1.0) -> Normal:
    """Independent draws from a normal distribution.

    Args:
        mean: of the distribution, finite; by default 0.
        std: its standard deviation, finite and at least 0; by default 1.

    Returns:
        The initializer, for ``Spec``.

    Raises:
        ConfigError: one of them is out of its range.

    Example::

        fc.Spec((512, 512), init=fc.initializers.normal(std=0.02))
    """
    return Normal(mean, std)


def uniform(low: float = 0.0, high: float = 1.0) -> Uniform:
    """Independent draws from a uniform distribution.

    Args:
        low: the least value, finite; by default 0.
        high: the end of the range, finite and at least ``low``; by default 1. As in NumPy, it is
            not drawn, but rounding may give it.

    Returns:
        The initializer, for ``Spec``.

    Raises:
        ConfigError: one of them, or their difference, is not finite, or ``low`` is above ``high``.

    Example::

        fc.Spec((512, 512), init=fc.initializers.uniform(-0.1, 0.1))
    """
    return Uniform(low, high)


def _blocks(start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(block, low, high, position)``: ``[low, high)`` of the block belongs at position."""
    index, stop = start, start + size
    while index < stop:
        block, low = divmod(index, BLOCK_ELEMENTS)
        high = min(BLOCK_ELEMENTS, stop - block * BLOCK_ELEMENTS)
        yield block, low, high, index - start
        index += high - low


def _philox_key(seed: int, name: str) -> int:
    """Return 128 bits that depend on seed and name, and are the same on every machine."""
    # The seed's digits end at the NUL, so no other (seed, name) gives the same text.
    text = f"{seed}\0{name}".encode()
    digest = hashlib.blake2b(text, digest_size=16, person=b"fsdpcore.init").digest()
    return int.from_bytes(digest, "little")


def _check_fill(initializer: Initializer, out: NDArray[Any], start: int) -> int:
    """Return ``start`` as an int; raise ArgumentError for what ``fill`` cannot work with."""
    if not isinstance(out, np.ndarray):
        raise ArgumentError(f"out must be a NumPy array, got {type(out).__name__}")
    if out.ndim != 1:
        raise ArgumentError(
            f"out must be 1-D, a range of the flattened parameter; got shape {out.shape}"
        )
    if not out.flags.writeable:
        raise ArgumentError("out is read-only; fill writes into it")
    initializer.check_dtype(out.dtype)
    return as_int(start, "start", minimum=0)


def _integer_bounds(dtype: np.dtype[Any]) -> tuple[int, int] | None:
    """Return the range of an integer or bool dtype, ml_dtypes' included; None for other dtypes."""
    if dtype.kind == "b":
        return 0, 1
    try:
        info = _ml_dtypes.iinfo(dtype)
    except ValueError:
        return None
    return int(info.min), int(info.max)


def _is_real_floating(dtype: np.dtype[Any]) -> bool:
    """Whether dtype is a real floating type of NumPy or ml_dtypes, which has several kinds."""
    try:
        _ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return dtype.kind != "c"
