"""Processes of the tests, forked from one that has imported what they need and done nothing else.

A new interpreter for each would take a fifth of a second of a core, mostly for imports.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

# An exit code can be read once. Whoever starts a process reads those of all others, so threads that
# start and await processes side by side take it from each other, and then find 255.
_EXIT_CODES = threading.Lock()
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["fsdpcore", "fsdpcore.transports.zmq.backend", "pytest"])

Pipe = _CONTEXT.Pipe


def start(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Have a new process call a function from the top of a module."""
    process = _CONTEXT.Process(target=function, args=args, daemon=True)
    with _EXIT_CODES:
        process.start()
    return process


def exit_code(process: BaseProcess, seconds: float | None = None) -> int | None:
    """Wait for the end of a process."""
    wait([process.sentinel], seconds)
    with _EXIT_CODES:
        return process.exitcode


def shut_down() -> None:
    """End the process that all are forked from, and wait for that."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
