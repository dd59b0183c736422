"""Arrays for the tests: the same on every run, different on every rank; and how to compare them."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = tuple[int, ...]


def array_of(rank: int, shape: Shape, dtype: Any = np.float32, salt: str = "") -> Array:
    """The array of one rank: any bits for integers, values of mixed size and sign for floats."""
    return _made(rank, shape, np.dtype(dtype), salt).copy()


@functools.lru_cache(64)  # every rank asks for those of all ranks, often in one process
def _made(rank: int, shape: Shape, dtype: np.dtype[Any], salt: str) -> Array:
    seed = zlib.crc32(f"{rank}/{shape}/{dtype.name}/{salt}".encode())
    random = np.random.default_rng(seed)
    if dtype == np.bool_:
        return np.asarray(random.integers(0, 2, shape)).astype(dtype)
    if dtype.kind in "iu":
        size = int(np.prod(shape)) * dtype.itemsize
        whole: Array = random.integers(0, 256, size, np.uint8).view(dtype).reshape(shape)
        return whole
    values = np.ldexp(random.standard_normal(shape), random.integers(-4, 5, shape))
    if dtype.kind == "c":
        values = values + 1j * random.standard_normal(shape)
    return np.asarray(values).astype(dtype)


def arrays_of(size: int, shape: Shape, dtype: Any = np.float32, salt: str = "") -> list[Array]:
    """The arrays of all ranks."""
    return [array_of(rank, shape, dtype, salt) for rank in range(size)]


def check_same(actual: object, expected: Array, what: str) -> None:
    """Raise unless shape, dtype and every bit agree; NaNs count as equal."""
    assert isinstance(actual, np.ndarray), f"{what}: got {type(actual).__name__}, not an array"
    _check_kind(actual, expected, what)
    different = _different(actual, expected)
    if different.any():
        raise AssertionError(_first(actual, expected, different, what))


def check_close(actual: Array, expected: Array, what: str, *, terms: int) -> None:
    """Raise unless the arrays agree to the rounding of ``terms`` operations."""
    _check_kind(actual, expected, what)
    if actual.dtype.kind in "biu":
        check_same(actual, expected, what)
        return
    precision = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 2**-52}
    error = terms * precision.get(actual.dtype.name, 2**-23)
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    a, e = actual.astype(wide), expected.astype(wide)
    different = ~np.isclose(a, e, rtol=error, atol=32 * error)
    if different.any():
        raise AssertionError(_first(actual, expected, different, what))


def _check_kind(actual: Array, expected: Array, what: str) -> None:
    got, wanted = (actual.shape, actual.dtype), (expected.shape, expected.dtype)
    assert got == wanted, f"{what}: got {got}, expected {wanted}"


def _different(actual: Array, expected: Array) -> Any:
    if actual.dtype.kind == "c":
        parts = zip((actual.real, actual.imag), (expected.real, expected.imag), strict=True)
        real, imaginary = (_different(np.ascontiguousarray(a), e) for a, e in parts)
        return real | imaginary
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    a, e = (np.ascontiguousarray(array).reshape(-1) for array in (actual, expected))
    different = a.view(bits) != e.view(bits)
    if different.any():
        different &= ~((a != a) & (e != e))
    return different.reshape(expected.shape)


def _first(actual: Array, expected: Array, different: Any, what: str) -> str:
    place = tuple(int(index[0]) for index in np.nonzero(np.atleast_1d(different)))
    at = place if actual.ndim else ()
    return (
        f"{what}: {int(different.sum())} of {actual.size} elements differ, first at {place}: "
        f"got {actual[at]!r}, expected {expected[at]!r}"
    )


# Layouts: functions that put values into an array of that layout.

_FILL = 0x55


def _plain(values: Array) -> Array:
    return values.copy()


def _strided(values: Array) -> Array:
    base = _room(tuple(2 * size + 3 for size in values.shape), values.dtype)
    index: tuple[Any, ...] = (*(slice(1, 1 + 2 * size, 2) for size in values.shape), ...)
    view = base[index]
    view[...] = values
    return view


def _fortran(values: Array) -> Array:
    return np.array(values, order="F")


def _reversed(values: Array) -> Array:
    base = _room(values.shape, values.dtype)
    index: tuple[Any, ...] = (*(slice(None, None, -1) for _ in values.shape), ...)
    view = base[index]
    view[...] = values
    return view


def _column(values: Array) -> Array:
    base = _room((*values.shape, 3), values.dtype)
    view = base[..., 1]
    view[...] = values
    return view


def _read_only(values: Array) -> Array:
    copy = values.copy()
    copy.flags.writeable = False
    return copy


def _room(shape: Shape, dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape)) * dtype.itemsize
    return np.full(size, _FILL, np.uint8).view(dtype).reshape(shape)


WRITABLE: dict[str, Callable[[Array], Array]] = {
    "plain": _plain,
    "strided": _strided,
    "fortran": _fortran,
    "reversed": _reversed,
    "column": _column,
}
LAYOUTS: dict[str, Callable[[Array], Array]] = {**WRITABLE, "read-only": _read_only}


def check_surroundings(array: Array, what: str) -> None:
    """Raise if memory around a view of ``WRITABLE`` has changed; overwrites the view."""
    base = array
    while base.base is not None:
        base = base.base
    if base.dtype != np.uint8 or base.ndim != 1:
        return  # a layout without anything around
    array[...] = _room(array.shape, array.dtype)
    assert (base == _FILL).all(), f"{what}: wrote outside of the array"
