"""Texts between the ranks, of any length."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from fsdpcore.collectives import all_gather_v, gather_v, scatter_v
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array


def share_texts(
    text: str, backend: Backend, *, label: str, timeout: float | None = None
) -> list[str]:
    """Give every rank the texts of all, in their order; a collective."""
    joined: Array = all_gather_v(_row(text), backend, label=label, timeout=timeout)
    return _texts(joined)


def gather_texts(text: str, backend: Backend, *, timeout: float) -> list[str] | None:
    """Give rank 0 the texts of all ranks, in their order; the others get None. A collective."""
    joined: Array | None = gather_v(_row(text), backend, root=0, timeout=timeout)
    return None if joined is None else _texts(joined)


def scatter_texts(texts: Sequence[str] | None, backend: Backend, *, timeout: float) -> str:
    """Give each rank the text that rank 0 has for it; the others pass None. A collective."""
    if texts is None:
        row: Array = scatter_v(None, backend, root=0, timeout=timeout)
    else:
        rows = [_row(text) for text in texts]
        counts = [each.size for each in rows]
        row = scatter_v(np.concatenate(rows), backend, counts, root=0, timeout=timeout)
    return _texts(row)[0]


def _row(text: str) -> Array:
    # JSON in ASCII has no newline of its own, so that one ends it.
    return np.frombuffer((json.dumps(text) + "\n").encode(), np.uint8)


def _texts(joined: Array) -> list[str]:
    return [json.loads(line) for line in joined.tobytes().splitlines()]
