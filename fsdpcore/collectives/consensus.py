"""All ranks go on, or all raise the same error.

``compare`` is for what all ranks should say alike: arguments, options, values. They compare a
digest, and say it in words only where that differs. ``agree`` is for what a rank finds out by
itself, in its arguments or on its disk: it brings an error or a value, and the others learn of it,
so that none waits for a rank that has given up. ``receive`` is for what rank 0 decides for all.

The calls of a collective are compared by its messages, see ``agreement``. Whoever compares,
``core.disagreement`` finds where the ranks differ, and raises the error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from fsdpcore.collectives import all_gather
from fsdpcore.collectives.objects import all_gather_object, scatter_object
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.digests import digest
from fsdpcore.core.disagreement import Disagreement, check_same, grouped, in_short
from fsdpcore.core.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FsdpcoreError,
    MismatchError,
    StateError,
    in_words,
)
from fsdpcore.core.text import name_ranks

# The first of these that any rank has is what all raise: a corrupt file counts for more than
# trouble on the way to it, since load can go on with an older step.
_KINDS: tuple[type[FsdpcoreError], ...] = (
    StateError,
    ArgumentError,
    ConfigError,
    MismatchError,
    CorruptCheckpointError,
    CheckpointNotFoundError,
    CheckpointError,
)
_ON_RANKS = re.compile(r"\(on ranks? [^()]*\)$")
_MOST = 2000  # characters of a text; all ranks hold those of all

_T = TypeVar("_T")


def compare(
    backend: Backend,
    what: str,
    said: Sequence[str],
    message: Callable[[Disagreement], str],
    *,
    timeout: float | None = None,
) -> None:
    """Check that all ranks say the same; a collective, of 16 bytes per rank where they do.

    Args:
        backend: all ranks.
        what: is being done; the same on all of them.
        said: one thing after the other.
        message: makes the text of the error.
        timeout: seconds to wait for the others; by default as for any collective.

    Raises:
        MismatchError: the ranks differ; on all of them, with the same message.
    """
    text = json.dumps(list(said))
    own = digest(text.encode())
    joined: Array = all_gather(np.frombuffer(own, np.uint8), backend, label=what, timeout=timeout)
    if joined.tobytes() != own * backend.world_size:
        texts = all_gather_object(text, backend, label=f"{what}, in words", timeout=timeout)
        check_same([json.loads(each) for each in texts], backend.ranks, message)


def agree(
    backend: Backend,
    what: str,
    error: Exception | None,
    value: str = "",
    *,
    timeout: float | None = None,
    ending: str = "",
) -> list[str]:
    """Tell all ranks whether anything is wrong on this one; a collective, which blocks.

    Args:
        backend: all ranks.
        what: is being done; the same on all of them.
        error: what this rank ran into; None for nothing.
        value: anything else that all should know.
        timeout: seconds to wait for the others; by default as for any collective.
        ending: a sentence that ends the message of an error.

    Returns:
        ``value`` of every rank.

    Raises:
        StateError, ArgumentError, ConfigError, MismatchError, CorruptCheckpointError,
            CheckpointNotFoundError, CheckpointError: a rank has an error of this kind, or of any
            other, which is a CheckpointError; on all ranks, with the same message. On the rank
            itself with the error as its cause.
    """
    # As JSON, which is ASCII: the name of a file in an error may have half a surrogate pair, which
    # objects refuse.
    line = json.dumps([*_packed(error), value])
    lines = all_gather_object(line, backend, label=what, timeout=timeout)
    rows = [json.loads(each) for each in lines]
    if any(number >= 0 for number, _, _ in rows):
        raise _common(backend, what, rows, ending) from error
    return [each for _, _, each in rows]


def receive(
    backend: Backend,
    what: str,
    error: Exception | None,
    values: Sequence[str] | None,
    *,
    timeout: float,
    ending: str = "",
) -> str:
    """Get the value that rank 0 has for this rank, or raise what it ran into; a collective.

    Args:
        backend, what, timeout, ending: as for ``agree``.
        error: what rank 0 ran into; None on the others.
        values: of rank 0, one for each rank, unless it has an error; None on the others.

    Raises:
        The errors of ``agree``: rank 0 has one; on all ranks, with the same message.
    """
    lines = None
    if backend.rank == 0:
        packed = _packed(error)
        lines = [json.dumps([*packed, each]) for each in values or [""] * backend.world_size]
    kind, text, value = json.loads(scatter_object(lines, backend, timeout=timeout))
    if kind >= 0:
        raise _made(kind, f"{what}: {text}", ending) from error
    return str(value)


def _packed(error: Exception | None) -> tuple[int, str]:
    """Return the number of an error's kind, and its text; -1 for none."""
    if error is None:
        return -1, ""
    kind = next((n for n, each in enumerate(_KINDS) if isinstance(error, each)), len(_KINDS) - 1)
    text = str(error) if isinstance(error, _KINDS) else in_words(error)
    return kind, text if len(text) <= _MOST else f"{text[:_MOST]} ..."


def _made(kind: int, message: str, ending: str) -> FsdpcoreError:
    made: type[FsdpcoreError] = _KINDS[kind]
    return made(f"{message}. {ending}" if ending else message)


def _common(
    backend: Backend, what: str, rows: Sequence[Sequence[Any]], ending: str
) -> FsdpcoreError:
    failed = [
        (rank, kind, text)
        for rank, (kind, text, _) in zip(backend.ranks, rows, strict=True)
        if kind >= 0
    ]
    texts = []
    said = grouped([text for *_, text in failed], [rank for rank, *_ in failed])
    for text, ranks in in_short(said):
        # An error of some of the ranks, which these have agreed on before, has said it.
        said_already = len(ranks) == backend.world_size or _ON_RANKS.search(text)
        texts.append(text if said_already else f"{text} (on {name_ranks(ranks)})")
    return _made(min(kind for _, kind, _ in failed), f"{what}: {'; '.join(texts)}", ending)


class LocalAttempt:
    """What may fail on this rank alone: the others count on it to take part in all messages.

    In a ``with`` block, or by ``do`` and ``value``, an error is kept for ``agree``. After one
    nothing more is done: what the messages then say no longer matters.

    Attributes:
        error: the first one.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> LocalAttempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True

    def do(self, action: Callable[[], object]) -> None:
        """Do something, unless something failed."""
        self.value(action, None)

    def value(self, action: Callable[[], _T], otherwise: _T) -> _T:
        """Return what something gives; ``otherwise`` if that, or something before, fails."""
        if self.error is None:
            with self:
                return action()
        return otherwise
