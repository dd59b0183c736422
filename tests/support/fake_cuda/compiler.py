"""Compiles kernels with g++, and keeps them for all processes of this user and for later runs.

They are kept by a hash of their source, the flags and the compiler, in ``fake-cuda-UID`` below the
system's folder for temporary files: tens of files of 16 KB. The folder may be removed at any time.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
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
    folder = Path(tempfile.gettempdir(), f"fake-cuda-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    # What lies there is loaded and run: nobody else may have put it there.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"others can write to {folder}")
    return folder


@functools.cache
def _compiler() -> tuple[str, str]:
    """The path of the compiler, and what it says of itself."""
    path = shutil.which("g++")
    if path is None:
        raise NoCompiler(
            "kernels of the stand-in for CuPy are compiled with g++, which is not here"
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, said.stdout


@functools.cache
def _loaded(source: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    compiler, version = _compiler()
    text, command = HEADER + source, [compiler, *_FLAGS, *flags]
    name = hashlib.sha256(repr((text, command, version)).encode()).hexdigest()[:24]
    library = _folder() / f"{name}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_folder()) as scratch:
            (Path(scratch) / "kernel.cpp").write_text(text)
            made = subprocess.run(
                [*command, "kernel.cpp", "-o", library.name],
                cwd=scratch,
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode:
                raise CompileException(f"{made.stderr}\n\n{source}")
            # At once, so that no other process finds half of it.
            (Path(scratch) / library.name).replace(library)
    return ctypes.CDLL(str(library))


def compiled(source: str, options: Sequence[str]) -> ctypes.CDLL:
    """The library made of a source behind the header; raises ``CompileException``."""
    if isinstance(options, str) or not all(isinstance(option, str) for option in options):
        raise TypeError("options must be a tuple of str")
    flags = tuple(option for option in options if option.startswith(_KEPT))
    with _lock:
        return _loaded(source, flags)
