"""The parameters of kernels as CuPy has them: ``raw T x, float32 y``, and the types they get."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from support.fake_cuda.arrays import ndarray

_CTYPES = {
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "float16",
    "float32": "float",
    "float64": "double",
    "bfloat16": "bfloat16",
}


def ctype_of(dtype: Any) -> str:
    """The name of a dtype in C."""
    return _CTYPES[np.dtype(dtype).name]


@dataclass(frozen=True)
class Param:
    """One parameter: of a dtype, or of a type variable of one letter."""

    name: str
    letter: str | None
    dtype: Any
    raw: bool

    @property
    def ctype(self) -> str:
        """What it is called in C."""
        return self.letter or ctype_of(self.dtype)


def parsed(text: str) -> tuple[Param, ...]:
    """The parameters of a list of them."""
    return tuple(_param(one) for one in text.strip().split(",")) if text.strip() else ()


def _param(text: str) -> Param:
    words = text.split()
    if len(words) < 2:
        raise Exception(f"Syntax error: {text}")
    *marks, kind, name = words
    for mark in marks:
        if mark not in ("raw", "_non_const"):
            raise Exception(f'Unknown keyword "{mark}"')
    if len(kind) == 1:
        return Param(name, kind, None, "raw" in marks)
    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    return Param(name, None, dtype, "raw" in marks)


def decided(
    in_params: tuple[Param, ...], out_params: tuple[Param, ...], in_args: list[Any], out_args: Any
) -> dict[str, Any]:
    """The dtypes of type variables: outputs first, then inputs; scalars have no say."""
    found: dict[str, Any] = {}
    pairs = [*zip(out_params, out_args, strict=False), *zip(in_params, in_args, strict=True)]
    for param, arg in pairs:
        if not isinstance(arg, ndarray):
            continue
        if param.letter is None:
            if arg.dtype != param.dtype:
                raise TypeError(f"Type is mismatched. {param.name} {arg.dtype} {param.dtype}")
        elif found.setdefault(param.letter, arg.dtype) != arg.dtype:
            raise TypeError(
                f"Type is mismatched. {param.name} {arg.dtype} {found[param.letter]} {param.letter}"
            )
    for param in (*in_params, *out_params):
        if param.letter is not None:
            found[param.letter]  # as in CuPy: KeyError for what nothing decides
    return found


def checked_args(args: Any) -> None:
    """Raise ``TypeError`` for what is neither an array of a device nor a scalar."""
    for arg in args:
        if not isinstance(arg, (ndarray, bool, int, float, complex, np.generic)):
            raise TypeError(f"Unsupported type {type(arg)}")


def described(array: Any) -> Any:
    """An array as ``CArray`` reads it."""
    address = array.__array_interface__["data"][0]
    return np.array([address, array.size, *array.shape, *array.strides], np.int64)


def pointers(values: Sequence[Any]) -> Any:
    """The addresses of arrays, as kernels take them."""
    return (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
