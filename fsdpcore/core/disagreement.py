"""Where ranks differ that should say the same: the one place that raises ``MismatchError`` for it.

Nothing is sent here: who calls this has what every rank says. All ranks compare the same table, so
that all of them raise the same error, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from fsdpcore.core.errors import MismatchError
from fsdpcore.core.text import name_ranks

_SHOWN = 8  # things that are said


@dataclass(frozen=True)
class Disagreement:
    """The first thing of which ranks do not say the same.

    Attributes:
        position: of the thing in what each rank says.
        groups: what is said of it, each once, with the ranks (of the job) that say so. The group of
            the first rank comes first.
    """

    position: int
    groups: Sequence[tuple[str, Sequence[int]]]

    @property
    def first(self) -> int:
        """The rank that the others are compared with."""
        return self.groups[0][1][0]

    @property
    def others(self) -> list[int]:
        """The ranks that say something else than the first one."""
        return sorted(rank for _, ranks in self.groups[1:] for rank in ranks)

    @property
    def values(self) -> str:
        """What is said, as in "0 and 1"."""
        return " and ".join(text for text, _ in self.groups)

    @property
    def ranks(self) -> str:
        """Who differs, as in "rank 0 and ranks 1, 3"."""
        return f"rank {self.first} and {name_ranks(self.others)}"

    @property
    def sentence(self) -> str:
        """Who says what, as in "0 on rank 0, but 1 on rank 1 and rank 3"."""
        (text, _), *rest = self.groups
        others = [f"{each} on {_each_of(ranks)}" for each, ranks in rest]
        return f"{text} on rank {self.first}, but {', '.join(others)}"

    def lines(self, title: str) -> str:
        """Return the title, and who says what: one line for each thing that is said."""
        says = [f"  {name_ranks(ranks)}: {text}" for text, ranks in self.groups]
        return "\n".join([f"{title} does not fit together:", *says])


def check_same(
    rows: Sequence[Sequence[Hashable]],
    ranks: Sequence[int],
    message: Callable[[Disagreement], str],
    *,
    words: Callable[[Any], str] = str,
) -> None:
    """Compare what every rank says.

    Args:
        rows: what each rank says of one thing after the other; a shorter row ends earlier.
        ranks: the numbers (in the job) of those ranks.
        message: makes the text of the error.
        words: how to say in a message what was compared.

    Raises:
        MismatchError: they differ.
    """
    for position, column in enumerate(zip_longest(*rows, fillvalue=_END)):
        if any(each != column[0] for each in column):
            groups = [
                ("nothing more" if said is _END else words(said), who)
                for said, who in grouped(column, ranks)
            ]
            raise MismatchError(message(Disagreement(position, in_short(groups))))


def grouped(said: Iterable[Any], ranks: Iterable[int]) -> list[tuple[Any, list[int]]]:
    """Return what is said, each thing once, with the ranks that say so."""
    found: dict[Any, list[int]] = {}
    for each, rank in zip(said, ranks, strict=True):
        found.setdefault(each, []).append(rank)
    return list(found.items())


def in_short(groups: Sequence[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Return what is said, with the ranks that say so; many things as the first ones and a rest."""
    first, rest = list(groups[:_SHOWN]), groups[_SHOWN:]
    if rest:
        what = f"one of {len(rest)} other things" if len(rest) > 1 else "something else"
        first.append((what, [rank for _, ranks in rest for rank in ranks]))
    return first


def _each_of(ranks: Sequence[int]) -> str:
    few = " and ".join(f"rank {rank}" for rank in ranks[:_SHOWN])
    return few if len(ranks) <= _SHOWN else name_ranks(ranks)


_END = object()
