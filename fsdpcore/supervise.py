"""Watching over the processes of a job: the first that fails ends them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

# After one rank failed, the others have this long to end by themselves, then to heed SIGTERM.
GRACE_SECONDS = 1.0
TERM_SECONDS = 0.4
_POLL_SECONDS = 0.01


class Child(Protocol):
    """A process, of ``subprocess`` or of ``multiprocessing``."""

    @property
    def pid(self) -> int | None:
        """The process id."""

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: minus the signal), else None."""


def wait(children: Sequence[Child], failed: Callable[[int], bool]) -> int | None:
    """Wait until all children ended, or one failed, which ends the others.

    Args:
        children: in rank order.
        failed: told an exit code, says whether that is a failure.

    Returns:
        The rank that failed first, or None if all ended well.
    """
    running = dict(enumerate(children))
    try:
        while running:
            for rank, child in list(running.items()):
                code = child.poll()
                if code is not None:
                    del running[rank]
                    if failed(code):
                        return rank
            if running:
                time.sleep(_POLL_SECONDS)
        return None
    finally:
        stop([child for child in running.values() if child.poll() is None])


def stop(children: Sequence[Child], *, first: signal.Signals | None = None) -> None:
    """End processes: wait for them, then SIGTERM, then SIGKILL. Returns once all are gone."""
    if first is not None:
        _signal(children, first)
    for seconds, then in ((GRACE_SECONDS, signal.SIGTERM), (TERM_SECONDS, signal.SIGKILL)):
        if _all_ended(children, seconds):
            return
        _signal(children, then)
    _all_ended(children, 10.0)


def _all_ended(children: Sequence[Child], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while any(child.poll() is None for child in children):
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _signal(children: Sequence[Child], number: signal.Signals) -> None:
    """Signal what still runs: with its own children, where it leads a process group."""
    for child in children:
        if child.poll() is None and child.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(child.pid) == child.pid:
                    os.killpg(child.pid, number)
                else:
                    os.kill(child.pid, number)


def die_with_parent() -> None:
    """Have the kernel kill the calling process when its parent ends (on Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        pr_set_pdeathsig = 1
        libc.prctl(pr_set_pdeathsig, int(signal.SIGKILL))


def describe_exit(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
