"""Whether there is a GPU here that tests can use."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys

_INSTALL = (
    "on a machine with a GPU, pip install -e '.[cuda13,test]', or cuda12 for a driver of CUDA 12"
)
_PROBE = f"""
try:
    import cupy
    from cupy.cuda import nccl, runtime
except ImportError as error:
    raise SystemExit(f"no CuPy ({{error}}): {_INSTALL}")
try:
    count = runtime.getDeviceCount()
except runtime.CUDARuntimeError as error:
    raise SystemExit(f"no GPU that CuPy can use: {{error}}")
if not count:
    raise SystemExit("no GPU: CUDA sees none")
if not nccl.available:
    raise SystemExit("no NCCL: CuPy finds no library; install nvidia-nccl-cu13")
"""


@functools.cache
def why_no_gpu() -> str:
    """What it takes to run tests on a GPU and is not there; empty if all is."""
    if importlib.util.find_spec("cupy") is None:
        return f"no CuPy: {_INSTALL}"
    # In a process of its own, since one that has looked for GPUs cannot be forked any more. CuPy
    # warns of what it does not find.
    command = [sys.executable, "-W", "ignore", "-c", _PROBE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stderr.strip() if found.returncode else ""
