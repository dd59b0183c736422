"""``KernelSource``: a kernel of our own for a GPU, in C, which CuPy compiles.

Kernels are compiled without fused multiply-adds, so that their results are those of the same
operations one by one, as NumPy does them on the host. What differs from the host: CuPy has all
kernels take float32 numbers below 1.2e-38 for zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_OPTIONS = ("-fmad=false",)  # of the compiler, beside those that CuPy adds


@dataclass(frozen=True)
class KernelSource:
    """A kernel in C, as ``cupy.ElementwiseKernel`` takes it."""

    in_params: str
    out_params: str
    operation: str
    name: str
    preamble: str

    def compiled(self, cupy: Any) -> Any:
        """Return the kernel; CuPy compiles it for each device when it is first launched there."""
        return cupy.ElementwiseKernel(
            self.in_params,
            self.out_params,
            self.operation,
            self.name,
            preamble=self.preamble,
            options=_OPTIONS,
            no_return=True,
        )
