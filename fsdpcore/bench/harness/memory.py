"""How much memory a rank's process takes, as the kernel counts it.

``VmHWM`` of ``/proc/self/status`` is the largest resident set so far, with all pages of shared
memory that this process has touched; every process that maps a page counts it whole. The
proportional set size (``Pss`` of ``/proc/self/smaps_rollup``) divides each page by the number of
processes that map it, so that the sum over the ranks counts it once. The kernel keeps no maximum
of that: ``PssSampler`` reads it over and over. See proc(5).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
_PROC = Path("/proc/self")


@dataclass(frozen=True)
class Memory:
    """One process, in bytes; 0 where the system does not say.

    Attributes:
        process: its id, by which ranks that are threads of one process are told from others.
        peak_rss: largest resident set since ``reset_peak``, or since the start where that failed.
        pss: proportional set size, now or the largest that was sampled.
    """

    process: int
    peak_rss: int
    pss: int

    @classmethod
    def now(cls) -> Memory:
        """Measure this process."""
        return cls(os.getpid(), peak_rss(), pss())

    @classmethod
    def read(cls, answer: Sequence[float]) -> Memory:
        """From the numbers of ``as_answer``."""
        process, peak, proportional = answer
        return cls(int(process), int(peak), int(proportional))

    def as_answer(self) -> list[float]:
        """As numbers, which a rank can send as its answer to an order."""
        return [float(self.process), float(self.peak_rss), float(self.pss)]


def peak_rss() -> int:
    """Bytes of the largest resident set of this process."""
    found = _kibibytes("status", "VmHWM")
    if found:
        return found * 1024
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def pss() -> int:
    """Bytes of this process, each shared page divided by the number of processes that map it."""
    return _kibibytes("smaps_rollup", "Pss") * 1024


def reset_peak() -> None:
    """Begin a new peak of the resident set, where the kernel allows it."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5", encoding="ascii")


def _kibibytes(file: str, name: str) -> int:
    with contextlib.suppress(OSError), (_PROC / file).open(encoding="ascii") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0])
    return 0


class PssSampler:
    """Reads the proportional set size in a thread, inside a ``with`` block that is not timed.

    Attributes:
        highest: bytes.
    """

    def __init__(self, interval: float = 0.002) -> None:
        self.highest = 0
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while True:
            self.highest = max(self.highest, pss())
            if self._done.wait(self._interval):
                return

    def __enter__(self) -> PssSampler:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()


def highest_rss(ranks: Sequence[Memory]) -> int:
    """Bytes of the process whose resident set was the largest."""
    return max(memory.peak_rss for memory in ranks)


def pss_per_rank(ranks: Sequence[Memory]) -> int:
    """Bytes of all processes together, divided by the number of ranks."""
    processes = {memory.process: memory.pss for memory in ranks}
    return sum(processes.values()) // len(ranks)
