"""Which of several checkpoints is the best, by a metric that was saved with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from fsdpcore.core.errors import ArgumentError

_Key = TypeVar("_Key")
_PREFIX = "best:"

Step = int | str | None
"""A step by its number; "latest", as None, for the newest; "best:loss" for the one with the
smallest ``loss``, "best:-accuracy" for the one with the largest ``accuracy``."""


class Best(NamedTuple):
    """The best of all checkpoints.

    Attributes:
        metric: name of what they are compared by.
        largest: the larger, the better; else the smaller.
    """

    metric: str
    largest: bool = False

    @classmethod
    def parse(cls, text: str) -> Best:
        """Read "best:NAME" or "best:-NAME".

        Raises:
            ArgumentError: it is neither.
        """
        name = text.removeprefix(_PREFIX)
        if name == text or not name.removeprefix("-"):
            raise ArgumentError(
                f"step is a number, 'latest', 'best:loss' for the smallest loss, or "
                f"'best:-accuracy' for the largest accuracy; got {text!r:.80}"
            )
        return cls(name.removeprefix("-"), name.startswith("-"))

    def __str__(self) -> str:
        return f"{'largest' if self.largest else 'smallest'} {self.metric!r}"


def best_first(known: Iterable[tuple[_Key, Mapping[str, float]]], best: Best) -> list[_Key]:
    """Return what has the metric, the best first.

    Args:
        known: checkpoints, each with its metrics. Of equal ones those that come first stay first.
        best: by what. One whose value is NaN is left out.
    """
    sign = -1 if best.largest else 1
    rated = [(sign * metrics[best.metric], key) for key, metrics in known if best.metric in metrics]
    rated = [each for each in rated if not math.isnan(each[0])]
    return [key for _, key in sorted(rated, key=lambda each: each[0])]
