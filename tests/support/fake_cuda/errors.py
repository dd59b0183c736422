"""The exceptions of CuPy, with its words, and of the stand-in."""

from __future__ import annotations

_CUDA = {
    1: "cudaErrorInvalidValue: invalid argument",
    2: "cudaErrorMemoryAllocation: out of memory",
    35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
    100: "cudaErrorNoDevice: no CUDA-capable device is detected",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    600: "cudaErrorNotReady: device not ready",
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    719: "cudaErrorLaunchFailure: unspecified launch failure",
}

_NCCL = {
    0: "NCCL_ERROR_SUCCESS: no error",
    1: "NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",  # noqa: E501
    2: "NCCL_ERROR_SYSTEM_ERROR: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    3: "NCCL_ERROR_INTERNAL_ERROR: internal error - please report this issue to the NCCL developers",  # noqa: E501
    4: "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for details)",
    5: "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details)",
    6: "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error",
}


class CUDARuntimeError(RuntimeError):
    """A call of the CUDA runtime failed; ``status`` is its code."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(_CUDA[status])


class NcclError(RuntimeError):
    """A call of NCCL failed; ``status`` is its code, up to 6."""

    def __init__(self, status: int) -> None:
        text = _NCCL[status]
        self.status = status
        super().__init__(text)


class NoCompiler(RuntimeError):
    """There is no g++ to compile kernels with: a test that needs it is skipped."""


class SwitchedOff(RuntimeError):
    """The machine was switched off, by the end of ``installed()``, while somebody waited for it."""
