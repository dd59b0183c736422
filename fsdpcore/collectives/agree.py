"""All ranks go on, or all raise the same error: they tell each other what went wrong.

What a rank can only find out by itself, in its arguments or on its disk, the others learn here, so
that none waits for a rank that has given up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from fsdpcore.collectives import all_gather_v
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FsdpcoreError,
    StateError,
    in_words,
)

# The first of these that any rank has is what all raise: a corrupt file counts for more than
# trouble on the way to it, since load can go on with an older step.
_KINDS: tuple[type[FsdpcoreError], ...] = (
    StateError,
    ArgumentError,
    CorruptCheckpointError,
    CheckpointNotFoundError,
    CheckpointError,
)
_MOST = 2000  # characters of a text; all ranks hold those of all

_T = TypeVar("_T")


def agree(
    backend: Backend,
    what: str,
    error: Exception | None,
    told: str = "",
    *,
    timeout: float | None = None,
    ending: str = "",
) -> list[str]:
    """Tell all ranks whether anything is wrong on this one; a collective, which blocks.

    Args:
        backend: all ranks.
        what: is being done; the same on all of them.
        error: what this rank ran into; None for nothing.
        told: anything else that all should know.
        timeout: seconds to wait for the others; by default as for any collective.
        ending: a sentence that ends the message of an error.

    Returns:
        ``told`` of every rank.

    Raises:
        StateError, ArgumentError, CorruptCheckpointError, CheckpointNotFoundError,
            CheckpointError: a rank has an error of this kind, or of any other, which is a
            CheckpointError; on all ranks, with the same message. On the rank itself with the error
            as its cause.
    """
    kind, text = -1, ""
    if error is not None:
        kind = next(
            (n for n, each in enumerate(_KINDS) if isinstance(error, each)), len(_KINDS) - 1
        )
        text = str(error) if isinstance(error, _KINDS) else in_words(error)
        if len(text) > _MOST:
            text = f"{text[:_MOST]} ..."
    line = json.dumps([kind, text, told]) + "\n"
    row: Array = np.frombuffer(line.encode(), np.uint8)
    joined: Array = all_gather_v(row, backend, label=what, timeout=timeout)
    rows = [json.loads(each) for each in joined.tobytes().decode().splitlines()]
    if any(number >= 0 for number, _, _ in rows):
        raise _common(backend, what, rows, ending) from error
    return [each for _, _, each in rows]


def _common(
    backend: Backend, what: str, rows: Sequence[Sequence[Any]], ending: str
) -> FsdpcoreError:
    worst: int = min(kind for kind, _, _ in rows if kind >= 0)
    found: dict[str, list[int]] = {}
    for rank, (kind, text, _) in zip(backend.ranks, rows, strict=True):
        if kind >= 0:
            found.setdefault(text, []).append(rank)
    texts = []
    for text, ranks in found.items():
        everywhere = len(ranks) == backend.world_size
        texts.append(text if everywhere else f"{text} (on {on_ranks(ranks)})")
    message = f"{what}: {'; '.join(texts)}"
    common: type[FsdpcoreError] = _KINDS[worst]
    return common(f"{message}. {ending}" if ending else message)


def on_ranks(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Attempts:
    """Does what may fail on this rank alone: the others count on it to take part in all messages.

    After an error nothing more is done: what the messages then say no longer matters.

    Attributes:
        error: the first one.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def do(self, action: Callable[[], object]) -> None:
        """Do something, unless something failed."""
        self.value(action, None)

    def value(self, action: Callable[[], _T], otherwise: _T) -> _T:
        """Return what something gives; ``otherwise`` if that, or something before, fails."""
        if self.error is None:
            try:
                return action()
            except Exception as error:
                self.error = error
        return otherwise
