"""Products of arrays: half precision is multiplied in single and rounded once, as on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from support.fake_cuda.arrays import ndarray
from support.fake_cuda.launch import run
from support.fake_cuda.lifting import HALVES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _widely(function: Any) -> Any:
    def product(*operands: Any) -> Any:
        dtype = np.result_type(*operands)
        if dtype in HALVES:
            return np.asarray(function(*[o.astype(np.float32) for o in operands])).astype(dtype)
        return function(*operands)

    return product


def _check(name: str, *operands: Any) -> None:
    for one in operands:
        if not isinstance(one, ndarray):
            raise TypeError(f"Unsupported type {type(one)} for {name}")


def matmul(
    *args: Any,
    axes: Any = None,
    axis: Any = None,
    keepdims: bool = False,
    casting: Any = "same_kind",
    dtype: Any = None,
    signature: Any = None,
    order: str = "K",
    out: Any = None,
) -> Any:
    first, second, *rest = args
    _check("matmul", first, second)
    if max(first.ndim, second.ndim) > 2 and np.result_type(first.dtype, second.dtype) == BFLOAT16:
        raise TypeError("data type 'E' not understood")  # stacks of these are what CuPy cannot
    function = _widely(np.matmul)
    if dtype is not None:
        function = lambda a, b: np.matmul(a, b, dtype=dtype)  # noqa: E731
    target = out[0] if isinstance(out, tuple) else rest[0] if rest else out
    return run("matmul", function, [first, second], out=target, casting=casting)


def dot(a: Any, b: Any, out: Any = None) -> Any:
    if not isinstance(a, ndarray) or not isinstance(b, ndarray):
        return a * b
    # CuPy wants exactly the dtype and the order of the result.
    if out is not None and not out.flags.c_contiguous:
        raise ValueError("Output array must be C-contiguous")
    if out is not None and out.dtype != np.result_type(a.dtype, b.dtype):
        raise ValueError("Output array has an invalid dtype")
    return run("dot", _widely(np.dot), [a, b], out=out)


def vdot(a: Any, b: Any) -> Any:
    _check("vdot", a, b)
    return run("vdot", _widely(np.vdot), [a, b])


def inner(a: Any, b: Any) -> Any:
    _check("inner", a, b)
    return run("inner", _widely(np.inner), [a, b])


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    _check("tensordot", a, b)
    return run("tensordot", _widely(lambda x, y: np.tensordot(x, y, axes)), [a, b])


def einsum(*operands: Any, **kwargs: Any) -> Any:
    dtype, optimize = kwargs.pop("dtype", None), kwargs.pop("optimize", False)
    if kwargs:
        raise TypeError(f"Did not understand the following kwargs: {list(kwargs)}")
    subscripts, *arrays = operands
    if not isinstance(subscripts, str):
        raise NotImplementedError("the stand-in takes einsum's subscripts as text")
    _check("einsum", *arrays)

    def product(*hosts: Any) -> Any:
        return np.einsum(subscripts, *hosts, dtype=dtype, optimize=optimize)

    return run("einsum", _widely(product), arrays)


PRODUCTS = {f.__name__: f for f in (matmul, dot, vdot, inner, tensordot, einsum)}
