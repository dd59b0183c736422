"""All ranks do something, or none does: they tell each other what speaks against it."""

from __future__ import annotations

from fsdpcore.collectives.agree import agree, on_ranks
from fsdpcore.comm.backend import Backend
from fsdpcore.core.errors import ArgumentError, MismatchError


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
    error = ArgumentError(problem) if problem else None
    return agree(backend, what, error, told, ending="Nothing was changed on any rank")


def check_equal(backend: Backend, told: list[str], message: str) -> None:
    """Raise MismatchError with ``message`` if a rank told something else; after ``consent``."""
    others = [rank for rank, text in zip(backend.ranks, told, strict=True) if text != told[0]]
    if others:
        raise MismatchError(f"{message}: rank {backend.ranks[0]} and {on_ranks(others)} differ")
