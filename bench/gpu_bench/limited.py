"""Commands with a limit of time, that leave no process behind. Wants nothing but Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_MARK = "GPU_BENCH_STEP"  # a name that starts like ours would be taken for a setting


def python(
    arguments: Sequence[str],
    seconds: float,
    output: IO[Any],
    *,
    environ: Mapping[str, str] = os.environ,
    cwd: Path | None = None,
    patience: float = 0.0,
) -> int | None:
    """Run Python; its exit code, or None if it was ended as its time was over.

    Whatever it has started is ended with it, wherever that is by then.

    Args:
        arguments: of the interpreter.
        seconds: that it may take.
        output: where to write what it prints.
        environ, cwd: as ``subprocess`` takes them.
        patience: seconds between interrupting it and ending it: pytest says what it has found.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(  # noqa: S603 (it is our own)
        [sys.executable, *arguments],
        cwd=cwd,
        # Of what has started this command, too, so that it finds what is left of both.
        env={**environ, _MARK: environ.get(_MARK, "") + mark},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        if patience:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
        return None
    finally:
        _end(mark.encode())
        process.wait()


def _end(mark: bytes) -> None:
    quiet, end = 0, time.monotonic() + 5.0
    while quiet < 2 and time.monotonic() < end:  # twice, as one may have started another
        quiet = 0 if _killed(mark) else quiet + 1
        time.sleep(0.05)


def _killed(wanted: bytes) -> int:
    """Kill the processes with this in their environment; return how many there were."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    count += 1
    return count
