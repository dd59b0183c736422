"""What the arrays of an update must be like, and how they go from one dtype to another."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fsdpcore.core.array_module import address, array_module, on_host, place
from fsdpcore.core.errors import ArgumentError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_UPDATED = (np.dtype(np.float32), np.dtype(np.float64))
_FLOATING = (*_UPDATED, np.dtype(np.float16), _BFLOAT16)


def check_dtype(dtype: np.dtype[Any], what: str) -> None:
    """Raise ArgumentError unless ``dtype`` can be updated in place."""
    if dtype not in _UPDATED:
        raise ArgumentError(
            f"{what} must be float32 or float64, got {dtype}; for half precision keep a float32 "
            "master shard and round it after the update"
        )


def check_names(optimizer: str, state: Collection[str], expected: Collection[str]) -> None:
    """Raise ArgumentError unless ``state`` has the arrays that the optimizer made."""
    if set(state) != set(expected):
        raise ArgumentError(
            f"{optimizer} needs the state arrays {sorted(expected)}, got {sorted(state)}; make "
            "them with the same optimizer"
        )


def check_arrays(
    param: NDArray[Any],
    grad: NDArray[Any],
    state: Mapping[str, NDArray[Any]],
    out: NDArray[Any] | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Check the arrays of one update.

    Args:
        param, grad, out: flat, of one size; ``grad`` and ``out`` may have a narrower dtype. All
            arrays are NumPy's, or CuPy's on one GPU.
        state: flat, of the parameter's dtype.
        sizes: elements of those state arrays that are not as large as the parameter.

    Raises:
        ArgumentError: one of them is not as said, cannot be written, or shares memory with
            another.
    """
    if sizes is None and _plainly_right(param, grad, state, out):
        return
    written = {"param": param} | {f"state[{name!r}]": array for name, array in state.items()}
    check_flat("param", param)
    check_dtype(param.dtype, "param")
    for name, array in state.items():
        what = f"state[{name!r}]"
        check_flat(what, array)
        size = param.size if sizes is None else sizes.get(name, param.size)
        _check_like(what, array, param, size, narrower=False)
    check_flat("grad", grad)
    _check_like("grad", grad, param, param.size, narrower=True)
    if out is not None:
        check_flat("out", out)
        _check_like("out", out, param, param.size, narrower=True)
        written["out"] = out
    for name, array in written.items():
        if on_host(array) and not array.flags.writeable:  # CuPy's always are
            raise ArgumentError(f"{name} is read-only, but update writes it in place")
    arrays = {**written, "grad": grad}
    _check_places(arrays)
    _check_no_overlap(arrays)


def _plainly_right(
    param: NDArray[Any],
    grad: NDArray[Any],
    state: Mapping[str, NDArray[Any]],
    out: NDArray[Any] | None,
) -> bool:
    """Whether all is as it nearly always is; what is not, the other checks say in words."""
    arrays = [param, grad, *state.values()]
    dtype, size = getattr(param, "dtype", None), getattr(param, "size", -1)
    if out is not None or dtype not in _UPDATED:
        return False
    for array in arrays:
        if type(array) is not np.ndarray or array.dtype is not dtype:
            return False
        flags = array.flags
        if array.ndim != 1 or array.size != size or not flags.c_contiguous:
            return False
        if not flags.writeable and array is not grad:
            return False
    pairs = itertools.combinations(arrays, 2)
    return not any(np.may_share_memory(first, second) for first, second in pairs)


def check_flat(name: str, array: NDArray[Any]) -> None:
    """Raise ArgumentError unless ``array`` is a contiguous 1-D array."""
    if array_module(array) is None:
        raise ArgumentError(f"{name} must be a NumPy or CuPy array, got {type(array).__name__}")
    if array.ndim != 1 or not array.flags.c_contiguous:
        raise ArgumentError(
            f"{name} must be 1-D and contiguous, got shape {array.shape} with strides "
            f"{array.strides}; pass the flat shard"
        )


def round_into(out: NDArray[Any], values: NDArray[Any]) -> None:
    """Round ``values`` to the dtype of ``out``; what is too large for that becomes inf."""
    with np.errstate(over="ignore"):
        np.copyto(out, values, casting="unsafe")


def scaled_into(out: NDArray[Any], grad: NDArray[Any], scale: float) -> NDArray[Any]:
    """Return ``out`` with ``grad * scale``, computed in the dtype of ``out``."""
    if grad.dtype == out.dtype:
        np.multiply(grad, scale, out=out)
        return out
    np.copyto(out, grad)
    if scale != 1.0:
        np.multiply(out, scale, out=out)
    return out


def _check_like(
    name: str, array: NDArray[Any], param: NDArray[Any], size: int, *, narrower: bool
) -> None:
    fits = array.dtype == param.dtype
    if narrower and not fits:
        fits = array.dtype in _FLOATING and array.itemsize <= param.itemsize
    if array.size != size or not fits:
        rule = "it must have that or a narrower floating dtype" if narrower else "all must agree"
        expected = f"{param.size}" if size == param.size else f"{size} elements here, itself {size}"
        raise ArgumentError(
            f"{name} has {array.size} elements of {array.dtype}, but param has {expected} of "
            f"{param.dtype}; {rule}"
        )


def _check_places(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ArgumentError unless all arrays are where the first is."""
    first, expected = next((name, place(array)) for name, array in arrays.items())
    for name, array in arrays.items():
        if place(array) != expected:
            raise ArgumentError(
                f"{name} is on {place(array)}, but {first} on {expected}; move it there"
            )


def _check_no_overlap(arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise ArgumentError if two arrays share memory; exact, because all are contiguous."""
    names = list(arrays)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if _overlap(arrays[first], arrays[second]):
                raise ArgumentError(f"{first} and {second} share memory; each needs its own")


def _overlap(first: NDArray[Any], second: NDArray[Any]) -> bool:
    """Whether contiguous arrays of one place share memory."""
    if on_host(first):
        return np.may_share_memory(first, second)
    if not first.size or not second.size:
        return False
    start, other = address(first), address(second)
    return start < other + second.nbytes and other < start + first.nbytes
