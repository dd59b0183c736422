"""Kernels of the stand-in for CuPy: their source, compiled for the host."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import fake_cuda

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ for kernels")


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cuda.installed(1):
        import cupy

        yield cupy


def values(count: int = 20000) -> Any:
    """Of all sizes, some of them beyond half precision, and those that are no numbers."""
    random = np.random.default_rng(0)
    made = random.standard_normal(count) * 10.0 ** random.uniform(-12, 8, count)
    return np.concatenate([made, [0.0, -0.0, np.inf, -np.inf]])


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rounded_as_cupy_does(cupy: Any, dtype: Any, source: Any) -> None:
    given = values().astype(source)
    found = cupy.empty(given.shape, dtype)
    cupy.ElementwiseKernel("T x", "U y", "y = x", "narrow")(cupy.asarray(given), found)
    # CuPy makes a float of a double on the way to bfloat16.
    through = given.astype(np.float32) if dtype is not np.float16 else given
    with np.errstate(all="ignore"):
        expected = through.astype(dtype)
    np.testing.assert_array_equal(found.get().view(np.uint16), expected.view(np.uint16))
    back = cupy.ElementwiseKernel("T x", "float32 y", "y = x", "widen")(found)
    np.testing.assert_array_equal(back.get(), expected.astype(np.float32))


def test_arguments_are_broadcast_and_raw_ones_are_not(cupy: Any) -> None:
    kernel = cupy.ElementwiseKernel("T x, raw float32 y, int32 k", "T z", "z = x * y[i] + k")
    x = np.arange(6.0).reshape(2, 3)
    y = np.arange(6, dtype=np.float32)
    expected = x * y.reshape(2, 3) + 2
    assert kernel(cupy.asarray(x), cupy.asarray(y), 2.9).tolist() == expected.tolist()
    turned = cupy.asarray(np.asfortranarray(x))
    assert kernel(turned, cupy.asarray(y), np.int64(2)).tolist() == expected.tolist()


def test_raw_arguments_alone_need_a_size(cupy: Any) -> None:
    kernel = cupy.ElementwiseKernel(
        "", "raw T x", "x[i] = i * 10 + _ind.size()", no_return=True, options=("-fmad=false",)
    )
    x = cupy.empty(5, np.int64)
    assert kernel(x, size=4) is None
    assert x.tolist() == [4, 14, 24, 34, -1]
    with pytest.raises(ValueError, match="Loop size is undecided"):
        kernel(x)


def test_the_order_of_elements_shows(cupy: Any) -> None:
    kernel = cupy.ElementwiseKernel("", "raw T x", "x[i + 1] = x[i]", no_return=True)
    x = cupy.arange(5)
    kernel(x, size=4)
    assert x.tolist() == [0, 0, 1, 2, 3]


def test_what_does_not_fit_is_refused(cupy: Any) -> None:
    kernel = cupy.ElementwiseKernel("T x, T y", "T z", "z = x + y")
    x = cupy.ones(3)
    with pytest.raises(TypeError, match="Type is mismatched"):
        kernel(x, x.astype(np.float32))
    with pytest.raises(TypeError, match="Unsupported type"):
        kernel(x, np.ones(3))
    with pytest.raises(TypeError, match="Wrong number of arguments"):
        kernel(x)
    with pytest.raises(ValueError, match="Out shape is mismatched"):
        kernel(x, x, cupy.ones(1))
    with pytest.raises(ValueError, match="Can not use 'i'"):
        cupy.ElementwiseKernel("T i", "T z", "z = i")
    with pytest.raises(cupy.cuda.compiler.CompileException, match="nothing_like_this"):
        cupy.ElementwiseKernel("T x", "T z", "z = nothing_like_this(x)")(x)


def test_functions_and_preamble(cupy: Any) -> None:
    kernel = cupy.ElementwiseKernel(
        "T x",
        "T y",
        "y = isfinite(x) ? max(twice(x), sqrt(x * x)) + tanh(x) - fabs(pow(x, 2)) : NAN",
        preamble="__device__ __forceinline__ T twice(T v) { return __fmul_rn(v, 2); }",
    )
    x = np.array([-1.5, 0.0, 2.0, np.inf], np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.maximum(2 * x, np.abs(x)) + np.tanh(x) - x**2
    np.testing.assert_allclose(kernel(cupy.asarray(x)).get()[:3], expected[:3], rtol=1e-6)


def test_reductions(cupy: Any) -> None:
    kernel = cupy.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
    host = np.random.default_rng(0).standard_normal((3, 4, 5))
    x = cupy.asarray(host)
    assert kernel(x).shape == ()
    np.testing.assert_allclose(kernel(x).get(), np.sqrt((host**2).sum()))
    expected = np.sqrt((host**2).sum((0, 2), keepdims=True))
    np.testing.assert_allclose(kernel(x, axis=(0, 2), keepdims=True).get(), expected)
    largest = cupy.ReductionKernel(
        "T x", "float64 y", "x", "max(a, b)", "y = a", "-1e300", reduce_type="double"
    )
    assert float(largest(x)) == host.max()


def test_kernels_of_threads(cupy: Any) -> None:
    code = """
    extern "C" __global__ void add(const float* x, float* y, int n, double by) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < n) y[i] = x[i] + by;
    }
    """
    x, y = cupy.arange(6, dtype=np.float32), cupy.zeros(6, np.float32)
    kernel = cupy.RawModule(code=code).get_function("add")
    kernel((2,), (4,), (x, y, np.int32(5), 2.0))
    assert y.tolist() == [2, 3, 4, 5, 6, 0]
    with pytest.raises(TypeError, match="arguments of"):
        kernel((2,), (4,), (x, y, 5, 2.0))


def test_kernels_run_on_a_stream_and_are_ordered(cupy: Any) -> None:
    machine = fake_cuda.current.machine()
    kernel = cupy.ElementwiseKernel("T x", "T y", "y = x + 1", "plus")
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    x = cupy.zeros(4)
    cupy.cuda.Stream.null.synchronize()
    with machine.frozen(first):
        y = kernel(x, cupy.empty(4), stream=first)
        kernel(y, x, stream=second)
        second.synchronize()
        assert np.isnan(machine.memories.at(x.data.ptr, 32).view(np.float64)).all()
    assert {race.second for race in machine.races} == {"kernel plus"}
    machine.races.clear()
    assert machine.calls("kernel plus")[0].stream == first.ptr
