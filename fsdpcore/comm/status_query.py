"""``StatusQuery``: one question to other ranks of what they are doing, and their answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdpcore.diagnostics.status import Status


class StatusQuery:
    """What was asked, seen from the rank that asks; for one thread at a time.

    Attributes:
        open: the ranks that have not answered.
        answers: of those that have.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.open = set(ranks)
        self.answers: dict[int, Status] = {}

    def note(self, rank: int, content: Mapping[str, Any]) -> None:
        """Take the answer of a rank that was asked; another one's is not heard."""
        if rank in self.open:
            self.open.discard(rank)
            self.answers[rank] = Status.from_json(content)
