"""All ranks go on, or all raise the same error.

``compare`` is for what all ranks should say alike: arguments, options, values. They compare a
digest, and say it in words only where that differs. ``agree`` is for what a rank finds out by
itself, in its arguments or on its disk: it brings an error or a value, and the others learn of it,
so that none waits for a rank that has given up.

The calls of a collective are compared in its first message, see ``fingerprint``. Whoever compares,
``core.disagreement`` finds where the ranks differ, and raises the error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from fsdpcore.collectives import all_gather
from fsdpcore.collectives.texts import share_texts
from fsdpcore.comm.backend import Backend
from fsdpcore.core.buffers import Array
from fsdpcore.core.disagreement import Disagreement, check_same, grouped, name_ranks
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
_MOST = 2000  # characters of a text; all ranks hold those of all
_DIGEST = 16  # bytes

_T = TypeVar("_T")


def compare(
    backend: Backend, what: str, said: Sequence[str], message: Callable[[Disagreement], str]
) -> None:
    """Check that all ranks say the same; a collective, of 16 bytes per rank where they do.

    Args:
        backend: all ranks.
        what: is being done; the same on all of them.
        said: one thing after the other.
        message: makes the text of the error.

    Raises:
        MismatchError: the ranks differ; on all of them, with the same message.
    """
    text = json.dumps(list(said))
    digest = hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest()
    joined: Array = all_gather(np.frombuffer(digest, np.uint8), backend, label=what)
    if joined.tobytes() != digest * backend.world_size:
        texts = share_texts(text, backend, label=f"{what}, in words")
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
    kind, text = -1, ""
    if error is not None:
        kind = next(
            (n for n, each in enumerate(_KINDS) if isinstance(error, each)), len(_KINDS) - 1
        )
        text = str(error) if isinstance(error, _KINDS) else in_words(error)
        if len(text) > _MOST:
            text = f"{text[:_MOST]} ..."
    line = json.dumps([kind, text, value])
    rows = [json.loads(each) for each in share_texts(line, backend, label=what, timeout=timeout)]
    if any(number >= 0 for number, _, _ in rows):
        raise _common(backend, what, rows, ending) from error
    return [each for _, _, each in rows]


def _common(
    backend: Backend, what: str, rows: Sequence[Sequence[Any]], ending: str
) -> FsdpcoreError:
    failed = [
        (rank, kind, text)
        for rank, (kind, text, _) in zip(backend.ranks, rows, strict=True)
        if kind >= 0
    ]
    texts = []
    for text, ranks in grouped([text for *_, text in failed], [rank for rank, *_ in failed]):
        everywhere = len(ranks) == backend.world_size
        texts.append(text if everywhere else f"{text} (on {name_ranks(ranks)})")
    message = f"{what}: {'; '.join(texts)}"
    common: type[FsdpcoreError] = _KINDS[min(kind for _, kind, _ in failed)]
    return common(f"{message}. {ending}" if ending else message)


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
