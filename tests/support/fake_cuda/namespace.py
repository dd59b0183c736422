"""The names of ``cupy``: what NumPy's dispatch, operators and methods look up."""

from __future__ import annotations

from typing import Any

import numpy as np

_CONSTANTS = "newaxis pi e inf nan euler_gamma"
_TYPES = """
bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64
complex128 intp dtype generic number integer floating inexact finfo iinfo signedinteger
unsignedinteger complexfloating broadcast_shapes issubdtype isscalar promote_types ndindex
"""
_CREATION = """
empty zeros ones full empty_like zeros_like ones_like full_like array asarray asanyarray
ascontiguousarray asnumpy arange linspace eye identity frombuffer
"""
_names: dict[str, Any] = {}


def names() -> dict[str, Any]:
    """All of them; dots for those of submodules, as "linalg.norm"."""
    if not _names:
        _names.update(_make())
    return _names


def lookup(name: str) -> Any:
    """What has a name, or None."""
    return names().get(name)


def _make() -> dict[str, Any]:
    from support.fake_cuda import creation, kernels, raw_kernels
    from support.fake_cuda.arrays import ndarray
    from support.fake_cuda.functions import FUNCTIONS, norm
    from support.fake_cuda.memory import MemoryPool, PinnedMemoryPool
    from support.fake_cuda.products import PRODUCTS
    from support.fake_cuda.ufuncs import ufunc, ufuncs

    made: dict[str, Any] = {name: getattr(np, name) for name in (_CONSTANTS + _TYPES).split()}
    made.update(ufuncs())
    made.update(FUNCTIONS)
    made.update(PRODUCTS)
    for name in _CREATION.split():
        made[name] = getattr(creation, name)
    pool, pinned = MemoryPool(), PinnedMemoryPool()
    made |= {
        "ndarray": ndarray,
        "ufunc": ufunc,
        "bool": np.bool_,
        "linalg.norm": norm,
        "ElementwiseKernel": kernels.ElementwiseKernel,
        "ReductionKernel": kernels.ReductionKernel,
        "RawKernel": raw_kernels.RawKernel,
        "RawModule": raw_kernels.RawModule,
        "get_default_memory_pool": lambda: pool,
        "get_default_pinned_memory_pool": lambda: pinned,
    }
    return made
