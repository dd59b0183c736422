"""Compiles kernels with g++, each source once in a session."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from support.fake_cuda.errors import NoCompiler
from support.fake_cuda.kernel_header import HEADER

# No multiply-adds that round once: so it is on the host, and so on a GPU with -fmad=false. On a GPU
# numbers may differ without.
_FLAGS = (
    "-O1",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-w",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
)
_KEPT = ("-D", "-U")
_lock = threading.Lock()


class CompileException(Exception):
    """A kernel does not compile."""


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="fake-cuda-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _loaded(source: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        raise NoCompiler(
            "kernels of the stand-in for CuPy are compiled with g++, which is not here"
        )
    name = hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:24]
    file = _folder() / f"{name}.cpp"
    file.write_text(HEADER + source)
    library = file.with_suffix(".so")
    made = subprocess.run(
        [compiler, *_FLAGS, *flags, str(file), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise CompileException(f"{made.stderr}\n\n{source}")
    return ctypes.CDLL(str(library))


def compiled(source: str, options: Sequence[str]) -> ctypes.CDLL:
    """The library made of a source behind the header; raises ``CompileException``."""
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise TypeError("options must be a tuple of str")
    flags = tuple(option for option in options if option.startswith(_KEPT))
    with _lock:
        return _loaded(source, flags)
