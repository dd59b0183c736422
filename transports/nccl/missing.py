"""What keeps this machine from computing on a GPU, and what to do about it, in words.

Found without CuPy, which may be what is missing.
"""

from __future__ import annotations

import ctypes

from fsdpcore.core.errors import MissingDependencyError

# Of ``cudaError_t``.
_INSUFFICIENT_DRIVER, _NO_DEVICE = 35, 100
# Within a container, the driver is what the host lends.
_NO_DRIVER = (
    "there is no NVIDIA driver on this machine: install one, or start the container with access to "
    "the GPUs of its host"
)


def driver_version() -> int:
    """The newest CUDA that the driver of this machine supports, as 1000 major + 10 minor; or 0."""
    found = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return found.value


def in_numbers(version: int) -> str:
    """A version of CUDA as people write it: 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"


def no_cupy(error: ImportError) -> MissingDependencyError:
    """The error where CuPy cannot be imported."""
    problem = "CuPy is not installed"
    if not tells_nothing_more(error):
        problem = f"CuPy cannot be imported ({_first_line(error)})"
    version = driver_version()
    if not version:  # which comes first: without it, CuPy is of no use
        return MissingDependencyError(
            f"transport 'nccl' needs a GPU and its driver, and {_NO_DRIVER}; {problem} either: for "
            f"a driver of CUDA 13 or newer, {_extra(13000)}, for one of CUDA 12 'cuda12' instead",
            "",
        )
    command = _extra(version)
    return MissingDependencyError(
        f"transport 'nccl': {problem}; for the NVIDIA driver here, which supports CUDA "
        f"{in_numbers(version)}, install it with: {command}",
        command,
    )


def tells_nothing_more(error: ImportError) -> bool:
    """Whether it says just that CuPy is not installed."""
    return isinstance(error, ModuleNotFoundError) and error.name == "cupy"


def no_nccl(runtime_version: int) -> MissingDependencyError:
    """The error where CuPy is there, built for a version of CUDA, but finds no NCCL."""
    command = f"pip install nvidia-nccl-cu{runtime_version // 1000}"
    return MissingDependencyError(
        "transport 'nccl': CuPy finds no NCCL (libnccl.so.2), which its wheels do not contain; "
        f"install the wheel for its CUDA with: {command}",
        command,
    )


def no_gpu(status: int, text: str, runtime_version: int) -> MissingDependencyError:
    """The error where CUDA, asked for its devices, answers with one of its own errors."""
    newest = driver_version()
    told = f"transport 'nccl': no GPU can be used ({text}): "
    if not newest:
        return MissingDependencyError(f"{told}{_NO_DRIVER}", "")
    if status == _INSUFFICIENT_DRIVER or newest // 1000 < runtime_version // 1000:
        command = _extra(newest)
        return MissingDependencyError(
            f"{told}the driver supports CUDA {in_numbers(newest)}, and CuPy was built for CUDA "
            f"{in_numbers(runtime_version)}; install a newer driver, or a CuPy for it: uninstall "
            f"this one, then {command}",
            command,
        )
    if status == _NO_DEVICE:
        return MissingDependencyError(
            f"{told}the driver sees none, or CUDA_VISIBLE_DEVICES hides them", ""
        )
    return MissingDependencyError(f"{told}nvidia-smi may say more", "")


def _extra(version: int) -> str:
    """The command that installs CuPy and NCCL for a driver of this version."""
    return f'pip install "fsdpcore[cuda{13 if version >= 13000 else 12}]"'


def _first_line(error: ImportError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" =-")]
    return lines[0] if lines else type(error).__name__
