"""Arguments: turn what a caller passed into what is computed with, or say what is wrong with it.

All functions have one form: ``as_...(value, what, ...)`` returns the value in its canonical form,
and raises ``ArgumentError`` (or the ``error`` that a caller names) otherwise. The message begins
with ``what``, the words for the value; then it says what is expected, and what was passed. Nothing
is communicated, and nothing but what is returned is allocated.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from numbers import Real
from typing import Any, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.core.array_module import array_module, on_host
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import ArgumentError, FsdpcoreError
from fsdpcore.core.text import rank_list

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])

MAX_TAG = 2**31 - 1


# Objects.


def kind_of(value: object) -> str:
    """Say what was passed: what is short as itself, of other objects their type."""
    short = value is None or isinstance(value, (bool, int, float, str))
    return f"{value!r:.80}" if short else type(value).__name__


def as_instance(value: T, kind: type, what: str, expected: str, hint: str = "") -> T:
    """Return ``value`` if it is of that type.

    ``expected`` are the words for such a one, ``hint`` those for what to do.
    """
    if not isinstance(value, kind):
        end = f"; {hint}" if hint else ""
        raise ArgumentError(f"{what} must be {expected}, got {kind_of(value)}{end}")
    return value


def as_callable(value: C, what: str, takes: str) -> C:
    """Return ``value`` if it can be called; ``takes`` are the arguments that it will get."""
    if not callable(value):
        raise ArgumentError(f"{what} needs a function of ({takes}), got {kind_of(value)}")
    return value


def as_choice(
    value: T, choices: Collection[T], what: str, *, error: type[FsdpcoreError] = ArgumentError
) -> T:
    """Return ``value`` if it is one of ``choices``."""
    # Not by ``in``, which an array does not answer and for which 1 is True.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        names = list(map(repr, choices))
        these = " or ".join(names) if len(names) == 2 else f"one of {', '.join(names)}"
        raise error(f"{what} must be {these}, got {value!r:.200}")
    return value


def as_name(value: object, what: str, *, error: type[FsdpcoreError] = ArgumentError) -> str:
    """Return ``value`` if it is text of at least a character."""
    if not isinstance(value, str) or not value:
        raise error(f"{what} must be a non-empty string, got {value!r:.200}")
    return value


# Numbers.


def as_int(
    value: object,
    what: str,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    error: type[FsdpcoreError] = ArgumentError,
) -> int:
    """Return ``value`` as a Python int.

    Raises ``error`` for bools, for what is not an integer, below ``minimum`` and above ``maximum``.
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
    if maximum is not None and number > maximum:
        raise error(f"{what} must be at most {maximum}, got {number}")
    return number


def as_int64(value: object, what: str) -> int:
    """Return ``value`` as an integer of 64 bits."""
    return as_int(value, what, minimum=-(2**63), maximum=2**63 - 1)


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


# Ranks.


def as_rank(value: object, world_size: int, what: str) -> int:
    """Return ``value`` as a rank of a group of ``world_size``."""
    rank = as_int(value, f"{what}: a rank")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"{what}: rank {rank} is not in 0..{world_size - 1}")
    return rank


def as_members(ranks: object, world_size: int, what: str) -> tuple[int, ...]:
    """Return ``ranks`` as members of a group of ``world_size``, in their order, each named once."""
    # Text and bytes are sequences too, and a set has no order to number its members by.
    if isinstance(ranks, (str, bytes, bytearray, Set, Mapping)) or not isinstance(ranks, Iterable):
        raise ArgumentError(f"{what}: the members must be a sequence of ranks, got {ranks!r:.200}")
    members = tuple(ranks)
    plain = set(map(type, members)) == {int}  # many ranks, as a rule: no call for each
    if not plain or not 0 <= min(members) <= max(members) < world_size:
        members = tuple(as_rank(rank, world_size, f"{what}: no such member") for rank in members)
    if len(set(members)) != len(members):
        raise ArgumentError(f"{what}: a rank is named twice in {rank_list(members)}")
    return members


def as_counts(counts: object, ranks: int, what: str, total: int | None = None) -> list[int]:
    """Return ``counts`` as numbers of rows, one for each of so many ranks.

    ``total`` is the number of rows that the array has, if that is known.
    """
    if isinstance(counts, (str, bytes, Mapping, Set)) or not isinstance(counts, Iterable):
        raise ArgumentError(f"{what} must be integers, one per rank, got {counts!r:.200}")
    sizes = [as_int(count, f"each of {what}", minimum=0) for count in counts]
    if len(sizes) != ranks:
        raise ArgumentError(f"{what} must be {ranks} numbers, one per rank, got {rank_list(sizes)}")
    if total is not None and sum(sizes) != total:
        raise ArgumentError(
            f"{what} {rank_list(sizes)} sum up to {sum(sizes)}, but the array has {total} rows"
        )
    return sizes


def as_tag(value: object) -> int:
    """Return ``value`` as the tag of a message."""
    return as_int(value, "a tag", minimum=0, maximum=MAX_TAG)


# Arrays.


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


def as_allocatable(shape: object, dtype: np.dtype[Any], what: str) -> tuple[int, ...]:
    """Return ``shape`` as ``as_shape`` does, if some memory is as large as such an array."""
    sizes = as_shape(shape, what)
    if math.prod(sizes) * dtype.itemsize > sys.maxsize:
        raise ArgumentError(f"no memory is as large as {what}, {dtype} of shape {sizes}")
    return sizes


def as_real_array(
    value: Any, what: str, *, floating: bool = False, shape: tuple[int, ...] | None = None
) -> Array:
    """Return ``value`` in this machine's byte order; the same array where it has that already.

    It must be an array of NumPy or CuPy, of real numbers, or of floating-point ones if
    ``floating``; and of that ``shape``, if one is given.
    """
    module = array_module(value)
    real = module is not None and (
        rounds_into(value.dtype, _FLOAT) if floating else _is_real(value.dtype)
    )
    if not real:
        raise ArgumentError(
            f"{what} must be an array of NumPy or CuPy of "
            f"{'floating-point' if floating else 'real'} numbers, got "
            f"{kind_of(value) if module is None else value.dtype}"
        )
    array: Array = value
    if shape is not None and array.shape != shape:
        raise ArgumentError(f"{what} must have the shape {shape}, got {array.shape}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_indices(values: Any, size: int, what: str) -> Array:
    """Return ``values``, an array of integers in [0, ``size``), as int64.

    On a GPU a look at them would wait for it: there their range is not checked.
    """
    dtype = getattr(values, "dtype", None)
    if array_module(values) is None or dtype is None or dtype.kind not in "iu":
        raise ArgumentError(f"{what} must be an array of integers, got {dtype or type(values)}")
    if on_host(values) and values.size:
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= size:
            raise ArgumentError(f"{what} are in [0, {size}), got {low if low < 0 else high}")
    found: Array = values.astype(np.int64)
    return found


_FLOAT = np.dtype(np.float32)


def _is_real(dtype: np.dtype[Any]) -> bool:
    """Whether it is of numbers without an imaginary part; 2 marks those of other packages."""
    return dtype.kind in "biuf" or dtype.isbuiltin == 2
