"""What the collectives must compute, told a second time and apart from the package's code.

Everything takes the arrays of all ranks, in rank order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

BOOL = np.dtype(np.bool_)
INTEGERS = [np.dtype(f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")]
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
FLOATS = [*HALVES, np.dtype(np.float32), np.dtype(np.float64)]
COMPLEX = np.dtype(np.complex64)
COMPLEXES = [COMPLEX, np.dtype(np.complex128)]
DTYPES = [BOOL, *INTEGERS, *FLOATS, *COMPLEXES]
BITWISE = ["band", "bor", "bxor"]
LOGICAL = ["land", "lor", "lxor"]
OPS = ["sum", "mean", "min", "max", "prod", *BITWISE, *LOGICAL]


def allowed(op: str, dtype: np.dtype[Any]) -> bool:
    """Whether a reduction has a meaning for a dtype."""
    if op in BITWISE:
        return dtype in (BOOL, *INTEGERS)
    if op in LOGICAL:
        return dtype == BOOL
    if op == "mean":
        return dtype in (*FLOATS, *COMPLEXES)
    return dtype not in COMPLEXES or op in ("sum", "prod")


COMBINATIONS = [(dtype, op) for dtype in DTYPES for op in OPS if allowed(op, dtype)]


def reduced(parts: Sequence[Array], op: str) -> Array:
    """The elementwise reduction, to the bit."""
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    with np.errstate(all="ignore"):
        total = _tree([part.astype(wide) for part in parts], _combine(op, dtype))
        if op == "mean":
            total = _divided(total, len(parts))
        return total.astype(dtype)


def _tree(values: Sequence[Array], combine: Callable[[Array, Array], Array]) -> Array:
    """The largest power of two of ranks that leaves some over, with the rest of them."""
    if len(values) == 1:
        return values[0]
    left = 1
    while 2 * left < len(values):
        left *= 2
    return combine(_tree(values[:left], combine), _tree(values[left:], combine))


def _combine(op: str, dtype: np.dtype[Any]) -> Callable[[Array, Array], Array]:
    if op == "min":
        return _smaller
    if op == "max":
        return _larger
    if op in (*BITWISE, *LOGICAL):  # the latter of bool alone, where they are the same
        return {"and": _bits_and, "or": _bits_or, "xor": _bits_xor}[op[1:]]
    if dtype in COMPLEXES and op == "prod":
        return _complex_product
    if dtype == BOOL:
        return (lambda a, b: a | b) if op == "sum" else (lambda a, b: a & b)
    add_or_multiply: Callable[[Array, Array], Array] = np.multiply if op == "prod" else np.add
    if dtype.kind in "iu":
        # Modulo 2**64, then modulo 2**bits: the same as modulo 2**bits in every step.
        return lambda a, b: add_or_multiply(a.astype(np.uint64), b.astype(np.uint64)).astype(dtype)
    return add_or_multiply


def _bits_and(a: Array, b: Array) -> Array:
    return a & b


def _bits_or(a: Array, b: Array) -> Array:
    return a | b


def _bits_xor(a: Array, b: Array) -> Array:
    return a ^ b


def _smaller(a: Array, b: Array) -> Array:
    return np.where(_is_nan(a), a, np.where(_is_nan(b), b, np.where(a < b, a, b)))


def _larger(a: Array, b: Array) -> Array:
    return np.where(_is_nan(a), a, np.where(_is_nan(b), b, np.where(a > b, a, b)))


def _complex_product(a: Array, b: Array) -> Array:
    result = np.empty_like(a)
    result.real = a.real * b.real - a.imag * b.imag
    result.imag = a.real * b.imag + a.imag * b.real
    return result


def _is_nan(a: Array) -> Any:
    return a != a


def _divided(total: Array, count: int) -> Array:
    result = np.empty_like(total)
    if total.dtype in COMPLEXES:
        part = total.real.dtype.type(count)
        result.real = total.real / part
        result.imag = total.imag / part
    else:
        result[...] = total / total.dtype.type(count)
    return result


def pieces(array: Array, count: int) -> list[Array]:
    """Axis 0 in ``count`` parts, the first ones one row longer where it does not divide."""
    return np.array_split(array, count)


def joined(parts: Sequence[Array]) -> Array:
    """The parts one after the other along axis 0; 0-d ones as rows of one element."""
    return np.concatenate([part.reshape(1) if part.ndim == 0 else part for part in parts])


def exchanged(sources: Sequence[Array], counts: Sequence[Sequence[int]], rank: int) -> Array:
    """What arrives at ``rank`` where rank s sends ``counts[s][r]`` rows to each rank r."""
    arriving = []
    for source, sizes in zip(sources, counts, strict=True):
        start = sum(sizes[:rank])
        arriving.append(source[start : start + sizes[rank]])
    return np.concatenate(arriving)
