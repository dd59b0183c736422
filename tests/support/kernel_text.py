"""Kernels as one file of CUDA C++ that needs nothing but the toolkit, to see that they compile.

It has around each kernel what ``cupy.ElementwiseKernel`` puts there: types by letters, arrays as
objects with an index, a loop over ``i``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fsdpcore.compress import on_gpu
from fsdpcore.compress.quantiser import Format
from fsdpcore.core.buffers import BFLOAT16
from fsdpcore.core.gpu_kernel import KernelSource
from fsdpcore.fsdp.gpu import inplace, sums
from fsdpcore.fsdp.gpu.kernel import Formula, source
from fsdpcore.fsdp.optim import formulas

HALVES = (np.dtype(np.float16), BFLOAT16)
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
UINT8 = np.dtype(np.uint8)
_CTYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
    "uint8": "unsigned char",
    "int32": "int",
    "int64": "long long",
}

_HEAD = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>

template <typename H> struct Half {  // converts as CuPy's types do
  H value;
  __device__ Half() {}
  __device__ Half(float v) : value(v) {}
  explicit __device__ Half(double v) : value(v) {}
  __device__ operator float() const { return float(value); }
};
typedef Half<__half> float16;
typedef Half<__nv_bfloat16> bfloat16;

template <typename T> struct Array {
  T *data;
  __device__ T &operator[](ptrdiff_t at) { return data[at]; }
  __device__ const T &operator[](ptrdiff_t at) const { return data[at]; }
};
"""

Dtypes = Mapping[str, "np.dtype[Any]"]


def kernels() -> Iterator[tuple[KernelSource, Dtypes]]:
    """Every kernel there is, with the dtypes of its arrays, in kinds that matter."""
    for update in formulas.ALL:
        yield _updating(update, FLOAT32, FLOAT32, None)
        yield _updating(update, FLOAT32, BFLOAT16, BFLOAT16)
    for half in HALVES:
        yield _updating(formulas.ADAM, FLOAT32, FLOAT32, half)
        yield _updating(formulas.ADAM, FLOAT64, half, half)
    yield _updating(formulas.ADAM, FLOAT64, FLOAT64, FLOAT32)
    for dtype in (*HALVES, FLOAT32, FLOAT64):
        for formula in (inplace.ADD, inplace.DIVIDE, inplace.CUT):
            wide = FLOAT32 if dtype.itemsize < 4 else dtype
            yield source(formula, wide), dict.fromkeys(formula.arrays, dtype)
        yield _summing("square", dtype)
    kinds: tuple[sums.SumKind, ...] = ("absolute", "power", "largest")
    for kind in kinds:
        yield _summing(kind, FLOAT32)
        yield sums.fold_source(kind), dict.fromkeys(("slots", "folded"), FLOAT64)
    for form in (Format(8, 64, False), Format(4, 4096, True)):
        arrays = {**dict.fromkeys(("values", "signs", "scales"), FLOAT32), "codes": UINT8}
        yield on_gpu.encode_source(form), arrays
        yield on_gpu.decode_source(form), arrays


def text() -> str:
    """One file of all of them, as functions of numbered names."""
    return _HEAD + "".join(
        _kernel(number, made, dtypes) for number, (made, dtypes) in enumerate(kernels())
    )


def _updating(
    update: formulas.Update, wide: np.dtype[Any], grad: np.dtype[Any], out: np.dtype[Any] | None
) -> tuple[KernelSource, Dtypes]:
    formula: Formula = formulas.formula(update, rounded=out is not None)
    dtypes = {"grad": grad} | dict.fromkeys(("param", *update.state), wide)
    return source(formula, wide), dtypes if out is None else {**dtypes, "out": out}


def _summing(kind: sums.SumKind, dtype: np.dtype[Any]) -> tuple[KernelSource, Dtypes]:
    return sums.add_source(kind), {"values": dtype, "divisor": FLOAT64, "slots": FLOAT64}


def _kernel(number: int, made: KernelSource, dtypes: Dtypes) -> str:
    types, params = {}, []
    for const, given in (("const ", made.in_params), ("", made.out_params)):
        for param in given.split(","):
            *raw, kind, name = param.split()
            if not raw:
                params.append(f"const {_CTYPES[kind]} {name}")
                continue
            if len(kind) == 1:
                types[kind] = _CTYPES[dtypes[name].name]
            params.append(f"{const}Array<{_CTYPES[dtypes[name].name]}> {name}")
    typedefs = "".join(f"typedef {ctype} {letter};\n" for letter, ctype in types.items())
    return f"""
namespace number_{number} {{
{typedefs}{made.preamble}
extern "C" __global__ void {made.name}_{number}({", ".join(params)}, ptrdiff_t _size) {{
  #pragma unroll 1
  for (ptrdiff_t i = (ptrdiff_t)blockIdx.x * blockDim.x + threadIdx.x; i < _size;
       i += (ptrdiff_t)blockDim.x * gridDim.x) {{
{made.operation};
  }}
}}
}}
"""
