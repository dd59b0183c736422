"""What a dtype is called in a checkpoint's metadata, and how it is stored as safetensors.

Values are stored little-endian. What safetensors has no code for is stored as parts: a complex
number of two parts as pairs of these, anything else as its bytes. The metadata has the dtype's own
name, so that it comes back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from fsdpcore.checkpoint.format.strict_json import short
from fsdpcore.core.errors import ArgumentError, CorruptCheckpointError, FsdpcoreError

_Dtype = np.dtype[Any]

CODES: Mapping[str, _Dtype] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.int8),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
        "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
        "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
        "U16": np.dtype(np.uint16),
        "I16": np.dtype(np.int16),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "U32": np.dtype(np.uint32),
        "I32": np.dtype(np.int32),
        "F32": np.dtype(np.float32),
        "U64": np.dtype(np.uint64),
        "I64": np.dtype(np.int64),
        "F64": np.dtype(np.float64),
        "C64": np.dtype(np.complex64),
    }
)
"""The dtype of every code of safetensors whose elements are whole bytes."""

BITS: Mapping[str, int] = MappingProxyType(
    {
        **{code: dtype.itemsize * 8 for code, dtype in CODES.items()},
        # Packed: no dtype of NumPy has less than a byte per element.
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
    }
)
"""Bits per element of every code of safetensors, those without a dtype included."""

# Types of ml_dtypes that safetensors has no code for, or packs where NumPy does not. Which of them
# there are depends on the version of ml_dtypes.
_OTHERS = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
    "int4",
    "uint4",
    "int2",
    "uint2",
    "int1",
    "uint1",
)
_PAIRS = {"complex128": "F64", "complex32": "F16", "bcomplex32": "BF16"}


def _stored() -> dict[_Dtype, tuple[str, tuple[int, ...]]]:
    """Return code and extra axes for every dtype that can be stored."""
    stored: dict[_Dtype, tuple[str, tuple[int, ...]]] = {
        dtype: (code, ()) for code, dtype in CODES.items()
    }
    for name in _OTHERS:
        if hasattr(ml_dtypes, name):
            stored[np.dtype(getattr(ml_dtypes, name))] = ("U8", ())
    for name, code in _PAIRS.items():
        scalar = getattr(np, name, None) or getattr(ml_dtypes, name, None)
        if scalar is not None:
            stored[np.dtype(scalar)] = (code, (2,))
    return stored


_STORED: Mapping[_Dtype, tuple[str, tuple[int, ...]]] = MappingProxyType(_stored())
_NAMED: Mapping[str, _Dtype] = MappingProxyType({dtype.name: dtype for dtype in _STORED})


def stored_as(dtype: DTypeLike) -> tuple[str, tuple[int, ...]]:
    """Return the code of safetensors that a dtype is stored as, and axes to append to the shape.

    The axes are ``()`` where safetensors has the dtype, ``(2,)`` for complex numbers of two parts.
    The byte order of ``dtype`` does not matter: what is stored is little-endian.

    Raises:
        ArgumentError: values of this dtype cannot be stored.
    """
    found = np.dtype(dtype)
    try:
        return _STORED[found.newbyteorder("=")]
    except KeyError:
        raise ArgumentError(
            f"arrays of dtype {found} cannot be stored in a checkpoint; convert with astype() to "
            f"one of: {', '.join(_NAMED)}"
        ) from None


def named_dtype(name: str, error: type[FsdpcoreError] = CorruptCheckpointError) -> _Dtype:
    """Return the dtype of a name in the metadata, in this machine's byte order.

    Raises:
        CorruptCheckpointError: no dtype that can be stored has this name; or ``error``, if given.
    """
    found = _NAMED.get(name) if type(name) is str else None
    if found is None:
        raise error(f"the dtype {short(name)} is not known; known are: {', '.join(_NAMED)}")
    return found
