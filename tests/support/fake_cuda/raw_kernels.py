"""``RawKernel`` and ``RawModule``: CUDA C, compiled for the host, one thread after the other."""

from __future__ import annotations

import ctypes
import string
from typing import Any

import numpy as np
from support.fake_cuda.arrays import ndarray
from support.fake_cuda.compiler import compiled
from support.fake_cuda.kernel_params import checked_args, pointers
from support.fake_cuda.launch import launch

_RAW = string.Template(
    """
$code
template <size_t... I> struct _Indices {};
template <size_t N> using _Below = _Indices<__integer_pack(N)...>;
template <typename... P, size_t... I>
static void _call(void (*kernel)(P...), void* const* args, _Indices<I...>) {
  kernel(*(P*)args[I]...);
}
template <typename... P>
static int _sizes(void (*)(P...), long long* sizes) {
  const size_t found[] = {sizeof(P)..., 0};
  for (size_t i = 0; i < sizeof...(P); ++i) sizes[i] = found[i];
  return sizeof...(P);
}
template <typename... P>
static void _all(void (*kernel)(P...), const unsigned* g, const unsigned* b, void* const* args) {
  gridDim = {g[0], g[1], g[2]};
  blockDim = {b[0], b[1], b[2]};
  for (unsigned block = g[0] * g[1] * g[2]; block-- > 0;)
    for (unsigned thread = b[0] * b[1] * b[2]; thread-- > 0;) {
      blockIdx = {block % g[0], block / g[0] % g[1], block / g[0] / g[1]};
      threadIdx = {thread % b[0], thread / b[0] % b[1], thread / b[0] / b[1]};
      _call(kernel, args, _Below<sizeof...(P)>());
    }
}
extern "C" int sizes(long long* found) { return _sizes(&$name, found); }
extern "C" void run(const unsigned* grid, const unsigned* block, void* const* args) {
  _all(&$name, grid, block, args);
}
"""
)


class RawKernel:
    """A kernel of CUDA C. Its threads run one after the other: without barriers or shuffles."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        *,
        enable_cooperative_groups: bool = False,
        jitify: Any = None,
    ) -> None:
        self.code, self.name, self.options, self.backend = code, name, options, backend

    def compile(self, log_stream: Any = None) -> None:
        """Compile it now and not at the first call."""
        self._library()

    def _library(self) -> Any:
        return compiled(_RAW.substitute(code=self.code, name=self.name), self.options)

    def __call__(self, grid: Any, block: Any, args: Any, **kwargs: Any) -> None:
        shared, stream = kwargs.pop("shared_mem", 0), kwargs.pop("stream", None)
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        checked_args(args)
        library = self._library()
        values = [_argument(arg) for arg in args]
        sizes = np.zeros(256, np.int64)
        count = library.sizes(sizes.ctypes.data_as(ctypes.c_void_p))
        if [v.nbytes for v in values] != sizes[:count].tolist():
            raise TypeError(
                f"{self.name} takes arguments of {sizes[:count].tolist()} bytes, not of "
                f"{[v.nbytes for v in values]}: on a GPU it would read something else"
            )
        extents = [np.array((*extent, 1, 1)[:3], np.uint32) for extent in (grid, block)]
        hosts = [arg._host for arg in args if isinstance(arg, ndarray)]
        extent_pointers = [extent.ctypes.data_as(ctypes.c_void_p) for extent in extents]

        def work() -> None:
            assert hosts is not None
            library.run(*extent_pointers, pointers(values))

        arrays = [arg for arg in args if isinstance(arg, ndarray)]
        # Which of them it writes is not known here: it may be all.
        launch(f"kernel {self.name}", work, (), arrays, stream, shared=shared)


def _argument(arg: Any) -> Any:
    if isinstance(arg, ndarray):
        return np.array(arg.data.ptr, np.int64)
    if isinstance(arg, bool):
        return np.array(arg, np.bool_)
    return np.asarray(arg)


class RawModule:
    """CUDA C with several kernels."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Any = None,
        jitify: Any = None,
    ) -> None:
        if code is None or path is not None:
            raise NotImplementedError("the stand-in compiles code, and loads no binaries")
        self.code, self.options = code, options

    def get_function(self, name: str) -> RawKernel:
        """A kernel of it."""
        return RawKernel(self.code, name, self.options)
