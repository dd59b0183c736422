"""Network namespaces of a thread, and other calls for which Python 3.10 has no functions."""

from __future__ import annotations

import ctypes
import os
import signal

_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_LIBC = ctypes.CDLL(None, use_errno=True)


def make() -> int:
    """Move this thread into a new network namespace; a descriptor of its file."""
    _checked(_LIBC.unshare(_NEWNET))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter(path: str) -> None:
    """Move this thread into the network namespace whose file this is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_LIBC.setns(descriptor, _NEWNET))
    finally:
        os.close(descriptor)


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def be_punctual() -> None:
    """Let this thread's waits end when they should, not up to 50 microseconds later."""
    _checked(_LIBC.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
