"""Functions of arrays that are no ufuncs: NumPy's, run on a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from support.fake_cuda.arrays import ndarray
from support.fake_cuda.creation import array
from support.fake_cuda.launch import launch, run

_HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def _need_array(name: str, value: Any) -> None:
    if not isinstance(value, ndarray):
        raise TypeError(f"{name} takes arrays of a device, not {type(value)}")


def _lifted(name: str, function: Any = None) -> Callable[..., Any]:
    """NumPy's function of that name, of an array or a sequence of arrays."""
    found = function or getattr(np, name)

    def lifted(a: Any, *args: Any, **kwargs: Any) -> Any:
        for one in a if isinstance(a, (list, tuple)) and a else [a]:
            _need_array(name, one)
        out = kwargs.pop("out", None)
        return run(name, found, [a, *args], kwargs, out)

    lifted.__name__ = name
    return lifted


def _viewing(name: str) -> Callable[..., Any]:
    """A function whose result is a view of the array."""
    function = getattr(np, name)

    def viewing(a: Any, *args: Any, **kwargs: Any) -> Any:
        _need_array(name, a)
        found = function(a._host, *args, **kwargs)
        if isinstance(found, (list, tuple)):
            return [a._of(one) for one in found]
        return a._of(found)

    viewing.__name__ = name
    return viewing


def _wide(dtype: Any, given: Any) -> Any:
    """Half precision is summed in single."""
    wanted = np.dtype(dtype if given is None else given)
    return np.float32 if wanted in _HALVES else given


def _reduction(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def reduction(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> Any:
        _need_array(name, a)
        result = a.dtype if dtype is None else np.dtype(dtype)

        def reduced(host: Any) -> Any:
            value = function(host, axis=axis, dtype=_wide(a.dtype, dtype), keepdims=keepdims)
            return value.astype(result) if result in _HALVES else value

        return run(name, reduced, [a], out=out)

    reduction.__name__ = name
    return reduction


def _selection(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def selection(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        _need_array(name, a)
        return run(name, lambda host: function(host, axis=axis, keepdims=keepdims), [a], out=out)

    selection.__name__ = name
    return selection


def _accumulation(name: str) -> Callable[..., Any]:
    function = getattr(np, name)

    def accumulation(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        _need_array(name, a)
        return run(name, lambda host: function(host, axis=axis, dtype=dtype), [a], out=out)

    accumulation.__name__ = name
    return accumulation


def _of_unknown_size(name: str) -> Callable[..., Any]:
    """A function whose result has as many values as there are: the host waits for it."""
    function = getattr(np, name)

    def known_later(a: Any, *args: Any, **kwargs: Any) -> Any:
        _need_array(name, a)
        found = function(a.get(), *args, **kwargs)
        return tuple(array(one) for one in found) if isinstance(found, tuple) else array(found)

    known_later.__name__ = name
    return known_later


# Functions whose signatures differ from NumPy's.


def concatenate(
    tup: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind"
) -> Any:
    arrays = list(tup)
    for one in arrays:
        if not isinstance(one, ndarray):
            raise TypeError(f"Only cupy arrays can be concatenated: {type(one)}")
    return run(
        "concatenate",
        lambda *parts: np.concatenate(parts, axis, dtype=dtype, casting=casting),
        arrays,
        out=out,
    )


def stack(
    tup: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: Any = "same_kind"
) -> Any:
    return concatenate(
        [expand_dims(one, axis) for one in tup], axis, out, dtype=dtype, casting=casting
    )


def expand_dims(a: ndarray, axis: Any) -> ndarray:
    return a._of(np.expand_dims(a._host, axis))


def copyto(dst: ndarray, src: Any, casting: Any = "same_kind", where: Any = None) -> None:
    if not isinstance(dst, ndarray):
        raise AttributeError("'memoryview' object has no attribute 'copy_from_async'")
    if isinstance(src, np.ndarray) and src.ndim:
        raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
    shown = np.ones((), src.dtype) if isinstance(src, ndarray) else np.asarray(src)
    if isinstance(src, ndarray) and not np.can_cast(src.dtype, dst.dtype, casting):
        raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
    shape = src.shape if isinstance(src, ndarray) else shown.shape
    np.broadcast_to(np.ones((), dst.dtype), dst.shape)
    if np.broadcast_shapes(shape, dst.shape) != dst.shape:
        raise ValueError(f"could not broadcast input array from shape {shape} into {dst.shape}")
    reads = [one for one in (src, where) if isinstance(one, ndarray)]
    source = src._host if isinstance(src, ndarray) else shown
    mask = where._host if isinstance(where, ndarray) else True if where is None else where
    target = dst._host
    launch(
        "copyto",
        lambda: np.copyto(target, source, casting="unsafe", where=mask),
        reads if where is None else [*reads, dst],
        [dst],
    )


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if (x is None) != (y is None):
        raise ValueError("Must provide both 'x' and 'y' or neither.")
    if x is None:
        return FUNCTIONS["nonzero"](condition)
    _need_array("where", condition)
    return run("where", np.where, [condition, x, y])


def clip(a: Any, a_min: Any, a_max: Any, out: Any = None) -> Any:
    _need_array("clip", a)
    return run("clip", np.clip, [a, a_min, a_max], out=out)


def may_share_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    _need_array("may_share_memory", b)
    return bool(np.may_share_memory(a._host, b._host))


def shares_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    _need_array("shares_memory", b)
    return bool(np.shares_memory(a._host, b._host))


def reshape(a: ndarray, newshape: Any, order: str = "C") -> ndarray:
    return a.reshape(newshape, order=order)


def ravel(a: ndarray, order: str = "C") -> ndarray:
    return a.ravel(order)


def copy(a: ndarray, order: str = "K") -> ndarray:
    return a.copy("C" if order == "K" else order)


def shape(a: Any) -> tuple[int, ...]:
    return a.shape if isinstance(a, ndarray) else np.shape(a)


def ndim(a: Any) -> int:
    return len(shape(a))


def size(a: Any, axis: int | None = None) -> int:
    sizes = shape(a)
    return int(np.prod(sizes, dtype=int)) if axis is None else sizes[axis]


def result_type(*args: Any) -> Any:
    return np.result_type(*[a.dtype if isinstance(a, ndarray) else a for a in args])


def can_cast(from_: Any, to: Any, casting: Any = "safe") -> bool:
    return bool(np.can_cast(from_.dtype if isinstance(from_, ndarray) else from_, to, casting))


def iscomplexobj(x: Any) -> bool:
    return bool(x.dtype.kind == "c") if isinstance(x, ndarray) else bool(np.iscomplexobj(x))


def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    if a1.shape != a2.shape:
        return array(False)
    return run("array_equal", lambda a, b: np.bool_(np.array_equal(a, b, equal_nan)), [a1, a2])


def _argsort(a: Any, axis: Any = -1, kind: Any = None) -> Any:
    _need_array("argsort", a)
    return run("argsort", lambda host: np.argsort(host, axis, kind="stable"), [a])


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    _need_array("norm", x)
    return run("norm", lambda host: np.linalg.norm(host, ord, axis, keepdims), [x])


def scatter_add(a: ndarray, slices: Any, value: Any) -> None:
    from support.fake_cuda.namespace import lookup

    lookup("add").at(a, slices, value)  # type: ignore[union-attr]


_LIFTED = """
take repeat tile triu tril roll flip outer bincount diff searchsorted interp nan_to_num
round take_along_axis diag kron cross isclose vstack hstack
"""
_VIEWING = """
split array_split transpose swapaxes moveaxis squeeze broadcast_to diagonal atleast_1d atleast_2d
rollaxis
"""
_SELECTIONS = "max min amax amin all any argmax argmin"

FUNCTIONS: dict[str, Any] = {
    **{name: _lifted(name) for name in _LIFTED.split()},
    **{name: _viewing(name) for name in _VIEWING.split()},
    **{name: _reduction(name) for name in ["sum", "prod", "mean", "nansum"]},
    **{name: _selection(name) for name in _SELECTIONS.split()},
    **{name: _selection(name) for name in ["count_nonzero", "nanmax", "nanmin"]},
    **{name: _accumulation(name) for name in ["cumsum", "cumprod"]},
    **{name: _of_unknown_size(name) for name in ["nonzero", "flatnonzero", "argwhere", "unique"]},
    **{name: _lifted(name) for name in ["std", "var", "median", "sort", "trace"]},
    "argsort": _argsort,
    **{
        function.__name__: function
        for function in (
            concatenate, stack, expand_dims, copyto, where, clip, may_share_memory, shares_memory,
            reshape, ravel, copy, shape, ndim, size, result_type, can_cast, iscomplexobj,
            array_equal,
        )
    },
}  # fmt: skip
