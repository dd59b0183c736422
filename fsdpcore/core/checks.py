"""Turn what a caller passed into canonical Python and NumPy values, or say what is wrong.

Pure: nothing is allocated. Every function takes ``what``, the words that the message uses for
the value, and the exception to raise where that differs between callers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.errors import ArgumentError, FsdpcoreError


def as_int(
    value: object,
    what: str,
    *,
    minimum: int | None = None,
    error: type[FsdpcoreError] = ArgumentError,
) -> int:
    """Return ``value`` as a Python int.

    Raises ``error`` for bools, for what is not an integer, and below ``minimum``.
    """
    number: int | None = None
    if type(value) is int:  # what is common, without the cost of asking for a protocol
        number = value
    elif isinstance(value, SupportsIndex) and not isinstance(value, (bool, np.bool_)):
        try:
            number = operator.index(value)
        except TypeError:
            number = None  # for instance an array that is not a single integer
    if number is None:
        raise error(f"{what} must be an integer, got {value!r}")
    if minimum is not None and number < minimum:
        raise error(f"{what} must be at least {minimum}, got {number}")
    return number


def as_finite(
    value: object,
    what: str,
    *,
    minimum: float | None = None,
    error: type[FsdpcoreError] = ArgumentError,
) -> float:
    """Return ``value`` as a Python float; raise ``error`` if it is no finite real ``>= minimum``.

    The result is a Python float on purpose: under NEP 50 it takes the dtype of the array that it
    is combined with, where a NumPy scalar would upcast float32 arithmetic to float64.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise error(f"{what} must be a real number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise error(f"{what} must be finite, got {number}")
    if minimum is not None and number < minimum:
        raise error(f"{what} must be at least {minimum:g}, got {number:g}")
    return number


def as_shape(shape: object, what: str) -> tuple[int, ...]:
    """Return ``shape`` (an int or a sequence of ints) as a tuple of Python ints.

    Raises ArgumentError for anything else and for negative extents.
    """
    # What is common first, without the cost of asking for protocols.
    if type(shape) is tuple and all(type(extent) is int and extent >= 0 for extent in shape):
        return shape
    if isinstance(shape, SupportsIndex) and not isinstance(shape, np.ndarray):
        return (as_int(shape, f"the extent of {what}", minimum=0),)
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Iterable):
        raise ArgumentError(f"the shape of {what} must be a tuple of integers, got {shape!r}")
    return tuple(
        as_int(extent, f"extent {axis} of the shape of {what}", minimum=0)
        for axis, extent in enumerate(shape)
    )


def as_dtype(dtype: DTypeLike, what: str) -> np.dtype[Any]:
    """Return ``dtype`` as a native numeric ``np.dtype``, ml_dtypes' types (bfloat16) included.

    Raises ArgumentError for what NumPy does not know, for dtypes that are not numbers or bools,
    and for foreign byte order.
    """
    if dtype is None:  # which NumPy would read as float64
        raise ArgumentError(f"{what} needs a dtype, for instance np.float32; got None")
    try:
        result = np.dtype(dtype)
    except TypeError as exc:
        raise ArgumentError(
            f"{what} has the dtype {dtype!r}, which NumPy does not know; for types such as "
            "bfloat16 pass ml_dtypes.bfloat16"
        ) from exc
    # NumPy marks the number types that another package registered with isbuiltin == 2.
    if result.kind not in "biufc" and result.isbuiltin != 2:
        raise ArgumentError(f"{what} has the dtype {result}; only numbers and bools can be sharded")
    if not result.isnative:
        raise ArgumentError(
            f"{what} has the dtype {result.str}, which is not in this machine's byte order; "
            f"use {result.newbyteorder('=').str}"
        )
    return result


def rounds_into(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Whether values of one dtype may become those of another: both real floating, or equal."""
    # By name, as the types of ml_dtypes have no kind in common with NumPy's.
    return given == wanted or all(d.name.startswith(("float", "bfloat")) for d in (given, wanted))


def as_positive(value: object, what: str, *, infinite: bool = False) -> float:
    """Return ``value`` as a Python float; raise ArgumentError if it is no positive real.

    Infinity counts as one if ``infinite``.
    """
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    real = isinstance(value, (Real, np.generic, np.ndarray))
    if not (real and number > 0 and (infinite or math.isfinite(number))):
        raise ArgumentError(f"{what} must be a positive number, got {value!r}")
    return number
