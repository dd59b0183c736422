"""Abstract arrays: shape and dtype without values, for jobs that are larger than this machine.

They are NumPy's, on memory that is reserved and never touched: their shapes, views and addresses
are real. What would read or write values does nothing, in no time, so that a model of any size
goes through the same code as one that is trained. That is so of arithmetic, of reductions and of
the functions below; all others are NumPy's, which reads what is there: zeros.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from fsdpcore.core.buffers import Array, dtype_code, input_array
from fsdpcore.core.device import HostDevice

_SMALL = 1 << 16  # bytes, below which memory is not worth a mapping of its own
# Linux's number of it, which Python names since 3.13: memory that nobody touches need not be there.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class AbstractArray(np.ndarray[Any, Any]):
    """An array without values; ``abstract`` makes one, and so do its slices and copies."""

    valueless = True

    def __setitem__(self, key: Any, value: Any) -> None:
        """Nothing is written."""

    def fill(self, value: Any) -> None:
        """Nothing is written."""

    def copy(self, order: Any = "C") -> AbstractArray:
        """Return another one."""
        return abstract(self.shape, self.dtype)

    def astype(self, dtype: DTypeLike, *args: Any, **options: Any) -> AbstractArray:  # type: ignore[override]
        """Return one of another dtype."""
        return abstract(self.shape, dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.get("out")
        if out is not None:
            return out[0] if len(out) == 1 else out
        if method == "reduce":
            return _reduced(ufunc, inputs[0], options)
        shapes = [np.shape(each) for each in inputs]
        if method != "__call__" or (ufunc.signature is not None and ufunc is not np.matmul):
            return NotImplemented
        shape = _product(*shapes) if ufunc is np.matmul else np.broadcast_shapes(*shapes)
        kinds = [_kind(each) for each in inputs]
        dtype = options.get("dtype") or ufunc.resolve_dtypes((*kinds, None))[-1]
        return abstract(shape, dtype)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        if func is np.copyto:
            return None
        if func is np.dot and args[0].ndim == args[1].ndim == 1:
            return args[0].dtype.type(0)
        if func is np.concatenate and (*args[1:], options.get("axis", 0))[0] == 0:
            if options.get("out") is not None:
                return options["out"]
            parts = args[0]
            rows = sum(len(part) for part in parts)
            return abstract((rows, *parts[0].shape[1:]), options.get("dtype") or parts[0].dtype)
        if func is np.take and options.get("axis") == 0:
            return abstract((len(args[1]), *args[0].shape[1:]), args[0].dtype)
        if func in (np.empty_like, np.zeros_like, np.ones_like):
            shape, dtype = options.get("shape"), options.get("dtype")
            return abstract(args[0].shape if shape is None else shape, dtype or args[0].dtype)
        return super().__array_function__(func, types, args, options)


def abstract(shape: int | Sequence[int], dtype: DTypeLike) -> AbstractArray:
    """Return a new array without values."""
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(sizes) * kind.itemsize
    if nbytes < _SMALL:
        return np.zeros(sizes, kind).view(AbstractArray)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    memory = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    return memory.view(kind).reshape(sizes).view(AbstractArray)


class AbstractDevice(HostDevice):
    """A host where what is kept for long is abstract: all that ``Backend.empty`` returns.

    Results of collectives are not, so that ranks can tell each other numbers.
    """

    def lined_up(self, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        return abstract(shape, dtype)

    def lined_up_zeros(self, size: int, dtype: np.dtype[Any]) -> Array:
        return abstract(size, dtype)

    def operand(self, value: ArrayLike) -> Array:
        if isinstance(value, AbstractArray) and value.flags.c_contiguous:
            dtype_code(value.dtype)
            return value
        return input_array(value)


def _reduced(ufunc: np.ufunc, array: Array, options: dict[str, Any]) -> Any:
    """What a reduction gives: an abstract array, or a number as if all values were 0."""
    axis = options.get("axis", 0)
    axes = range(array.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    left = {number % array.ndim for number in axes}
    keep = options.get("keepdims", False)
    kept = [(n, size) for n, size in enumerate(array.shape) if keep or n not in left]
    sizes = [1 if n in left else size for n, size in kept]
    dtype = ufunc.reduce(np.zeros(1, array.dtype), dtype=options.get("dtype")).dtype
    return abstract(sizes, dtype) if sizes else dtype.type(ufunc is np.logical_and)


def _kind(value: Any) -> Any:
    """The dtype of an operand; the type of a number of Python, which has none of its own."""
    return type(value) if type(value) in (int, float, complex) else np.asarray(value).dtype


def _product(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix product of arrays of at least one axis."""
    outer = np.broadcast_shapes(left[:-2], right[:-2])
    return *outer, *left[-2:-1], *(right[-1:] if len(right) > 1 else ())
