"""Lines of text between the ranks, of any length. JSON is one: it escapes what would end a line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdpcore.collectives import all_gather_v, gather_v, scatter_v
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array


def share_lines(
    line: str, backend: Backend, *, label: str, timeout: float | None = None
) -> list[str]:
    """Give every rank the lines of all, in their order; a collective."""
    joined: Array = all_gather_v(_row(line), backend, label=label, timeout=timeout)
    return _lines(joined)


def gather_lines(line: str, backend: Backend, *, timeout: float) -> list[str] | None:
    """Give rank 0 the lines of all ranks, in their order; the others get None. A collective."""
    joined: Array | None = gather_v(_row(line), backend, root=0, timeout=timeout)
    return None if joined is None else _lines(joined)


def scatter_lines(lines: Sequence[str] | None, backend: Backend, *, timeout: float) -> str:
    """Give each rank the line that rank 0 has for it; the others pass None. A collective."""
    if lines is None:
        row: Array = scatter_v(None, backend, root=0, timeout=timeout)
    else:
        rows = [_row(line) for line in lines]
        counts = [each.size for each in rows]
        row = scatter_v(np.concatenate(rows), backend, counts, root=0, timeout=timeout)
    return _lines(row)[0]


def _row(line: str) -> Array:
    return np.frombuffer(f"{line}\n".encode(), np.uint8)


def _lines(joined: Array) -> list[str]:
    return joined.tobytes().decode().split("\n")[:-1]
