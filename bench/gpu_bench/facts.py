"""What the numbers were measured on: GPU, driver, libraries; ``-m gpu_bench.facts`` prints it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
from typing import Any

from fsdpcore.bench.harness import record

_PACKAGES = ("fsdpcore", "numpy", "ml_dtypes", "pyzmq", "torch", "nvidia-nccl-cu13", "numba")


def facts() -> dict[str, Any]:
    """Everything that can be found out; ``missing`` says what cannot, and why."""
    found: dict[str, Any] = {
        **record.machine(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }
    for name, look in {"cupy": _cupy, "gpus": _gpus, "nccl": _nccl}.items():
        try:
            found[name] = look()
        except Exception as error:  # whatever is missing, the rest is worth telling
            found.setdefault("missing", {})[name] = f"{type(error).__name__}: {error}"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cupy() -> dict[str, Any]:
    cupy: Any = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime
    return {
        "version": cupy.__version__,
        "cuda_runtime": runtime.runtimeGetVersion(),
        "cuda_driver": runtime.driverGetVersion(),
    }


def _gpus() -> list[dict[str, Any]]:
    cupy: Any = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime
    gpus = []
    for number in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(number)
        with cupy.cuda.Device(number):
            free, total = runtime.memGetInfo()
        gpus.append(
            {
                "name": properties["name"].decode(),
                "compute_capability": f"{properties['major']}.{properties['minor']}",
                "multiprocessors": properties["multiProcessorCount"],
                "memory_gib": round(total / 2**30, 1),
                "free_gib": round(free / 2**30, 1),
            }
        )
    return gpus


def _nccl() -> dict[str, Any]:
    nccl: Any = importlib.import_module("cupy.cuda.nccl")
    return {"version": nccl.get_version(), "available": bool(nccl.available)}


if __name__ == "__main__":
    print(json.dumps(facts(), indent=1))
