"""All ranks do something, or none does: they tell each other what speaks against it."""

from __future__ import annotations

import json

import numpy as np

from fsdpcore.backend import Backend
from fsdpcore.buffers import Array
from fsdpcore.collectives import all_gather_v
from fsdpcore.errors import ArgumentError, MismatchError

_MOST = 2000  # characters of a problem; all ranks hold those of all


def consent(backend: Backend, what: str, problem: str, told: str = "") -> list[str]:
    """Tell all ranks whether anything is wrong; a collective.

    Args:
        backend: all ranks.
        what: is about to be done; the same on all of them.
        problem: what this rank found; "" for nothing.
        told: anything else that all should know.

    Returns:
        ``told`` of every rank.

    Raises:
        ArgumentError: a rank has a problem; on all ranks, with the same message.
    """
    if len(problem) > _MOST:
        problem = f"{problem[:_MOST]} ..."
    line = json.dumps([problem, told]) + "\n"
    row: Array = np.frombuffer(line.encode(), np.uint8)
    joined: Array = all_gather_v(row, backend, label=what)
    rows = [json.loads(each) for each in joined.tobytes().decode().splitlines()]
    found: dict[str, list[int]] = {}
    for rank, (theirs, _) in zip(backend.ranks, rows, strict=True):
        if theirs:
            found.setdefault(theirs, []).append(rank)
    if found:
        everywhere = len(found) == 1 and len(*found.values()) == backend.world_size
        texts = [
            text if everywhere else f"{text} (on {_ranks(ranks)})" for text, ranks in found.items()
        ]
        raise ArgumentError(f"{what}: {'; '.join(texts)}. Nothing was changed on any rank")
    return [theirs for _, theirs in rows]


def check_equal(backend: Backend, told: list[str], message: str) -> None:
    """Raise MismatchError with ``message`` if a rank told something else; after ``consent``."""
    others = [rank for rank, text in zip(backend.ranks, told, strict=True) if text != told[0]]
    if others:
        raise MismatchError(f"{message}: rank {backend.ranks[0]} and {_ranks(others)} differ")


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
